"""Intervals for samples that hang together: the method of batch means.

Requests that follow each other meet the same queue, so their waits are alike, and an interval that takes them for
independent is too narrow, by a factor of ten in a busy queue. Cut a long run into 20 stretches of time instead: whole
stretches are nearly independent, and how much they differ says how sure the figure is. Sources: Law, "Simulation
Modeling and Analysis" (5th ed., 2015), 9.5; Cochran, "Sampling Techniques" (3rd ed., 1977), 2.11 for the ratio of
sums, as stretches hold unlike numbers of requests.

A percentile's interval is taken on the scale of shares: the share of samples at or below it is a mean, its error is
found from the stretches, and the samples that lie so much further up and down are the interval.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from nanoinfer.errors import NanoinferError

BATCHES: Final = 20
#: Student's t for 19 degrees of freedom, two-sided.
STUDENT: Final = {0.95: 2.0930, 0.99: 2.8609}
#: Fewer samples than this make no batches to speak of.
LEAST: Final = 10 * BATCHES


class Interval(NamedTuple):
    """A figure and its bounds; a bound that the samples cannot give is ``None``, and so is the figure of no sample."""

    value: float | None
    low: float | None
    high: float | None


def ratio_error(sums: Sequence[float], counts: Sequence[int]) -> float:
    """Standard error of ``sum(sums) / sum(counts)``, from how much the batches stray from that ratio."""
    total = sum(counts)
    ratio = math.fsum(sums) / total
    strayed = math.fsum((s - ratio * n) ** 2 for s, n in zip(sums, counts, strict=True))
    return math.sqrt(len(counts) / (len(counts) - 1) * strayed) / total


class Batches:
    """Samples in 20 batches by when they were taken. Every sample is kept, in eight bytes.

    Args:
        start: of the time that the batches share evenly.
        end: of it; what is taken before or after goes to the first or last batch.
    """

    #: Relative width of what cannot be told apart.
    resolution: float = 0.0

    def __init__(self, start: float, end: float) -> None:
        if not end > start:
            raise NanoinferError(f"batches: end ({end}) must come after start ({start})")
        self.start, self.end = start, end
        self.counts = [0] * BATCHES
        self.sums = [0.0] * BATCHES
        self.minimum, self.maximum = math.inf, -math.inf
        self._squares = 0.0
        self._values = [array("d") for _ in range(BATCHES)]
        self._ordered: list[array[float]] | None = None
        self._all: list[float] = []

    def add(self, t: float, value: float, n: int = 1) -> None:
        """Note ``n`` samples of this value, taken at time ``t``."""
        batch = min(max(int((t - self.start) / (self.end - self.start) * BATCHES), 0), BATCHES - 1)
        self.counts[batch] += n
        self.sums[batch] += n * value
        self._squares += n * value * value
        self.minimum, self.maximum = min(self.minimum, value), max(self.maximum, value)
        self._ordered = None
        self._keep(batch, value, n)

    @property
    def n(self) -> int:
        """Samples."""
        return sum(self.counts)

    @property
    def std(self) -> float | None:
        """Standard deviation of the samples; ``None`` of fewer than two."""
        if (n := self.n) < 2:
            return None
        return math.sqrt(max(0.0, self._squares - math.fsum(self.sums) ** 2 / n) / (n - 1))

    def mean(self, confidence: float = 0.95) -> Interval:
        """The mean and where the true one lies, with this confidence (0.95 or 0.99)."""
        if not (n := self.n):
            return Interval(None, None, None)
        value = math.fsum(self.sums) / n
        if n < LEAST:
            return Interval(value, None, None)
        reach = STUDENT[confidence] * ratio_error(self.sums, self.counts)
        return Interval(value, value - reach, value + reach)

    def percentile(self, q: float, confidence: float = 0.95) -> Interval:
        """The ``q``-th percentile (inverted CDF) and where the true one lies."""
        if not (n := self.n):
            return Interval(None, None, None)
        value = self._quantile(q / 100)
        if n < LEAST:
            return Interval(value, None, None)
        reach = STUDENT[confidence] * ratio_error(self._at_most(value), self.counts)
        low, high = q / 100 - reach, q / 100 + reach
        return Interval(value, self._quantile(low) if low > 0 else None, self._quantile(high) if high < 1 else None)

    # --- how samples are kept -----------------------------------------------------------

    def _keep(self, batch: int, value: float, n: int) -> None:
        self._values[batch].extend([value] * n)

    def _sort(self) -> list[array[float]]:
        if self._ordered is None:
            self._ordered = [array("d", sorted(values)) for values in self._values]
            self._all = sorted(value for values in self._ordered for value in values)
        return self._ordered

    def _quantile(self, share: float) -> float:
        """The smallest sample that at least this share of the samples do not exceed."""
        self._sort()
        return self._all[max(_rank(share, len(self._all)), 1) - 1]

    def _at_most(self, value: float) -> list[int]:
        """Of each batch, samples that do not exceed the value."""
        return [bisect_right(values, value) for values in self._sort()]


class BinnedBatches(Batches):
    """The same for very many positive samples: percentiles from bins of 0.1%, in memory that does not grow with ``n``.

    Mean, extremes and counts stay exact. A percentile is its bin's middle, at most 0.05% off; 0 has a bin of its own.
    """

    resolution = 1e-3

    def __init__(self, start: float, end: float) -> None:
        super().__init__(start, end)
        self._bins: list[Counter[int]] = [Counter() for _ in range(BATCHES)]
        self._log = math.log1p(self.resolution)

    def _keep(self, batch: int, value: float, n: int) -> None:
        self._bins[batch][self._bin(value)] += n

    def _bin(self, value: float) -> int:
        return math.floor(math.log(value) / self._log) if value > 0 else -(2**62)

    def _quantile(self, share: float) -> float:
        bins: Counter[int] = sum(self._bins, Counter())
        left = max(_rank(share, self.n), 1)
        for index in sorted(bins):
            left -= bins[index]
            if left <= 0:
                break
        middle = math.exp((index + 0.5) * self._log) if index > -(2**62) else 0.0
        return min(max(middle, self.minimum), self.maximum)

    def _at_most(self, value: float) -> list[int]:
        last = self._bin(value)
        return [sum(n for index, n in bins.items() if index <= last) for bins in self._bins]


def _rank(share: float, n: int) -> int:
    """Counted from 1; a rounding error must not turn the 990th of 1000 into the 991st."""
    return min(math.ceil(share * n - 1e-9 * n), n)

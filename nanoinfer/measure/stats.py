"""Statistics that do not promise more than the samples hold.

A percentile is always an order statistic (the inverted CDF: a value that was really seen). It comes with a
distribution-free interval, and where there are too few samples for it that is said instead of hidden.
"""

from __future__ import annotations

import math
import random
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Final, NamedTuple

from nanoinfer.errors import NanoinferError, check

#: The percentiles that every summary carries.
TAILS = (90.0, 95.0, 99.0)


def present(values: Iterable[float | None]) -> list[float]:
    """Drop the undefined: a metric that is ``None`` was not measured, which is not 0."""
    return [value for value in values if value is not None]


# --- percentiles -----------------------------------------------------------------


def _fraction(q: float) -> Fraction:
    """``q`` percent as an exact fraction, so that p99.9 of 1000 samples is the 999th, not the 1000th."""
    check("percentile: q, in percent,", q, at_least=0, at_most=100, error=NanoinferError)
    return Fraction(repr(float(q))) / 100


def _ordered(values: Iterable[float]) -> list[float]:
    ordered = sorted(values)
    if any(math.isnan(value) for value in ordered):
        raise NanoinferError("percentile: a sample is NaN; use None for 'not measured' and drop it with present()")
    return ordered


def sorted_percentile(ordered: Sequence[float], q: float, weights: Sequence[float] | None = None) -> float:
    """:func:`percentile` of at least one sample, already in rising order; each counts ``weights`` times."""
    if weights is None:
        return ordered[max(math.ceil(_fraction(q) * len(ordered)), 1) - 1]
    reached = list(accumulate(weights))
    return ordered[bisect_left(reached, _fraction(q) * reached[-1])]


def percentile(values: Iterable[float], q: float) -> float | None:
    """The smallest sample that at least ``q`` percent of the samples do not exceed (inverted CDF).

    Empty gives ``None``, never 0. ``inf`` is allowed (a failed request in an adjusted percentile); NaN is refused.
    """
    _fraction(q)
    ordered = _ordered(values)
    return sorted_percentile(ordered, q) if ordered else None


def least_n(q: float, confidence: float = 0.99) -> int:
    """The fewest samples whose extreme bounds the ``q``-th percentile with this one-sided confidence.

    ``1 - p**n >= confidence``: p90 44, p95 90, p99 459, p99.9 4603 at 99%. For a
    two-sided interval ask with ``(1 + confidence) / 2`` (p99: 528 at two-sided 99%).
    """
    p = _inner_share("least_n", q, confidence)
    return math.ceil(math.log1p(-confidence) / math.log(max(p, 1 - p)))


def _inner_share(function: str, q: float, confidence: float) -> float:
    """``q`` as a share, where an interval exists."""
    check(f"{function}: q", q, above=0, below=100, error=NanoinferError)
    check(f"{function}: confidence", confidence, above=0, below=1, error=NanoinferError)
    return float(_fraction(q))


def _binomial(n: int, p: float) -> tuple[int, list[float]]:
    """``(first, pmf)``: the binomial probabilities of ``first, first + 1, ...``.

    Only counts within 14 deviations of the mean: what is left out is below 1e-15.
    """
    reach = 14 * math.sqrt(n * p * (1 - p)) + 40
    first, last = max(0, math.floor(n * p - reach)), min(n, math.ceil(n * p + reach))
    log_p, log_q, log_n = math.log(p), math.log1p(-p), math.lgamma(n + 1)
    return first, [
        math.exp(log_n - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * log_p + (n - k) * log_q)
        for k in range(first, last + 1)
    ]


def percentile_interval(
    values: Iterable[float], q: float, confidence: float = 0.95
) -> tuple[float | None, float | None]:
    """An exact, distribution-free, two-sided interval for the ``q``-th percentile of independent samples.

    The number of samples below the true percentile is binomial(n, q%), so two order statistics enclose it with
    at least ``confidence``. An end that the samples cannot give (see :func:`least_n`) is ``None``.
    """
    ordered, p = _ordered(values), _inner_share("percentile_interval", q, confidence)
    n, tail = len(ordered), (1 - confidence) / 2
    if not n:
        return None, None
    first, pmf = _binomial(n, p)
    # The largest rank with P(K < low) <= tail, and the smallest with P(K >= high) <= tail.
    below = list(accumulate(pmf))
    low = next((k for k, mass in enumerate(below, start=first) if mass > tail), first)
    above = list(accumulate(reversed(pmf)))
    high = next((first + len(pmf) - i for i, mass in enumerate(above) if mass > tail), first + len(pmf))
    return (ordered[low - 1] if low >= 1 else None), (ordered[high - 1] if high <= n else None)


# --- summaries -------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """What ``n`` samples say. Every figure is ``None`` where ``n`` is 0 (``std`` where n < 2).

    ``low`` and ``high`` bound the MEDIAN with ``confidence``, for any distribution; ``None`` where ``n`` is too small
    (below 6 at 95%). ``too_small`` names the percentiles that ``n`` cannot support.
    """

    n: int
    mean: float | None
    std: float | None
    minimum: float | None
    maximum: float | None
    median: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    low: float | None
    high: float | None
    confidence: float
    too_small: tuple[str, ...]


def summarize(values: Iterable[float], confidence: float = 0.95) -> Summary:
    """Summarise samples; percentiles by :func:`percentile`, the interval by :func:`percentile_interval`."""
    ordered = _ordered(values)
    n = len(ordered)
    low, high = percentile_interval(ordered, 50, confidence)
    mean = math.fsum(ordered) / n if n else None
    std = None
    if mean is not None and n > 1 and math.isfinite(mean):
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / (n - 1))
    minimum, maximum, median, p90, p95, p99 = (
        sorted_percentile(ordered, q) if n else None for q in (0.0, 100.0, 50.0, *TAILS)
    )
    too_small = tuple(f"p{q:g}" for q in TAILS if n < least_n(q))
    return Summary(n, mean, std, minimum, maximum, median, p90, p95, p99, low, high, confidence, too_small)


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians and its bootstrap interval (``None`` where there are fewer than two pairs)."""

    value: float
    low: float | None
    high: float | None
    confidence: float


def ratio_of_medians(
    a: Sequence[float], b: Sequence[float], *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Ratio:
    """``median(a) / median(b)`` of paired samples, with a percentile-bootstrap interval.

    ``a[i]`` and ``b[i]`` were taken next to each other, so pairs are resampled: what slowed both cancels.
    """
    if not a or len(a) != len(b):
        raise NanoinferError(f"ratio: needs as many samples of a as of b, at least one, got {len(a)} and {len(b)}")
    if min(*a, *b) <= 0:
        raise NanoinferError("ratio: samples must be positive")

    def ratio(indices: Sequence[int]) -> float:
        above, below = (sorted_percentile(sorted(samples[i] for i in indices), 50) for samples in (a, b))
        return above / below

    n, rng = len(a), random.Random(seed)
    value = ratio(range(n))
    if n < 2:
        return Ratio(value, None, None, confidence)
    draws = sorted(ratio(rng.choices(range(n), k=n)) for _ in range(resamples))
    tail = 50 * (1 - confidence)
    return Ratio(value, sorted_percentile(draws, tail), sorted_percentile(draws, 100 - tail), confidence)


# --- autocorrelated samples: batch means -----------------------------------------

BATCHES: Final = 20
#: Student's t for 19 degrees of freedom, two-sided.
STUDENT_T: Final = {0.95: 2.0930, 0.99: 2.8609}
#: Fewer samples than this give no interval.
MIN_BATCHED: Final = 10 * BATCHES


class Interval(NamedTuple):
    """A value and its bounds; a bound that the samples cannot give is ``None``, and so is the value of no sample."""

    value: float | None
    low: float | None
    high: float | None


def ratio_error(sums: Sequence[float], counts: Sequence[int]) -> float:
    """Standard error of ``sum(sums) / sum(counts)``, from how much the batches stray from that ratio.

    Source: Cochran, "Sampling Techniques" (3rd ed., 1977), 2.11; batches hold unequal numbers of requests.
    """
    total = sum(counts)
    ratio = math.fsum(sums) / total
    strayed = math.fsum((s - ratio * n) ** 2 for s, n in zip(sums, counts, strict=True))
    return math.sqrt(len(counts) / (len(counts) - 1) * strayed) / total


class BatchMeans:
    """Intervals for autocorrelated samples, by the method of batch means. Every sample is kept, in eight bytes.

    Consecutive requests meet the same queue, so an interval that takes their waits for independent is too narrow,
    by a factor of ten in a busy queue. Here ``start`` to ``end`` is cut into 20 batches of equal duration, which are
    nearly independent, and the interval follows from how much they differ. That of a percentile is taken on the
    scale of shares: the share of samples at or below it is a mean. Source: Law, "Simulation Modeling and Analysis"
    (5th ed., 2015), 9.5. Raises :class:`NanoinferError` for an ``end`` that is not after ``start``.
    """

    #: Relative width below which two values count as equal.
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
        self._sorted: tuple[list[list[float]], list[float]] | None = None

    def add(self, t: float, value: float, n: int = 1) -> None:
        """Note ``n`` samples of this value at time ``t``; one outside goes to the first or last batch."""
        batch = min(max(int((t - self.start) / (self.end - self.start) * BATCHES), 0), BATCHES - 1)
        self.counts[batch] += n
        self.sums[batch] += n * value
        self._squares += n * value * value
        self.minimum, self.maximum = min(self.minimum, value), max(self.maximum, value)
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
        """The mean and its interval; ``confidence`` is 0.95 or 0.99."""
        if not (n := self.n):
            return Interval(None, None, None)
        value = math.fsum(self.sums) / n
        if n < MIN_BATCHED:
            return Interval(value, None, None)
        reach = STUDENT_T[confidence] * ratio_error(self.sums, self.counts)
        return Interval(value, value - reach, value + reach)

    def percentile(self, q: float, confidence: float = 0.95) -> Interval:
        """The ``q``-th percentile (inverted CDF) and its interval."""
        if not self.n:
            return Interval(None, None, None)
        value = self._percentile(q)
        if self.n < MIN_BATCHED:
            return Interval(value, None, None)
        reach = 100 * STUDENT_T[confidence] * ratio_error(self._at_most(value), self.counts)
        low = self._percentile(q - reach) if q > reach else None
        high = self._percentile(q + reach) if q + reach < 100 else None
        return Interval(value, low, high)

    def _keep(self, batch: int, value: float, n: int) -> None:
        self._sorted = None
        self._values[batch].extend([value] * n)

    def _sort(self) -> tuple[list[list[float]], list[float]]:
        """The samples of each batch and of all, in rising order."""
        if self._sorted is None:
            batches = [sorted(values) for values in self._values]
            self._sorted = batches, sorted(value for values in batches for value in values)
        return self._sorted

    def _percentile(self, q: float) -> float:
        return sorted_percentile(self._sort()[1], q)

    def _at_most(self, value: float) -> list[int]:
        """Samples of each batch that do not exceed the value."""
        return [bisect_right(values, value) for values in self._sort()[0]]


class BinnedBatchMeans(BatchMeans):
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

    def _percentile(self, q: float) -> float:
        bins: Counter[int] = sum(self._bins, Counter())
        indices = sorted(bins)
        index = sorted_percentile(indices, q, [bins[index] for index in indices])
        middle = math.exp((index + 0.5) * self._log) if index > -(2**62) else 0.0
        return min(max(middle, self.minimum), self.maximum)

    def _at_most(self, value: float) -> list[int]:
        last = self._bin(value)
        return [sum(n for index, n in bins.items() if index <= last) for bins in self._bins]

"""Statistics that do not promise more than the samples hold.

A tail percentile of a handful of samples is a guess dressed as a measurement.
Here a percentile is always an order statistic (the inverted CDF: a value that
was really seen), it comes with a distribution-free interval, and where there
are too few samples for it that is said instead of hidden.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from nanoinfer.errors import NanoinferError

#: The percentiles that every summary carries.
TAILS = (90.0, 95.0, 99.0)


def present(values: Iterable[float | None]) -> list[float]:
    """Drop the undefined: a metric that is ``None`` was not measured, which is not 0."""
    return [value for value in values if value is not None]


def _fraction(q: float) -> Fraction:
    """``q`` percent as an exact fraction, so that p99.9 of 1000 samples is the 999th, not the 1000th."""
    if not 0 <= q <= 100:
        raise NanoinferError(f"percentile: q is in percent and must lie in 0..100, got {q}")
    return Fraction(repr(float(q))) / 100


def _ordered(values: Iterable[float]) -> list[float]:
    ordered = sorted(values)
    if any(math.isnan(value) for value in ordered):
        raise NanoinferError("percentile: a sample is NaN; use None for 'not measured' and drop it with present()")
    return ordered


def _order_statistic(ordered: Sequence[float], q: float) -> float:
    return ordered[max(math.ceil(_fraction(q) * len(ordered)), 1) - 1]


def percentile(values: Iterable[float], q: float) -> float | None:
    """The smallest sample that at least ``q`` percent of the samples do not exceed (inverted CDF).

    ``q`` is in percent (50 is the median). Empty gives ``None``, never 0. ``inf`` is
    allowed (a failed request in an adjusted percentile); NaN is refused.
    """
    _fraction(q)
    ordered = _ordered(values)
    return _order_statistic(ordered, q) if ordered else None


def least_n(q: float, confidence: float = 0.99) -> int:
    """The fewest samples whose extreme bounds the ``q``-th percentile with this one-sided confidence.

    ``1 - p**n >= confidence``: p90 44, p95 90, p99 459, p99.9 4603 at 99%. For a
    two-sided interval ask with ``(1 + confidence) / 2`` (p99: 528 at two-sided 99%).
    """
    p = float(_fraction(q))
    if not 0 < p < 1 or not 0 < confidence < 1:
        raise NanoinferError(f"least_n: needs 0 < q < 100 and 0 < confidence < 1, got q={q}, confidence={confidence}")
    return math.ceil(math.log1p(-confidence) / math.log(max(p, 1 - p)))


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
    """An exact, distribution-free, two-sided interval for the ``q``-th percentile.

    The number of samples below the true percentile is binomial(n, q%), so two order
    statistics enclose it with at least ``confidence``. An end that the samples cannot
    give (n too small, see :func:`least_n`) is ``None``. Samples must be independent.
    """
    ordered, p = _ordered(values), float(_fraction(q))
    if not 0 < p < 1 or not 0 < confidence < 1:
        raise NanoinferError(f"percentile_interval: needs 0 < q < 100 and 0 < confidence < 1, got {q}, {confidence}")
    n, tail = len(ordered), (1 - confidence) / 2
    if not n:
        return None, None
    first, pmf = _binomial(n, p)
    # Largest rank whose sample lies at or below the percentile but for `tail`: P(K < low) <= tail.
    low, mass = first, 0.0
    for k, probability in enumerate(pmf, start=first):
        mass += probability
        if mass > tail:
            low = k
            break
    # Smallest rank whose sample lies above it but for `tail`: P(K >= high) <= tail.
    high, mass = first + len(pmf), 0.0
    for k in range(first + len(pmf) - 1, first - 1, -1):
        mass += pmf[k - first]
        if mass > tail:
            high = k + 1
            break
    return (ordered[low - 1] if low >= 1 else None), (ordered[high - 1] if high <= n else None)


@dataclass(frozen=True)
class Summary:
    """What ``n`` samples say. Every figure is ``None`` where ``n`` is 0 (``std`` where n < 2).

    ``low`` and ``high`` bound the MEDIAN (``interval_of``) with ``confidence``, exactly
    and for any distribution; ``None`` where n is too small (below 6 at 95%).
    ``too_small`` names the percentiles that ``n`` cannot support.
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
    interval_of: str = "median"

    def describe(self, unit: str = "", scale: float = 1.0, digits: int = 2) -> str:
        """One line for people; ``scale`` 1000 turns seconds into milliseconds."""
        if self.median is None:
            return "not measured (n=0)"
        end = f" {unit}" if unit else ""
        text = f"median {self.median * scale:.{digits}f}{end}"
        if self.low is None or self.high is None:
            text += f" (n={self.n}, too small for an interval)"
        else:
            text += (
                f" ({self.confidence:.0%} interval of the median {self.low * scale:.{digits}f}"
                f" to {self.high * scale:.{digits}f}, n={self.n})"
            )
        for name, value in (("p90", self.p90), ("p99", self.p99)):
            if value is not None and name not in self.too_small:
                text += f", {name} {value * scale:.{digits}f}{end}"
        return text + (f"; n too small for {', '.join(self.too_small)}" if self.too_small else "")


def summarize(values: Iterable[float], confidence: float = 0.95) -> Summary:
    """Summarise samples; percentiles by :func:`percentile`, the interval by :func:`percentile_interval`."""
    ordered = _ordered(values)
    n = len(ordered)
    low, high = percentile_interval(ordered, 50, confidence)
    mean = math.fsum(ordered) / n if n else None
    std = None
    if mean is not None and n > 1 and math.isfinite(mean):
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / (n - 1))
    p90, p95, p99 = (_order_statistic(ordered, q) if n else None for q in TAILS)
    return Summary(
        n=n,
        mean=mean,
        std=std,
        minimum=ordered[0] if n else None,
        maximum=ordered[-1] if n else None,
        median=_order_statistic(ordered, 50) if n else None,
        p90=p90,
        p95=p95,
        p99=p99,
        low=low,
        high=high,
        confidence=confidence,
        too_small=tuple(f"p{q:g}" for q in TAILS if n < least_n(q)),
    )


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

    ``a[i]`` and ``b[i]`` were taken next to each other, so pairs are resampled: what
    slowed both (a clock change, a neighbour) cancels. The same seed gives the same interval.
    """
    if not a or len(a) != len(b):
        raise NanoinferError(f"ratio: needs as many samples of a as of b, at least one, got {len(a)} and {len(b)}")
    if min(*a, *b) <= 0:
        raise NanoinferError("ratio: samples must be positive")

    def ratio(indices: Sequence[int]) -> float:
        return _order_statistic(sorted(a[i] for i in indices), 50) / _order_statistic(sorted(b[i] for i in indices), 50)

    n, rng = len(a), random.Random(seed)
    value = ratio(range(n))
    if n < 2:
        return Ratio(value, None, None, confidence)
    draws = sorted(ratio(rng.choices(range(n), k=n)) for _ in range(resamples))
    tail = 50 * (1 - confidence)
    return Ratio(value, _order_statistic(draws, tail), _order_statistic(draws, 100 - tail), confidence)

"""Schedules: absolute, seeded, not rescaled."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from itertools import islice, pairwise

import pytest

from nanoinfer.errors import RequestError
from nanoinfer.workload.arrivals import constant, gamma, poisson, ramp, ramp_time, schedule


def gaps(offsets: Iterator[float], n: int = 20_000) -> list[float]:
    return [b - a for a, b in pairwise([0.0, *islice(offsets, n)])]


def test_constant_is_a_multiple_and_not_a_sum_of_gaps() -> None:
    assert list(islice(constant(4), 4)) == [0.0, 0.25, 0.5, 0.75]
    assert next(islice(constant(10), 1_000_000, None)) == 100_000.0  # adding 0.1 a million times is 1.3 µs off


def test_poisson_gaps_are_exponential() -> None:
    found = gaps(poisson(5, seed=1))
    assert statistics.fmean(found) == pytest.approx(0.2, rel=0.03)
    assert statistics.stdev(found) / statistics.fmean(found) == pytest.approx(1, rel=0.03)
    # Without memory: of those that last 0.2 s, exp(-1) last another 0.2 s.
    lasting = [gap for gap in found if gap > 0.2]
    assert sum(gap > 0.4 for gap in lasting) / len(lasting) == pytest.approx(math.exp(-1), rel=0.05)


def test_the_same_seed_gives_the_same_schedule_and_another_another() -> None:
    assert schedule("poisson", 7, n=50, seed=3) == schedule("poisson", 7, n=50, seed=3)
    assert schedule("poisson", 7, n=50, seed=3) != schedule("poisson", 7, n=50, seed=4)
    assert list(islice(gamma(7, 1.0, 3), 50)) == schedule("poisson", 7, n=50, seed=3)


def test_poisson_is_not_rescaled_to_its_rate() -> None:
    """The 100th arrival at 10 a second lies at 10 s give or take 1, as chance has it."""
    lasts = [schedule("poisson", 10, n=100, seed=seed)[-1] for seed in range(300)]
    assert statistics.fmean(lasts) == pytest.approx(10, abs=0.3)
    assert statistics.stdev(lasts) == pytest.approx(1, rel=0.2)
    counts = [len(schedule("poisson", 10, seconds=10, seed=seed)) for seed in range(300)]
    assert statistics.fmean(counts) == pytest.approx(100, abs=3)
    assert statistics.variance(counts) == pytest.approx(100, rel=0.3)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_gamma_shape(burstiness: float) -> None:
    found = gaps(gamma(5, burstiness, seed=2))
    assert statistics.fmean(found) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(found) / statistics.fmean(found) == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_a_ramp_climbs() -> None:
    offsets = list(ramp(2, 20, 100, seed=5))
    assert offsets == sorted(offsets) and offsets[-1] < 100
    assert len(offsets) == pytest.approx(1100, abs=4 * math.sqrt(1100))
    # Rate 2 to 11 in the first half, 11 to 20 in the second: 325 and 775.
    assert sum(at < 50 for at in offsets) == pytest.approx(325, abs=4 * math.sqrt(325))


def test_the_ramps_clock_is_the_inverse_of_its_count() -> None:
    for low, high in ((2, 20), (20, 2), (0, 8), (8, 0), (5, 5)):
        for t in (0.0, 1.0, 7.5, 10.0):
            n = low * t + (high - low) * t * t / 20
            assert ramp_time(n, low, high, 10) == pytest.approx(t, abs=1e-6)
    assert ramp_time(41, 8, 0, 10) == math.inf  # 8 a second falling to 0 in 10 s are 40
    assert len(list(ramp(8, 0, 10))) < 80


def test_schedules_from_words() -> None:
    assert schedule("constant", 2, seconds=2) == [0.0, 0.5, 1.0, 1.5]
    assert schedule("constant", 2, n=3, seconds=99) == [0.0, 0.5, 1.0]
    assert schedule("gamma:0.5", 2, n=9, seed=1) == list(islice(gamma(2, 0.5, 1), 9))
    assert schedule("ramp:2-20", 1, seconds=30, seed=1) == list(ramp(2, 20, 30, 1))


@pytest.mark.parametrize(
    ("shape", "rate", "limits", "says"),
    [
        ("steady", 1, {"n": 1}, "arrivals 'steady': write constant, poisson, gamma:0.5 or ramp:2-20"),
        ("gamma", 1, {"n": 1}, "arrivals 'gamma'"),
        ("poisson:3", 1, {"n": 1}, "arrivals 'poisson:3'"),
        ("gamma:0", 1, {"n": 1}, "burstiness must be above 0"),
        ("gamma:nan", 1, {"n": 1}, "burstiness must be above 0"),
        ("ramp:2-20", 1, {"n": 1}, "a ramp needs a length in seconds"),
        ("ramp:0-0", 1, {"seconds": 1}, "the higher rate must be above 0"),
        ("ramp:2", 1, {"seconds": 1}, "arrivals 'ramp:2'"),
        ("poisson", 0, {"n": 1}, "rate must be above 0"),
        ("poisson", math.inf, {"n": 1}, "rate must be above 0"),
        ("poisson", 1, {"seconds": 0}, "seconds must be above 0"),
        ("poisson", 1, {}, "say how many requests"),
    ],
)
def test_what_makes_no_schedule(shape: str, rate: float, limits: dict[str, float], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        schedule(shape, rate, **limits)  # type: ignore[arg-type]

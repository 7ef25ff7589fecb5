"""Batch means: exact on small numbers, honest on samples that hang together, where other intervals are not."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoinfer.errors import NanoinferError
from nanoinfer.measure.batches import BATCHES, Batches, BinnedBatches, ratio_error
from nanoinfer.measure.stats import percentile, percentile_interval
from tests.examples import examples


def filled(values: list[float], kind: type[Batches] = Batches) -> Batches:
    found = kind(0.0, float(len(values)))
    for t, value in enumerate(values):
        found.add(t, value)
    return found


def test_the_error_of_a_ratio_by_hand() -> None:
    # Means 1, 2, 3 of equal batches: their standard deviation is 1, that of their mean 1 / sqrt(3).
    assert ratio_error([10.0, 20.0, 30.0], [10, 10, 10]) == pytest.approx(1 / math.sqrt(3))
    # Batches of unlike sizes and the same mean do not stray at all.
    assert ratio_error([2.0, 20.0], [1, 10]) == 0.0


def test_mean_and_its_interval_by_hand() -> None:
    # Twenty batches of ten; ten of them are all 1, ten all 3: s = 1.026, half-width 2.093 s / sqrt(20) = 0.4801.
    found = filled([float(1 + 2 * (i // 10 % 2)) for i in range(200)]).mean()
    assert found.value == 2.0
    assert found.high is not None and found.high - 2.0 == pytest.approx(2.0930 * math.sqrt(20 / 19) / math.sqrt(20))
    assert found.low == pytest.approx(4.0 - found.high)


def test_times_outside_go_to_the_nearest_batch() -> None:
    found = Batches(10.0, 20.0)
    for t in (0.0, 10.0, 10.4, 10.5, 19.99, 20.0, 99.0):
        found.add(t, 1.0)
    assert found.counts == [3, 1, *[0] * (BATCHES - 3), 3]
    with pytest.raises(NanoinferError, match="must come after"):
        Batches(1.0, 1.0)


@examples(50)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.sampled_from([0.0, 1.0, 50.0, 90.0, 99.0, 100.0]))
def test_percentiles_are_order_statistics(values: list[int], q: float) -> None:
    assert filled([float(v) for v in values]).percentile(q).value == percentile(values, q)


@pytest.mark.parametrize("n", [100, 1000, 10_000])
def test_the_99th_of_a_hundred_is_the_99th(n: int) -> None:
    assert filled([float(i + 1) for i in range(n)]).percentile(99).value == n * 0.99


def test_few_samples_have_no_interval_and_none_no_figure() -> None:
    found = filled([1.0, 2.0, 3.0])
    assert found.mean() == (2.0, None, None) and found.percentile(50) == (2.0, None, None)
    assert (found.std, found.minimum, found.maximum) == (1.0, 1.0, 3.0)
    empty = Batches(0.0, 1.0)
    assert empty.mean() == empty.percentile(50) == (None, None, None)
    assert empty.std is None and empty.n == 0
    # 200 samples do not reach beyond their 99th percentile.
    assert filled([random.Random(i).random() for i in range(200)]).percentile(99).high is None


def wandering(n: int, seed: int) -> list[float]:
    """Each sample is mostly the one before: an AR(1) with correlation 0.95, mean 0, variance 1."""
    rng, x, found = random.Random(seed), 0.0, []
    for _ in range(n):
        x = 0.95 * x + math.sqrt(1 - 0.95**2) * rng.gauss(0, 1)
        found.append(x)
    return found


def test_intervals_hold_where_samples_hang_together() -> None:
    runs = [wandering(8000, seed) for seed in range(60)]
    means, medians, independent = 0, 0, 0
    for values in runs:
        found = filled(values)
        low, high = found.mean()[1:]
        means += low is not None and high is not None and low <= 0 <= high
        low, high = found.percentile(50)[1:]
        medians += low is not None and high is not None and low <= 0 <= high
        low, high = percentile_interval(values, 50)
        independent += low is not None and high is not None and low <= 0 <= high
    # 95% of 60 is 57; at 52 a right interval fails once in a hundred runs. The seeds are fixed.
    assert means >= 52 and medians >= 52
    assert independent < 35


def test_bins_are_a_thousandth_wide_and_the_rest_is_exact() -> None:
    rng = random.Random(1)
    values = [rng.lognormvariate(-4, 1) for _ in range(5000)]
    exact, binned = filled(values), filled(values, BinnedBatches)
    assert binned.mean() == exact.mean() and binned.n == 5000
    assert (binned.minimum, binned.maximum, binned.std) == (exact.minimum, exact.maximum, exact.std)
    for q in (1, 50, 90, 99):
        for a, b in zip(binned.percentile(q), exact.percentile(q), strict=True):
            assert a == pytest.approx(b, rel=0.0012)
        assert binned.percentile(q).value == pytest.approx(exact.percentile(q).value, rel=0.0006)


def test_many_samples_of_one_value() -> None:
    found = BinnedBatches(0.0, 1.0)
    found.add(0.5, 0.02, 10**9)
    found.add(0.5, 0.0, 10)
    assert found.n == 10**9 + 10 and found.percentile(50).value == pytest.approx(0.02, rel=0.0006)
    assert found.percentile(0).value == 0.0
    assert found.mean().value == pytest.approx(0.02)

"""Queueing formulas: textbook values, limits, and the virtual clock held against them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice, repeat

import pytest

from nanoinfer.cache.blocks import BlockPool
from nanoinfer.engines.scheduler import Scheduler
from nanoinfer.errors import RequestError
from nanoinfer.measure import metrics
from nanoinfer.measure.stats import BatchMeans
from nanoinfer.simulate import Span, simulate
from nanoinfer.theory.cost import mg1_wait
from nanoinfer.theory.roofline import StepTimes
from nanoinfer.workload.arrivals import poisson
from nanoinfer.workload.items import WorkItem


def test_waits_at_half_load() -> None:
    # M/M/1 waits a whole service, M/D/1 half of one.
    assert mg1_wait(0.5, 2.0, 1) == 2.0
    assert mg1_wait(0.5, 2.0, 0) == 1.0
    assert mg1_wait(0.9, 1.0, 0) == pytest.approx(4.5) and mg1_wait(0.9, 1.0, 1) == pytest.approx(9.0)
    assert mg1_wait(0.0, 1.0, 0) == 0.0
    assert mg1_wait(0.5, 2.0, 4.0) == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: mg1_wait(1.0, 1.0, 0), "load 1 never settles"),
        (lambda: mg1_wait(-0.1, 1.0, 1), "load must be at least 0, got -0.1"),
        (lambda: mg1_wait(0.5, float("nan"), 0), "service_s must be at least 0, got nan"),
    ],
)
def test_what_has_no_answer_is_refused(call: object, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        call()  # type: ignore[operator]


# --- the virtual clock as a queue ------------------------------------------------------


class Fixed(StepTimes):
    """Every step takes as long."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s

    def seconds(self, rows: Sequence[tuple[int, int]], ends: int) -> float:
        return self.step_s

    def decoding(self, contexts: Sequence[int]) -> Iterator[float]:
        return repeat(self.step_s)


def one_at_a_time() -> Scheduler:
    return Scheduler(BlockPool(8, 16, share_prefixes=False), max_running=1, token_budget=16)


@pytest.mark.parametrize("load", [0.7, *(pytest.param(load, marks=pytest.mark.slow) for load in (0.5, 0.9))])
def test_the_mean_wait_is_that_of_m_d_1(load: float) -> None:
    # A request takes 4 steps of 0.25 s, one of its prompt and three jumped over: a service of 1 s.
    n, warm = 40_000, 4_000
    work = (WorkItem(b"\0" * 8, 4, at) for at in islice(poisson(load, seed=11), n))
    waits = BatchMeans(warm / load, n / load)
    for trace in simulate(work, one_at_a_time(), Fixed(0.25)):
        assert trace.t_start is not None and trace.t_end is not None
        assert trace.t_end - trace.t_start == pytest.approx(1.0)
        if trace.t_scheduled >= warm / load:
            waits.add(trace.t_scheduled, trace.t_start - trace.t_scheduled)
    found = waits.mean(confidence=0.99)
    assert found.low is not None and found.high is not None
    assert found.low <= mg1_wait(load, 1.0, 0) <= found.high
    assert found.high - found.low < 0.5 * mg1_wait(load, 1.0, 0)  # an interval that says something
    assert not found.low <= mg1_wait(load, 1.0, 1) <= found.high


def test_the_mean_wait_is_that_of_m_m_1() -> None:
    # Many tiny steps, geometric in number: nearly exponential services with a mean of 1 s.
    rng, load, n = random.Random(5), 0.7, 10_000
    steps = 100
    outputs = (1 + int(rng.expovariate(1 / (steps - 0.5))) for _ in range(n))
    work = (WorkItem(b"\0", output, at) for at, output in zip(poisson(load, seed=6), outputs, strict=False))
    waits = BatchMeans(0.0, n / load)
    scheduler = Scheduler(BlockPool(2**12, 16, share_prefixes=False), max_running=1, token_budget=16)
    for trace in simulate(work, scheduler, Fixed(1 / steps)):
        waits.add(trace.t_scheduled, (trace.t_start or 0.0) - trace.t_scheduled)
    found = waits.mean(confidence=0.99)
    assert found.low is not None and found.high is not None
    assert found.low <= mg1_wait(load, 1.0, 1) <= found.high


def test_littles_law_holds_exactly_over_a_whole_run() -> None:
    # Who is there is counted from the scheduler's side, step by step; how long each stayed, from the traces.
    rng = random.Random(2)
    work = [WorkItem(bytes(rng.randrange(1, 40)), rng.randrange(1, 20), at) for at in islice(poisson(2.0, seed=3), 400)]
    scheduler = Scheduler(BlockPool(24, 4, share_prefixes=False), max_running=4, token_budget=8)
    gone: list[float] = []  # of those who left, times
    leaving: list[Sequence[int]] = []
    remove = scheduler.remove
    scheduler.remove = lambda text: (leaving.append(text.tokens), remove(text))[1]  # type: ignore[method-assign]

    def note(span: Span) -> None:
        gone.extend([span.end] * len(leaving))
        leaving.clear()

    traces = list(simulate(work, scheduler, Fixed(0.05), note))
    end, area = gone[-1], sum(gone) - sum(w.at for w in work)
    law = metrics.little(traces, 0.0, end + 1)
    assert len(gone) == len(traces) == 400 and law.concurrency * (end + 1) == pytest.approx(area, rel=1e-12)
    assert law.error == pytest.approx(0.0, abs=1e-12)
    assert law.concurrency == pytest.approx(law.rate * law.time, rel=1e-12)

"""The fast virtual clock gives what the plain one gives, to the last bit, with fewer decisions and little memory."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import count, islice, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nanoinfer.cache.blocks import BlockPool
from nanoinfer.configs.config import SHAPES
from nanoinfer.engines.scheduler import Scheduler, StepPlan
from nanoinfer.errors import RequestError
from nanoinfer.measure.trace import Trace
from nanoinfer.simulate import virtual
from nanoinfer.simulate.simulate import simulate, step_seconds, watch
from nanoinfer.simulate.virtual import Span, simulated
from nanoinfer.theory.roofline import Machine, StepTimes
from nanoinfer.workload.arrivals import poisson
from nanoinfer.workload.items import WorkItem
from tests.examples import examples


class ByRows:
    """Every row's context and every new token cost time: no two steps take equally long."""

    def seconds(self, rows: Sequence[tuple[int, int]], ends: int) -> float:
        return 1 + sum(0.01 * old + 0.1 * new for old, new in rows) + 0.001 * ends

    def decoding(self, contexts: Sequence[int]) -> Iterator[float]:
        return (self.seconds([(c - 1 + step, 1) for c in contexts], len(contexts)) for step in count())


def plain(work: Sequence[WorkItem], scheduler: Scheduler, times: virtual.Times) -> list[Trace]:
    def seconds(plan: StepPlan) -> float:
        return times.seconds([(c.start, c.n) for c in plan.chunks], sum(c.reaches_end for c in plan.chunks))

    return simulate(work, scheduler, seconds)


def state(scheduler: Scheduler) -> dict[str, object]:
    """All that the future could depend on."""
    pool = scheduler.pool
    return {
        "preemptions": scheduler.preemptions,
        "counts": asdict(pool.counts),
        "free": pool._free,
        "cached": pool.cached,
        "found": pool._found,
        "empty": (scheduler.running, list(scheduler.waiting), pool.used),
    }


def in_order(traces: Sequence[Trace]) -> list[dict[str, object]]:
    return sorted((asdict(trace) for trace in traces), key=str)


works = st.lists(
    st.tuples(
        st.integers(1, 24),  # prompt tokens
        st.integers(0, 2),  # what they are: 0 is also what the simulation generates
        st.integers(1, 40),  # output tokens
        st.sampled_from([0.0, 0.0, 0.5, 3.0, 11.0, 40.0]),  # seconds after the one before
    ),
    min_size=1,
    max_size=14,
)


@examples(300)
@given(works, st.integers(1, 5), st.integers(1, 12), st.integers(1, 5), st.integers(17, 60), st.booleans())
# Two that are alike share blocks; a queue before a full house; blocks that run out; a search for shared blocks that
# is in vain and yet saves them from being evicted.
@example([(20, 0, 40, 0.0), (20, 0, 30, 3.0), (20, 0, 9, 0.5)], 3, 4, 2, 40, True)
@example([(4, 1, 40, 0.0)] * 12, 2, 3, 4, 40, False)
@example([(8, 1, 40, 0.0)] * 8, 5, 8, 4, 20, True)
@example([(8, 1, 40, 0.0), (8, 2, 40, 3.0)] * 4, 5, 8, 4, 20, False)
@example([(18, 3, 9, 0.5), (23, 0, 9, 0.0), (7, 1, 2, 0.0), (7, 3, 2, 0.0), (7, 1, 1, 0.0)], 4, 2, 3, 20, True)
def test_the_same_traces_to_the_last_bit(
    drawn: list[tuple[int, int, int, float]], running: int, extra: int, size: int, blocks: int, share: bool
) -> None:
    at, work = 0.0, []
    for prompt, what, output, gap in drawn:
        at += gap
        work.append(WorkItem([what] * prompt, output, at))
    slow, fast = (Scheduler(BlockPool(blocks, size, share), running, running + extra) for _ in range(2))
    try:
        expected = plain(work, slow, ByRows())
    except RequestError:  # one that can never fit
        with pytest.raises(RequestError, match="cannot fit"):
            list(simulated(work, fast, ByRows()))
        return
    found = list(simulated(iter(work), fast, ByRows()))
    assert in_order(found) == in_order(expected)
    assert state(fast) == state(slow)
    fast.check()
    assert [t.t_end for t in found] == sorted(t.t_end or 0.0 for t in found)


def test_few_decisions_where_little_happens() -> None:
    scheduler = Scheduler(BlockPool(1000, 16, False), 8, 64)
    plans, spans = watch(scheduler), list[Span]()
    work = [WorkItem([1] * 10, 500, 0.0), WorkItem([1] * 10, 500, 5.0), WorkItem([1] * 10, 100, 10.0)]
    traces = list(simulated(work, scheduler, ByRows(), spans.append))
    assert [len(t.chunks) for t in traces] == [t.output_tokens for t in traces]
    assert sorted(t.output_tokens for t in traces) == [100, 500, 500]
    assert len(plans) == 3  # one for each prompt
    assert sum(s.steps for s in spans) > 500 and len(spans) < 15
    assert sum(s.tokens for s in spans) == sum(t.prompt_tokens + t.output_tokens - 1 for t in traces)
    assert all(a.end <= b.start for a, b in pairwise(spans))
    assert max(s.blocks for s in spans) == 32 + 32  # 509 tokens each; the short one is gone by then
    assert spans[-1].blocks == 32 and scheduler.pool.used == 0


def test_a_short_cache_is_jumped_over_up_to_its_last_block() -> None:
    # Three rows of 3 + 30 tokens in 12 blocks of 4: they run out in mid-answer, and somebody is preempted.
    work = [WorkItem([i] * 3, 30, 0.0) for i in range(3)]
    schedulers = [Scheduler(BlockPool(12, 4, False), 4, 16) for _ in range(2)]
    plans = watch(schedulers[0])
    fast = list(simulated(work, schedulers[0], ByRows()))
    assert in_order(fast) == in_order(plain(work, schedulers[1], ByRows()))
    assert sum(t.preemptions for t in fast) == schedulers[0].preemptions > 0
    assert len(plans) < 20


@pytest.mark.parametrize("model", ["smollm2-135m", "llama-3.1-8b"])
def test_the_step_time_model_prices_a_jump_as_it_prices_its_plans(model: str) -> None:
    config, machine = SHAPES[model], Machine.datasheet("H100", "bfloat16")
    work = [WorkItem(bytes(10 + 7 * i), 5 + 11 * i % 37, i / 900) for i in range(40)]
    house = [Scheduler(BlockPool(400, 16, False), 8, 64) for _ in range(2)]
    fast = list(simulated(work, house[0], StepTimes(config, machine)))
    assert in_order(fast) == in_order(simulate(work, house[1], step_seconds(config, machine)))


def test_work_is_taken_no_sooner_than_it_can_matter() -> None:
    taken = 0

    def endless() -> Iterator[WorkItem]:
        nonlocal taken
        for at in poisson(1000.0, seed=1):  # a hundred times what can be served
            taken += 1
            yield WorkItem(b"\0" * 10, 10, at)

    traces = list(islice(simulated(endless(), Scheduler(BlockPool(100, 16, False), 4, 16), ByRows()), 200))
    assert [t.t_scheduled for t in traces] == sorted(t.t_scheduled for t in traces)
    assert taken <= 200 + 2 * 4 + 1


def test_memory_does_not_grow_with_the_number_of_requests() -> None:
    def peak(n: int) -> int:
        work = (WorkItem(b"\0" * 20, 60, at) for at in islice(poisson(0.02, seed=4), n))
        scheduler = Scheduler(BlockPool(100, 16, False), 8, 64)
        gc.collect()
        tracemalloc.start()
        try:
            for _ in simulated(work, scheduler, ByRows()):
                pass
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(50)
    assert peak(1000) < 2 * peak(200)


@pytest.mark.parametrize("gap", [9.0, 1000.0])
def test_ends_of_steps_are_dropped_and_traces_stay_whole(gap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "KEPT", 3)
    outputs = [1] * 10 + [1 + 7 * i % 50 for i in range(50)]
    work = [WorkItem([1] * (1 + i % 5), output, gap * i) for i, output in enumerate(outputs)]
    house = [Scheduler(BlockPool(60, 4), 5, 9) for _ in range(2)]
    assert in_order(list(simulated(work, house[0], ByRows()))) == in_order(plain(work, house[1], ByRows()))


@pytest.mark.parametrize(
    ("work", "says"),
    [
        ([WorkItem([1], 1, 5.0), WorkItem([1], 1, 4.0)], "in order of its time: 4 s after 5 s"),
        ([WorkItem("text", 1)], "token ids"),
        ([WorkItem([1], 0)], "at least 1 token in and 1 out, got 1 and 0"),
        ([WorkItem([], 1)], "at least 1 token in and 1 out, got 0 and 1"),
        ([WorkItem([1] * 60, 6)], "cannot fit in a KV cache of 64"),
    ],
)
def test_work_that_cannot_be_served(work: list[WorkItem], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        list(simulated(work, Scheduler(BlockPool(16, 4), 4, 8), ByRows()))


def test_no_work_is_no_traces() -> None:
    assert list(simulated([], Scheduler(BlockPool(16, 4), 4, 8), ByRows())) == []

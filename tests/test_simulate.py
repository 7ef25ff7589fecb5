"""The simulator by hand, against a plain loop to the last bit, and against the plans of a real run."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import count, islice, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nanoinfer import simulate as simulator
from nanoinfer.cache.blocks import BlockPool
from nanoinfer.configs.config import SHAPES
from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.engines.scheduler import Scheduler, SequenceState, StepPlan
from nanoinfer.errors import RequestError
from nanoinfer.measure.trace import Trace
from nanoinfer.models.registry import load_model
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.simulate import Span, record_plans, sequence_of, simulate
from nanoinfer.theory.curves import Rows
from nanoinfer.theory.roofline import Machine, StepTimes, decode_step, prefill_step
from nanoinfer.workload.arrivals import poisson
from nanoinfer.workload.items import WorkItem
from tests.examples import examples


def step_by_step(work: Sequence[WorkItem], scheduler: Scheduler, seconds: Callable[[Rows, int], float]) -> list[Trace]:
    """What a simulation must come to, a step at a time; one trace a request, in the order of ``work``."""
    traces = [Trace(w.at, w.at, prompt_tokens=len(w.prompt)) for w in work]
    for w in work:
        scheduler.refuse(sequence_of(w).limit)
    due = deque(sorted(range(len(work)), key=lambda i: work[i].at))
    active: dict[SequenceState, int] = {}
    clock = 0.0
    while due or active:
        if not active:
            clock = max(clock, work[due[0]].at)
        while due and work[due[0]].at <= clock:
            index = due.popleft()
            sequence = sequence_of(work[index])
            scheduler.add(sequence)
            active[sequence] = index
        plan = scheduler.schedule()
        for chunk in plan.chunks:
            trace = traces[active[chunk.sequence]]
            if trace.t_start is None:
                trace.t_start, trace.cached_tokens = clock, chunk.sequence.cached_tokens
        clock += seconds([(c.start, c.n) for c in plan.chunks], sum(c.reaches_end for c in plan.chunks))
        scheduler.commit(plan)
        for sequence in [chunk.sequence for chunk in plan.chunks if chunk.reaches_end]:
            trace = traces[active[sequence]]
            trace.token(clock)
            if trace.output_tokens == work[active[sequence]].output:
                trace.t_end, trace.preemptions = clock, sequence.preemptions
                del active[sequence]
                scheduler.remove(sequence)
            else:
                sequence.tokens.append(0)
    return traces


def empty_scheduler(blocks: int = 16, running: int = 4, budget: int = 8) -> Scheduler:
    return Scheduler(BlockPool(blocks, 4), running, budget)


def by_tokens(rows: Rows, ends: int) -> float:
    """A step takes a second, and a tenth for each token."""
    return 1 + sum(new for _, new in rows) / 10


def times(trace: Trace) -> list[float]:
    return [round(t, 6) for t, _ in trace.chunks]


def test_two_requests_by_hand() -> None:
    scheduler = empty_scheduler()
    one, two = simulate([WorkItem([1] * 6, 3), WorkItem([2] * 4, 2, at=0.5)], scheduler, by_tokens)
    # 0 to 1.6: six tokens of the first. Then one of it and four of the second: 1.5 s. Then two: 1.2 s.
    assert times(one) == [1.6, 3.1, 4.3]
    assert times(two) == [3.1, 4.3]
    assert (one.t_start, two.t_start, two.t_scheduled) == (0.0, 1.6, 0.5)
    assert (one.t_end, one.output_tokens, two.prompt_tokens) == (pytest.approx(4.3), 3, 4)
    assert scheduler.pool.used == 0


def test_the_clock_jumps_over_idle_time() -> None:
    one, two = simulate([WorkItem([1] * 2, 1), WorkItem([2] * 2, 1, at=100.0)], empty_scheduler(), by_tokens)
    assert times(one) == [1.2] and times(two) == [101.2]


def test_a_long_prompt_comes_in_chunks_and_others_decode_meanwhile() -> None:
    one, two = simulate([WorkItem([1] * 2, 4), WorkItem([2] * 20, 1, at=0.1)], empty_scheduler(), by_tokens)
    # 7 tokens of the long prompt with each decoding row, then the last 6 of it.
    assert times(one) == [1.2, 3.0, 4.8, 6.5]
    assert times(two) == [6.5]


def test_found_prefixes_are_not_computed_again() -> None:
    first, again = simulate([WorkItem([1] * 8, 1), WorkItem([1] * 8, 1, at=50)], empty_scheduler(budget=9), by_tokens)
    assert (first.cached_tokens, again.cached_tokens) == (0, 4)
    assert times(again) == [51.4]


def test_the_step_time_model_gives_a_plan_its_seconds() -> None:
    config, machine = SHAPES["smollm2-135m"], Machine.datasheet("H100", "bfloat16")
    (trace,) = simulate([WorkItem([1] * 64, 3)], empty_scheduler(32, 4, 512), StepTimes(config, machine))
    steps = [prefill_step(config, machine, 1, 64), *(decode_step(config, machine, 1, n) for n in (65, 66))]
    assert trace.chunks[-1][0] == pytest.approx(sum(s.seconds for s in steps), rel=0.01)


@pytest.mark.parametrize("blocks", [8, 64])
def test_the_same_plans_as_a_real_run(blocks: int) -> None:
    loaded = load_model("random:tiny-llama")
    rng = random.Random(3)
    lengths = [(rng.randrange(1, 40), rng.randrange(1, 20)) for _ in range(12)]
    work = [WorkItem([rng.randrange(1, 200) for _ in range(p)], new) for p, new in lengths]
    engine = ContinuousEngine(loaded, max_running=4, token_budget=16, block_size=8, cache_tokens=8 * blocks)
    ours = Scheduler(BlockPool(blocks, 8), 4, 16)
    real, computed = record_plans(engine.scheduler), record_plans(ours)
    params = [SamplingParams(max_tokens=w.output, ignore_eos=True) for w in work]
    engine.generate([list(w.prompt) for w in work], params)
    list(simulate(work, ours, by_tokens))
    assert [spans(plan) for plan in real] == [spans(plan) for plan in computed]
    assert len(real) > 40
    assert (ours.preemptions > 0) == (blocks == 8)


def spans(plan: StepPlan) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.n) for chunk in plan.chunks]


# --- jumps ------------------------------------------------------------------------------


class ByRows(StepTimes):
    """Every row's context and every new token cost time: no two steps take equally long."""

    def __init__(self) -> None:
        """Without a model and a machine."""

    def seconds(self, rows: Sequence[tuple[int, int]], ends: int) -> float:
        return 1 + sum(0.01 * old + 0.1 * new for old, new in rows) + 0.001 * ends

    def decoding(self, contexts: Sequence[int]) -> Iterator[float]:
        return (self.seconds([(c - 1 + step, 1) for c in contexts], len(contexts)) for step in count())


def counts(scheduler: Scheduler) -> dict[str, object]:
    pool = scheduler.pool
    return {
        "preemptions": scheduler.preemptions,
        "counts": asdict(pool.counts),
        "blocks": (pool.available, pool.cached, pool.used),
        "requests": (scheduler.running, list(scheduler.waiting)),
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
# Two that are alike share blocks; a queue before full slots; blocks that run out; a search for shared blocks that
# is in vain and yet saves them from being evicted.
@example([(20, 0, 40, 0.0), (20, 0, 30, 3.0), (20, 0, 9, 0.5)], 3, 4, 2, 40, True)
@example([(4, 1, 40, 0.0)] * 12, 2, 3, 4, 40, False)
@example([(8, 1, 40, 0.0)] * 8, 5, 8, 4, 20, True)
@example([(8, 1, 40, 0.0), (8, 2, 40, 3.0)] * 4, 5, 8, 4, 20, False)
@example([(18, 3, 9, 0.5), (23, 0, 9, 0.0), (7, 1, 2, 0.0), (7, 3, 2, 0.0), (7, 1, 1, 0.0)], 4, 2, 3, 20, True)
def test_the_traces_are_those_of_a_loop_step_by_step(
    drawn: list[tuple[int, int, int, float]], running: int, extra: int, size: int, blocks: int, share: bool
) -> None:
    at, work = 0.0, []
    for prompt, what, output, gap in drawn:
        at += gap
        work.append(WorkItem([what] * prompt, output, at))
    slow, fast = (Scheduler(BlockPool(blocks, size, share), running, running + extra) for _ in range(2))
    try:
        expected = step_by_step(work, slow, ByRows().seconds)
    except RequestError:  # one that can never fit
        with pytest.raises(RequestError, match="cannot fit"):
            list(simulate(work, fast, ByRows()))
        return
    found = list(simulate(iter(work), fast, ByRows()))
    assert in_order(found) == in_order(expected)
    assert counts(fast) == counts(slow)
    fast.check()
    # What the cache remembers is equal too: the same work once more finds the same.
    again = [step_by_step(work, scheduler, ByRows().seconds) for scheduler in (slow, fast)]
    assert in_order(again[0]) == in_order(again[1]) and counts(fast) == counts(slow)
    assert [t.t_end for t in found] == sorted(t.t_end or 0.0 for t in found)


def test_few_decisions_where_little_happens() -> None:
    scheduler = Scheduler(BlockPool(1000, 16, False), 8, 64)
    plans, spans = record_plans(scheduler), list[Span]()
    work = [WorkItem([1] * 10, 500, 0.0), WorkItem([1] * 10, 500, 5.0), WorkItem([1] * 10, 100, 10.0)]
    traces = list(simulate(work, scheduler, ByRows(), spans.append))
    assert [len(t.chunks) for t in traces] == [t.output_tokens for t in traces]
    assert sorted(t.output_tokens for t in traces) == [100, 500, 500]
    assert len(plans) == 3  # one for each prompt
    assert sum(s.steps for s in spans) > 500 and len(spans) < 15
    assert sum(s.tokens for s in spans) == sum(t.prompt_tokens + t.output_tokens - 1 for t in traces)
    assert all(a.end <= b.start for a, b in pairwise(spans))
    assert max(s.blocks for s in spans) == 32 + 32  # 509 tokens each; the short one is gone by then
    assert spans[-1].blocks == 32 and scheduler.pool.used == 0


def test_a_short_cache_is_jumped_over_up_to_its_last_block() -> None:
    # Three rows of 3 + 30 tokens in 12 blocks of 4: they run out in mid-answer, and one is preempted.
    work = [WorkItem([i] * 3, 30, 0.0) for i in range(3)]
    schedulers = [Scheduler(BlockPool(12, 4, False), 4, 16) for _ in range(2)]
    plans = record_plans(schedulers[0])
    fast = list(simulate(work, schedulers[0], ByRows()))
    assert in_order(fast) == in_order(step_by_step(work, schedulers[1], ByRows().seconds))
    assert sum(t.preemptions for t in fast) == schedulers[0].preemptions > 0
    assert len(plans) < 20


def test_the_step_time_model_gives_a_jump_the_seconds_of_its_plans() -> None:
    times = StepTimes(SHAPES["smollm2-135m"], Machine.datasheet("H100", "bfloat16"))
    work = [WorkItem(bytes(10 + 7 * i), 5 + 11 * i % 37, i / 900) for i in range(40)]
    schedulers = [Scheduler(BlockPool(400, 16, False), 8, 64) for _ in range(2)]
    fast = list(simulate(work, schedulers[0], times))
    assert in_order(fast) == in_order(step_by_step(work, schedulers[1], times.seconds))


def test_with_a_function_of_rows_every_step_is_planned() -> None:
    work = [WorkItem([1] * 10, 50), WorkItem([2] * 30, 7, 12.5)]
    schedulers = [Scheduler(BlockPool(100, 16), 8, 64) for _ in range(2)]
    plans, spans = record_plans(schedulers[0]), list[Span]()
    each = list(simulate(work, schedulers[0], ByRows().seconds, spans.append))
    assert in_order(each) == in_order(step_by_step(work, schedulers[1], ByRows().seconds))
    assert len(plans) == len(spans) and {span.steps for span in spans} == {1}


def test_work_is_taken_no_sooner_than_it_can_matter() -> None:
    taken = 0

    def endless() -> Iterator[WorkItem]:
        nonlocal taken
        for at in poisson(1000.0, seed=1):  # a hundred times what can be served
            taken += 1
            yield WorkItem(b"\0" * 10, 10, at)

    traces = list(islice(simulate(endless(), Scheduler(BlockPool(100, 16, False), 4, 16), ByRows()), 200))
    assert [t.t_scheduled for t in traces] == sorted(t.t_scheduled for t in traces)
    assert taken <= 200 + 2 * 4 + 1


def test_memory_does_not_grow_with_the_number_of_requests() -> None:
    def peak(n: int) -> int:
        work = (WorkItem(b"\0" * 20, 60, at) for at in islice(poisson(0.02, seed=4), n))
        scheduler = Scheduler(BlockPool(100, 16, False), 8, 64)
        gc.collect()
        tracemalloc.start()
        try:
            for _ in simulate(work, scheduler, ByRows()):
                pass
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(50)
    assert peak(1000) < 2 * peak(200)


@pytest.mark.parametrize("gap", [9.0, 1000.0])
def test_ends_of_steps_are_dropped_and_traces_stay_whole(gap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator, "KEPT_ENDS", 3)
    outputs = [1] * 10 + [1 + 7 * i % 50 for i in range(50)]
    work = [WorkItem([1] * (1 + i % 5), output, gap * i) for i, output in enumerate(outputs)]
    schedulers = [Scheduler(BlockPool(60, 4), 5, 9) for _ in range(2)]
    assert in_order(list(simulate(work, schedulers[0], ByRows()))) == in_order(
        step_by_step(work, schedulers[1], ByRows().seconds)
    )


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
        list(simulate(work, Scheduler(BlockPool(16, 4), 4, 8), ByRows()))


def test_no_work_is_no_traces() -> None:
    assert list(simulate([], Scheduler(BlockPool(16, 4), 4, 8), ByRows())) == []

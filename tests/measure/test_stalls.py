"""Gaps explained: timelines made by hand, and the real engine on a clock that only its steps move."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoinfer.engines import continuous
from nanoinfer.engines import engine as engines
from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.errors import NanoinferError
from nanoinfer.measure.stalls import Pause, Stall, StepNote, shifted, stalls, totals, watch_gc
from nanoinfer.measure.trace import Trace
from nanoinfer.models.registry import load_model
from nanoinfer.sampling.params import SamplingParams


def stream(*times: float, **more: object) -> Trace:
    return Trace(0.0, 0.0, [(t, 1) for t in times], t_end=times[-1], **more)  # type: ignore[arg-type]


def steps(*ends: float, **notes: dict[int, int]) -> list[StepNote]:
    """Steps without a break; ``prefill={2: 8}``: the third read 8 tokens of prompts."""
    prefill, preempted = notes.get("prefill", {}), notes.get("preempted", {})
    starts = (0.0, *ends)
    return [
        StepNote(a, b, 1, prefill.get(i, 0), preempted.get(i, 0))
        for i, (a, b) in enumerate(zip(starts, ends, strict=False))
    ]


def only(found: list[Stall]) -> Stall:
    assert len(found) == 1
    return found[0]


def test_prefill_of_another_request() -> None:
    trace = stream(1, 2, 3, 10, 11, t_start=0.0)
    stall = only(stalls([trace], steps(1, 2, 3, 10, 11, prefill={0: 4, 3: 64})))
    assert (stall.trace, stall.start, stall.end, stall.first) == (0, 3, 10, False)
    assert stall.shares == {"decode": 1, "prefill": 6}
    assert stall.cause == "prefill"


def test_a_step_that_was_slow_for_no_known_reason() -> None:
    trace = stream(1, 2, 3, 10, 11, t_start=0.0)
    stall = only(stalls([trace], steps(1, 2, 3, 10, 11, prefill={0: 4})))
    assert stall.shares == {"decode": 1, "unexplained": 6}
    assert stall.cause == "unexplained"


def test_collections_and_compilations_come_before_the_step_they_held_up() -> None:
    trace = stream(1, 2, 3, 10, 11, t_start=0.0)
    log = steps(1, 2, 3, 10, 11, prefill={0: 4, 3: 64})
    pauses = [Pause("gc", 4, 6), Pause("compile", 5, 8), Pause("gc", 10.5, 10.6)]
    stall = only(stalls([trace], log, pauses))
    assert stall.shares == {"gc": 1, "compile": 3, "decode": 1, "prefill": 2}
    assert stall.cause == "compile"


def test_a_preempted_request_waits_for_its_blocks() -> None:
    """It loses them at 3, others decode at its expense, and the step to 9 computes it again."""
    victim = stream(1, 2, 3, 9, 10, t_start=0.0, preemptions=1)
    other = stream(1, 2, 3, 4, 5, 6, 9, 10, t_start=0.0)
    log = steps(1, 2, 3, 4, 5, 6, 9, 10, prefill={0: 8, 6: 7}, preempted={3: 1})
    stall = only(stalls([victim, other], log))
    assert (stall.trace, stall.start, stall.end) == (0, 3, 9)
    assert stall.shares == {"preemption": 6}
    every = {(s.trace, s.start): s for s in stalls([victim, other], log, longer_than=0)}
    assert every[1, 6.0].shares == {"decode": 1, "prefill": 2}  # to the other it is a prompt like any
    assert every[1, 3.0].shares == {"decode": 1}
    assert every[0, 2.0].cause == "decode"


def test_a_request_preempted_once_is_not_so_in_every_gap() -> None:
    """At 3 another request loses its blocks, in a step that gives this one, preempted at another time, its token."""
    trace = stream(1, 2, 3, 9, 10, t_start=0.0, preemptions=1)
    log = steps(1, 2, 3, 9, 10, prefill={3: 5}, preempted={3: 1})
    assert only(stalls([trace], log)).shares == {"decode": 1, "prefill": 5}


def test_the_wait_for_the_first_token() -> None:
    late = Trace(0.0, 1.0, [(9.0, 1), (10.0, 1)], t_end=10.0, t_start=4.0)
    quick = [Trace(t, t, [(t + 1.0, 1)], t_end=t + 1.0, t_start=t) for t in (20.0, 30.0)]
    stall = only(stalls([late, *quick], [StepNote(0, 4, 3), StepNote(4.5, 9, 2, 60)]))
    assert stall.first
    assert (stall.start, stall.end) == (0, 9)
    assert stall.shares == {"client": 1, "queue": 3, "prompt": 4.5, "unexplained": 0.5}
    assert stall.cause == "prompt"


def test_time_on_the_network() -> None:
    """The engine had nothing to do from 3 to 8, and the client heard nothing until 8.5."""
    over_http = stream(1, 2, 3, 8.5, 9.5, kinds=["content"] * 5)
    in_process = stream(1, 2, 3, 8.5, 9.5)
    log = [*steps(1, 2, 3, prefill={0: 4}), StepNote(8, 8.5, 1), StepNote(8.5, 9.5, 1)]
    assert only(stalls([over_http], log)).shares == {"client": 5, "decode": 0.5}
    assert only(stalls([in_process], log)).shares == {"unexplained": 5, "decode": 0.5}
    nothing_noted = only(stalls([over_http], pauses=[Pause("gc", 4, 5)]))
    assert nothing_noted.shares == {"client": 4.5, "gc": 1}


def test_how_long_is_long() -> None:
    trace = stream(1, 2, 4, 7, 8, 9)
    assert [s.end - s.start for s in stalls([trace], longer_than=2.5)] == [3]
    assert [s.end - s.start for s in stalls([trace], longer_than=1.5)] == [2, 3]
    assert len(stalls([trace], longer_than=0)) == 6  # the wait for the first token too
    assert stalls([trace]) == []
    assert stalls([]) == []
    with pytest.raises(NanoinferError, match="longer_than"):
        stalls([trace], longer_than=-1)


def test_notes_that_cannot_be() -> None:
    with pytest.raises(NanoinferError, match="before another ends"):
        stalls([], [StepNote(0, 2, 1), StepNote(1, 3, 1)])
    with pytest.raises(NanoinferError, match="before its start"):
        stalls([], [StepNote(2, 1, 1)])


def test_totals_add_up_all_stalls() -> None:
    trace = stream(1, 2, 3, 10, 11, 18, 19, t_start=0.0)
    log = steps(1, 2, 3, 10, 11, 18, 19, prefill={0: 4, 3: 64})
    assert totals(stalls([trace], log)) == {"prefill": 6, "unexplained": 6, "decode": 2}


def test_notes_on_another_clock() -> None:
    assert shifted([StepNote(5, 6, 2, 3, 1)], -5) == [StepNote(0, 1, 2, 3, 1)]
    assert shifted([Pause("gc", 5, 6)], 1) == [Pause("gc", 6, 7)]


def test_collections_are_noted() -> None:
    before = len(gc.callbacks)
    with watch_gc() as pauses:
        gc.collect()
        assert len(gc.callbacks) == before + 1
    noted = len(pauses)
    gc.collect()
    assert noted >= 1 and len(pauses) == noted
    assert all(pause.cause == "gc" and pause.start <= pause.end for pause in pauses)
    assert len(gc.callbacks) == before


TIMES = st.lists(st.floats(0, 20), min_size=2, max_size=12, unique=True).map(sorted)
SPANS = st.lists(st.tuples(st.floats(0, 20), st.floats(0, 5)), max_size=6)


@given(
    TIMES,
    TIMES,
    st.lists(st.integers(0, 9), min_size=12, max_size=12),
    SPANS,
    SPANS,
    st.booleans(),
    st.booleans(),
    st.none() | st.floats(0, 20),
)
def test_the_shares_of_a_gap_add_up_to_it(
    tokens: list[float],
    marks: list[float],
    work: list[int],
    collections: list[tuple[float, float]],
    compilations: list[tuple[float, float]],
    kinds: bool,
    every_other: bool,
    started: float | None,
) -> None:
    log = [StepNote(a, b, 1, n % 5, n // 7) for a, b, n in zip(marks, marks[1:], work, strict=False)]
    log = log[:: 2 if every_other else 1]
    pauses = [Pause("gc", t, t + s) for t, s in collections] + [Pause("compile", t, t + s) for t, s in compilations]
    trace = Trace(
        0.0,
        tokens[0] / 2,
        [(t, 1) for t in tokens],
        t_end=tokens[-1],
        t_start=started,
        preemptions=work[0],
        kinds=["content"] * len(tokens) if kinds else [],
    )
    for stall in stalls([trace], log, pauses, longer_than=0):
        assert sum(stall.shares.values()) == pytest.approx(stall.end - stall.start)
        assert min(stall.shares.values()) > 0
        assert stall.cause in stall.shares


# --- the real engine ----------------------------------------------------------------------------


class Clock:
    """A second a step, half a second more for every prompt token: only steps move it."""

    def __init__(self) -> None:
        self.t = 0.0

    def __call__(self) -> float:
        return self.t


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(continuous, "now", clock)
    monkeypatch.setattr(engines, "now", clock)
    return clock


def noted(engine: ContinuousEngine, clock: Clock) -> list[StepNote]:
    """The engine's notes of its steps from now on; its forward pass moves the clock."""
    notes: list[StepNote] = []
    forward = engine._forward

    def timed(chunks, copies):  # type: ignore[no-untyped-def]
        clock.t += 1 + 0.5 * sum(chunk.n for chunk in chunks if chunk.n > 1)
        return forward(chunks, copies)

    engine._forward, engine.on_step = timed, notes.append  # type: ignore[method-assign]
    return notes


def tiny(**options: int) -> ContinuousEngine:
    return ContinuousEngine(load_model("random:tiny-llama"), block_size=4, **options)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def test_another_prompt_holds_up_a_stream(clock: Clock) -> None:
    engine = tiny(max_running=4, token_budget=16, cache_tokens=256)
    notes = noted(engine, clock)
    first = engine.stream([[1, 2]], greedy(9))
    for _ in range(4):
        next(first)
    second = engine.stream([list(range(3, 15))], greedy(2))
    next(second)
    for generation in (first, second):
        for _ in generation:
            pass
    traces = [first.requests[0].trace, second.requests[0].trace]
    stall = only([s for s in stalls(traces, notes) if not s.first])
    assert (stall.trace, stall.end - stall.start) == (0, 7)
    assert stall.shares == {"decode": 1, "prefill": 6}  # 12 tokens of the other's prompt
    waits = [s for s in stalls(traces, notes, longer_than=0) if s.first]
    assert [s.shares for s in waits] == [{"prompt": 2}, {"prompt": 7}]


def test_the_engines_preemptions(clock: Clock) -> None:
    engine = tiny(max_running=2, token_budget=16, cache_tokens=20)
    notes = noted(engine, clock)
    done = engine.generate([[1, 2, 3, 4], [5, 6, 7, 8]], greedy(9))
    traces = [completion.trace for completion in done]
    assert [trace.preemptions for trace in traces] == [0, 1]
    stall = max((s for s in stalls(traces, notes, longer_than=0) if not s.first), key=lambda s: s.end - s.start)
    assert stall.trace == 1
    assert stall.shares == {"preemption": stall.end - stall.start}
    for s in stalls(traces, notes, longer_than=0):
        assert sum(s.shares.values()) == pytest.approx(s.end - s.start)
        assert s.cause == ("prompt" if s.first else "preemption" if s == stall else "decode")


def test_a_request_without_a_slot_waits_in_the_queue(clock: Clock) -> None:
    engine = tiny(max_running=1, token_budget=16, cache_tokens=64)
    notes = noted(engine, clock)
    done = engine.generate([[1, 2, 3, 4], [5, 6, 7, 8]], greedy(4))
    waits = [s for s in stalls([c.trace for c in done], notes, longer_than=0) if s.first]
    assert waits[0].shares == {"prompt": 3}
    assert waits[1].shares == {"queue": 6, "prompt": 3}  # 3 for the other's prompt, and its three further tokens
    assert waits[1].cause == "queue"


def test_a_collection_inside_a_step(clock: Clock) -> None:
    engine = tiny(max_running=1, token_budget=16, cache_tokens=64)
    notes = noted(engine, clock)
    pauses: list[Pause] = []
    step: Callable[[], None] = engine.step

    def interrupted() -> None:
        if len(notes) == 3:
            pauses.append(Pause("gc", clock.t, clock.t + 5))
            clock.t += 5
        step()

    engine.step = interrupted  # type: ignore[method-assign]
    done = engine.generate([[1, 2]], greedy(6))
    stall = only([s for s in stalls([done[0].trace], notes, pauses) if not s.first])
    assert stall.shares == {"gc": 5, "decode": 1}

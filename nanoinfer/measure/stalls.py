"""Why a stream stalled: every long gap between tokens, attributed to what happened meanwhile.

A trace says when tokens came, the engine's notes what its steps did in the gaps, and pauses when it was interrupted by
a garbage collection or a compilation. All times are seconds of one monotonic clock. The shares of a gap add up to it,
so nothing is counted twice and what stays unexplained is seen.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, TypeVar

from nanoinfer.errors import NanoinferError, check
from nanoinfer.measure.clock import now
from nanoinfer.measure.stats import percentile
from nanoinfer.measure.trace import Trace

#: decode: steps as long as those without a prompt usually are; prefill: what a step with prompts took beyond that;
#: preemption: from the loss of its blocks to its next token; queue: from sending to its start; prompt: its own;
#: client: late sending, or time on the network and in the client, where no step ran or none was noted.
Cause = Literal["decode", "prefill", "preemption", "compile", "gc", "queue", "prompt", "client", "unexplained"]


@dataclass(frozen=True)
class StepNote:
    """One step of an engine: when it ran (s), rows that decoded, prompt tokens, sequences that lost their blocks."""

    start: float
    end: float
    decode_rows: int
    prefill_tokens: int = 0
    preempted: int = 0


@dataclass(frozen=True)
class Pause:
    """A time in which the process did not serve."""

    cause: Literal["compile", "gc"]
    start: float
    end: float


@dataclass(frozen=True)
class Stall:
    """A long gap of trace number ``trace``, from ``start`` to ``end``, s."""

    trace: int
    start: float
    end: float
    first: bool  # the wait for the first token, from when the request was due
    shares: dict[Cause, float]  # seconds by cause; they add up to the gap

    @property
    def cause(self) -> Cause:
        """What took most of it, other than ordinary decoding."""
        return max(self.shares, key=lambda cause: (cause != "decode", self.shares[cause]))


@contextmanager
def watch_gc() -> Generator[list[Pause], None, None]:
    """Note every garbage collection of this process while the block runs: ``with watch_gc() as pauses: ...``."""
    pauses: list[Pause] = []
    began: list[float] = []

    def callback(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            began.append(now())
        elif began:
            pauses.append(Pause("gc", began.pop(), now()))

    gc.callbacks.append(callback)
    try:
        yield pauses
    finally:
        gc.callbacks.remove(callback)


Note = TypeVar("Note", StepNote, Pause)


def shifted(notes: Iterable[Note], by: float) -> list[Note]:
    """The notes ``by`` seconds later; by ``-start``, on the clock of traces that count from the start of their run."""
    return [replace(note, start=note.start + by, end=note.end + by) for note in notes]


def stalls(
    traces: Sequence[Trace], steps: Sequence[StepNote] = (), pauses: Sequence[Pause] = (), *, longer_than: float = 3.0
) -> list[Stall]:
    """Every gap between tokens above ``longer_than`` times the median one, and so every wait for a first token.

    Raises :class:`NanoinferError` for steps that overlap or run backwards, and for a negative multiple.
    """
    check("stalls: longer_than", longer_than, at_least=0, error=NanoinferError)
    log = _Log(steps, pauses)
    gaps = []
    for number, trace in enumerate(traces):
        times = [trace.t_scheduled, *(t for t, _ in trace.token_chunks)]
        gaps += [Stall(number, a, b, i == 0, {}) for i, (a, b) in enumerate(pairwise(times))]
    long = []
    for first in (True, False):
        kind = [gap for gap in gaps if gap.first == first]
        limit = longer_than * (percentile((gap.end - gap.start for gap in kind), 50) or 0.0)
        long += [gap for gap in kind if gap.end - gap.start > limit]
    long.sort(key=lambda gap: (gap.trace, gap.start))
    return [replace(gap, shares=log.shares(gap, traces[gap.trace])) for gap in long]


def totals(long_gaps: Iterable[Stall]) -> dict[Cause, float]:
    """Seconds by cause over all stalls, the largest first."""
    seconds: defaultdict[Cause, float] = defaultdict(float)
    for stall in long_gaps:
        for cause, share in stall.shares.items():
            seconds[cause] += share
    return dict(sorted(seconds.items(), key=lambda pair: -pair[1]))


class _Log:
    """The notes of a run in order of time."""

    def __init__(self, steps: Sequence[StepNote], pauses: Sequence[Pause]) -> None:
        self.steps = sorted(steps, key=lambda step: step.start)
        for step in self.steps:
            if step.end < step.start:
                raise NanoinferError(f"stalls: a step ends at {step.end}, before its start at {step.start}")
        for a, b in pairwise(self.steps):
            if b.start < a.end:
                raise NanoinferError(f"stalls: a step starts at {b.start}, before another ends at {a.end}")
        self.starts = [step.start for step in self.steps]
        self.ends = [step.end for step in self.steps]
        # Compiling collects garbage too: then it is the compiling.
        self.pauses = sorted(pauses, key=lambda pause: pause.cause != "compile")
        plain = [step.end - step.start for step in self.steps if not step.prefill_tokens]
        self.ordinary = percentile(plain, 50) or 0.0

    def shares(self, gap: Stall, trace: Trace) -> dict[Cause, float]:
        """Cut the gap where anything begins or ends, and give every piece its cause."""
        inside = self.steps[bisect_right(self.ends, gap.start) : bisect_right(self.starts, gap.end)]
        pauses = [pause for pause in self.pauses if pause.start < gap.end and pause.end > gap.start]
        lost = gap.end if gap.first else _lost(inside, gap, trace)
        marks = {gap.start, gap.end, lost, trace.t_sent, gap.start if trace.t_start is None else trace.t_start}
        marks |= {t for step in inside for t in (step.start, step.end)}
        marks |= {t for pause in pauses for t in (pause.start, pause.end)}
        outside: Cause = "client" if trace.kinds or not self.steps else "unexplained"
        shares: defaultdict[Cause, float] = defaultdict(float)
        worked: defaultdict[int, float] = defaultdict(float)  # by step, what no other cause took
        at = 0
        for a, b in pairwise(sorted(t for t in marks if gap.start <= t <= gap.end)):
            while at < len(inside) and inside[at].end <= a:
                at += 1
            running = at < len(inside) and inside[at].start <= a
            cause: Cause | None = next((pause.cause for pause in pauses if pause.start <= a < pause.end), None)
            if cause is None and a >= lost:
                cause = "preemption"
            if cause is None and gap.first:
                cause = _waiting(a, trace, running)
            if cause is None and running:
                worked[at] += b - a
            else:
                shares[cause or outside] += b - a
        for index, seconds in worked.items():
            usual = min(seconds, self.ordinary)
            shares["decode"] += usual
            shares["prefill" if inside[index].prefill_tokens else "unexplained"] += seconds - usual
        return {cause: seconds for cause, seconds in shares.items() if seconds > 0}


def _lost(inside: Sequence[StepNote], gap: Stall, trace: Trace) -> float:
    """When, in the gap, the request lost its blocks; the gap's end where it did not.

    A request that keeps them gets a token from every step, so that only one step starts in a gap.
    """
    begun = [step for step in inside if gap.start <= step.start < gap.end]
    if trace.preemptions and len(begun) > 1:
        return next((step.start for step in begun if step.preempted), gap.end)
    return gap.end


def _waiting(t: float, trace: Trace, running: bool) -> Cause | None:
    """What the wait for a first token is at ``t``."""
    if t < trace.t_sent:
        return "client"
    if trace.t_start is not None and t < trace.t_start:
        return "queue"
    return "prompt" if running else None

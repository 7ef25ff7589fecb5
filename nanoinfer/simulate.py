"""The scheduler of the real engine on a clock that is only computed.

Nothing runs but the policy: a step-time model says how long each step would take, and the same
:class:`~nanoinfer.engines.scheduler.Scheduler`, given the same work, makes the same plans as in a real run.

While all running requests decode, and none arrives or leaves, steps are taken in one jump, without a plan for each. The
scheduler's tables grow and are committed by the same calls in the same order, less those that change nothing but a
length, so the traces are those of a simulation step by step, to the last bit. Nothing is kept of requests that have
ended, and work is taken no sooner than it can matter: memory grows neither with their number nor with the queue.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import Final, NamedTuple

from nanoinfer.engines.scheduler import Scheduler, SequenceState, StepPlan
from nanoinfer.errors import RequestError
from nanoinfer.measure.trace import Trace
from nanoinfer.theory.curves import Rows
from nanoinfer.theory.roofline import StepTimes
from nanoinfer.workload.items import WorkItem

#: Ends of steps that are kept before those that no active request needs any more are dropped.
KEPT_ENDS: Final = 4096


class Span(NamedTuple):
    """One step, or several in one jump."""

    start: float  # s
    end: float
    steps: int
    rows: int
    tokens: int  # computed
    blocks: int  # held in the last step


@dataclass(eq=False, slots=True)
class _Request:
    trace: Trace
    left: int  # tokens
    #: First and last number of each range of steps in which it got a token per step.
    runs: list[list[int]] = field(default_factory=list)


def simulate(
    work: Iterable[WorkItem],
    scheduler: Scheduler,
    times: StepTimes | Callable[[Rows, int], float],
    on_span: Callable[[Span], None] | None = None,
) -> Iterator[Trace]:
    """Serve the work on a computed clock that starts at 0; yield a trace whenever a request ends.

    ``work`` comes in order of ``at`` and is taken as the clock gets there; each request ends after its ``output``
    tokens. ``scheduler`` has no requests yet. Where ``times`` is a function of rows and ends, as
    :meth:`StepTimes.seconds`, every step is planned, none jumped over. ``on_span`` is called after each step or
    jump. Raises :class:`RequestError`, when its turn comes, for work that can never fit or is out of order.
    """
    simulation = _Simulation(iter(work), scheduler, times)
    while simulation.queue_arrivals():
        start, before = simulation.clock, simulation.steps
        rows, tokens, ended = simulation.advance()
        if on_span is not None:
            on_span(Span(start, simulation.clock, simulation.steps - before, rows, tokens, simulation.held))
        yield from ended


def record_plans(scheduler: Scheduler) -> list[StepPlan]:
    """A list to which every plan is added that the scheduler makes from now on."""
    plans: list[StepPlan] = []
    schedule = scheduler.schedule

    def recorded() -> StepPlan:
        plans.append(schedule())
        return plans[-1]

    scheduler.schedule = recorded  # type: ignore[method-assign]
    return plans


def sequence_of(work: WorkItem) -> SequenceState:
    """The request as the scheduler sees it: its last token is never fed, so the cache need not hold it.

    Raises :class:`RequestError` for a prompt that is a text, an empty one, or no token wanted.
    """
    ids = work.ids
    if not ids or work.output < 1:
        raise RequestError(f"a request has at least 1 token in and 1 out, got {len(ids)} and {work.output}")
    return SequenceState(ids, len(ids) + work.output - 1)


class _Simulation:
    def __init__(
        self, work: Iterator[WorkItem], scheduler: Scheduler, times: StepTimes | Callable[[Rows, int], float]
    ) -> None:
        self.scheduler = scheduler
        self.model = None if callable(times) else times
        self.seconds = times if callable(times) else times.seconds
        self.clock = 0.0
        self.active: dict[SequenceState, _Request] = {}
        self._work, self._next = work, next(work, None)
        self._ends = array("d")  # of steps, the first of them number self._first
        self._first, self._keep = 0, KEPT_ENDS
        self.steps, self.held = 0, 0  # blocks in the last step
        self._decoding = False  # every running request lacks its newest token and no other
        self._turned_away = False  # the last plan did so with the head of the queue, and no request has left since

    def queue_arrivals(self) -> bool:
        """False where all is done. Requests beyond ``max_running`` in the queue cannot matter yet: they wait."""
        if not self.active and self._next is not None:
            self.clock = max(self.clock, self._next.at)
        while (work := self._next) is not None and work.at <= self.clock:
            if len(self.scheduler.waiting) >= self.scheduler.max_running:
                break
            sequence = sequence_of(work)
            self.scheduler.add(sequence)
            self.active[sequence] = _Request(Trace(work.at, work.at, prompt_tokens=len(work.prompt)), work.output)
            self._next = next(self._work, None)
            if self._next is not None and self._next.at < work.at:
                raise RequestError(f"work must come in order of its time: {self._next.at:g} s after {work.at:g} s")
        return bool(self.active)

    def advance(self) -> tuple[int, int, list[Trace]]:
        """Take a step, or several in a jump: rows, tokens, and the traces that ended."""
        return (self._jump() if self._nothing_to_decide else None) or self._step()

    # --- a step ---------------------------------------------------------------------------

    def _step(self) -> tuple[int, int, list[Trace]]:
        """As the scheduler plans it."""
        scheduler = self.scheduler
        plan = scheduler.schedule()
        for chunk in plan.chunks:
            trace = self.active[chunk.sequence].trace
            if trace.t_start is None:
                trace.t_start, trace.cached_tokens = self.clock, chunk.sequence.cached_tokens
        ready = [chunk.sequence for chunk in plan.chunks if chunk.reaches_end]
        self.clock += self.seconds([(chunk.start, chunk.n) for chunk in plan.chunks], len(ready))
        scheduler.commit(plan)
        self._note_ends([self.clock])
        self._decoding = len(ready) == len(scheduler.running)
        tokens = plan.n_tokens
        self._turned_away = bool(scheduler.waiting) and tokens < scheduler.token_budget
        return len(plan.chunks), tokens, self._give_tokens(ready, 1)

    # --- many steps -----------------------------------------------------------------------

    @property
    def _nothing_to_decide(self) -> bool:
        """Whether the next plan is sure to be one token for every running request."""
        scheduler = self.scheduler
        if self.model is None or not (self._decoding and scheduler.running):
            return False
        # None is admitted where no slot is free. Where blocks are short, the head of the queue stays turned away
        # while they only get shorter; but with shared prefixes the search for its blocks renews their use.
        return not scheduler.waiting or (self._turned_away and (self._is_full or not scheduler.pool.share_prefixes))

    @property
    def _is_full(self) -> bool:
        return self.scheduler.slots_taken >= self.scheduler.max_running

    def _jump(self) -> tuple[int, int, list[Trace]] | None:
        """As many decode steps as are certain, up to the one in which a request ends; None where not one is."""
        assert self.model is not None
        scheduler = self.scheduler
        running = list(scheduler.running)
        most = self._steps_with_blocks(running, min(self.active[sequence].left for sequence in running))
        if not most:
            return None
        until = math.inf
        if self._next is not None and not scheduler.waiting and not self._is_full:
            until = self._next.at
        ends = array("d")
        for seconds in islice(self.model.decoding([len(sequence.tokens) for sequence in running]), most):
            self.clock += seconds
            ends.append(self.clock)
            if self.clock >= until:
                break
        self._grow_tables(running, len(ends))
        self._note_ends(ends)
        return len(running), len(running) * len(ends), self._give_tokens(running, len(ends))

    def _steps_with_blocks(self, sequences: Sequence[SequenceState], most: int) -> int:
        """For how many steps, up to ``most``, there are blocks for all."""
        pool = self.scheduler.pool
        if len(sequences) * (most // pool.block_size + 1) <= pool.available:
            return most

        def needed(steps: int) -> int:
            return sum(pool.missing(sequence.table, steps) for sequence in sequences if sequence.table is not None)

        return bisect_right(range(1, most + 1), pool.available, key=needed)

    def _grow_tables(self, sequences: Sequence[SequenceState], steps: int) -> None:
        """Grow and commit the tables as ``steps`` steps would: the calls that take or hash a block, in their order."""
        pool = self.scheduler.pool
        size = pool.block_size
        tables = [sequence.table for sequence in sequences if sequence.table is not None]
        lengths = [table.length for table in tables]
        calls: list[tuple[int, bool, int]] = []  # step, commit or grow, row
        for row, (sequence, table) in enumerate(zip(sequences, tables, strict=True)):
            sequence.tokens += [0] * (steps - 1)
            calls += [(s, False, row) for s in range(len(table.blocks) * size - table.length + 1, steps + 1, size)]
            calls += [(s, True, row) for s in range(size - table.length % size, steps + 1, size)]
        for step, is_commit, row in sorted(calls):
            table = tables[row]
            if is_commit:
                pool.commit(table, sequences[row].tokens, lengths[row] + step - table.length)
            else:
                pool.grow(table, 1)
        for sequence, table, length in zip(sequences, tables, lengths, strict=True):
            if left := length + steps - table.length:
                pool.commit(table, sequence.tokens, left)

    # --- tokens and ends ------------------------------------------------------------------

    def _note_ends(self, ends: Sequence[float]) -> None:
        self._ends.extend(ends)
        self.steps += len(ends)
        self.held = self.scheduler.pool.used
        if len(self._ends) > self._keep:
            oldest = min([self.steps - len(ends), *(r.runs[0][0] for r in self.active.values() if r.runs)])
            del self._ends[: oldest - self._first]
            self._first, self._keep = oldest, max(KEPT_ENDS, 2 * len(self._ends))

    def _give_tokens(self, sequences: Sequence[SequenceState], steps: int) -> list[Trace]:
        """A token each in each of the last steps; the traces of those for which it was the last one."""
        last, ended = self.steps - 1, []
        for sequence in sequences:
            request = self.active[sequence]
            if request.runs and request.runs[-1][1] == last - steps:
                request.runs[-1][1] = last
            else:
                request.runs.append([last - steps + 1, last])
            request.left -= steps
            if request.left:
                sequence.tokens.append(0)
            else:
                ended.append(self._end(sequence, request))
        return ended

    def _end(self, sequence: SequenceState, request: _Request) -> Trace:
        trace = request.trace
        for first, last in request.runs:
            trace.chunks += zip(self._ends[first - self._first : last + 1 - self._first], repeat(1), strict=False)
        trace.output_tokens = len(trace.chunks)
        trace.t_end, trace.preemptions = self.clock, sequence.preemptions
        del self.active[sequence]
        self.scheduler.remove(sequence)
        self._turned_away = False
        return trace

"""The virtual clock made fast: jumps over steps in which nothing is decided, and forgets who has left.

While everybody who runs decodes, and nobody comes or leaves, step follows step with one token more for each.
Such steps are taken in one go: their times by the step-time model one after the other, but no plan is made
for each. The scheduler's state goes on as it would have: its tables grow and are committed by the same calls to its
pool, in the same order, less those that change nothing but a length. So the traces are those of the plain form in
:mod:`nanoinfer.simulate.simulate`, to the last bit.

Nothing is kept of requests that have ended, and work is taken from its iterator no sooner than it can matter: memory
does not grow with the number of requests, nor with the length of the queue.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import Final, NamedTuple, Protocol

from nanoinfer.engines.scheduler import Scheduler
from nanoinfer.engines.scheduler import SequenceState as Text
from nanoinfer.errors import RequestError
from nanoinfer.measure.trace import Trace
from nanoinfer.simulate.simulate import text_of
from nanoinfer.workload.items import WorkItem

#: Ends of steps that are kept before those that nobody needs any more are dropped.
KEPT: Final = 4096


class Times(Protocol):
    """A step-time model; :class:`nanoinfer.theory.roofline.StepTimes` is one."""

    def seconds(self, rows: Sequence[tuple[int, int]], ends: int) -> float:
        """Of a step: tokens that each row has in the cache, and new ones; rows that get a token from it."""

    def decoding(self, contexts: Sequence[int]) -> Iterator[float]:
        """Of decode steps without end: tokens that the rows hold in the first of them, its new one included."""


class Span(NamedTuple):
    """One step, or several in one go. Seconds; ``tokens`` went through the model, ``blocks`` were held in the last."""

    start: float
    end: float
    steps: int
    rows: int
    tokens: int
    blocks: int


@dataclass(eq=False, slots=True)
class _Row:
    """One who is here. ``runs`` are numbers of steps, first and last of each stretch that gave it a token a step."""

    trace: Trace
    left: int
    runs: list[list[int]] = field(default_factory=list)


def simulated(
    work: Iterable[WorkItem], scheduler: Scheduler, times: Times, watch: Callable[[Span], None] | None = None
) -> Iterator[Trace]:
    """Serve the work on a virtual clock that starts at 0; a trace whenever a request ends.

    Args:
        work: in order of ``at``; taken as the clock gets there. Each request ends after its ``output`` tokens.
        scheduler: with an empty house.
        times: how long steps take.
        watch: is called behind each step or jump.

    Raises:
        RequestError: when its turn comes, for work that can never fit, and for work out of order.
    """
    return _Simulation(work, scheduler, times, watch).run()


class _Simulation:
    def __init__(
        self, work: Iterable[WorkItem], scheduler: Scheduler, times: Times, watch: Callable[[Span], None] | None
    ) -> None:
        self.scheduler, self.times, self.watch = scheduler, times, watch
        self.clock = 0.0
        self.here: dict[Text, _Row] = {}
        self._work = iter(work)
        self._next = next(self._work, None)
        self._ends = array("d")  # of steps, the first of them number self._first
        self._first, self._steps, self._keep = 0, 0, KEPT
        self._held = 0  # blocks in the last step
        #: Everybody who runs lacks its newest token and no other.
        self._decoding = False
        #: The head of the queue was turned away by the last plan, and nobody has left since.
        self._turned_away = False

    def run(self) -> Iterator[Trace]:
        """See :func:`simulated`."""
        while self._queue_who_is_due():
            start, before = self.clock, self._steps
            rows, tokens, ended = (self._jump() if self._nothing_to_decide else None) or self._step()
            if self.watch is not None:
                steps = self._steps - before
                self.watch(Span(start, self.clock, steps, rows, tokens, self._held))
            yield from ended

    # --- who comes ------------------------------------------------------------------------

    def _queue_who_is_due(self) -> bool:
        """False where all is done. A queue longer than the house has places cannot matter yet, so it waits outside."""
        if not self.here and self._next is not None:
            self.clock = max(self.clock, self._next.at)
        while (work := self._next) is not None and work.at <= self.clock:
            if len(self.scheduler.waiting) >= self.scheduler.max_running:
                break
            text = text_of(work)
            self.scheduler.add(text)
            self.here[text] = _Row(Trace(work.at, work.at, prompt_tokens=len(work.prompt)), work.output)
            self._next = next(self._work, None)
            if self._next is not None and self._next.at < work.at:
                raise RequestError(f"work must come in order of its time: {self._next.at:g} s after {work.at:g} s")
        return bool(self.here)

    # --- a step ---------------------------------------------------------------------------

    def _step(self) -> tuple[int, int, list[Trace]]:
        """One step as the scheduler says: rows, tokens, and who has ended."""
        scheduler = self.scheduler
        plan = scheduler.schedule()
        for chunk in plan.chunks:
            trace = self.here[chunk.sequence].trace
            if trace.t_start is None:
                trace.t_start, trace.cached_tokens = self.clock, chunk.sequence.cached_tokens
        ready = [chunk.sequence for chunk in plan.chunks if chunk.reaches_end]
        self.clock += self.times.seconds([(chunk.start, chunk.n) for chunk in plan.chunks], len(ready))
        scheduler.commit(plan)
        self._note_ends([self.clock])
        self._decoding = len(ready) == len(scheduler.running)
        tokens = plan.n_tokens
        self._turned_away = bool(scheduler.waiting) and tokens < scheduler.token_budget
        return len(plan.chunks), tokens, self._give_tokens(ready, 1)

    # --- many steps -----------------------------------------------------------------------

    @property
    def _nothing_to_decide(self) -> bool:
        """Whether the next plan is sure to be one token for everybody who runs."""
        scheduler = self.scheduler
        if not (self._decoding and scheduler.running):
            return False
        # Nobody comes in where no place is free. Where blocks are short, the head of the queue stays turned away
        # while they only get shorter; but with shared prefixes the search for its blocks renews their use.
        return not scheduler.waiting or (self._turned_away and (self._is_full or not scheduler.pool.share_prefixes))

    @property
    def _is_full(self) -> bool:
        return self.scheduler.slots_taken >= self.scheduler.max_running

    def _jump(self) -> tuple[int, int, list[Trace]] | None:
        """As many decode steps as are certain, up to the one in which somebody ends; None where not one is."""
        scheduler = self.scheduler
        running = list(scheduler.running)
        most = self._blocks_last(running, min(self.here[text].left for text in running))
        if not most:
            return None
        until = math.inf
        if self._next is not None and not scheduler.waiting and not self._is_full:
            until = self._next.at
        ends = array("d")
        for seconds in islice(self.times.decoding([len(text.tokens) for text in running]), most):
            self.clock += seconds
            ends.append(self.clock)
            if self.clock >= until:
                break
        self._advance(running, len(ends))
        self._note_ends(ends)
        return len(running), len(running) * len(ends), self._give_tokens(running, len(ends))

    def _blocks_last(self, texts: Sequence[Text], most: int) -> int:
        """For how many steps, up to ``most``, there are blocks for everybody."""
        pool = self.scheduler.pool
        if len(texts) * (most // pool.block_size + 1) <= pool.available:
            return most

        def needed(steps: int) -> int:
            return sum(pool.missing(text.table, steps) for text in texts if text.table is not None)

        return bisect_right(range(1, most + 1), pool.available, key=needed)

    def _advance(self, texts: Sequence[Text], steps: int) -> None:
        """Grow and commit the tables as so many steps would: the calls that take or file a block, in their order."""
        pool = self.scheduler.pool
        size = pool.block_size
        tables = [text.table for text in texts if text.table is not None]
        lengths = [table.length for table in tables]
        calls: list[tuple[int, bool, int]] = []  # step, commit or grow, row
        for row, (text, table) in enumerate(zip(texts, tables, strict=True)):
            text.tokens += [0] * (steps - 1)
            calls += [(s, False, row) for s in range(len(table.blocks) * size - table.length + 1, steps + 1, size)]
            calls += [(s, True, row) for s in range(size - table.length % size, steps + 1, size)]
        for step, is_commit, row in sorted(calls):
            table = tables[row]
            if is_commit:
                pool.commit(table, texts[row].tokens, lengths[row] + step - table.length)
            else:
                pool.grow(table, 1)
        for text, table, length in zip(texts, tables, lengths, strict=True):
            if left := length + steps - table.length:
                pool.commit(table, text.tokens, left)

    # --- who gets a token, and who leaves ---------------------------------------------------

    def _note_ends(self, ends: Sequence[float]) -> None:
        self._ends.extend(ends)
        self._steps += len(ends)
        self._held = self.scheduler.pool.used
        if len(self._ends) > self._keep:
            oldest = min([self._steps - len(ends), *(row.runs[0][0] for row in self.here.values() if row.runs)])
            del self._ends[: oldest - self._first]
            self._first, self._keep = oldest, max(KEPT, 2 * len(self._ends))

    def _give_tokens(self, texts: Sequence[Text], steps: int) -> list[Trace]:
        """A token each in each of the last steps; the traces of those for whom it was the last one."""
        last, ended = self._steps - 1, []
        for text in texts:
            row = self.here[text]
            if row.runs and row.runs[-1][1] == last - steps:
                row.runs[-1][1] = last
            else:
                row.runs.append([last - steps + 1, last])
            row.left -= steps
            if row.left:
                text.tokens.append(0)
            else:
                ended.append(self._leave(text, row))
        return ended

    def _leave(self, text: Text, row: _Row) -> Trace:
        trace = row.trace
        for first, last in row.runs:
            trace.chunks += zip(self._ends[first - self._first : last + 1 - self._first], repeat(1), strict=False)
        trace.output_tokens = len(trace.chunks)
        trace.t_end, trace.preemptions = self.clock, text.preemptions
        del self.here[text]
        self.scheduler.remove(text)
        self._turned_away = False
        return trace

"""Which tokens of which sequences the next step computes. No tensors, no clock.

Every running sequence that only lacks its newest token gets it: that is decode. What is left of the step's token
budget goes to prompts, the oldest first, in chunks. When blocks run out, the youngest sequence gives all of its
blocks back and waits, to be computed again later. Sequences are served in the order of arrival, always. Sources:
Yu et al., "Orca" (2022); Agrawal et al., "Sarathi-Serve" (2024).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from nanoinfer.cache.blocks import BlockPool, BlockTable
from nanoinfer.errors import RequestError


@dataclass(eq=False)
class SequenceState:
    """One text as the scheduler sees it."""

    tokens: list[int]  # prompt and generated; the caller appends to it. The newest one is not in the cache yet
    limit: int  # most tokens that the cache will have to hold for it
    samples: list[Any] = field(default_factory=lambda: [None])  # the caller's, that go on from the prompt: a slot each
    arrival: tuple[int, int] = (0, 0)  # rank in the queue, given by Scheduler.add, and number of the sample
    table: BlockTable | None = None  # its blocks while it runs
    cached_tokens: int = 0  # found in the cache when it last started
    preemptions: int = 0  # how often it had to give its blocks back

    @property
    def n_samples(self) -> int:
        return len(self.samples)

    @property
    def remaining(self) -> int:
        """Tokens that are not in the cache yet: 1 while it decodes."""
        return len(self.tokens) - (self.table.length if self.table is not None else 0)


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start`` to ``start + n`` of a sequence, computed in one step."""

    sequence: SequenceState
    start: int
    n: int

    @property
    def reaches_end(self) -> bool:
        """Its last token is the sequence's newest: the logits there choose the next one."""
        return self.start + self.n == len(self.sequence.tokens)


@dataclass
class StepPlan:
    """One step: what to compute, and which blocks (from, to) to copy before."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        return sum(chunk.n for chunk in self.chunks)


class Scheduler:
    """Iteration-level scheduling over one pool of blocks: at most ``max_running`` sequences, ``token_budget`` tokens.

    The budget must exceed ``max_running``, so that prompts get on even when all slots are taken by decoding sequences.
    """

    def __init__(self, pool: BlockPool, max_running: int = 32, token_budget: int = 256) -> None:
        if max_running < 1 or token_budget <= max_running:
            raise RequestError(
                f"token_budget must be above max_running, and that at least 1; got {token_budget} and {max_running}"
            )
        self.pool, self.max_running, self.token_budget = pool, max_running, token_budget
        self.waiting: deque[SequenceState] = deque()  # by arrival
        self.running: list[SequenceState] = []  # by arrival
        self.preemptions = 0
        self._arrivals = count()

    # --- in and out ---------------------------------------------------------------------

    def refuse(self, limit: int, n_samples: int = 1) -> None:
        """Raise :class:`RequestError` for a sequence that could never run, however empty the engine."""
        if self.pool.blocks_for(limit) > self.pool.n_blocks:
            raise RequestError(
                f"a request that may grow to {limit} tokens cannot fit in a KV cache of "
                f"{self.pool.n_blocks * self.pool.block_size}: shorten it, lower max_tokens, or enlarge the cache"
            )
        if n_samples > self.max_running:
            raise RequestError(f"n = {n_samples} samples cannot run together: at most {self.max_running} sequences do")

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence after all others. Raises :class:`RequestError` for one that can never run."""
        self.refuse(sequence.limit, sequence.n_samples)
        sequence.arrival = (next(self._arrivals), 0)
        self.waiting.append(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Take a sequence out, finished or cancelled, wherever it is; its blocks are back at once."""
        if sequence.table is None:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._close(sequence)

    def fork(self, sequence: SequenceState) -> list[SequenceState]:
        """One sequence for each sample of one whose prompt is now computed: itself first. They share its blocks."""
        assert sequence.table is not None
        first, *others = sequence.samples
        sequence.samples = [first]
        forks = []
        for number, sample in enumerate(others, start=1):
            tokens, table = list(sequence.tokens), self.pool.fork(sequence.table)
            arrival = (sequence.arrival[0], number)
            forks.append(replace(sequence, tokens=tokens, samples=[sample], arrival=arrival, table=table))
        index = self.running.index(sequence) + 1
        self.running[index:index] = forks
        return [sequence, *forks]

    # --- a step ---------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """The next step's work; empty only when no sequence is left.

        A plan must be carried out: its blocks are taken. A caller that cannot has to remove all sequences.
        """
        plan, budget = StepPlan(), self.token_budget
        for sequence in [s for s in self.running if s.remaining == 1]:
            # Younger ones make room; where there are none, the sequence itself has to go.
            while sequence.table is not None and not self.pool.room(sequence.table):
                self._preempt_youngest()
            budget -= self._compute(sequence, 1, plan)
        for sequence in [s for s in self.running if s.remaining > 1]:
            # Without room a prompt waits with what it has: other sequences decode meanwhile, and will end.
            budget -= self._compute(sequence, budget, plan)
        while budget and (admitted := self._admit()):
            budget -= self._compute(admitted, budget, plan)
        return plan

    def commit(self, plan: StepPlan) -> None:
        """The step has run: its tokens are in the cache. Call before new tokens are appended."""
        for chunk in plan.chunks:
            assert chunk.sequence.table is not None
            self.pool.commit(chunk.sequence.table, chunk.sequence.tokens, chunk.n)

    def _compute(self, sequence: SequenceState, most: int, plan: StepPlan) -> int:
        """Plan at most ``most`` of the sequence's tokens, as far as there is room; returns how many."""
        if (table := sequence.table) is None:  # it lost its blocks in this very step
            return 0
        if n := min(sequence.remaining, most, self.pool.room(table)):
            plan.copies += self.pool.grow(table, n)
            plan.chunks.append(Chunk(sequence, table.length, n))
        return n

    def _preempt_youngest(self) -> None:
        """The youngest gives its blocks back and goes to the head of the queue. Those in the plan are older."""
        victim = self.running.pop()
        self._close(victim)
        victim.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(victim)

    def _admit(self) -> SequenceState | None:
        """Start the head of the queue, if it has slots and room for all of its text.

        A block for each running sequence is set aside: to admit one and preempt it soon costs more than to let it wait.
        """
        if not self.waiting or self.slots_taken + self.waiting[0].n_samples > self.max_running:
            return None
        head = self.waiting[0]
        table = self.pool.open(head.tokens)
        needed = self.pool.missing(table, len(head.tokens) - table.length)
        if needed + len(self.running) > self.pool.available:
            self.pool.close(table)
            return None
        self.waiting.popleft()
        head.table, head.cached_tokens = table, table.length
        self.pool.counts.asked_tokens += len(head.tokens)
        self.pool.counts.found_tokens += table.length
        self.running.append(head)
        return head

    def _close(self, sequence: SequenceState) -> None:
        assert sequence.table is not None
        self.pool.close(sequence.table)
        sequence.table = None

    # --- accounts -------------------------------------------------------------------------

    @property
    def slots_taken(self) -> int:
        """Sequences that run, or will once their prompt is computed."""
        return sum(s.n_samples for s in self.running)

    @property
    def tables(self) -> Iterator[BlockTable]:
        return (s.table for s in self.running if s.table is not None)

    @property
    def waste(self) -> float:
        """Share of the allocated cache slots that hold no token: ``(allocated - live) / allocated``."""
        allocated = self.pool.used * self.pool.block_size
        return 1 - self.pool.live_tokens(self.tables) / allocated if allocated else 0.0

    def check(self) -> None:
        """Assert what must hold between steps. Raises AssertionError."""
        self.pool.check(self.tables)
        assert self.slots_taken <= self.max_running, "more sequences run than there are slots"
        order = [s.arrival for s in (*self.running, *self.waiting)]
        assert order == sorted(order), "arrival order violated"
        assert all(s.table is None for s in self.waiting), "a waiting sequence holds blocks"

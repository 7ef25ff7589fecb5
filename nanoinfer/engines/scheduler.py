"""Which tokens of which sequences the next step computes. No tensors, no clock.

The rules fit in one breath. Every running sequence that only lacks its newest token gets it: that is
decode. What is left of the step's token budget goes to prompts, the oldest first, in chunks. When blocks
run out, the youngest sequence gives all of its own back and waits, to be computed again later. Nobody
overtakes: the order is that of arrival, always. Sources: Yu et al., "Orca" (2022); Agrawal et al.,
"Sarathi-Serve" (2024).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from nanoinfer.cache.blocks import BlockPool, BlockTable
from nanoinfer.errors import RequestError


@dataclass(eq=False)
class Sequence:
    """One text as the scheduler sees it.

    Args:
        tokens: the prompt, then what was generated; whoever samples appends to it. The newest one is not
            in the cache yet.
        limit: the most tokens that the cache will have to hold for it.
        width: samples that will go on from the prompt; each takes a place among the running.
        arrival: rank in the queue, given by :meth:`Scheduler.add`.
        table: its blocks while it runs; None while it waits.
        found_tokens: tokens that it found in the cache when it last started.
        preemptions: how often it had to give its blocks back.
    """

    tokens: list[int]
    limit: int
    width: int = 1
    arrival: tuple[int, int] = (0, 0)
    table: BlockTable | None = None
    found_tokens: int = 0
    preemptions: int = 0

    @property
    def remaining(self) -> int:
        """Tokens that are not in the cache yet: 1 while it decodes."""
        return len(self.tokens) - (self.table.length if self.table is not None else 0)


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start`` to ``start + n`` of a sequence, computed in one step."""

    sequence: Sequence
    start: int
    n: int

    @property
    def reaches_end(self) -> bool:
        """Its last token is the sequence's newest: the logits there choose the next one."""
        return self.start + self.n == len(self.sequence.tokens)


@dataclass
class Plan:
    """One step: what to compute, and which blocks (from, to) to copy before."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        """Tokens that go through the model."""
        return sum(chunk.n for chunk in self.chunks)


class Scheduler:
    """Iteration-level scheduling over one pool of blocks.

    Args:
        pool: where the blocks are.
        max_running: sequences that may run at a time.
        token_budget: tokens that a step may compute. It must exceed ``max_running``, so that prompts get on
            beside a full house of decoding sequences.
    """

    def __init__(self, pool: BlockPool, max_running: int = 32, token_budget: int = 256) -> None:
        if max_running < 1 or token_budget <= max_running:
            raise RequestError(
                f"token_budget must be above max_running, and that at least 1; got {token_budget} and {max_running}"
            )
        self.pool, self.max_running, self.token_budget = pool, max_running, token_budget
        self.waiting: deque[Sequence] = deque()  # by arrival
        self.running: list[Sequence] = []  # by arrival
        self.preemptions = 0
        self._arrivals = count()

    # --- in and out ---------------------------------------------------------------------

    def refuse(self, limit: int, width: int = 1) -> None:
        """Raise :class:`RequestError` for a sequence that could never run, however empty the house."""
        if self.pool.blocks_for(limit) > self.pool.n_blocks:
            raise RequestError(
                f"a request that may grow to {limit} tokens cannot fit in a KV cache of "
                f"{self.pool.n_blocks * self.pool.block_size}: shorten it, lower max_tokens, or enlarge the cache"
            )
        if width > self.max_running:
            raise RequestError(f"n = {width} samples cannot run together: at most {self.max_running} sequences do")

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind all others. Raises :class:`RequestError` for one that can never run."""
        self.refuse(sequence.limit, sequence.width)
        sequence.arrival = (next(self._arrivals), 0)
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, finished or cancelled, wherever it is; its blocks are back at once."""
        if sequence.table is None:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._close(sequence)

    def fork(self, sequence: Sequence) -> list[Sequence]:
        """The further samples of a sequence whose prompt is now computed; they share its blocks and run with it."""
        assert sequence.table is not None
        twins = [
            Sequence(
                list(sequence.tokens),
                sequence.limit,
                arrival=(sequence.arrival[0], sample),
                table=self.pool.fork(sequence.table),
                found_tokens=sequence.found_tokens,
                preemptions=sequence.preemptions,
            )
            for sample in range(1, sequence.width)
        ]
        place = self.running.index(sequence) + 1
        self.running[place:place] = twins
        sequence.width = 1
        return twins

    # --- a step ---------------------------------------------------------------------------

    def schedule(self) -> Plan:
        """The next step's work; empty only when there is nobody left.

        A plan must be carried out: its blocks are taken. Whoever cannot has to remove everybody.
        """
        plan, budget = Plan(), self.token_budget
        for sequence in [s for s in self.running if s.remaining == 1]:
            # Younger ones make room; where there are none, the sequence itself has to go.
            while sequence.table is not None and not self.pool.room(sequence.table):
                self._preempt_youngest()
            budget -= self._compute(sequence, 1, plan)
        for sequence in [s for s in self.running if s.remaining > 1]:
            # Without room a prompt waits with what it has: others decode beside it, and will end.
            budget -= self._compute(sequence, budget, plan)
        while budget and (newcomer := self._admit()):
            budget -= self._compute(newcomer, budget, plan)
        return plan

    def commit(self, plan: Plan) -> None:
        """The step has run: its tokens are in the cache. Call before new tokens are appended."""
        for chunk in plan.chunks:
            assert chunk.sequence.table is not None
            self.pool.commit(chunk.sequence.table, chunk.sequence.tokens, chunk.n)

    def _compute(self, sequence: Sequence, most: int, plan: Plan) -> int:
        """Plan as many of the sequence's tokens as there is budget and room for; how many that is."""
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

    def _admit(self) -> Sequence | None:
        """Start the head of the queue, if it has a place and room for all of its text.

        A block for each of the others is set aside: to admit somebody and throw them out again costs more
        than to let them wait.
        """
        if not self.waiting or self.places_taken + self.waiting[0].width > self.max_running:
            return None
        head = self.waiting[0]
        table = self.pool.open(head.tokens)
        needed = self.pool.missing(table, len(head.tokens) - table.length)
        if needed + len(self.running) > self.pool.available:
            self.pool.close(table)
            return None
        self.waiting.popleft()
        head.table, head.found_tokens = table, table.length
        self.pool.counts.asked_tokens += len(head.tokens)
        self.pool.counts.found_tokens += table.length
        self.running.append(head)
        return head

    def _close(self, sequence: Sequence) -> None:
        assert sequence.table is not None
        self.pool.close(sequence.table)
        sequence.table = None

    # --- accounts -------------------------------------------------------------------------

    @property
    def places_taken(self) -> int:
        """Sequences that run, or will once their prompt is computed."""
        return sum(s.width for s in self.running)

    @property
    def tables(self) -> Iterator[BlockTable]:
        """The tables of all who run."""
        return (s.table for s in self.running if s.table is not None)

    @property
    def waste(self) -> float:
        """Share of the allocated slots that hold no token: ``(allocated - live) / allocated``."""
        allocated = self.pool.used * self.pool.block_size
        return 1 - self.pool.live_tokens(self.tables) / allocated if allocated else 0.0

    def check(self) -> None:
        """Assert what must hold between steps. Raises AssertionError."""
        self.pool.check(self.tables)
        assert self.places_taken <= self.max_running, "more run than there are places"
        order = [s.arrival for s in (*self.running, *self.waiting)]
        assert order == sorted(order), "somebody was overtaken"
        assert all(s.table is None for s in self.waiting), "one that waits holds blocks"

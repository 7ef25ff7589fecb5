"""A scheduler with a sampler, and a memory in which every sequence must find its own text."""

from __future__ import annotations

from collections.abc import Iterable

from nanoinfer.cache.blocks import BlockPool, BlockTable
from nanoinfer.engines.scheduler import Scheduler, SequenceState, StepPlan


class Harness:
    """A scheduler, a sampler, and a memory that knows of every slot which text was written there.

    Keys and values depend on their token and all before it, so what a slot holds is the text up to its token.
    """

    def __init__(self, n_blocks: int, running: int = 4, budget: int = 16, size: int = 4, share: bool = True) -> None:
        self.pool = BlockPool(n_blocks, size, share)
        self.scheduler = Scheduler(self.pool, running, budget)
        self.memory: list[list[tuple[int, ...] | None]] = [[None] * size for _ in range(n_blocks)]

    @property
    def present(self) -> list[SequenceState]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    def add(self, prompt: list[int], limit: int | None = None, n_samples: int = 1) -> SequenceState:
        """Goes on from the prompt until ``limit`` tokens are in the cache; by default all that it holds."""
        sequence = SequenceState(list(prompt), limit or self.pool.n_blocks * self.pool.block_size, [None] * n_samples)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> str:
        """One step, all of it. The plan in words: which sequence computes which slice of its text."""
        plan = self.compute()
        words = " ".join(f"{name(c.sequence)}[{c.start}:{c.start + c.n}]" for c in plan.chunks)
        for sequence in [chunk.sequence for chunk in plan.chunks if chunk.reaches_end]:
            for text in self.scheduler.fork(sequence):
                text.tokens.append((len(text.tokens).bit_count() + text.arrival[1]) % 2)
                if len(text.tokens) > text.limit:
                    self.scheduler.remove(text)
        return words

    def steps(self, n: int) -> list[str]:
        return [self.step() for _ in range(n)]

    def compute(self) -> StepPlan:
        """Schedule, copy and write as the plan says, commit; then every sequence has to find its own text."""
        oldest = self.present[:1]
        plan = self.scheduler.schedule()
        assert plan.n_tokens <= self.scheduler.token_budget
        assert len({id(chunk.sequence) for chunk in plan.chunks}) == len(plan.chunks), "twice in one step"
        assert [chunk.sequence for chunk in plan.chunks[:1]] == oldest, "the oldest did not get on"
        before = list(self.memory)
        for source, target in plan.copies:
            self.memory[target] = list(before[source])
        for chunk in plan.chunks:
            assert chunk.n > 0
            assert chunk.start == chunk.sequence.table.length  # type: ignore[union-attr]
            for at in range(chunk.start, chunk.start + chunk.n):
                block, slot = self.slot(chunk.sequence, at)
                self.memory[block][slot] = tuple(chunk.sequence.tokens[: at + 1])
        self.scheduler.commit(plan)
        for block in free_blocks(self.pool, self.scheduler.tables):
            self.memory[block] = [None] * self.pool.block_size  # not to be read
        for sequence in self.scheduler.running:
            for at in range(sequence.table.length):  # type: ignore[union-attr]
                block, slot = self.slot(sequence, at)
                assert self.memory[block][slot] == tuple(sequence.tokens[: at + 1]), "another sequence's text"
        return plan

    def slot(self, sequence: SequenceState, at: int) -> tuple[int, int]:
        assert sequence.table is not None
        return sequence.table.blocks[at // self.pool.block_size], at % self.pool.block_size

    def check(self) -> None:
        self.scheduler.check()
        assert self.pool.live_tokens(self.scheduler.tables) <= self.pool.used * self.pool.block_size
        assert 0 <= self.scheduler.waste <= 1
        assert all(sequence.table is not None for sequence in self.scheduler.running)
        assert all(s.remaining == 1 for s in self.scheduler.running[:-1]), "prompts are computed one after the other"

    def work(self) -> int:
        """Steps in which all that are present have ended at the latest; see :func:`steps_of`."""
        budget = self.scheduler.token_budget
        return sum(s.n_samples * steps_of(len(s.tokens), s.limit, budget) for s in self.present)


def steps_of(tokens: int, limit: int, budget: int) -> int:
    """Steps that a text takes once it is the oldest: it has the whole budget, or one token a step; nothing stops it.

    Preempted before and to be computed again, it takes no more: ceil((p + g) / b) <= ceil(p / b) + g.
    """
    return -(-tokens // budget) + limit - tokens


def free_blocks(pool: BlockPool, tables: Iterable[BlockTable]) -> list[int]:
    """Blocks that no table holds and whose content is not kept."""
    held = {block for table in tables for block in table.blocks}
    return sorted(set(range(pool.n_blocks)) - held - set(pool.cached))


def name(sequence: SequenceState) -> str:
    """The first to arrive is a, its further samples are a' and a''."""
    return chr(ord("a") + sequence.arrival[0]) + "'" * sequence.arrival[1]


def names(sequences: Iterable[SequenceState]) -> str:
    return " ".join(name(s) for s in sequences)

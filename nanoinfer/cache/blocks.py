"""Ownership of the paged KV cache's blocks: free list, reference counts, prefix sharing. No tensors.

A block holds the keys and values of ``block_size`` consecutive tokens, and is in one of three states:

    free ──take──▶ used ──release──▶ free               without content to keep
                   ▲  └────release──▶ cached            full, and found by its content
                   └────share────────────┘ └──evict──▶ used, by another sequence

A full block is found by its exact content: the tokens in it and all tokens before it. The key of a block is (number of
the prefix before it, its tokens), and such numbers are never used again, so two different prefixes cannot collide.
Sources: Kwon et al., "PagedAttention" (2023); Zheng et al., "SGLang" (2024).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from nanoinfer.errors import RequestError

ROOT = 0  # the number of the empty prefix


@dataclass(eq=False)
class BlockTable:
    """One sequence's blocks in the order of its tokens; ``length`` tokens are written, from the first slot on.

    ``prefix`` is the number of the prefix that the first ``hashed_blocks`` hold.
    """

    blocks: list[int] = field(default_factory=list)
    length: int = 0
    prefix: int = ROOT
    hashed_blocks: int = 0


@dataclass
class PoolCounts:
    """Since the pool was made: tokens looked up, and found, by their content; blocks evicted; blocks copied."""

    asked_tokens: int = 0
    found_tokens: int = 0
    evicted: int = 0
    copied: int = 0


class BlockPool:
    """``n_blocks`` of ``block_size`` tokens; with ``share_prefixes``, full ones can be found by their content."""

    def __init__(self, n_blocks: int, block_size: int = 8, share_prefixes: bool = True) -> None:
        if n_blocks < 1 or block_size < 1:
            raise RequestError(f"a pool needs at least 1 block of 1 token, got {n_blocks} blocks of {block_size}")
        self.n_blocks, self.block_size, self.share_prefixes = n_blocks, block_size, share_prefixes
        self.counts = PoolCounts()
        self._free = list(range(n_blocks - 1, -1, -1))
        self._cached: dict[int, None] = {}  # no owner, content kept; the least recently used first
        self._refs = [0] * n_blocks
        self._numbers = count(ROOT + 1)
        self._by_content: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # key -> number, block
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> key

    @property
    def available(self) -> int:
        """Blocks that can be taken now: free ones, and cached ones that would be evicted."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """Blocks that a table holds."""
        return self.n_blocks - self.available

    @property
    def cached(self) -> list[int]:
        """Blocks without an owner whose content is kept, the next to be evicted first."""
        return list(self._cached)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_size)

    # --- tables ---------------------------------------------------------------------------

    def open(self, tokens: Sequence[int]) -> BlockTable:
        """A table that shares the longest cached prefix of ``tokens``: whole blocks, and never the last token.

        The last token has to be computed in any case, for its logits.
        """
        table = BlockTable()
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            key = (table.prefix, tuple(tokens[start : start + self.block_size]))
            if key not in self._by_content:
                break
            table.prefix, block = self._by_content[key]
            self._share(block)
            table.blocks.append(block)
        table.hashed_blocks = len(table.blocks)
        table.length = table.hashed_blocks * self.block_size
        return table

    def missing(self, table: BlockTable, n_new: int) -> int:
        """Blocks that :meth:`grow` would take for ``n_new`` more tokens."""
        return self.blocks_for(table.length + n_new) - len(table.blocks) + self._must_copy(table)

    def room(self, table: BlockTable) -> int:
        """Tokens that the table could grow by, now."""
        available = self.available - self._must_copy(table)
        slack = len(table.blocks) * self.block_size - table.length
        return slack + available * self.block_size if available >= 0 else 0

    def grow(self, table: BlockTable, n_new: int) -> list[tuple[int, int]]:
        """Give the table blocks for ``n_new`` more tokens, at most :meth:`room`.

        Returns the blocks to copy before anything is written, (from, to): the next slot was in a shared block.
        """
        copies = []
        if self._must_copy(table):
            old, new = table.blocks[-1], self._take()
            table.blocks[-1] = new
            self._release(old)
            self.counts.copied += 1
            copies.append((old, new))
        while len(table.blocks) * self.block_size < table.length + n_new:
            table.blocks.append(self._take())
        return copies

    def commit(self, table: BlockTable, tokens: Sequence[int], n_new: int) -> None:
        """Note that ``n_new`` more of the sequence's ``tokens`` are written; full blocks can be found from now on."""
        table.length += n_new
        if not self.share_prefixes:
            return
        for index in range(table.hashed_blocks, table.length // self.block_size):
            key = (table.prefix, tuple(tokens[index * self.block_size : (index + 1) * self.block_size]))
            block = table.blocks[index]
            if key not in self._by_content:
                self._by_content[key] = next(self._numbers), block
                self._key_of[block] = key
            table.prefix = self._by_content[key][0]
        table.hashed_blocks = table.length // self.block_size

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table over the same blocks: copy on write, block by block."""
        for block in table.blocks:
            self._share(block)
        return BlockTable(list(table.blocks), table.length, table.prefix, table.hashed_blocks)

    def close(self, table: BlockTable) -> None:
        """Give all blocks back, the last one first: the end of a sequence is evicted before its beginning."""
        for block in reversed(table.blocks):
            self._release(block)
        table.blocks.clear()
        table.length = table.hashed_blocks = 0
        table.prefix = ROOT

    def drop_cached(self) -> list[int]:
        """Forget all content of blocks without an owner; returns these blocks, which are now free."""
        dropped = self.cached
        for block in dropped:
            self._forget(block)
        self._free += dropped
        return dropped

    # --- single blocks ------------------------------------------------------------------

    def _must_copy(self, table: BlockTable) -> bool:
        """Whether the next slot is in a block that another table holds too."""
        index = table.length // self.block_size
        return index < len(table.blocks) and self._refs[table.blocks[index]] > 1

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block = next(iter(self._cached))
            self._forget(block)
            self.counts.evicted += 1
        self._refs[block] = 1
        return block

    def _share(self, block: int) -> None:
        self._cached.pop(block, None)
        self._refs[block] += 1

    def _release(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def _forget(self, block: int) -> None:
        del self._cached[block]
        del self._by_content[self._key_of.pop(block)]

    # --- accounting -----------------------------------------------------------------------

    def live_tokens(self, tables: Iterable[BlockTable]) -> int:
        """Slots that hold a token of one of the tables, shared ones counted once."""
        size = self.block_size  # all tables that share a block have filled it equally far
        filled = {block: table.length - i * size for table in tables for i, block in enumerate(table.blocks)}
        return sum(min(max(tokens, 0), size) for tokens in filled.values())

    def check(self, tables: Iterable[BlockTable] | None = None) -> None:
        """Assert that free + cached + used are all blocks and, given all tables, that each reference is theirs."""
        free, cached = set(self._free), set(self._cached)
        used = {block for block, refs in enumerate(self._refs) if refs}
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & cached or free & used or cached & used), "a block is in two states"
        assert free | cached | used == set(range(self.n_blocks)), "a block is lost"
        assert min(self._refs) >= 0, "a block was released more often than it was taken"
        assert cached <= self._key_of.keys(), "a cached block cannot be found"
        assert not free & self._key_of.keys(), "a free block can be found"
        found = {(block, key) for key, (_, block) in self._by_content.items()}
        assert found == set(self._key_of.items()), "a block is found under another's content"
        if tables is not None:
            held: Counter[int] = Counter()
            for table in tables:
                held.update(table.blocks)
                assert table.length <= len(table.blocks) * self.block_size, "a table is longer than its blocks"
            assert [held[block] for block in range(self.n_blocks)] == self._refs, "references and tables differ"

"""Who owns which block of the paged KV cache: free list, reference counts, prefix sharing. No tensors.

A block holds the keys and values of ``block_size`` consecutive tokens, and is in one of three states:

    free ──take──▶ used ──release──▶ free               nothing worth keeping in it
                   ▲  └────release──▶ cached            full, and findable by its content
                   └────share────────────┘ └──evict──▶ used, by another sequence

A full block is findable by its exact content: the tokens in it and all tokens before it. The key of a
block is (number of the block before it in the text, its tokens), and such numbers are never used again, so
two different prefixes cannot meet. Sources: Kwon et al., "PagedAttention" (2023); Zheng et al., "SGLang" (2024).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from nanoinfer.errors import RequestError

ROOT = 0  # the number of the empty prefix


@dataclass(eq=False)
class BlockTable:
    """One sequence's blocks in the order of its text; ``length`` tokens are written, from the first slot on.

    ``prefix`` is the number of the text in the first ``filed`` blocks.
    """

    blocks: list[int] = field(default_factory=list)
    length: int = 0
    prefix: int = ROOT
    filed: int = 0


@dataclass
class PoolCounts:
    """Since the pool was made: tokens asked for and found by their content, blocks evicted, blocks copied."""

    asked_tokens: int = 0
    found_tokens: int = 0
    evicted: int = 0
    copied: int = 0


class BlockPool:
    """Hands out blocks and takes them back.

    Args:
        n_blocks: all there are.
        block_size: tokens a block.
        share_prefixes: keep full blocks findable by their content.
    """

    def __init__(self, n_blocks: int, block_size: int = 8, share_prefixes: bool = True) -> None:
        if n_blocks < 1 or block_size < 1:
            raise RequestError(f"a pool needs at least 1 block of 1 token, got {n_blocks} blocks of {block_size}")
        self.n_blocks, self.block_size, self.share_prefixes = n_blocks, block_size, share_prefixes
        self.counts = PoolCounts()
        self._free = list(range(n_blocks - 1, -1, -1))
        self._cached: dict[int, None] = {}  # no owner, content kept; the least recently released first
        self._refs = [0] * n_blocks
        self._numbers = count(ROOT + 1)
        self._found: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # key -> number, block
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> key

    @property
    def available(self) -> int:
        """Blocks that can be had now: free ones, and cached ones that would be evicted."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """Blocks that a table holds."""
        return self.n_blocks - self.available

    @property
    def cached(self) -> list[int]:
        """Blocks that nobody holds and whose content is kept, the next to be evicted first."""
        return list(self._cached)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    # --- a table's life ---------------------------------------------------------------

    def open(self, tokens: Sequence[int]) -> BlockTable:
        """A table that shares the longest cached prefix of ``tokens``: whole blocks, and never the last token.

        The last token has to be computed in any case, for its logits.
        """
        table = BlockTable()
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            key = (table.prefix, tuple(tokens[start : start + self.block_size]))
            if key not in self._found:
                break
            table.prefix, block = self._found[key]
            self._share(block)
            table.blocks.append(block)
        table.filed = len(table.blocks)
        table.length = table.filed * self.block_size
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
        """Give the table blocks for ``n_new`` more tokens, no more than there is :meth:`room` for.

        Returns:
            blocks to copy before anything is written, (from, to): the next slot was in a block that others hold too.
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
        """Note that ``n_new`` more of the sequence's ``tokens`` are written; file blocks that are now full."""
        table.length += n_new
        if not self.share_prefixes:
            return
        for index in range(table.filed, table.length // self.block_size):
            key = (table.prefix, tuple(tokens[index * self.block_size : (index + 1) * self.block_size]))
            block = table.blocks[index]
            if key not in self._found:
                self._found[key] = next(self._numbers), block
                self._key_of[block] = key
            table.prefix = self._found[key][0]
        table.filed = table.length // self.block_size

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table over the same blocks. Whoever writes first into a shared block gets a copy of it."""
        for block in table.blocks:
            self._share(block)
        return BlockTable(list(table.blocks), table.length, table.prefix, table.filed)

    def close(self, table: BlockTable) -> None:
        """Give all blocks back, the last one first: the end of a text is evicted before its beginning."""
        for block in reversed(table.blocks):
            self._release(block)
        table.blocks.clear()
        table.length = table.filed = 0
        table.prefix = ROOT

    def drop_cached(self) -> list[int]:
        """Forget all content that nobody holds; returns the blocks, which are now free."""
        dropped = self.cached
        for block in dropped:
            self._forget(block)
        self._free += dropped
        return dropped

    # --- single blocks ------------------------------------------------------------------

    def _must_copy(self, table: BlockTable) -> bool:
        """The next slot is in a block that somebody else holds too."""
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
        del self._found[self._key_of.pop(block)]

    # --- accounts -----------------------------------------------------------------------

    def live_tokens(self, tables: Iterable[BlockTable]) -> int:
        """Slots that hold a token of one of the tables, shared ones counted once."""
        filled: dict[int, int] = {}
        for table in tables:
            for index, block in enumerate(table.blocks):
                # All who share a block have filled it equally far.
                filled[block] = min(max(table.length - index * self.block_size, 0), self.block_size)
        return sum(filled.values())

    def check(self, tables: Iterable[BlockTable] | None = None) -> None:
        """Assert that free + cached + used is all there is and, given all tables, that each reference is theirs.

        Raises:
            AssertionError: the accounts do not add up.
        """
        free, cached = set(self._free), set(self._cached)
        used = {block for block, refs in enumerate(self._refs) if refs}
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & cached or free & used or cached & used), "a block is in two states"
        assert free | cached | used == set(range(self.n_blocks)), "a block is lost"
        assert min(self._refs) >= 0, "a block was released more often than it was taken"
        assert cached <= self._key_of.keys(), "a cached block cannot be found"
        assert not free & self._key_of.keys(), "a free block can be found"
        found = {(block, key) for key, (_, block) in self._found.items()}
        assert found == set(self._key_of.items()), "a block is filed under another's content"
        if tables is not None:
            held = [0] * self.n_blocks
            for table in tables:
                for block in table.blocks:
                    held[block] += 1
                assert table.length <= len(table.blocks) * self.block_size, "a table is longer than its blocks"
            assert held == self._refs, "references and tables differ"

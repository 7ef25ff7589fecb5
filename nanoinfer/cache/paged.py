"""The paged KV cache: keys and values in blocks that need not be adjacent.

:mod:`nanoinfer.cache.blocks` decides which sequence holds which block; here are the tensors. Rows of a step need
not be alike: one brings its newest token, another a chunk of its prompt. All their tokens are packed one
after the other into a single row, so that the model's products see no padding at all.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoinfer.cache.blocks import BlockTable
from nanoinfer.cache.ragged import ragged_attention
from nanoinfer.configs.config import ModelConfig


@dataclass(frozen=True)
class NewTokens:
    """``n`` tokens of one sequence, after the ``table.length`` that are there; their blocks are taken already."""

    table: BlockTable
    n: int

    @property
    def end(self) -> int:
        """Tokens that the sequence has in the cache after the step."""
        return self.table.length + self.n


class PagedCache:
    """Keys and values of all sequences, ``[L, n_blocks, block_size, n_kv, d_h]`` each; ``nbytes`` are those of both."""

    def __init__(
        self, config: ModelConfig, n_blocks: int, block_size: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        shape = (config.n_layers, n_blocks, block_size, config.n_kv_heads, config.d_head)
        self.k, self.v = (zeros(shape, device, dtype) for _ in range(2))
        self.nbytes = self.k.nbytes + self.v.nbytes
        self.block_size = block_size

    def step(self, rows: Sequence[NewTokens], copies: Sequence[tuple[int, int]] = ()) -> PagedStep:
        """The cache of one forward pass, quickest where rows of one new token and of similar length are adjacent."""
        self.prepare(rows, copies)
        return PagedStep(self, rows)

    def prepare(self, rows: Sequence[NewTokens], copies: Sequence[tuple[int, int]] = ()) -> None:
        """Make the blocks ready for a step, whose rows are in the order in which their tokens are packed.

        First blocks are copied, (from, to). Then a block that is begun and not filled gets zeros, as the contiguous
        cache has: a NaN that its last owner left there would not be stopped by a mask, since 0 * NaN is NaN.
        """
        begun = [block for row in rows if (block := self._begun(row)) is not None]
        for store in (self.k, self.v):
            if copies:
                source, target = torch.tensor(copies, device=store.device).T
                store[:, target] = store[:, source]
            if begun:
                clear(store, begun)

    def _begun(self, row: NewTokens) -> int | None:
        """The block in which this step writes the first slot but not the last."""
        index = row.end // self.block_size
        return row.table.blocks[index] if row.table.length <= index * self.block_size < row.end else None


class PagedStep:
    """One forward pass over the paged cache; a :class:`~nanoinfer.models.attention.KVCache` of ``[1, N]`` tokens.

    ``ids`` of the pass are the rows' new tokens one after the other, ``positions`` are here: ``[1, N]``.
    """

    def __init__(self, cache: PagedCache, rows: Sequence[NewTokens]) -> None:
        self.cache, size, device = cache, cache.block_size, cache.k.device
        spans = [(row.table.blocks, range(row.table.length, row.end)) for row in rows]
        slots = [blocks[i // size] * size + i % size for blocks, span in spans for i in span]
        self.slots = torch.tensor(slots, device=device)  # [N], where the new tokens go
        self.positions = torch.tensor([[i for _, span in spans for i in span]], device=device)
        self.ragged = ragged_attention([(row.table.blocks, row.table.length, row.n) for row in rows], cache.k)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Write ``k`` and ``v`` into the blocks, then attend in each row to its own tokens; as in ``KVCache``."""
        assert mask is None, "the rows of a paged step need no mask"
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [N, n, d_h]
        for store, new in ((self.cache.k, k), (self.cache.v, v)):
            store[layer].flatten(0, 1).index_copy_(0, self.slots, new)
        return self.ragged(q, k, v, self.cache.k[layer], self.cache.v[layer]).flatten(1)[None]

    def advance(self, n_tokens: int) -> None:
        """Nothing to do: the tables know their lengths."""


def zeros(shape: Sequence[int], device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """Zeros; on Linux's CPUs in pages of 2 MiB where the system gives them.

    A step reads a little of every layer: in pages of 4 KiB each piece is a TLB miss, and at first a page fault.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE") or not nbytes:
        return torch.zeros(shape, device=device, dtype=dtype)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)  # keeps the memory alive


def clear(store: Tensor, blocks: Sequence[int]) -> None:
    """Put zeros into these blocks of every layer of ``store``, ``[L, n_blocks, block_size, n_kv, d_h]``."""
    if store.device.type == "cpu":
        # By NumPy, in this thread: PyTorch's threads would then spin on cores that the next step needs.
        store.flatten(2).view(torch.uint8).numpy()[:, list(blocks)] = 0
    else:
        store.index_fill_(1, torch.tensor(blocks, device=store.device), 0.0)

"""A decode step whose shapes and addresses never change, so that it can be recorded once and replayed.

A CUDA graph repeats kernels with the very arguments they had when it was recorded. So whatever differs from one step
to the next is read from memory: from one tensor, filled by a single copy. Rows and their blocks are padded.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from nanoinfer.cache.paged import NewTokens, PagedCache
from nanoinfer.cache.ragged import RaggedFlash


class StaticStep:
    """One new token of each row, over the paged cache; a :class:`~nanoinfer.models.attention.KVCache` of ``[1, R]``.

    Blocks are gathered. Flash attention could read them in place, but the kernel that comes with PyTorch does so for
    blocks of 256 tokens only.

    Args:
        cache: whose blocks are read and written.
        n_rows: R. Rows that a step lacks are padding.
        n_blocks: M, blocks of a row at most. What a row lacks is padding, behind a mask.
        scratch: the block that rows of padding read and write; no sequence holds it.
    """

    def __init__(self, cache: PagedCache, n_rows: int, n_blocks: int, scratch: int) -> None:
        self.cache, self.n_rows, self.n_blocks, self.scratch = cache, n_rows, n_blocks, scratch
        self.n_visible = n_blocks * cache.block_size  # S
        device, dtype = cache.k.device, cache.k.dtype
        self.given = torch.zeros(n_rows * (3 + n_blocks), dtype=torch.int64, device=device)
        ids, positions, self.slots, self.blocks = torch.split(self.given, [n_rows, n_rows, n_rows, n_rows * n_blocks])
        self.ids, self.positions = ids[None], positions[None]  # [1, R]
        # What follows from the positions, worked out on the device at the beginning of every step.
        self.lengths = torch.ones(n_rows, dtype=torch.int32, device=device)
        self.mask = torch.zeros(n_rows, 1, 1, self.n_visible, dtype=dtype, device=device)
        # What never changes.
        self.places = torch.arange(self.n_visible, device=device)
        self.ends_q = torch.arange(n_rows + 1, dtype=torch.int32, device=device)
        self.ends_k = self.ends_q * self.n_visible
        self.is_flash = RaggedFlash.fits(cache.k)

    def fill(self, rows: Sequence[NewTokens], ids: Sequence[int]) -> None:
        """Put a step's numbers where the recorded kernels read them.

        Args:
            rows: of one new token each, R at most.
            ids: their tokens.
        """
        assert 0 < len(rows) == len(ids) <= self.n_rows and all(row.n == 1 for row in rows)
        size, padding = self.cache.block_size, self.n_rows - len(rows)
        nothing = [0] * padding
        positions = [row.table.length for row in rows]
        slots = [row.table.blocks[at // size] * size + at % size for row, at in zip(rows, positions, strict=True)]
        numbers = array("q", [*ids, *nothing, *positions, *nothing, *slots, *[self.scratch * size] * padding])
        for row in rows:
            # Filled up with the row's own first block: a mask does not hide a NaN, and others' blocks may have one.
            blocks = row.table.blocks[: -(-row.end // size)]
            numbers.fromlist(blocks + blocks[:1] * (self.n_blocks - len(blocks)))
        numbers.fromlist([self.scratch] * (padding * self.n_blocks))
        given = torch.frombuffer(numbers, dtype=torch.int64)
        # Page-locked memory of its own each time: PyTorch hands it out again when the copy is done, and nobody waits.
        self.given.copy_(given.pin_memory() if self.given.is_cuda else given, non_blocking=True)

    def begin(self) -> None:
        """The step's first work on the device; to be recorded before the model."""
        self.lengths.copy_(self.positions[0] + 1)
        if not self.is_flash:
            hidden = self.places >= self.lengths[:, None]
            self.mask.zero_().masked_fill_(hidden[:, None, None], -math.inf)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Write ``k`` and ``v`` into the blocks, then let each row look at its own text; shapes as in ``KVCache``."""
        assert mask is None, "the rows of a decode step need no mask"
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [R, n, d_h]
        n_kv, d_head = k.shape[1:]
        seen = []
        for store, new in ((self.cache.k[layer], k), (self.cache.v[layer], v)):
            store.flatten(0, 1).index_copy_(0, self.slots, new)
            seen.append(store.index_select(0, self.blocks).view(self.n_rows, self.n_visible, n_kv, d_head))
        return (self._flash if self.is_flash else self._sdpa)(q, *seen).flatten(1)[None]

    def advance(self, n_tokens: int) -> None:
        """Nothing to do: the tables know their lengths."""

    def _sdpa(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """``[R, n_q, d_h]`` over ``[R, S, n_kv, d_h]``; queries that share a head of keys make its time axis."""
        grouped = q.reshape(self.n_rows, keys.shape[2], -1, q.shape[2])  # [R, n_kv, group, d_h]
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self.mask).flatten(1, 2)

    def _flash(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The same on CUDA in 16 bits. A row's only query sees all of its text, so nothing here is causal."""
        return varlen_attn(  # type: ignore[return-value]  # a pair only where more is asked for
            q.contiguous(),
            keys.flatten(0, 1),
            values.flatten(0, 1),
            self.ends_q,
            self.ends_k,
            1,
            self.n_visible,
            enable_gqa=q.shape[1] != keys.shape[2],
            seqused_k=self.lengths,
        )

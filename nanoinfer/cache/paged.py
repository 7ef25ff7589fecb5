"""The paged KV cache: keys and values in blocks that need not be neighbours.

:mod:`nanoinfer.cache.blocks` decides which block belongs to whom; here are the tensors. Rows of a step need
not be alike: one brings its newest token, another a chunk of its prompt. All their tokens lie one
behind the other in a single packed row, so that the model's products see no padding at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoinfer.cache.blocks import BlockTable
from nanoinfer.cache.memory import clear, zeros
from nanoinfer.cache.ragged import Ragged, RaggedFlash, RaggedSdpa
from nanoinfer.configs.config import ModelConfig


@dataclass(frozen=True)
class NewTokens:
    """``n`` tokens of one sequence, behind the ``table.length`` ones that are there; the blocks are taken already."""

    table: BlockTable
    n: int

    @property
    def end(self) -> int:
        """Tokens that the sequence has in the cache after the step."""
        return self.table.length + self.n


class PagedCache:
    """Keys and values of all sequences, ``[L, n_blocks, block_size, n_kv, d_h]`` each.

    ``nbytes`` are the bytes allocated: ``2 * L * n_blocks * block_size * n_kv * d_h * bytes per element``.
    """

    def __init__(
        self, config: ModelConfig, n_blocks: int, block_size: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        shape = (config.n_layers, n_blocks, block_size, config.n_kv_heads, config.d_head)
        self.k, self.v = (zeros(shape, device, dtype) for _ in range(2))
        self.nbytes = self.k.nbytes + self.v.nbytes
        self.block_size = block_size

    def step(self, rows: Sequence[NewTokens], copies: Sequence[tuple[int, int]] = ()) -> PagedStep:
        """Prepare for one forward pass of a model over these rows; the result is the pass's cache.

        Rows of one new token that are neighbours and of similar length are quickest. ``copies`` as in :meth:`prepare`.
        """
        self.prepare(rows, copies)
        return PagedStep(self, rows)

    def prepare(self, rows: Sequence[NewTokens], copies: Sequence[tuple[int, int]] = ()) -> None:
        """Make the blocks ready for a step, whoever computes it.

        A block that is begun and not filled keeps what its last owner left. A mask does not stop a NaN there: 0 * NaN
        is NaN. So it begins with zeros, as the contiguous cache does.

        Args:
            rows: in the order in which their tokens are packed.
            copies: blocks to copy first, (from, to).
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

    ``ids`` of the pass are the rows' new tokens one behind the other, ``positions`` are here: ``[1, N]``.
    """

    def __init__(self, cache: PagedCache, rows: Sequence[NewTokens]) -> None:
        self.cache, size, device = cache, cache.block_size, cache.k.device
        spans = [(row.table.blocks, range(row.table.length, row.end)) for row in rows]
        slots = [blocks[i // size] * size + i % size for blocks, span in spans for i in span]
        self.slots = torch.tensor(slots, device=device)  # [N], where the new tokens go
        self.positions = torch.tensor([[i for _, span in spans for i in span]], device=device)
        ways: type[Ragged] = RaggedFlash if RaggedFlash.fits(cache.k) else RaggedSdpa
        self.ragged = ways([(row.table.blocks, row.table.length, row.n) for row in rows], cache.k)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Write ``k`` and ``v`` into the blocks, then let each row look at its own text; shapes as in ``KVCache``."""
        assert mask is None, "the rows of a paged step need no mask"
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [N, n, d_h]
        for store, new in ((self.cache.k, k), (self.cache.v, v)):
            store[layer].flatten(0, 1).index_copy_(0, self.slots, new)
        return self.ragged(q, k, v, self.cache.k[layer], self.cache.v[layer]).flatten(1)[None]

    def advance(self, n_tokens: int) -> None:
        """Nothing to do: the tables know their lengths."""

"""Attention of rows of unlike lengths: one new token in some, a chunk of a prompt in others.

Both implementations take the same arguments and give the same result. :class:`RaggedSdpa` runs everywhere, and was
the quickest of those measured on CPUs: gather the blocks of rows of similar length into one padded tensor, then
PyTorch's own attention. :class:`RaggedFlash` is one kernel that ships with PyTorch for CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from nanoinfer.models.attention import attend

#: Of each row: its blocks, tokens written before this step, new tokens.
Row = tuple[Sequence[int], int, int]
#: Rows are gathered together as long as padded blocks are at most this multiple of the rows' own.
MOST_PADDED = 1.3


class Ragged(Protocol):
    """Attention for one step, prepared once and called in every layer."""

    def __init__(self, rows: Sequence[Row], store: Tensor) -> None:
        """Prepare for rows whose keys are in the blocks of ``store``, ``[L, n_blocks, block_size, n_kv, d_h]``."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, k_blocks: Tensor, v_blocks: Tensor) -> Tensor:
        """Attend in one layer.

        Args:
            q: ``[N, n_q, d_h]``, the new tokens of all rows one after the other; so is the result.
            k, v: ``[N, n_kv, d_h]``, of the same tokens; they are in the blocks already.
            k_blocks, v_blocks: ``[n_blocks, block_size, n_kv, d_h]``.
        """


class RaggedSdpa:
    """Rows of one new token in groups of similar length, rows of more one by one."""

    def __init__(self, rows: Sequence[Row], store: Tensor) -> None:
        self.size = store.shape[2]
        self.singles: list[tuple[slice, Tensor, Tensor]] = []  # packed rows, blocks [R, M], mask [R, 1, 1, S]
        self.chunks: list[tuple[slice, Tensor | None, int]] = []  # packed tokens, blocks [1, M], visible tokens
        at = 0
        for group in group_rows(rows, self.size):
            _, start, n = group[0]
            if n == 1:
                where = slice(at, at + len(group))
                self.singles.append((where, self._blocks(group, store), self._mask(group, store)))
            else:
                where = slice(at, at + n)
                # With nothing written before, k and v are all that is visible.
                self.chunks.append((where, self._blocks(group, store) if start else None, start + n))
            at = where.stop

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, k_blocks: Tensor, v_blocks: Tensor) -> Tensor:
        out = torch.empty_like(q)
        n_q, n_kv, d_head = q.shape[1], k.shape[1], q.shape[2]
        for where, blocks, mask in self.singles:
            grouped = q[where].reshape(-1, n_kv, n_q // n_kv, d_head)
            keys, values = _gather(k_blocks, blocks), _gather(v_blocks, blocks)  # [R, n_kv, S, d_h]
            out[where] = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).flatten(1, 2)
        for where, index, visible in self.chunks:
            if index is None:
                keys, values = (x[where].transpose(0, 1)[None] for x in (k, v))
            else:
                keys, values = (_gather(x, index)[:, :, :visible] for x in (k_blocks, v_blocks))
            out[where] = attend(q[where].transpose(0, 1)[None], keys, values).view(-1, n_q, d_head)
        return out

    def _blocks(self, group: Sequence[Row], store: Tensor) -> Tensor:
        """``[R, M]``; a short row is padded with its own first block, which holds finite numbers only."""
        needed = [-(-(start + n) // self.size) for _, start, n in group]
        longest = max(needed)
        return torch.tensor(
            [[*blocks[:m], *[blocks[0]] * (longest - m)] for (blocks, _, _), m in zip(group, needed, strict=True)],
            device=store.device,
        )

    def _mask(self, group: Sequence[Row], store: Tensor) -> Tensor:
        """``[R, 1, 1, S]`` in the dtype of the keys, to be added: a bool one would be converted in every layer."""
        lengths = torch.tensor([start + n for _, start, n in group], device=store.device)
        slots = torch.arange(-(-int(lengths.max()) // self.size) * self.size, device=store.device)
        mask = torch.zeros(len(group), 1, 1, len(slots), device=store.device, dtype=store.dtype)
        return mask.masked_fill_((slots >= lengths[:, None])[:, None, None], -math.inf)


def _gather(blocks: Tensor, index: Tensor) -> Tensor:
    """Blocks ``[n_blocks, block_size, n_kv, d_h]`` by ``[R, M]`` to ``[R, n_kv, M * block_size, d_h]``."""
    _, _, n_kv, d_head = blocks.shape
    return blocks.index_select(0, index.flatten()).view(len(index), -1, n_kv, d_head).transpose(1, 2)


def group_rows(rows: Sequence[Row], size: int) -> list[list[Row]]:
    """Adjacent rows that may be padded to one length; a row of several tokens is a group of its own."""
    groups: list[list[Row]] = []
    longest = total = 0  # blocks: of the last group's longest row, of all its rows
    for row in rows:
        _, start, n = row
        blocks = -(-(start + n) // size)
        if groups and n == 1 and groups[-1][0][2] == 1:
            padded = max(longest, blocks) * (len(groups[-1]) + 1)
            if padded <= MOST_PADDED * (total + blocks):
                groups[-1].append(row)
                longest, total = max(longest, blocks), total + blocks
                continue
        groups.append([row])
        longest = total = blocks
    return groups


class RaggedFlash:
    """PyTorch's variable-length flash attention, over keys and values gathered without padding."""

    def __init__(self, rows: Sequence[Row], store: Tensor) -> None:
        device, size = store.device, store.shape[2]
        visible = [start + n for _, start, n in rows]
        slots = [
            blocks[i // size] * size + i % size
            for (blocks, _, _), length in zip(rows, visible, strict=True)
            for i in range(length)
        ]
        self.slots = torch.tensor(slots, device=device)
        self.ends_q = _ends([n for _, _, n in rows], device)
        self.ends_k = _ends(visible, device)
        self.longest_q, self.longest_k = max(n for _, _, n in rows), max(visible)

    @staticmethod
    def fits(store: Tensor) -> bool:
        """Whether the kernel takes such keys: on CUDA, in 16 bits."""
        return store.device.type == "cuda" and store.dtype in (torch.float16, torch.bfloat16)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, k_blocks: Tensor, v_blocks: Tensor) -> Tensor:
        keys, values = (x.flatten(0, 1).index_select(0, self.slots) for x in (k_blocks, v_blocks))  # [sum S, n_kv, d_h]
        return varlen_attn(  # type: ignore[return-value]  # a pair only where more is asked for
            q.contiguous(),
            keys,
            values,
            self.ends_q,
            self.ends_k,
            self.longest_q,
            self.longest_k,
            window_size=(-1, 0),  # causal: the last query sees the last key
            enable_gqa=q.shape[1] != keys.shape[1],
        )


def _ends(lengths: Sequence[int], device: torch.device) -> Tensor:
    """``[R + 1]`` int32: where each row begins, and where the last one ends."""
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)

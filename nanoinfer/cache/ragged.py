"""Attention of rows of unlike lengths: one new token in some, a chunk of a prompt in others.

:class:`RaggedSdpa` runs everywhere, and was the quickest of those measured on CPUs: gather the blocks of rows of
similar length into one padded tensor, then PyTorch's own attention. :class:`RaggedFlash` is one kernel that ships with
PyTorch for CUDA. Both are prepared once a step, for rows whose keys are in the blocks of a store
``[L, n_blocks, block_size, n_kv, d_h]``, and called in every layer, with the same result: from ``q`` ``[N, n_q, d_h]``,
the new tokens of all rows one after the other, to the same shape. ``k`` and ``v`` ``[N, n_kv, d_h]`` are of these
tokens, and in the layer's ``k_blocks`` and ``v_blocks`` ``[n_blocks, block_size, n_kv, d_h]`` already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from nanoinfer.models.attention import attend

#: Of each row: its blocks, tokens written before this step, new tokens.
Row = tuple[Sequence[int], int, int]
#: Where each row's queries begin, and the last ones end, ``[R + 1]`` int32; so of keys; the most of each in a row.
Spans = tuple[Tensor, Tensor, int, int]
#: Rows are gathered together as long as padded blocks are at most this multiple of the rows' own.
MOST_PADDED = 1.3


def ragged_attention(rows: Sequence[Row], store: Tensor) -> RaggedFlash | RaggedSdpa:
    """The one for this store, prepared for a step."""
    return RaggedFlash(rows, store) if RaggedFlash.fits(store) else RaggedSdpa(rows, store)


class RaggedSdpa:
    """Rows of one new token in groups of similar length, rows of more one by one."""

    def __init__(self, rows: Sequence[Row], store: Tensor) -> None:
        self.size = store.shape[2]
        #: Packed tokens, rows R, blocks [R, M], visible tokens, mask [R, 1, 1, S].
        self.groups: list[tuple[slice, int, Tensor | None, int, Tensor | None]] = []
        at = 0
        for group in group_rows(rows, self.size):
            _, start, n = group[0]
            where = slice(at, at + n * len(group))
            at = where.stop
            if n == 1:
                lengths = [start + 1 for _, start, _ in group]
                mask = self._mask(lengths, store)
                self.groups.append((where, len(group), self._blocks(group, store), max(lengths), mask))
            else:  # with nothing written before, k and v are all that is visible
                self.groups.append((where, 1, self._blocks(group, store) if start else None, start + n, None))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, k_blocks: Tensor, v_blocks: Tensor) -> Tensor:
        out = torch.empty_like(q)
        for where, n_rows, index, visible, mask in self.groups:
            new = q[where]
            if index is None:
                keys, values = (x[where].transpose(0, 1)[None] for x in (k, v))  # [1, n_kv, n, d_h]
            else:
                keys, values = (_gather(x, index) for x in (k_blocks, v_blocks))  # [R, n_kv, S, d_h]
                if mask is None:
                    keys, values = keys[:, :, :visible], values[:, :, :visible]
            queries = new.view(n_rows, -1, *q.shape[1:]).transpose(1, 2)  # [R, n_q, n, d_h]
            out[where] = attend(queries, keys, values, mask).view_as(new)
        return out

    def _blocks(self, group: Sequence[Row], store: Tensor) -> Tensor:
        """``[R, M]``; a short row is padded with its own first block, which holds finite numbers only."""
        needed = [-(-(start + n) // self.size) for _, start, n in group]
        longest = max(needed)
        return torch.tensor(
            [[*blocks[:m], *[blocks[0]] * (longest - m)] for (blocks, _, _), m in zip(group, needed, strict=True)],
            device=store.device,
        )

    def _mask(self, lengths: Sequence[int], store: Tensor) -> Tensor:
        """``[R, 1, 1, S]`` in the dtype of the keys, to be added: a bool one would be converted in every layer."""
        slots = torch.arange(-(-max(lengths) // self.size) * self.size, device=store.device)
        mask = torch.zeros(len(lengths), 1, 1, len(slots), device=store.device, dtype=store.dtype)
        hidden = slots >= torch.tensor(lengths, device=store.device)[:, None]
        return mask.masked_fill_(hidden[:, None, None], -math.inf)


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
        new = [n for _, _, n in rows]
        self.spans = (_ends(new, device), _ends(visible, device), max(new), max(visible))

    @staticmethod
    def fits(store: Tensor) -> bool:
        """Whether the kernel takes such keys: on CUDA, in 16 bits."""
        return store.device.type == "cuda" and store.dtype in (torch.float16, torch.bfloat16)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, k_blocks: Tensor, v_blocks: Tensor) -> Tensor:
        keys, values = (x.flatten(0, 1).index_select(0, self.slots) for x in (k_blocks, v_blocks))  # [sum S, n_kv, d_h]
        return flash(q, keys, values, self.spans, window_size=(-1, 0))  # causal: the last query sees the last key


def flash(q: Tensor, keys: Tensor, values: Tensor, spans: Spans, **options: Any) -> Tensor:
    """PyTorch's ``varlen_attn`` of queries ``[N, n_q, d_h]``, several of which may share a KV head."""
    options["enable_gqa"] = q.shape[1] != keys.shape[1]
    return varlen_attn(q.contiguous(), keys, values, *spans, **options)  # type: ignore[return-value]  # else a pair


def _ends(lengths: Sequence[int], device: torch.device) -> Tensor:
    """``[R + 1]`` int32: where each row begins, and where the last one ends."""
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)

"""Rows of unlike lengths in one tensor: padded on the left, so that all rows end together.

Which slots are padding is known from lengths, never from ids: a model's padding id
may well be a real token of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Padded:
    """A batch ready for a model.

    ``ids`` and ``positions`` are ``[B, T]``; ``pads`` ``[B]`` counts the padding of each row;
    ``mask`` is ``[B, 1, T, T]`` bool, or None where no row is padded (plain causal attention).
    """

    ids: Tensor
    positions: Tensor
    pads: Tensor
    mask: Tensor | None


def left_pad(rows: Sequence[Sequence[int]], device: torch.device | str = "cpu", pad_id: int = 0) -> Padded:
    """Pad rows of token ids on the left to the longest. Positions count real tokens only."""
    longest = max(len(row) for row in rows)
    padding = [longest - len(row) for row in rows]
    ids = torch.tensor([[pad_id] * n + list(row) for n, row in zip(padding, rows, strict=True)], device=device)
    pads = torch.tensor(padding, device=device)
    slots = torch.arange(longest, device=device)
    positions = (slots - pads[:, None]).clamp(min=0)
    if not any(padding):
        return Padded(ids, positions, pads, None)
    causal = slots[None, :] <= slots[:, None]  # [T, T]
    real = slots >= pads[:, None]  # [B, T]
    mask = causal & real[:, None, None, :]
    # A padding slot sees itself, or its softmax over nothing would be NaN. No real token sees it.
    mask = mask | torch.eye(longest, dtype=torch.bool, device=device)
    return Padded(ids, positions, pads, mask)

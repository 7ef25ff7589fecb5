"""Run the whole context through the model for every single token, as NanoGPT does.

Nothing is kept between steps. It is the reference that every other engine is held to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoinfer.engines.engine import Forward, StaticEngine
from nanoinfer.engines.request import Request
from nanoinfer.models.model import Model


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
    """Pad rows of token ids on the left to the longest, so that all rows end together.

    Positions count real tokens only. Which slots are padding follows from lengths, never from ids: ``pad_id`` may well
    be a real token of a prompt.
    """
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


def recompute(model: Model, rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Next-token logits ``[B, V]`` of whole rows, each cropped to its last ``context`` tokens."""
    batch = left_pad([row[-model.config.context :] for row in rows], device)
    return model(batch.ids, batch.positions, mask=batch.mask, last_only=True)[:, -1]


class NaiveEngine(StaticEngine):
    """Full recompute at every step, for a batch of any size."""

    name = "naive"

    def start(self, requests: list[Request]) -> Forward:
        return lambda running: recompute(self.model, [r.ids for r in running], self.device)

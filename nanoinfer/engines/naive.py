"""NanoGPT's way: run the whole context through the model for every single token.

Nothing is kept between steps. It is the reference that every other engine is held to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanoinfer.engines.padding import left_pad
from nanoinfer.engines.request import Request
from nanoinfer.engines.static import Forward, StaticEngine
from nanoinfer.models.model import Model


def recompute(model: Model, rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Next-token logits ``[B, V]`` of whole rows, each cropped to its last ``context`` tokens."""
    batch = left_pad([row[-model.config.context :] for row in rows], device)
    return model(batch.ids, batch.positions, mask=batch.mask, last_only=True)[:, -1]


class NaiveEngine(StaticEngine):
    """Full recompute at every step, for a batch of any size."""

    name = "naive"

    def start(self, requests: list[Request]) -> Forward:
        """Nothing to prepare."""
        return lambda running: recompute(self.model, [r.ids for r in running], self.device)

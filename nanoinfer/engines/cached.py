"""Keep the keys and values: prefill the prompts once, then feed one token a row and step.

One static batch: its rows start together, and the cache is laid out for the longest
of them. Rows that have ended keep their slots until the last one ends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.cache.contiguous import ContiguousCache
from nanoinfer.engines.engine import Forward, StaticEngine
from nanoinfer.engines.naive import left_pad, recompute
from nanoinfer.engines.request import Request
from nanoinfer.models.model import Model


class CachedEngine(StaticEngine):
    """Prefill, then decode over a preallocated contiguous cache."""

    name = "cached"

    def start(self, requests: list[Request]) -> Forward:
        return CachedBatch(self, requests)


class CachedBatch:
    """The rows of one batch and their cache."""

    def __init__(self, engine: CachedEngine, requests: list[Request]) -> None:
        self.model: Model = engine.model
        self.config, self.device = engine.config, engine.device
        self.requests = requests
        self.rows = {request.index: row for row, request in enumerate(requests)}
        batch = left_pad([r.prompt_ids for r in requests], self.device)
        self.batch, self.ragged = batch, batch.mask is not None
        # Every row is fed all its tokens but the last one, and none beyond the context.
        longest = max(min(r.limit, self.config.context - len(r.prompt_ids) + 1) for r in requests)
        capacity = batch.ids.shape[1] + longest - 1
        self.cache = ContiguousCache(self.config, len(requests), capacity, self.device, engine.dtype)
        self.cropped = False

    def __call__(self, running: list[Request]) -> Tensor:
        """Next-token logits ``[R, V]`` of the running requests."""
        # Cropping shifts every position, so from then on nothing in the cache is valid any more.
        self.cropped = self.cropped or any(r.length > self.config.context for r in running)
        if self.cropped:
            return self.recompute(running)
        logits = self.prefill() if self.cache.length == 0 else self.decode()
        return logits[[self.rows[r.index] for r in running]]

    def recompute(self, running: list[Request]) -> Tensor:
        """The last ``context`` tokens of each running row, without the cache; ``[R, V]``."""
        return recompute(self.model, [r.ids for r in running], self.device)

    def prefill(self) -> Tensor:
        """All prompts at once; ``[B, V]``."""
        batch = self.batch
        return self.model(batch.ids, batch.positions, self.cache, batch.mask, last_only=True)[:, -1]

    def decode(self) -> Tensor:
        """The newest token of each row; ``[B, V]``. Rows that have ended repeat their last one, unread."""
        ids = torch.tensor([[r.generated[-1]] for r in self.requests], device=self.device)
        last = torch.tensor([[r.length - 1] for r in self.requests], device=self.device)
        positions = last.clamp(max=self.config.context - 1)
        mask = None
        if self.ragged:
            slots = torch.arange(self.cache.length + 1, device=self.device)
            mask = (slots >= self.batch.pads[:, None])[:, None, None, :]  # [B, 1, 1, S]
        return self.model(ids, positions, self.cache, mask)[:, -1]

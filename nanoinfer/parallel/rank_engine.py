"""One rank chooses the tokens, and the others are told: what every engine of several ranks has to see to.

Each rank keeps the requests and runs the same loop over them, so all must take the same tokens. Only one rank may have
the logits, and a request without a seed rolls dice that no other rank has. So the ids are handed on: 8 bytes a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.engines.cached import CachedEngine
from nanoinfer.engines.request import Request
from nanoinfer.errors import RequestError
from nanoinfer.models.registry import LoadedModel
from nanoinfer.parallel.collectives import Wire


class RankEngine(CachedEngine):
    """A static batch worked on by all ranks together; every one of them is given the same prompts and settings.

    Args:
        loaded: the model, or this rank's part of it.
        wire: to the other ranks.
        chooser: the rank that has the logits ``[R, V]`` of the running rows; of others' nothing is read.
    """

    def __init__(self, loaded: LoadedModel, wire: Wire, chooser: int) -> None:
        super().__init__(loaded)
        self.wire, self.chooser = wire, chooser

    def refuse(self, request: Request) -> None:
        """Refuse what only a rank that has the logits could give, and cropping, which moves all positions."""
        if request.params.logprobs is not None:
            raise RequestError(f"the {self.name} engine keeps no logprobs: one rank alone has the logits; use 'cached'")
        if request.params.on_full == "crop":
            raise RequestError(f"the {self.name} engine does not crop; use on_full='stop', or the cached engine")

    def choose(self, logits: Tensor, running: list[Request]) -> list[int]:
        """The chooser's tokens, on every rank: ``R`` int64 in one broadcast."""
        if self.wire.rank == self.chooser:
            ids = torch.tensor(super().choose(logits, running), device=self.device)
        else:
            ids = torch.empty(len(running), dtype=torch.int64, device=self.device)
        return self.wire.broadcast(ids, self.chooser).tolist()

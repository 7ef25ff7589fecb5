"""The base of engines over several ranks: one rank chooses the tokens and broadcasts them.

Each rank runs the same loop over the same requests, so all must take the same tokens. But only one rank may have the
logits, and requests without a seed draw differently on each. So ids are broadcast: 8 bytes a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.engines.cached import CachedEngine
from nanoinfer.engines.request import Request
from nanoinfer.errors import RequestError
from nanoinfer.models.registry import LoadedModel
from nanoinfer.parallel.collectives import Communicator


class RankEngine(CachedEngine):
    """A static batch computed by all ranks together; every rank is given the same prompts and settings.

    ``loaded`` is the model, or this rank's part of it; ``sampling_rank`` has the logits of the running rows.
    """

    def __init__(self, loaded: LoadedModel, comm: Communicator, sampling_rank: int) -> None:
        super().__init__(loaded)
        self.comm, self.sampling_rank = comm, sampling_rank

    def refuse(self, request: Request) -> None:
        """Refuse logprobs, which only one rank could give, and cropping, which moves all positions."""
        if request.params.logprobs is not None:
            raise RequestError(f"the {self.name} engine keeps no logprobs: one rank alone has the logits; use 'cached'")
        if request.params.on_full == "crop":
            raise RequestError(f"the {self.name} engine does not crop; use on_full='stop', or the cached engine")

    def choose(self, logits: Tensor, requests: list[Request]) -> list[int]:
        """The sampling rank's tokens, on every rank: ``R`` int64 in one broadcast."""
        if self.comm.rank == self.sampling_rank:
            ids = torch.tensor(super().choose(logits, requests), device=self.device)
        else:
            ids = torch.empty(len(requests), dtype=torch.int64, device=self.device)
        return self.comm.broadcast(ids, self.sampling_rank).tolist()

"""Pipeline parallel: layers are cut into stages, one a rank, and micro-batches pass through them.

With m micro-batches over p stages a stage is idle ``(p-1) / (m+p-1)`` of the time (Huang et al., "GPipe", 2019); here
that is so for every token, since the ids of all rows return to the first stage together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nanoinfer.engines.request import Request
from nanoinfer.engines.static import CachedBatch, CachedEngine, Forward
from nanoinfer.errors import RequestError, check
from nanoinfer.measure.clock import timed
from nanoinfer.models.attention import KVCache
from nanoinfer.models.gpt2 import GPT2
from nanoinfer.models.llama import Llama
from nanoinfer.models.model import Decoder
from nanoinfer.models.registry import LoadedModel
from nanoinfer.optimize.linear import share_weights
from nanoinfer.parallel.collectives import Communicator
from nanoinfer.theory.communication import partition
from nanoinfer.theory.parallel import layers_of, stages


def cut(model: GPT2 | Llama, stage: int, pp: int) -> GPT2 | Llama:
    """The part of a model that one of ``pp`` stages needs, as a model of fewer layers that shares its weights.

    The first stage has the embedding, the last one the norm and the head; both have a tied matrix. Raises
    :class:`RequestError` for more stages than layers.
    """
    own = stages(model.config.n_layers, pp)[stage]
    part = share_weights(model)
    part.config = layers_of(model.config, own)
    is_gpt2, (embedding, blocks, norm) = isinstance(part, GPT2), part.parts
    begin = {embedding, "wpe"} if is_gpt2 else {embedding}
    end = {norm, embedding if model.config.tied else "lm_head"}
    needed = (begin if stage == 0 else set()) | (end if stage == pp - 1 else set())
    for name in (begin | end) - needed:
        delattr(part, name)
    layers = nn.ModuleList(part.blocks[i] for i in own)
    for number, block in enumerate(layers):  # this part's cache has its own layers only
        attention: Any = block.attn if is_gpt2 else block.self_attn
        attention.layer = number
    setattr(part, blocks, layers)
    return part


class Stage(Decoder):
    """One rank's part of a model (:func:`cut`), called like a whole one; only the last stage returns logits.

    It receives hidden states from the previous stage and sends its own to the next. All stages are called with the
    same micro-batches in the same order. ``busy`` counts the seconds spent computing; the rest is communication.
    """

    def __init__(self, model: Decoder, comm: Communicator) -> None:
        super().__init__(model.config)
        self.model, self.comm = model, comm
        self.is_first, self.is_last = comm.rank == 0, comm.rank == comm.size - 1
        self.busy = 0.0
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype

    def hidden(
        self, ids: Tensor, positions: Tensor, cache: KVCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        empty = torch.empty(*ids.shape, self.config.d_model, device=self.device, dtype=self.dtype)
        received = None if self.is_first else self.comm.receive(empty, self.comm.rank - 1)

        def work() -> Tensor:
            x = self.model.embed(ids, positions) if received is None else received
            return self.model.through_layers(x, positions, cache, mask)

        out, seconds = timed(work, self.device)
        self.busy += seconds
        if not self.is_last:
            self.comm.send(out, self.comm.rank + 1)
        return out

    def head(self, x: Tensor) -> Tensor:
        """Last norm and head, ``[..., d]`` to ``[..., V]`` at the last stage; ``[..., 0]`` at the others."""
        if not self.is_last:
            return x[..., :0]
        logits, seconds = timed(lambda: self.model.head(x), self.device)
        self.busy += seconds
        return logits


class RankEngine(CachedEngine):
    """A static batch computed by all ranks together; every rank is given the same prompts and settings.

    ``loaded`` is the model, or this rank's part of it. Only ``sampling_rank`` may have the logits, and requests without
    a seed draw differently on each rank, so it chooses the tokens and broadcasts them.
    """

    crops = False  # which moves all positions

    def __init__(self, loaded: LoadedModel, comm: Communicator, sampling_rank: int) -> None:
        super().__init__(loaded)
        self.comm, self.sampling_rank = comm, sampling_rank

    def refuse(self, request: Request) -> None:
        """Refuse logprobs, which only one rank could give."""
        if request.params.logprobs is not None:
            raise RequestError(f"the {self.name} engine keeps no logprobs: one rank alone has the logits; use 'cached'")

    def choose(self, logits: Tensor, requests: list[Request]) -> list[int]:
        """The sampling rank's tokens, on every rank: ``R`` int64 in one broadcast."""
        if self.comm.rank == self.sampling_rank:
            ids = torch.tensor(super().choose(logits, requests), device=self.device)
        else:
            ids = torch.empty(len(requests), dtype=torch.int64, device=self.device)
        return self.comm.broadcast(ids, self.sampling_rank).tolist()


class PipelineEngine(RankEngine):
    """The cached engine over several ranks, each with some of the layers and their part of the cache.

    Every rank makes one from the whole model and is given the same prompts; the last stage chooses the tokens. More
    ``micro_batches`` (parts of a batch) leave less idle time, but each reads all weights again. Raises
    :class:`RequestError` for more stages than layers, or less than one micro-batch.
    """

    name = "pipeline"

    def __init__(self, loaded: LoadedModel, comm: Communicator, micro_batches: int = 1) -> None:
        check("micro_batches", micro_batches, at_least=1)
        part = cut(loaded.model, comm.rank, comm.size)
        super().__init__(replace(loaded, model=part), comm, sampling_rank=comm.size - 1)
        self.stage, self.micro_batches = Stage(part, comm), micro_batches

    def start(self, requests: list[Request]) -> Forward:
        parts = partition(len(requests), min(self.micro_batches, len(requests)))
        batches = [StageBatch(self, [requests[i] for i in part]) for part in parts]

        def forward(running: list[Request]) -> Tensor:
            rows = [[r for r in running if r.index in batch.rows] for batch in batches]
            return torch.cat([batch(active) for batch, active in zip(batches, rows, strict=True) if active])

        return forward


class StageBatch(CachedBatch):
    """One micro-batch at one stage."""

    def __init__(self, engine: PipelineEngine, requests: list[Request]) -> None:
        super().__init__(engine, requests)
        self.model = engine.stage

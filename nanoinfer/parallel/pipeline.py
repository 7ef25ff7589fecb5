"""Pipeline parallel: layers are cut into stages, one a rank, and micro-batches pass through them.

Only hidden states cross a boundary, ``B * T * d`` numbers a forward pass, so this split tolerates slow links. But a
stage is idle before the first micro-batch reaches it and after the last has left: with m micro-batches over p stages
``(p-1) / (m+p-1)`` of the time (Huang et al., "GPipe", 2019), and a single request passes all stages in sequence.

Here each token is a pass for all rows, whose ids return to the first stage together, so every token has that bubble.
Servers in which each micro-batch continues on its own have it once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nanoinfer.engines.cached import CachedBatch
from nanoinfer.engines.engine import Forward
from nanoinfer.engines.request import Request
from nanoinfer.errors import check
from nanoinfer.measure.clock import timed
from nanoinfer.models.attention import KVCache
from nanoinfer.models.gpt2 import GPT2
from nanoinfer.models.llama import Llama
from nanoinfer.models.model import Decoder
from nanoinfer.models.registry import LoadedModel
from nanoinfer.optimize.apply import share_weights
from nanoinfer.parallel.collectives import Communicator
from nanoinfer.parallel.rank_engine import RankEngine
from nanoinfer.theory.communication import partition
from nanoinfer.theory.parallel import layers_of, stages


def cut(model: GPT2 | Llama, stage: int, pp: int) -> GPT2 | Llama:
    """The part of a model that one of ``pp`` stages needs, as a model of fewer layers that shares its weights.

    The first stage has the embedding, the last one the norm and the head; both have a tied matrix. Layers are
    renumbered, since this part's cache has its own layers only.

    Raises:
        RequestError: more stages than layers.
    """
    own = stages(model.config.n_layers, pp)[stage]
    part = share_weights(model)
    part.config = layers_of(model.config, own)
    is_gpt2 = isinstance(part, GPT2)
    begin, end = ({"wte", "wpe"}, {"ln_f"}) if is_gpt2 else ({"embed_tokens"}, {"norm"})
    end.add("lm_head" if not model.config.tied else "wte" if is_gpt2 else "embed_tokens")
    needed = (begin if stage == 0 else set()) | (end if stage == pp - 1 else set())
    for name in (begin | end) - needed:
        delattr(part, name)
    layers = nn.ModuleList(part.blocks[i] for i in own)
    for number, block in enumerate(layers):
        attention: Any = block.attn if is_gpt2 else block.self_attn
        attention.layer = number
    setattr(part, "h" if is_gpt2 else "layers", layers)
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
        """This stage's output, ``[B, T, d]``, which has been sent to the next one."""
        shape = *ids.shape, self.config.d_model
        empty = torch.empty(shape, device=self.device, dtype=self.dtype)
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


class PipelineEngine(RankEngine):
    """The cached engine over several ranks, each with some of the layers and their part of the cache.

    Every rank makes one from the whole model (drop that to free its memory) and is given the same prompts. Rank 0 is
    the first stage; the last one chooses the tokens. More ``micro_batches`` (parts of a batch, of one row at least)
    leave less idle time, but each reads all weights again.

    Raises:
        RequestError: more stages than layers, or less than one micro-batch.
    """

    name = "pipeline"

    def __init__(self, loaded: LoadedModel, comm: Communicator, micro_batches: int = 1) -> None:
        check("micro_batches", micro_batches, at_least=1)
        part = cut(loaded.model, comm.rank, comm.size)
        super().__init__(replace(loaded, model=part), comm, sampling_rank=comm.size - 1)
        self.stage, self.micro_batches = Stage(part, comm), micro_batches

    def start(self, requests: list[Request]) -> Forward:
        """Allocate a cache for each micro-batch; a forward pass runs those in sequence that have not ended."""
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

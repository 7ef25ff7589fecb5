"""Pipeline parallel: the layers are cut into stages, one a rank, and micro-batches follow each other through them.

Only hidden states cross a boundary, ``B * T * d`` numbers a forward pass, which is why this split is the one that
bears slow links. But a stage has nothing to do until the first micro-batch has come to it, nor once the last has left:
of ``m`` micro-batches over ``p`` stages it idles ``(p-1) / (m+p-1)`` of the time (Huang et al., "GPipe", 2019), and a
single request passes all stages one after the other as it would on one device.

Here each token is a pass of its own for all rows, whose ids go back to the first stage together: so every token pays
that price. Servers that let each micro-batch go on by itself pay it once, with as many under way as there are stages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nanoinfer.engines.cached import CachedBatch
from nanoinfer.engines.request import Request
from nanoinfer.engines.static import Forward
from nanoinfer.errors import RequestError
from nanoinfer.measure.clock import timed
from nanoinfer.models.attention import KVCache
from nanoinfer.models.gpt2 import GPT2
from nanoinfer.models.llama import Llama
from nanoinfer.models.registry import LoadedModel
from nanoinfer.optimize.apply import share_weights
from nanoinfer.parallel.collectives import Wire
from nanoinfer.parallel.rank_engine import RankEngine
from nanoinfer.theory.stages import evenly, layers_of, stages


def cut(model: GPT2 | Llama, stage: int, pp: int) -> GPT2 | Llama:
    """The part of a model that one of ``pp`` stages needs, as a model of fewer layers that shares its weights.

    The first stage has the embedding, the last one the norm and the head. A tied matrix is both, and both have it.
    Layers are numbered anew, since a cache of this part has places for its own layers only.

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
    layers = nn.ModuleList((part.h if isinstance(part, GPT2) else part.layers)[i] for i in own)
    for number, block in enumerate(layers):
        attention: Any = block.attn if is_gpt2 else block.self_attn
        attention.layer = number
    setattr(part, "h" if is_gpt2 else "layers", layers)
    return part


class Stage:
    """One rank's part of a model, called as if it were whole: a :class:`~nanoinfer.models.model.Model`.

    It works on the hidden states that the stage before hands over and hands its own to the next one. So every stage
    is called in the same order, and each goes on with the next micro-batch while this one is further down the line.

    Args:
        model: what :func:`cut` left for this rank.
        wire: to the other stages; rank 0 is the first.

    Attributes:
        busy: seconds spent on computing so far; what remains of a wall clock's is waiting and handing over.
    """

    def __init__(self, model: GPT2 | Llama, wire: Wire) -> None:
        self.model, self.config, self.wire = model, model.config, wire
        self.is_first, self.is_last = wire.rank == 0, wire.rank == wire.size - 1
        self.busy = 0.0
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits ``[B, T, V]`` (``[B, 1, V]`` with ``last_only``) at the last stage; of no width at the others."""
        x = self.hidden(ids, positions, cache, mask)
        return self.head(x[:, -1:] if last_only else x)

    def hidden(
        self, ids: Tensor, positions: Tensor, cache: KVCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """What comes out of this stage, ``[B, T, d]``; it is on its way to the next one."""
        shape = *ids.shape, self.config.d_model
        empty = torch.empty(shape, device=self.device, dtype=self.dtype)
        given = None if self.is_first else self.wire.receive(empty, self.wire.rank - 1)

        def work() -> Tensor:
            x = self.model.embed(ids, positions) if given is None else given
            return self.model.through_layers(x, positions, cache, mask)

        out, seconds = timed(work, self.device)
        self.busy += seconds
        if not self.is_last:
            self.wire.send(out, self.wire.rank + 1)
        return out

    def head(self, x: Tensor) -> Tensor:
        """Last norm and head, ``[..., d]`` to ``[..., V]``, where they are; ``[..., 0]`` elsewhere."""
        if not self.is_last:
            return x[..., :0]
        logits, seconds = timed(lambda: self.model.head(x), self.device)
        self.busy += seconds
        return logits


class PipelineEngine(RankEngine):
    """The cached engine over several ranks, each of which has some of the layers and their part of the cache.

    Every rank makes one of the whole model, of which it keeps its stage, and is given the same prompts. The last stage
    chooses the tokens and tells the others.

    Args:
        loaded: the whole model. Let go of it afterwards, or its memory stays in use.
        wire: to the other ranks; rank 0 is the first stage.
        micro_batches: into how many parts a batch is cut, of one row at least. More of them leave less idle time, but
            each reads all weights again.

    Raises:
        RequestError: more stages than layers, or less than one micro-batch.
    """

    name = "pipeline"

    def __init__(self, loaded: LoadedModel, wire: Wire, micro_batches: int = 1) -> None:
        if micro_batches < 1:
            raise RequestError(f"micro_batches must be at least 1, got {micro_batches}")
        part = cut(loaded.model, wire.rank, wire.size)
        super().__init__(replace(loaded, model=part), wire, chooser=wire.size - 1)
        self.stage, self.micro_batches = Stage(part, wire), micro_batches

    def start(self, requests: list[Request]) -> Forward:
        """Allocate a cache for each micro-batch; a forward pass sends them through one behind the other.

        Once all rows of one have ended, it stays behind.
        """
        parts = evenly(len(requests), min(self.micro_batches, len(requests)))
        batches = [StageBatch(self, [requests[i] for i in part]) for part in parts]

        def forward(running: list[Request]) -> Tensor:
            rows = [[r for r in running if r.index in batch.rows] for batch in batches]
            return torch.cat([batch(own) for batch, own in zip(batches, rows, strict=True) if own])

        return forward


class StageBatch(CachedBatch):
    """One micro-batch at one stage."""

    def __init__(self, engine: PipelineEngine, requests: list[Request]) -> None:
        super().__init__(engine, requests)
        self.model = engine.stage

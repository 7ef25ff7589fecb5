"""Expert parallel: every rank has some of each layer's experts, and tokens travel to the ranks of theirs.

All else is on every rank, which has requests of its own (Lepikhin et al., "GShard", 2020). Every rank takes part in
every pass: before each the ranks with requests are counted, and when none has any, all stop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from nanoinfer.engines.load import load
from nanoinfer.errors import RequestError
from nanoinfer.models.llama import Llama
from nanoinfer.models.moe import MixtureOfExperts
from nanoinfer.models.registry import LoadedModel, load_model
from nanoinfer.optimize.linear import share_weights
from nanoinfer.parallel.collectives import Communicator
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.theory.communication import check_ep


class ShardedExperts(MixtureOfExperts):
    """A mixture of experts of which this rank has ``E/n`` consecutive ones."""

    def __init__(self, whole: MixtureOfExperts, comm: Communicator) -> None:
        nn.Module.__init__(self)
        self.top_k, self.n_experts, self.gate, self.comm = whole.top_k, whole.n_experts, whole.gate, comm
        own = whole.n_experts // comm.size
        self.experts = whole.experts[comm.rank * own : (comm.rank + 1) * own]
        self.computed: list[list[int]] = []  # [passes, E/n]: rows of each of them, from all ranks

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Results of rows ``[N, d]`` sorted by expert, of which expert ``e`` has ``counts[e]``; in the same order."""
        own, comm = len(self.experts), self.comm
        to_send = list(torch.split(counts, own))
        to_come = comm.all_to_all(to_send, [torch.empty_like(part) for part in to_send])  # of each rank [E/n]
        sent = list(torch.split(rows, _totals(to_send)))
        received = torch.cat(comm.all_to_all(sent, [rows.new_empty(n, rows.shape[1]) for n in _totals(to_come)]))
        # Received by rank, and of each rank by expert; computed by expert.
        share = torch.stack(to_come)  # [n, E/n]
        expert = torch.arange(own, device=rows.device).repeat(comm.size).repeat_interleave(share.flatten())
        order = expert.argsort(stable=True)
        results = torch.empty_like(received)
        results[order] = super().compute(received[order], share.sum(0))
        self.computed.append(share.sum(0).tolist())
        back = torch.split(results, _totals(to_come))
        return torch.cat(comm.all_to_all(back, [torch.empty_like(part) for part in sent]))


def _totals(counts: Sequence[Tensor]) -> list[int]:
    return [int(part.sum()) for part in counts]


def shard(loaded: LoadedModel, comm: Communicator) -> LoadedModel:
    """The model with this rank's experts only, for any engine, with requests of its own on each rank.

    After its last request a rank calls :func:`serve_idle_rank`. Raises :class:`RequestError` for a model without
    experts, or ranks that do not divide their number.
    """
    if loaded.model.config.moe is None:
        raise RequestError(f"'{loaded.name}' has no experts to spread; take a mixture of experts: random:tiny-moe")
    check_ep(loaded.model.config, comm.size)
    model = share_weights(loaded.model)
    assert isinstance(model, Llama)
    for block in model.layers:
        block.mlp = ShardedExperts(block.mlp, comm)  # type: ignore[arg-type]

    def before_a_pass(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        _busy_ranks(comm, 1, inputs[0].device)

    model.embed_tokens.register_forward_pre_hook(before_a_pass)
    return replace(loaded, model=model)


@torch.inference_mode()
def serve_idle_rank(model: Llama, comm: Communicator) -> None:
    """Compute for the other ranks, without rows of its own, until no rank has a pass left."""
    weight = model.embed_tokens.weight
    empty = weight.new_empty(1, 0, weight.shape[1])  # [B, T, d]
    while _busy_ranks(comm, 0, weight.device):
        for block in model.layers:
            block.mlp(empty)  # type: ignore[operator]


def _busy_ranks(comm: Communicator, own: int, device: torch.device) -> int:
    """The number of ranks that are about to run a pass: an all-reduce of 8 bytes."""
    return int(comm.all_reduce(torch.tensor([own], device=device)))


def generate(
    comm: Communicator,
    model: str,
    prompts: Sequence[str | Sequence[int]],
    params: Mapping[str, Any] | None = None,
    engine: str = "cached",
    **place: Any,
) -> dict[str, Any]:
    """A task for :func:`~nanoinfer.parallel.launch.launch`: every n-th prompt is this rank's.

    ``place`` has the model's ``device``, ``dtype`` and ``seed``. The answer has ``prompts`` and ``token_ids`` for
    :func:`~.data_parallel.in_order`, ``computed`` for :meth:`ExpertLoads.from_ranks`, and the log of what was ``sent``.
    """
    loaded = shard(load_model(model, **place), comm)
    mine, settings = range(comm.rank, len(prompts), comm.size), SamplingParams(**(params or {}))
    completions = load(loaded, engine).generate([prompts[i] for i in mine], settings) if mine else []
    assert isinstance(loaded.model, Llama)
    serve_idle_rank(loaded.model, comm)
    return {
        "prompts": list(mine),
        "token_ids": [completion.token_ids for completion in completions],
        "computed": rows_computed(loaded.model),
        "sent": [asdict(call) for call in comm.log],
    }


def rows_computed(model: Llama) -> list[list[list[int]]]:
    """Rows that each of this rank's experts has computed, ``[L, passes, E/n]``."""
    return [block.mlp.computed for block in model.layers]  # type: ignore[union-attr, misc]


@dataclass(frozen=True)
class ExpertLoads:
    """Balance of the experts' work: ``rows`` that each rank's experts computed, ``[L, passes, n]``."""

    rows: Sequence[Sequence[Sequence[int]]]

    @classmethod
    def from_ranks(cls, ranks: Sequence[Sequence[Sequence[Sequence[int]]]]) -> ExpertLoads:
        """From :func:`rows_computed` of each rank."""
        layers = zip(*ranks, strict=True)  # of each layer the passes of all ranks
        return cls([[[sum(experts) for experts in step] for step in zip(*layer, strict=True)] for layer in layers])

    @property
    def imbalance(self) -> list[float]:
        """``max/mean`` over ranks, of each layer: the sum of the busiest ranks' rows over the sum of the means."""
        return [
            sum(max(step) for step in layer) * len(layer[0]) / max(1, sum(sum(step) for step in layer))
            for layer in self.rows
        ]

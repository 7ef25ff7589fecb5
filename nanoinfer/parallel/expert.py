"""Expert parallel: every rank has some of each layer's experts, and tokens travel to where theirs are.

All else is on every rank, which has requests of its own (so attention is data parallel). In a layer the ranks tell each
other how many tokens will come, send them, compute what they were sent, and send the answers back: two all-to-alls, and
a small one for the counts (Lepikhin et al., "GShard", 2020). A layer is done when its busiest rank is, so what the
router likes best decides the pace: :class:`Loads`.

Nobody knows beforehand who sends him tokens. So every rank takes part in every pass, also one that has nothing left to
generate: before each pass the ranks are counted that have something, and when none has, all are done.
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
from nanoinfer.optimize.apply import share_weights
from nanoinfer.parallel.collectives import Wire
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.theory.communication import check_ep


class SpreadExperts(MixtureOfExperts):
    """A mixture of experts of which this rank has its share, ``E/n`` neighbours.

    Attributes:
        computed: rows that each of them had to compute, pass by pass, whoever sent them.
    """

    def __init__(self, whole: MixtureOfExperts, wire: Wire) -> None:
        nn.Module.__init__(self)
        self.top_k, self.n_experts, self.gate, self.wire = whole.top_k, whole.n_experts, whole.gate, wire
        own = whole.n_experts // wire.size
        self.experts = whole.experts[wire.rank * own : (wire.rank + 1) * own]
        self.computed: list[list[int]] = []

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """As in one place: rows ``[N, d]`` in the order of their ``counts`` ``[E]``, and so are their answers."""
        own, wire = len(self.experts), self.wire
        to_send = list(torch.split(counts, own))
        to_come = wire.all_to_all(to_send, [torch.empty_like(part) for part in to_send])  # of each rank [E/n]
        sent = list(torch.split(rows, _totals(to_send)))
        came = torch.cat(wire.all_to_all(sent, [rows.new_empty(n, rows.shape[1]) for n in _totals(to_come)]))
        # They came by rank, and of each rank by expert. Here they are wanted by expert.
        share = torch.stack(to_come)  # [n, E/n]
        expert = torch.arange(own, device=rows.device).repeat(wire.size).repeat_interleave(share.flatten())
        order = expert.argsort(stable=True)
        answers = torch.empty_like(came)
        answers[order] = super().compute(came[order], share.sum(0))
        self.computed.append(share.sum(0).tolist())
        back = torch.split(answers, _totals(to_come))
        return torch.cat(wire.all_to_all(back, [torch.empty_like(part) for part in sent]))


def _totals(counts: Sequence[Tensor]) -> list[int]:
    return [int(part.sum()) for part in counts]


def shard(loaded: LoadedModel, wire: Wire) -> LoadedModel:
    """The model with this rank's experts only; let go of ``loaded``, and the others' memory is free.

    Any engine can run on it, with requests of its own on each rank. Whoever has done them calls :func:`stand_by`.

    Raises:
        RequestError: a model without experts, or ranks that do not divide their number.
    """
    if loaded.model.config.moe is None:
        raise RequestError(f"'{loaded.name}' has no experts to spread; take a mixture of experts: random:tiny-moe")
    check_ep(loaded.model.config, wire.size)
    model = share_weights(loaded.model)
    assert isinstance(model, Llama)
    for block in model.layers:
        block.mlp = SpreadExperts(block.mlp, wire)  # type: ignore[arg-type]

    def before_a_pass(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        _busy_ranks(wire, 1, given[0].device)

    model.embed_tokens.register_forward_pre_hook(before_a_pass)
    return replace(loaded, model=model)


@torch.inference_mode()
def stand_by(model: Llama, wire: Wire) -> None:
    """Compute for the other ranks, without any rows of one's own, until none has a pass left to run."""
    weight = model.embed_tokens.weight
    nothing = weight.new_empty(1, 0, weight.shape[1])  # [B, T, d]
    while _busy_ranks(wire, 0, weight.device):
        for block in model.layers:
            block.mlp(nothing)  # type: ignore[operator]


def _busy_ranks(wire: Wire, own: int, device: torch.device) -> int:
    """How many ranks are about to run a pass: 8 bytes of each."""
    return int(wire.all_reduce(torch.tensor([own], device=device)))


def generate(
    wire: Wire,
    model: str,
    prompts: Sequence[str | Sequence[int]],
    params: Mapping[str, Any] | None = None,
    engine: str = "cached",
    **place: Any,
) -> dict[str, Any]:
    """A task for :func:`~nanoinfer.parallel.launch.launch`: every ``n``-th prompt is this rank's.

    Args:
        wire: to the other ranks.
        model: by name.
        prompts: of all ranks; a rank may be left without one.
        params: fields of :class:`~nanoinfer.sampling.params.SamplingParams`.
        engine: by name, for this rank's prompts.
        place: ``device``, ``dtype`` and ``seed`` of the model.

    Returns:
        Which ``prompts`` these were and their ``token_ids``, for :func:`~.data_parallel.in_order`; rows
        ``computed`` ``[L, passes, E/n]``, for :meth:`Loads.of`; and what was ``sent``.
    """
    loaded = shard(load_model(model, **place), wire)
    mine, setting = range(wire.rank, len(prompts), wire.size), SamplingParams(**(params or {}))
    done = load(loaded, engine).generate([prompts[i] for i in mine], setting) if mine else []
    assert isinstance(loaded.model, Llama)
    stand_by(loaded.model, wire)
    return {
        "prompts": list(mine),
        "token_ids": [completion.token_ids for completion in done],
        "computed": computed(loaded.model),
        "sent": [asdict(sent) for sent in wire.log],
    }


def computed(model: Llama) -> list[list[list[int]]]:
    """Rows that each of this rank's experts had to compute so far, ``[L, passes, E/n]``."""
    return [block.mlp.computed for block in model.layers]  # type: ignore[union-attr, misc]


@dataclass(frozen=True)
class Loads:
    """How evenly the work was spread.

    Args:
        rows: that each rank's experts computed, ``[L, passes, n]``.
    """

    rows: Sequence[Sequence[Sequence[int]]]

    @classmethod
    def of(cls, ranks: Sequence[Sequence[Sequence[Sequence[int]]]]) -> Loads:
        """From what :func:`computed` gave on each rank."""
        layers = zip(*ranks, strict=True)  # of each layer what all ranks have
        return cls([[[sum(own) for own in one] for one in zip(*layer, strict=True)] for layer in layers])

    @property
    def imbalance(self) -> list[float]:
        """Of each layer, ``max/mean`` over ranks: how much longer its experts take than if spread evenly.

        Passes count by what they compute: the sum of their busiest ranks' rows over the sum of their means.
        """
        return [
            sum(max(one) for one in layer) * len(layer[0]) / max(1, sum(sum(one) for one in layer))
            for layer in self.rows
        ]

"""Tensor parallel: every rank has a slice of every matrix, and all of them work on every token.

A product is split by its outputs (the columns of a matrix as one writes it, rows as PyTorch stores it): each rank then
has some of the outputs, and nobody need be told. Or by its inputs (the rows): each rank then has a part of every sum,
and the parts are added up. Attention and the MLP are two products each with something between that knows no neighbours:
a head minds its own queries, keys and values, an activation its own number. So the first product is split by outputs,
the second by the same numbers as inputs, and a layer has two sums to make (Shoeybi et al., "Megatron-LM", 2019).
The vocabulary is split at both ends: a rank looks up the tokens that it has, and gives logits of those.

The residual stream, norms and GPT-2's positions are whole on every rank. All ranks end with the same logits, so every
engine runs as it is: all ranks make one of the same settings and give it the same prompts and seeds.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.configs.config import ModelConfig
from nanoinfer.errors import RequestError
from nanoinfer.models.gpt2 import GPT2
from nanoinfer.models.llama import Llama
from nanoinfer.models.registry import LoadedModel
from nanoinfer.optimize.apply import share_weights
from nanoinfer.parallel.collectives import Wire
from nanoinfer.theory.capacity import check_tp, divides
from nanoinfer.theory.parameters import check_sizes
from nanoinfer.theory.stages import evenly


@dataclass(frozen=True)
class Share:
    """What one rank has of a model.

    Attributes:
        heads: its query heads.
        kv_heads: the KV heads that those look at; several ranks have the same one where there are more ranks.
        middle: its numbers of the MLP's middle, of ``d_ff``.
        vocabulary: its tokens, equally many on all ranks: the last ones may lie beyond the vocabulary's end.
    """

    heads: range
    kv_heads: range
    middle: range
    vocabulary: range


def share(config: ModelConfig, n: int, rank: int, *, uneven: bool = False) -> Share:
    """What ``rank`` of ``n`` has of a model of this shape. Arguments and errors as in :func:`shard`."""
    check_sizes(tp=n)
    if config.moe is not None:
        raise RequestError("tensor parallel does not cut experts; spread them over the ranks instead (expert parallel)")
    if not uneven or n > config.n_kv_heads:
        check_tp(config, n)
    if n > config.d_ff or (config.d_ff % n and not uneven):
        raise RequestError(f"tp {n} does not divide the MLP's d_ff of {config.d_ff} evenly; take a divisor")
    if n <= config.n_kv_heads:
        group = config.n_heads // config.n_kv_heads
        kv_heads = evenly(config.n_kv_heads, n)[rank]
        heads = range(kv_heads.start * group, kv_heads.stop * group)
    else:
        heads = evenly(config.n_heads, n)[rank]
        one = rank * config.n_kv_heads // n
        kv_heads = range(one, one + 1)
    tokens = -(-config.vocab_size // n)
    vocabulary = range(rank * tokens, (rank + 1) * tokens)
    return Share(heads, kv_heads, evenly(config.d_ff, n)[rank], vocabulary)


def is_even(config: ModelConfig, n: int) -> bool:
    """Whether ``n`` ranks get equal shares of heads and MLP."""
    return divides(config, n) and config.d_ff % n == 0


class LocalConfig(ModelConfig):
    """A model's shape with the heads and the ``d_ff`` of one rank; ``d_model`` and the vocabulary are the whole's."""

    def __post_init__(self) -> None:
        """A whole model's rules do not hold: a slice of GPT-2 has fewer heads than make up its width."""


# --- modules --------------------------------------------------------------------------


class ColumnLinear(nn.Linear):
    """Some outputs of a product, ``[..., K]`` to ``[..., fewer]``: a linear layer like any other.

    Args:
        whole: the product, which is left as it is.
        places: which outputs; of several ranges one behind the other.
    """

    def __init__(self, whole: nn.Linear, *places: range) -> None:
        outputs = sum(map(len, places))
        super().__init__(whole.in_features, outputs, bias=whole.bias is not None, device="meta")
        self.weight = _kept(torch.cat([whole.weight[p.start : p.stop] for p in places]))
        if whole.bias is not None:
            self.bias = _kept(torch.cat([whole.bias[p.start : p.stop] for p in places]))


class RowLinear(nn.Module):
    """A product of which each rank has some inputs, ``[..., fewer]`` to ``[..., N]``: the ranks add up their parts.

    Args:
        whole: the product, which is left as it is. Its bias is added once, to the sum.
        places: which inputs.
        wire: to the others.
    """

    def __init__(self, whole: nn.Linear, places: range, wire: Wire) -> None:
        super().__init__()
        self.part = nn.Linear(len(places), whole.out_features, bias=False, device="meta")
        self.part.weight = _kept(whole.weight[:, places.start : places.stop])
        self.bias, self.wire = whole.bias, wire

    def forward(self, x: Tensor) -> Tensor:
        """The whole sum, the same on every rank."""
        out = self.wire.all_reduce(self.part(x))
        return out if self.bias is None else out + self.bias


class VocabularyEmbedding(nn.Module):
    """A table of which each rank has some rows, ids ``[...]`` to ``[..., d]``: a token's vector comes from its owner.

    Args:
        table: ``[V, d]``, which is left as it is.
        places: which rows; those beyond the table are zeros.
        wire: to the others.
    """

    def __init__(self, table: Tensor, places: range, wire: Wire) -> None:
        super().__init__()
        self.weight = _kept(_rows(table, places))
        self.first, self.wire = places.start, wire

    def forward(self, ids: Tensor) -> Tensor:
        """Each rank's own rows and zeros for the others', added up."""
        local = ids - self.first
        elsewhere = (local < 0) | (local >= len(self.weight))
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.wire.all_reduce(rows.masked_fill(elsewhere[..., None], 0.0))


class VocabularyHead(nn.Module):
    """A head of which each rank has some tokens, ``[..., d]`` to logits ``[..., V]``, the same on every rank.

    Args:
        weight: ``[ceil(V / n), d]``: this rank's rows, shared with the embedding where the two are tied.
        vocab_size: V; what the slices have beyond that is cut off.
        wire: to the others.
    """

    def __init__(self, weight: nn.Parameter, vocab_size: int, wire: Wire) -> None:
        super().__init__()
        self.part = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.part.weight = weight
        self.vocab_size, self.wire = vocab_size, wire

    def forward(self, x: Tensor) -> Tensor:
        """Everybody's logits, side by side."""
        return self.wire.all_gather(self.part(x))[..., : self.vocab_size]


def _kept(part: Tensor) -> nn.Parameter:
    """A slice in memory of its own: a view would keep the whole alive."""
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=False)


def _rows(table: Tensor, places: range) -> Tensor:
    found = table[places.start : places.stop]
    return F.pad(found, (0, 0, 0, len(places) - len(found)))


# --- a model of them ------------------------------------------------------------------


def shard(loaded: LoadedModel, wire: Wire, *, uneven: bool = False) -> LoadedModel:
    """This rank's slice of a model; every rank calls it with the same whole one.

    What the slice has is copied, and the whole is left as it is: let go of it, and its memory is free. (A loader for
    models that no device holds whole would read the slice alone from the file; here it is cut where one can watch.)

    The result's config has the heads and the ``d_ff`` of this rank, from which a cache takes its size. Engines run on
    it as they are, but sizes that they take from this machine's free memory (``cache_tokens`` of the continuous engine)
    must be given, or ranks may differ. The kernel of :class:`~nanoinfer.optimize.options.Optimizations` cannot slice.

    Args:
        loaded: a whole Llama or GPT-2.
        wire: to the other ranks.
        uneven: also share what does not come out even, as whole KV heads with their queries; the first ranks then have
            more to do and the others wait for them.

    Raises:
        RequestError: heads or a ``d_ff`` that the ranks cannot share, or a model with experts.
    """
    whole = loaded.model.config
    mine = share(whole, wire.size, wire.rank, uneven=uneven)
    model = share_weights(loaded.model)
    if isinstance(model, GPT2):
        _shard_gpt2(model, mine, wire)
    else:
        _shard_llama(model, mine, wire)
    sizes = {"n_heads": len(mine.heads), "n_kv_heads": len(mine.kv_heads), "d_ff": len(mine.middle)}
    model.config = LocalConfig(**{**{field.name: getattr(whole, field.name) for field in fields(whole)}, **sizes})
    return replace(loaded, model=model)


def _shard_llama(model: Llama, mine: Share, wire: Wire) -> None:
    d_head = model.config.d_head
    q, kv = _numbers(mine.heads, d_head), _numbers(mine.kv_heads, d_head)
    block: Any
    for block in model.layers:
        attention, mlp = block.self_attn, block.mlp
        attention.q_proj = ColumnLinear(attention.q_proj, q)
        attention.k_proj = ColumnLinear(attention.k_proj, kv)
        attention.v_proj = ColumnLinear(attention.v_proj, kv)
        attention.o_proj = RowLinear(attention.o_proj, q, wire)
        mlp.gate_proj = ColumnLinear(mlp.gate_proj, mine.middle)
        mlp.up_proj = ColumnLinear(mlp.up_proj, mine.middle)
        mlp.down_proj = RowLinear(mlp.down_proj, mine.middle, wire)
    embedding = VocabularyEmbedding(model.embed_tokens.weight, mine.vocabulary, wire)
    model.embed_tokens = embedding  # type: ignore[assignment]
    model.lm_head = _head(model, embedding, mine, wire)  # type: ignore[assignment]


def _shard_gpt2(model: GPT2, mine: Share, wire: Wire) -> None:
    config = model.config
    heads = _numbers(mine.heads, config.d_head)
    # q, k and v lie behind each other in one matrix, and this rank has the same heads of each
    qkv = [range(i * config.d_model + heads.start, i * config.d_model + heads.stop) for i in range(3)]
    block: Any
    for block in model.h:
        attention, mlp = block.attn, block.mlp
        attention.n_heads = len(mine.heads)
        attention.c_attn = ColumnLinear(attention.c_attn, *qkv)
        attention.c_proj = RowLinear(attention.c_proj, heads, wire)
        mlp.c_fc = ColumnLinear(mlp.c_fc, mine.middle)
        mlp.c_proj = RowLinear(mlp.c_proj, mine.middle, wire)
    embedding = VocabularyEmbedding(model.wte.weight, mine.vocabulary, wire)
    model.wte = embedding  # type: ignore[assignment]
    model.lm_head = _head(model, embedding, mine, wire)  # type: ignore[assignment]


def _head(model: GPT2 | Llama, embedding: VocabularyEmbedding, mine: Share, wire: Wire) -> VocabularyHead:
    weight = embedding.weight if model.lm_head is None else _kept(_rows(model.lm_head.weight, mine.vocabulary))
    return VocabularyHead(weight, model.config.vocab_size, wire)


def _numbers(heads: range, d_head: int) -> range:
    """Where these heads' numbers lie."""
    return range(heads.start * d_head, heads.stop * d_head)

"""Tensor parallel: every rank has a slice of every matrix, and all ranks compute every token.

The first product of attention and of the MLP is split by its outputs, the second by its inputs, so that a layer has
two all-reduces (Shoeybi et al., "Megatron-LM", 2019). All ranks get the same logits: every engine runs unchanged.
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
from nanoinfer.models.registry import LoadedModel
from nanoinfer.optimize.linear import share_weights
from nanoinfer.parallel.collectives import Communicator
from nanoinfer.theory.arithmetic import check_sizes
from nanoinfer.theory.capacity import check_tp, divides
from nanoinfer.theory.communication import partition


@dataclass(frozen=True)
class ShardSpec:
    """The slice of a model on one rank."""

    heads: range  # query heads
    kv_heads: range  # of those; with more ranks than KV heads, several ranks have the same one
    middle: range  # activations of the MLP, of d_ff
    vocabulary: range  # tokens, equally many on all ranks: the last ones may lie beyond the vocabulary's end


def shard_spec(config: ModelConfig, n: int, rank: int, *, uneven: bool = False) -> ShardSpec:
    """The slice of ``rank`` of ``n``. ``uneven`` and errors as in :func:`shard`."""
    check_sizes(tp=n)
    if config.moe is not None:
        raise RequestError("tensor parallel does not cut experts; spread them over the ranks instead (expert parallel)")
    if not uneven or n > config.n_kv_heads:
        check_tp(config, n)
    if n > config.d_ff or (config.d_ff % n and not uneven):
        raise RequestError(f"tp {n} does not divide the MLP's d_ff of {config.d_ff} evenly; take a divisor")
    if n <= config.n_kv_heads:
        group = config.n_heads // config.n_kv_heads
        kv_heads = partition(config.n_kv_heads, n)[rank]
        heads = range(kv_heads.start * group, kv_heads.stop * group)
    else:
        heads = partition(config.n_heads, n)[rank]
        shared = rank * config.n_kv_heads // n
        kv_heads = range(shared, shared + 1)
    tokens = -(-config.vocab_size // n)
    vocabulary = range(rank * tokens, (rank + 1) * tokens)
    return ShardSpec(heads, kv_heads, partition(config.d_ff, n)[rank], vocabulary)


def is_even(config: ModelConfig, n: int) -> bool:
    """Whether ``n`` ranks get equal slices of heads and MLP."""
    return divides(config, n) and config.d_ff % n == 0


class LocalConfig(ModelConfig):
    """A model's shape with the heads and the ``d_ff`` of one rank, and the ``d_model`` and vocabulary of the whole."""

    def __post_init__(self) -> None:
        """Skip the checks of a whole model: the heads of a slice of GPT-2 do not add up to its width."""


class ColumnLinear(nn.Linear):
    """Some outputs of a product, ``[..., K]`` to ``[..., fewer]``: those of the ``indices``, concatenated."""

    def __init__(self, whole: nn.Linear, *indices: range) -> None:
        super().__init__(whole.in_features, sum(map(len, indices)), bias=whole.bias is not None, device="meta")
        self.weight = _kept(torch.cat([whole.weight[i.start : i.stop] for i in indices]))
        if whole.bias is not None:
            self.bias = _kept(torch.cat([whole.bias[i.start : i.stop] for i in indices]))


class RowLinear(nn.Module):
    """A product of which each rank has the inputs ``indices``, ``[..., fewer]`` to the sum over ranks ``[..., N]``."""

    def __init__(self, whole: nn.Linear, indices: range, comm: Communicator) -> None:
        super().__init__()
        self.part = nn.Linear(len(indices), whole.out_features, bias=False, device="meta")
        self.part.weight = _kept(whole.weight[:, indices.start : indices.stop])
        self.bias, self.comm = whole.bias, comm

    def forward(self, x: Tensor) -> Tensor:
        out = self.comm.all_reduce(self.part(x))
        return out if self.bias is None else out + self.bias


class VocabularyEmbedding(nn.Module):
    """A table ``[V, d]`` of which each rank has the rows ``indices``, zeros beyond V; ids ``[...]`` to ``[..., d]``."""

    def __init__(self, table: Tensor, indices: range, comm: Communicator) -> None:
        super().__init__()
        self.weight = _kept(_rows(table, indices))
        self.first, self.comm = indices.start, comm

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.first
        elsewhere = (local < 0) | (local >= len(self.weight))
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.comm.all_reduce(rows.masked_fill(elsewhere[..., None], 0.0))


class VocabularyHead(nn.Module):
    """A head of which each rank has ``weight`` ``[ceil(V / n), d]``; all get the logits ``[..., V]``."""

    def __init__(self, weight: nn.Parameter, vocab_size: int, comm: Communicator) -> None:
        super().__init__()
        self.part = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.part.weight = weight
        self.vocab_size, self.comm = vocab_size, comm

    def forward(self, x: Tensor) -> Tensor:
        return self.comm.all_gather(self.part(x))[..., : self.vocab_size]


def _kept(part: Tensor) -> nn.Parameter:
    """A copy of a slice: a view would keep the whole in memory."""
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=False)


def _rows(table: Tensor, indices: range) -> Tensor:
    rows = table[indices.start : indices.stop]
    return F.pad(rows, (0, 0, 0, len(indices) - len(rows)))


def shard(loaded: LoadedModel, comm: Communicator, *, uneven: bool = False) -> LoadedModel:
    """This rank's slice of a model, copied; every rank calls this with the same whole model.

    The result's config has the heads and the ``d_ff`` of this rank, from which a cache takes its size. Sizes that an
    engine would take from free memory (``cache_tokens``) must be given, or ranks may differ. ``uneven`` also divides
    what does not come out even, by whole KV heads with their queries; the first ranks then have more work. Raises
    :class:`RequestError` for heads or a ``d_ff`` that the ranks cannot divide, or a model with experts.
    """
    whole = loaded.model.config
    spec = shard_spec(whole, comm.size, comm.rank, uneven=uneven)
    model = share_weights(loaded.model)
    block: Any
    for block in model.blocks:
        (_shard_gpt2_block if isinstance(model, GPT2) else _shard_llama_block)(block, whole, spec, comm)
    embedding = VocabularyEmbedding(model.embedding.weight, spec.vocabulary, comm)
    setattr(model, model.parts[0], embedding)
    weight = embedding.weight if model.lm_head is None else _kept(_rows(model.lm_head.weight, spec.vocabulary))
    model.lm_head = VocabularyHead(weight, whole.vocab_size, comm)  # type: ignore[assignment]
    sizes = {"n_heads": len(spec.heads), "n_kv_heads": len(spec.kv_heads), "d_ff": len(spec.middle)}
    model.config = LocalConfig(**{**{field.name: getattr(whole, field.name) for field in fields(whole)}, **sizes})
    return replace(loaded, model=model)


def _shard_llama_block(block: Any, config: ModelConfig, spec: ShardSpec, comm: Communicator) -> None:
    q, kv = _numbers(spec.heads, config.d_head), _numbers(spec.kv_heads, config.d_head)
    attention, mlp = block.self_attn, block.mlp
    attention.q_proj = ColumnLinear(attention.q_proj, q)
    attention.k_proj = ColumnLinear(attention.k_proj, kv)
    attention.v_proj = ColumnLinear(attention.v_proj, kv)
    attention.o_proj = RowLinear(attention.o_proj, q, comm)
    mlp.gate_proj = ColumnLinear(mlp.gate_proj, spec.middle)
    mlp.up_proj = ColumnLinear(mlp.up_proj, spec.middle)
    mlp.down_proj = RowLinear(mlp.down_proj, spec.middle, comm)


def _shard_gpt2_block(block: Any, config: ModelConfig, spec: ShardSpec, comm: Communicator) -> None:
    heads = _numbers(spec.heads, config.d_head)
    # q, k and v are concatenated in one matrix, and this rank has the same heads of each
    qkv = [range(i * config.d_model + heads.start, i * config.d_model + heads.stop) for i in range(3)]
    attention, mlp = block.attn, block.mlp
    attention.n_heads = len(spec.heads)
    attention.c_attn = ColumnLinear(attention.c_attn, *qkv)
    attention.c_proj = RowLinear(attention.c_proj, heads, comm)
    mlp.c_fc = ColumnLinear(mlp.c_fc, spec.middle)
    mlp.c_proj = RowLinear(mlp.c_proj, spec.middle, comm)


def _numbers(heads: range, d_head: int) -> range:
    """Indices of these heads' numbers."""
    return range(heads.start * d_head, heads.stop * d_head)

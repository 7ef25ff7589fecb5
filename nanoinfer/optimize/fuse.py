"""Fuse products over the same input: it is read once, and one larger product uses the hardware better than several."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.models.attention import KVCache, attend
from nanoinfer.models.llama import LlamaAttention, LlamaMLP, rotate
from nanoinfer.models.model import Decoder


class FusedAttention(LlamaAttention):
    """Llama's attention with queries, keys and values from one product, and both rotations in one."""

    def __init__(self, plain: LlamaAttention) -> None:
        nn.Module.__init__(self)  # not the parent's, which would make three projections
        self.layer, self.d_head = plain.layer, plain.d_head
        self.n_q, self.n_kv = (p.out_features // plain.d_head for p in (plain.q_proj, plain.k_proj))
        self.qkv_proj = _joined([plain.q_proj, plain.k_proj, plain.v_proj])
        self.o_proj = plain.o_proj

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: KVCache | None, mask: Tensor | None) -> Tensor:
        qk, v = torch.split(self.heads(self.qkv_proj(x)), [self.n_q + self.n_kv, self.n_kv], dim=1)  # [B, n, T, d_h]
        q, k = torch.split(rotate(qk, *rope), [self.n_q, self.n_kv], dim=1)
        out = attend(q, k, v, mask) if cache is None else cache.attend(self.layer, q, k, v, mask)
        return self.o_proj(out)  # type: ignore[no-any-return]


class FusedMLP(LlamaMLP):
    """Llama's gated MLP with gate and up from one product."""

    def __init__(self, plain: LlamaMLP) -> None:
        nn.Module.__init__(self)
        self.gate_up_proj = _joined([plain.gate_proj, plain.up_proj])
        self.down_proj = plain.down_proj

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)  # type: ignore[no-any-return]


def fuse(model: Decoder) -> None:
    """Fuse q, k and v, and gate and up, in place, in a model from :func:`~nanoinfer.optimize.apply.share_weights`.

    GPT-2's are fused already. Fused weights are copies, in plain ``nn.Linear``.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LlamaAttention):
                setattr(parent, name, FusedAttention(child))
            elif isinstance(child, LlamaMLP):  # experts too
                setattr(parent, name, FusedMLP(child))


def _joined(parts: Sequence[nn.Linear]) -> nn.Linear:
    weight = torch.cat([part.weight for part in parts])
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear

"""Fused linear layers (one product in place of several over the same input) and packed ones (in oneDNN's layout).

The model that was loaded is left alone: what changes in place is a copy from :func:`share_weights`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.configs.config import ModelConfig
from nanoinfer.errors import DeviceError
from nanoinfer.models.attention import KVCache, attend
from nanoinfer.models.llama import LlamaAttention, LlamaMLP, rotate
from nanoinfer.models.model import Decoder

ROWS = 32  # of the layout: those for 8 to 512 are good for any number; in that for 1, more take 1.7 times as long

Net = TypeVar("Net", bound=nn.Module)
Part = TypeVar("Part", bound=nn.Module)


def share_weights(model: Net) -> Net:
    """A second set of modules, to be changed in place, over the parameters and buffers of ``model``: none is copied."""
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared)


def check_dense(config: ModelConfig, what: str) -> None:
    """Raise :class:`DeviceError` for a mixture of experts, where ``what`` needs a step that is alike for all tokens."""
    if config.moe is not None:
        raise DeviceError(f"{what} cannot do a mixture of experts: leave it off; fuse and pack can")


def replace_modules(model: nn.Module, kind: type[Part], make: Callable[[Part], nn.Module]) -> None:
    """Put what ``make`` returns in place of each module of a kind."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, kind):
                setattr(parent, name, make(child))


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
    """Fuse q, k and v, and gate and up, in place; GPT-2's are already. Fused weights are copies, in ``nn.Linear``."""
    replace_modules(model, LlamaAttention, FusedAttention)
    replace_modules(model, LlamaMLP, FusedMLP)  # experts too


def _joined(parts: Sequence[nn.Linear]) -> nn.Linear:
    weight = torch.cat([part.weight for part in parts])
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


# torch.compile cannot trace into a packed weight: it sees an operator and the shape of its result.
torch.library.define("nanoinfer::packed_linear", "(Tensor x, Tensor packed, Tensor? bias) -> Tensor")


@torch.library.impl("nanoinfer::packed_linear", "default")
def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]


torch.library.register_fake(
    "nanoinfer::packed_linear", lambda x, packed, bias: x.new_empty(*x.shape[:-1], packed.shape[0])
)


class PackedLinear(nn.Module):
    """``nn.Linear`` over a packed copy of its weight ``[N, K]``; a bias ``[N]`` is shared."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        # Not a buffer: code that walks over buffers cannot read this layout.
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.nanoinfer.packed_linear(x, self.packed, self.bias)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        n, k = self.packed.shape
        return f"in_features={k}, out_features={n}, bias={self.bias is not None}"


def pack(model: Decoder) -> None:
    """Pack every ``nn.Linear`` and the head, in place. Packed weights are copies, a tied head's too.

    Raises :class:`DeviceError` where oneDNN cannot pack.
    """
    tied = model.embedding.weight
    if tied.device.type != "cpu" or tied.dtype not in (torch.float32, torch.bfloat16):
        raise DeviceError(f"weights are packed on a CPU in float32 or bfloat16, not on {tied.device} in {tied.dtype}")
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        raise DeviceError("this PyTorch has no oneDNN (torch.backends.mkldnn), which packs weights: do without pack")
    if tied.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise DeviceError("oneDNN has no bfloat16 on this processor: do without pack, or use float32")
    if model.lm_head is None:
        model.lm_head = PackedLinear(tied)  # type: ignore[assignment]
    replace_modules(model, nn.Linear, lambda linear: PackedLinear(linear.weight, linear.bias))

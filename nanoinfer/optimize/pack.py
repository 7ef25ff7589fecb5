"""Weights in the layout that oneDNN's products read: put in order once, and not at every product."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanoinfer.errors import DeviceError
from nanoinfer.models.gpt2 import GPT2
from nanoinfer.models.llama import Llama

#: Rows that the layout is made for. From 8 to 512 it is nearly the same, and good for any number of rows; made for 1,
#: products of several rows take up to 1.7 times as long.
ROWS = 32

# A compiler cannot look into a packed weight. To it, a product with one is an operator of which it knows the shape.
torch.library.define("nanoinfer::packed_linear", "(Tensor x, Tensor packed, Tensor? bias) -> Tensor")


@torch.library.impl("nanoinfer::packed_linear", "default")
def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]


def _shape_of_packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])


torch.library.register_fake("nanoinfer::packed_linear", _shape_of_packed_linear)


class PackedLinear(nn.Module):
    """``nn.Linear`` over a packed copy of its weight ``[N, K]``; a bias ``[N]`` is shared."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        # No buffer: what walks over those cannot read it.
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """``[..., K]`` to ``[..., N]``."""
        return torch.ops.nanoinfer.packed_linear(x, self.packed, self.bias)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Sizes, as ``nn.Linear`` tells its own."""
        n, k = self.packed.shape
        return f"in_features={k}, out_features={n}, bias={self.bias is not None}"


def pack(model: GPT2 | Llama) -> None:
    """Replace every ``nn.Linear`` and the head by a :class:`PackedLinear`, in place.

    Args:
        model: from :func:`~nanoinfer.optimize.apply.share_weights`. Packed weights are new memory, a tied head's too.

    Raises:
        DeviceError: another device than the CPU, another dtype than float32 or bfloat16, a PyTorch without oneDNN,
            a processor on which oneDNN has no bfloat16.
    """
    tied = model.wte.weight if isinstance(model, GPT2) else model.embed_tokens.weight
    if tied.device.type != "cpu" or tied.dtype not in (torch.float32, torch.bfloat16):
        raise DeviceError(f"weights are packed on a CPU in float32 or bfloat16, not on {tied.device} in {tied.dtype}")
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        raise DeviceError("this PyTorch has no oneDNN (torch.backends.mkldnn), which packs weights: do without pack")
    if tied.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise DeviceError("oneDNN has no bfloat16 on this processor: do without pack, or use float32")
    if model.lm_head is None:
        model.lm_head = PackedLinear(tied)  # type: ignore[assignment]
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, PackedLinear(child.weight, child.bias))

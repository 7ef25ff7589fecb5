"""Weights in the layout of oneDNN's products: reordered once, not at every product."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanoinfer.errors import DeviceError
from nanoinfer.models.model import Decoder

ROWS = 32  # of the layout: those for 8 to 512 are good for any number; in that for 1, more take 1.7 times as long

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
    """Replace every ``nn.Linear`` and the head, in a model from :func:`~nanoinfer.optimize.apply.share_weights`.

    Packed weights are copies, a tied head's too. Raises :class:`DeviceError` where oneDNN cannot pack.
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
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, PackedLinear(child.weight, child.bias))

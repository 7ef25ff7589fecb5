"""Quantised layers, in the formats of :mod:`nanoinfer.optimize.formats`: a step reads fewer bytes of weights.

Head and embeddings keep their dtype, and so do the inputs of products, except in fp8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.errors import DeviceError, RequestError
from nanoinfer.models.model import Decoder
from nanoinfer.optimize import formats
from nanoinfer.optimize.linear import check_dense

Quantised = Literal["int8", "int4", "fp8"]
#: The mean square of each input channel ``[K]``, by the name of the ``nn.Linear`` it goes into.
Calibration = Mapping[str, Tensor]

GROUPS = (32, 64, 128, 256)  # int4 group sizes of PyTorch's operator
GROUP = 32  # 5 bits a weight, step and middle included
FEW_ROWS = 8  # up to here the int8 operator is faster
OUTPUTS, FP8_SIZES = 16, 16  # sizes of the int4 and fp8 operators are multiples of these
WINDOW = 512  # tokens of a calibration text that see each other


def _int8_linear(x: Tensor, whole: Tensor, scales: Tensor) -> Tensor:
    # Measured at the shapes of smollm2-135m, 1 to 512 rows. oneDNN's int8 products, fast at any number of rows, want
    # int8 inputs too, and a scale a row of those costs ten times what it costs in weights: KL 0.026, not 0.003. With
    # inputs in two bytes the error is gone, and so is the gain. PyTorch's operator for int8 weights alone is the
    # fastest at few rows of bfloat16 (at many, and in float32, the slowest by far), and reads past odd sizes.
    rows = x.reshape(-1, x.shape[-1])
    if x.dtype == torch.bfloat16 and len(rows) <= FEW_ROWS and x.shape[-1] % 32 == 0:
        out: Tensor = torch.ops.aten._weight_int8pack_mm(rows.contiguous(), whole, scales)
    else:
        out = F.linear(rows, whole.to(x.dtype)).mul_(scales)
    return out.view(*x.shape[:-1], -1)


def _int4_linear(x: Tensor, packed: Tensor, grid: Tensor, group: int) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).bfloat16().contiguous()  # the operator is slow in float32
    out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, group, grid)
    return out.view(*x.shape[:-1], -1).to(x.dtype)


# To torch.compile each is one operator with a shape: it does not trace the layout, nor the choice by number of rows.
torch.library.define("nanoinfer::int8_linear", "(Tensor x, Tensor whole, Tensor scales) -> Tensor")
torch.library.define("nanoinfer::int4_linear", "(Tensor x, Tensor packed, Tensor grid, int group) -> Tensor")
torch.library.impl("nanoinfer::int8_linear", "CPU", _int8_linear)
torch.library.impl("nanoinfer::int4_linear", "CPU", _int4_linear)
torch.library.register_fake("nanoinfer::int8_linear", lambda x, whole, scales: x.new_empty(*x.shape[:-1], len(whole)))
torch.library.register_fake(
    "nanoinfer::int4_linear", lambda x, packed, grid, group: x.new_empty(*x.shape[:-1], grid.shape[1])
)


class QuantisedLinear(nn.Module):
    """In place of an ``nn.Linear``: ``[..., K]`` to ``[..., N]`` in the input's dtype. The bias is shared."""

    def __init__(self, linear: nn.Linear, **buffers: Tensor) -> None:
        super().__init__()
        self.n_out, self.n_in = linear.weight.shape
        self.bias = linear.bias
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    @property
    def nbytes(self) -> int:
        """Bytes of weights with their scales and padding."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def extra_repr(self) -> str:
        return f"{self.n_in}, {self.n_out}, {self.nbytes} bytes"

    def forward(self, x: Tensor) -> Tensor:
        out = self.product(x)
        return out if self.bias is None else out + self.bias

    def product(self, x: Tensor) -> Tensor:
        """``[..., K]`` to ``[..., N]``, without the bias."""
        raise NotImplementedError


class Int8Linear(QuantisedLinear):
    """int8 with a scale a row, in bfloat16 if the weight is. On a GPU the weight is dequantised for each product.

    With ``energy`` ``[K]`` scales are activation-aware, else from plain rounding.
    """

    whole: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear, energy: Tensor | None = None) -> None:
        weight, dtype = linear.weight, torch.bfloat16 if linear.weight.dtype == torch.bfloat16 else torch.float32
        whole, scales = (
            formats.to_int8_rows(weight, dtype) if energy is None else formats.fit_int8_rows(weight, energy, dtype)
        )
        super().__init__(linear, whole=whole, scales=scales)

    def product(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and x.dtype != torch.float16:  # sums of 127 times the input can overflow float16
            return torch.ops.nanoinfer.int8_linear(x, self.whole, self.scales)  # type: ignore[no-any-return]
        return F.linear(x, formats.from_int8_rows(self.whole, self.scales).to(x.dtype))


class Int4Linear(QuantisedLinear):
    """int4 in groups of ``GROUPS`` numbers of a row, padded with zeros to whole groups; two codes a byte.

    Products are in bfloat16 on a CPU; on a GPU the weight is dequantised for each. ``energy`` as in int8.
    """

    packed: Tensor
    grid: Tensor  # [G, N, 2]: step and middle

    def __init__(self, linear: nn.Linear, group: int, energy: Tensor | None = None) -> None:
        n_out, n_in = linear.weight.shape
        padding = -n_in % group
        weight = F.pad(linear.weight.float(), (0, padding, 0, -n_out % OUTPUTS))
        if energy is None:
            codes, steps, middles = formats.to_int4_groups(weight, group)
        else:
            codes, steps, middles = formats.fit_int4_groups(weight, F.pad(energy, (0, padding)), group)
        if weight.device.type == "cpu":
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        else:
            packed = formats.to_nibbles(codes)
        super().__init__(linear, packed=packed, grid=torch.stack((steps, middles), -1).transpose(0, 1).contiguous())
        self.group, self.padding = group, padding

    def product(self, x: Tensor) -> Tensor:
        if self.padding:
            x = F.pad(x, (0, self.padding))
        if x.device.type == "cpu":
            out: Tensor = torch.ops.nanoinfer.int4_linear(x, self.packed, self.grid, self.group)
        else:
            out = F.linear(x, dequantise_int4(self.packed, self.grid).to(x.dtype))
        return out[..., : self.n_out]


def dequantise_int4(nibbles: Tensor, grid: Tensor) -> Tensor:
    """``[N, K]`` float32 from codes ``[N, K / 2]``, two a byte, and the groups' steps and middles ``[G, N, 2]``."""
    steps, middles = grid.transpose(0, 1).unbind(-1)
    return formats.from_int4_groups(formats.from_nibbles(nibbles), steps, middles)


class Fp8Linear(QuantisedLinear):
    """Weights and inputs in e4m3 with a scale a row; the product comes out in bfloat16."""

    narrow: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        narrow, scales = formats.to_fp8_rows(linear.weight)
        super().__init__(linear, narrow=narrow, scales=scales)

    def product(self, x: Tensor) -> Tensor:
        rows, scales = formats.to_fp8_rows(x.reshape(-1, x.shape[-1]))
        out: Tensor = torch._scaled_mm(
            rows, self.narrow.t(), scale_a=scales[:, None], scale_b=self.scales[None], out_dtype=torch.bfloat16
        )
        return out.view(*x.shape[:-1], -1).to(x.dtype)


def layer_linears(model: Decoder) -> Iterator[tuple[str, nn.Linear]]:
    """Every ``nn.Linear`` of the layers, with its name in the model; the head is not among them."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not model.lm_head:
            yield name, module


@torch.no_grad()
def channel_energy(model: Decoder, ids: Sequence[int]) -> dict[str, Tensor]:
    """Calibrate: the mean square of each input channel of the layers' products, ``[K]`` float32, by name.

    ``model`` is the copy that is to be quantised; some hundreds of ``ids`` are enough, and none a RequestError.
    """
    if not ids:
        raise RequestError("calibration needs a text: give at least one token id")
    sums: dict[str, Tensor] = {}

    def add(name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        del module
        sums[name] = sums.get(name, 0) + args[0].float().square().flatten(0, -2).sum(0)

    device, width = next(model.parameters()).device, min(WINDOW, model.config.context)
    with ExitStack() as hooks:
        for name, module in layer_linears(model):
            hooks.callback(module.register_forward_pre_hook(partial(add, name)).remove)
        for start in range(0, len(ids), width):
            window = torch.tensor([ids[start : start + width]], device=device)
            model.hidden(window, torch.arange(window.shape[1], device=device)[None])
    return {name: total / len(ids) for name, total in sums.items()}


@torch.no_grad()
def quantise(model: Decoder, weights: Quantised, calibration: Calibration | None = None, group: int = GROUP) -> None:
    """Replace every ``nn.Linear`` of the layers, in place.

    ``calibration`` is of this model for int8 and int4 (:func:`channel_energy`), None for plain rounding; ``group`` is
    the size of int4's groups, one of ``GROUPS``. Raises :class:`DeviceError` for experts, and for fp8 where device or
    sizes do not have it; :class:`RequestError` for a calibration for fp8 or of another model.
    """
    check_dense(model.config, "quantising")
    linears = dict(layer_linears(model))
    if group not in GROUPS:
        raise RequestError(f"int4 has groups of {', '.join(map(str, GROUPS))}, not of {group}")
    if calibration is not None:
        _check_calibration(calibration, weights, linears)
    if weights == "fp8":
        check_fp8(next(model.parameters()).device, linears)
    energies = calibration or {}
    for name, linear in linears.items():
        quantised: QuantisedLinear
        if weights == "int8":
            quantised = Int8Linear(linear, energies.get(name))
        elif weights == "int4":
            quantised = Int4Linear(linear, group, energies.get(name))
        else:
            quantised = Fp8Linear(linear)
        model.set_submodule(name, quantised)


def bits_per_weight(model: Decoder) -> float:
    """Mean bits of a weight of the layers' products, scales and padding included, biases not."""
    sizes = [(m.nbytes, m.n_in * m.n_out) for m in model.modules() if isinstance(m, QuantisedLinear)]
    sizes += [(linear.weight.nbytes, linear.weight.numel()) for _, linear in layer_linears(model)]
    return 8 * sum(n_bytes for n_bytes, _ in sizes) / sum(numbers for _, numbers in sizes)


def check_fp8(device: torch.device, linears: Mapping[str, nn.Linear]) -> None:
    """Raise :class:`DeviceError` unless the device has fp8 products and takes the sizes of these linears."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        here = device if device.type != "cuda" else torch.cuda.get_device_name(device)
        raise DeviceError(
            f"fp8 products need a GPU of compute capability 8.9 or higher, and the model is on {here}: use int8 or int4"
        )
    for name, linear in linears.items():
        if linear.in_features % FP8_SIZES or linear.out_features % FP8_SIZES:
            raise DeviceError(
                f"fp8 products take sizes that are multiples of {FP8_SIZES}, and {name} goes from "
                f"{linear.in_features} to {linear.out_features}: use int8 or int4"
            )


def _check_calibration(calibration: Calibration, weights: Quantised, linears: Mapping[str, nn.Linear]) -> None:
    if weights == "fp8":
        raise RequestError("a calibration is for int8 and int4, not for fp8: leave it out")
    for name, linear in linears.items():
        if name not in calibration or calibration[name].shape != (linear.in_features,):
            raise RequestError(
                f"the calibration has no {linear.in_features} energies for {name}: calibrate the copy that is quantised"
            )

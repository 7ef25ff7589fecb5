"""Layers through ``torch.compile``: the operations between products become a few fused kernels.

One layer is compiled, others run its code over their weights. Tokens are flattened to one row, so that one graph serves
a single token and one any number; attention over the cache is one opaque operator, whatever the cache's layout.
"""

from __future__ import annotations

import hashlib
import threading
import types
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanoinfer.log import say
from nanoinfer.measure.environment import cpu_model
from nanoinfer.models.attention import KVCache, attend
from nanoinfer.models.gpt2 import GPT2
from nanoinfer.models.llama import Llama
from nanoinfer.models.model import Decoder
from nanoinfer.optimize.linear import check_dense

#: Tokens of the sample for the many-token graph: a prime, since a width of the model would be taken for that width.
MANY = 509


class _Call(threading.local):
    """Arguments of the layer that this thread runs which the compiler does not see."""

    layer: int = 0
    shape: tuple[int, int] = (1, 1)  # rows, new tokens of each
    cache: KVCache | None = None
    mask: Tensor | None = None


_call = _Call()

torch.library.define("nanoinfer::attend", "(Tensor q, Tensor k, Tensor v) -> Tensor")


@torch.library.impl("nanoinfer::attend", "default")
def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``[1, n, B * T, d_h]`` to ``[1, B * T, n_q * d_h]``, by the cache of the layer that is being run."""
    q, k, v = (x.view(x.shape[1], *_call.shape, x.shape[3]).transpose(0, 1) for x in (q, k, v))  # [B, n, T, d_h]
    cache, mask = _call.cache, _call.mask
    out = attend(q, k, v, mask) if cache is None else cache.attend(_call.layer, q, k, v, mask)
    return out.reshape(1, -1, out.shape[-1])


torch.library.register_fake("nanoinfer::attend", lambda q, k, v: q.new_empty(1, q.shape[2], q.shape[1] * q.shape[3]))


class _Opaque:
    """The cache as the compiler sees it; the layer's number is not used, so that one graph serves all layers."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        del layer, mask
        return torch.ops.nanoinfer.attend(q, k, v)  # type: ignore[no-any-return]


_opaque = _Opaque()


def _layer(block: nn.Module, x: Tensor, *rope: tuple[Tensor, Tensor]) -> Tensor:
    return block(x, *rope, _opaque, None)  # type: ignore[no-any-return]


class CompiledLayer(nn.Module):
    """A layer whose forward pass is ``run``, over tokens flattened to ``[1, B * T, d]``."""

    def __init__(self, block: nn.Module, layer: int, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.block, self.layer, self._run = block, layer, run

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        """As the layer's; ``rest`` is cache and mask, in Llama after the rotation."""
        *ropes, _call.cache, _call.mask = rest
        _call.layer, _call.shape = self.layer, (x.shape[0], x.shape[1])
        rows = [tuple(part.reshape(1, 1, -1, part.shape[-1]) for part in rope) for rope in ropes]
        try:
            return self._run(self.block, x.reshape(1, -1, x.shape[-1]), *rows).view(x.shape)
        finally:
            _call.cache = _call.mask = None


def compile_layers(model: GPT2 | Llama) -> None:
    """Compile the layers of a model in place, after all else.

    Some ten seconds the first time, then from the compiler's cache. If the compiler fails, the model stays as it is,
    and a line on stderr says so. Raises :class:`DeviceError` for a model with experts.
    """
    check_dense(model.config, "the compiler")
    blocks = model.blocks
    try:
        mark = _mark(model)
        if not mark.exists():
            say("nanoinfer: compiling the model's layers, once, some seconds")
        # A code object for each model: PyTorch keeps graphs with the code object, a handful for each.
        run = torch.compile(types.FunctionType(_layer.__code__.replace(), globals()), dynamic=True)
        layers = [CompiledLayer(block, layer, run) for layer, block in enumerate(blocks)]
        warm_up(model, layers[0])
        mark.touch()
    except Exception as error:  # compilers fail in many ways, and steps work without
        _say_uncompiled(next((line for line in str(error).splitlines() if line.strip()), type(error).__name__))
    else:
        for layer in layers:
            blocks[layer.layer] = layer


@torch.inference_mode()
def warm_up(model: Decoder, layer: CompiledLayer) -> None:
    """Compile for many tokens, then for one; in inference mode, as engines compute."""
    weight = next(model.parameters())
    for n in (MANY, 1):
        x = torch.zeros(1, n, model.config.d_model, device=weight.device, dtype=weight.dtype)
        positions = torch.arange(n, device=weight.device)[None]
        layer(x, *model.shared_inputs(positions, weight.dtype), None, None)


def _mark(model: Decoder) -> Path:
    """A file in the compiler's cache that exists once this model has been compiled on this machine."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # slow to import

    weight = next(model.parameters())
    key = f"{torch.__version__} {cpu_model()} {torch.get_num_threads()} {weight.device} {weight.dtype} {model}"
    return Path(cache_dir()) / f"nanoinfer-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


@cache
def _say_uncompiled(reason: str) -> None:
    say(f"nanoinfer: layers run uncompiled, the compiler failed: {reason}")

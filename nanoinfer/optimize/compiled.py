"""Layers through ``torch.compile``: what stands between the products runs as a few fused kernels.

All layers are alike, so one of them is compiled and the rest run the same code over other weights. Tokens of a step lie
one behind the other, so only their number varies: one graph serves a single token, one any number of them. Where keys
and values lie is none of the compiler's business: to it, attention over the cache is one operator.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import types
from collections.abc import Callable
from functools import cache as once
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanoinfer.measure.environment import cpu_model
from nanoinfer.models.attention import KVCache, attend
from nanoinfer.models.gpt2 import GPT2
from nanoinfer.models.llama import Llama
from nanoinfer.optimize.options import check_dense

#: Tokens that many-token code is made for: enough to share among threads, and no width of a model, or the compiler
#: would take the two for one number.
MANY = 509


class _Now(threading.local):
    """What the layer that this thread runs needs outside the compiler's sight."""

    layer: int = 0
    shape: tuple[int, int] = (1, 1)  # rows, new tokens of each
    cache: KVCache | None = None
    mask: Tensor | None = None


_now = _Now()

torch.library.define("nanoinfer::attend", "(Tensor q, Tensor k, Tensor v) -> Tensor")


@torch.library.impl("nanoinfer::attend", "default")
def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """From ``[1, n, B * T, d_h]`` to ``[1, B * T, n_q * d_h]``, by the cache of the layer that is being run."""
    q, k, v = (x.view(x.shape[1], *_now.shape, x.shape[3]).transpose(0, 1) for x in (q, k, v))  # [B, n, T, d_h]
    cache, mask = _now.cache, _now.mask
    out = attend(q, k, v, mask) if cache is None else cache.attend(_now.layer, q, k, v, mask)
    return out.reshape(1, -1, out.shape[-1])


def _shape_of_attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(1, q.shape[2], q.shape[1] * q.shape[3])


torch.library.register_fake("nanoinfer::attend", _shape_of_attend)


class _Opaque:
    """The cache as the compiler sees it. The layer's number is not looked at, so code does not depend on it."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        del layer, mask
        return torch.ops.nanoinfer.attend(q, k, v)  # type: ignore[no-any-return]


_opaque = _Opaque()


def _layer(block: nn.Module, x: Tensor, *rope: tuple[Tensor, Tensor]) -> Tensor:
    return block(x, *rope, _opaque, None)  # type: ignore[no-any-return]


class CompiledLayer(nn.Module):
    """A layer whose forward pass goes through ``run``, its tokens in one row ``[1, B * T, d]``."""

    def __init__(self, block: nn.Module, layer: int, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.block, self.layer, self._run = block, layer, run

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        """As the layer's own: ``rest`` ends in cache and mask, which in Llama follow on the rotation."""
        *ropes, _now.cache, _now.mask = rest
        _now.layer, _now.shape = self.layer, (x.shape[0], x.shape[1])
        rows = [tuple(part.reshape(1, 1, -1, part.shape[-1]) for part in rope) for rope in ropes]
        try:
            return self._run(self.block, x.reshape(1, -1, x.shape[-1]), *rows).view(x.shape)
        finally:
            _now.cache = _now.mask = None


def compile_layers(model: GPT2 | Llama) -> None:
    """Have every layer of a twin go through the compiler, in place; a dozen seconds once, then from its files.

    Without a working compiler the model stays as it is, and a line on stderr says so.

    Args:
        model: from :func:`~nanoinfer.optimize.apply.share_weights`, after everything else that replaces its modules.

    Raises:
        DeviceError: for a model with experts.
    """
    check_dense(model.config, "the compiler")
    blocks = model.h if isinstance(model, GPT2) else model.layers
    try:
        mark = _mark(model)
        if not mark.exists():
            print("nanoinfer: compiling the model's layers, once, some seconds", file=sys.stderr, flush=True)
        # A code object of its own: PyTorch keeps graphs with the code, as long as it lives and a handful for each.
        run = torch.compile(types.FunctionType(_layer.__code__.replace(), globals()), dynamic=True)
        layers = [CompiledLayer(block, layer, run) for layer, block in enumerate(blocks)]
        _warm_up(model, layers[0])
        mark.touch()
    except Exception as error:  # whatever it is that the compiler lacks: steps do without
        _say_uncompiled(next((line for line in str(error).splitlines() if line.strip()), type(error).__name__))
    else:
        for layer in layers:
            blocks[layer.layer] = layer


@torch.inference_mode()
def _warm_up(model: GPT2 | Llama, layer: CompiledLayer) -> None:
    """Compile for many tokens, then for one; engines compute in inference mode, and what is compiled is for that."""
    weight = next(model.parameters())
    for n in (MANY, 1):
        x = torch.zeros(1, n, model.config.d_model, device=weight.device, dtype=weight.dtype)
        positions = torch.arange(n, device=weight.device)[None]
        ropes = [model.rope(positions, weight.dtype)] if isinstance(model, Llama) else []
        layer(x, *ropes, None, None)


def _mark(model: GPT2 | Llama) -> Path:
    """A file beside the compiler's own that is there once this model has been compiled on this machine."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # takes seconds, and few need it

    weight = next(model.parameters())
    key = f"{torch.__version__} {cpu_model()} {torch.get_num_threads()} {weight.device} {weight.dtype} {model}"
    return Path(cache_dir()) / f"nanoinfer-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


@once
def _say_uncompiled(reason: str) -> None:
    print(f"nanoinfer: layers run uncompiled, the compiler failed: {reason}", file=sys.stderr, flush=True)

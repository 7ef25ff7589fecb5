"""A decode step as one native call: built once on this machine, then loaded in milliseconds.

``csrc/step.cpp`` needs a C++ compiler and nothing else. It gets addresses, so arguments are checked here.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.cache.paged import NewTokens, PagedCache
from nanoinfer.errors import DeviceError
from nanoinfer.log import say
from nanoinfer.measure.environment import compiler, cpu_features
from nanoinfer.models.gpt2 import GPT2
from nanoinfer.models.llama import Llama, RMSNorm
from nanoinfer.models.model import Decoder
from nanoinfer.optimize.linear import check_dense
from nanoinfer.store import cache_dir

SOURCE = Path(__file__).parent / "csrc" / "step.cpp"
PARTS = (SOURCE, *(SOURCE.with_name(f"{name}.h") for name in ("attention", "products", "team", "vectors")))
Weights = Literal["float32", "bfloat16", "int8"]
KINDS: dict[Weights, int] = {"float32": 0, "bfloat16": 1, "int8": 2}
SLAB, GROUP = 32, 32  # as in step.cpp
NATIVE = ("-march=native",)
BUILD_SECONDS = 300  # time-out of the compiler

SIZES = ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_head", "d_ff", "vocab")


class _Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("gpt2", *SIZES, "kind", "kv_bf16", "threads")]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("rows", "table_width", "block_size", "shared_text")),
        *((name, ctypes.c_void_p) for name in ("ids", "positions", "tables", "k", "v")),
        ("layer_stride", ctypes.c_int64),
        ("logits", ctypes.c_void_p),
    ]


def build(flags: Sequence[str] = NATIVE) -> Path:
    """The compiled library, built once a source, compiler, target (``flags``) and processor; else DeviceError."""
    if (cxx := compiler()) is None:
        raise DeviceError("no C++ compiler here (c++, g++ or clang++): install one, or do without the kernel")
    code = [part.read_text(encoding="utf-8") for part in PARTS]
    key = "|".join([*code, cxx, *flags, cpu_features(), platform.machine()])
    path = cache_dir() / "kernels" / f"step-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    say(f"nanoinfer: building its CPU kernel with {Path(cxx).name}, once, some seconds")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        options = ["-O3", "-std=c++17", *flags, "-shared", "-fPIC", "-pthread", "-w", "-o", str(built)]
        try:
            done = subprocess.run([cxx, *options, str(SOURCE)], capture_output=True, text=True, timeout=BUILD_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DeviceError(f"the C++ compiler did not build the kernel: {error}") from None
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
            raise DeviceError(f"the C++ compiler did not build the kernel: {first}")
        built.replace(path)
    return path


def _library(path: Path) -> ctypes.CDLL:
    lib = ctypes.CDLL(str(path))
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    lib.ni_new.restype, lib.ni_new.argtypes = pointer, [ctypes.POINTER(_Shape), ctypes.c_float]
    lib.ni_bytes.restype, lib.ni_bytes.argtypes = ctypes.c_int64, [pointer]
    lib.ni_free.restype, lib.ni_free.argtypes = None, [pointer]
    lib.ni_linear.restype, lib.ni_linear.argtypes = None, [pointer, integer, pointer, pointer]
    lib.ni_norm.restype, lib.ni_norm.argtypes = None, [pointer, integer, pointer, pointer]
    lib.ni_embed.restype, lib.ni_embed.argtypes = None, [pointer, pointer, pointer, pointer]
    lib.ni_step.restype, lib.ni_step.argtypes = None, [pointer, ctypes.POINTER(_Step)]
    return lib


class DecodeKernel:
    """One model, which must stay alive and unchanged, packed for the native step by ``threads`` (None: as PyTorch).

    ``weights`` is the format of the products, None for the model's dtype. ``int8`` has a scale for every 32 numbers of
    a row; the inputs of the head get 16 bits. Raises :class:`DeviceError` for other than float32 or bfloat16 on a CPU,
    for experts, and without a compiler.
    """

    def __init__(
        self, model: Decoder, weights: Weights | None = None, threads: int | None = None, flags: Sequence[str] = NATIVE
    ) -> None:
        check_dense(model.config, "the kernel")
        embedding: Tensor = model.embedding.weight
        if embedding.device.type != "cpu" or embedding.dtype not in (torch.float32, torch.bfloat16):
            raise DeviceError(
                f"the kernel runs on a CPU in float32 or bfloat16, not on {embedding.device} in {embedding.dtype}"
            )
        self.model, self.config, self.dtype = model, model.config, embedding.dtype
        self.weights: Weights = weights or ("float32" if self.dtype == torch.float32 else "bfloat16")
        self.threads = threads or torch.get_num_threads()
        c = self.config
        shape = _Shape(
            c.family == "gpt2", c.n_layers, c.d_model, c.n_heads, c.n_kv_heads, c.d_head, c.d_ff, c.vocab_size,
            KINDS[self.weights], self.dtype == torch.bfloat16, self.threads,
        )  # fmt: skip
        self._lib = _library(build(flags))
        self._handle = self._lib.ni_new(ctypes.byref(shape), c.norm_eps)
        for index, (weight, bias) in enumerate(_linears(model)):
            slabs, b = pack(weight, self.weights), None if bias is None else bias.float().contiguous()
            self._lib.ni_linear(self._handle, index, _address(slabs), _address(b))
        for index, (weight, bias) in enumerate(_norms(model)):
            w, b = weight.float().contiguous(), None if bias is None else bias.float().contiguous()
            self._lib.ni_norm(self._handle, index, _address(w), _address(b))
        positions = model.wpe.weight if isinstance(model, GPT2) else None
        inv_freq = model.inv_freq.float().contiguous() if isinstance(model, Llama) else None
        self._alive = embedding, positions, inv_freq
        self._lib.ni_embed(self._handle, embedding.data_ptr(), _address(positions), _address(inv_freq))

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._lib.ni_free(self._handle)
            self._handle = None

    @property
    def nbytes(self) -> int:
        """Bytes of packed weights and scales, which a step reads in addition to the cache."""
        return int(self._lib.ni_bytes(self._handle))

    def __call__(self, cache: PagedCache, rows: Sequence[NewTokens], ids: Sequence[int]) -> Tensor:
        """Run one step: write the rows' new tokens into their blocks, and return the logits of each ``[N, V]`` fp32.

        The cache is in the model's dtype, with the blocks prepared (:meth:`PagedCache.prepare`). ``ids`` are the new
        tokens of all rows; a row may have several consecutive ones.
        """
        assert cache.k.dtype == self.dtype and cache.k.is_contiguous() and cache.v.is_contiguous()
        n = sum(row.n for row in rows)
        assert len(ids) == n > 0
        width = max(len(row.table.blocks) for row in rows)
        padded = [row.table.blocks + [0] * (width - len(row.table.blocks)) for row in rows for _ in range(row.n)]
        tables = torch.tensor(padded, dtype=torch.int32)
        positions = torch.tensor([i for row in rows for i in range(row.table.length, row.end)])
        tokens = torch.tensor(ids)
        logits = torch.empty(n, self.config.vocab_size)
        call = _Step(
            n, width, cache.block_size, n > len(rows), tokens.data_ptr(), positions.data_ptr(), tables.data_ptr(),
            cache.k.data_ptr(), cache.v.data_ptr(), cache.k.stride(0), logits.data_ptr(),
        )  # fmt: skip
        self._lib.ni_step(self._handle, ctypes.byref(call))
        return logits


def pack(weight: Tensor, kind: Weights) -> Tensor:
    """A weight ``[N, K]`` as slabs of ``SLAB`` outputs, in the order in which they are read.

    A slab is ``[K / i, SLAB, i]``: ``i`` adjacent numbers of one output are as many as an instruction takes (float32 1,
    bfloat16 2, int8 4). N is padded to whole slabs and K to whole groups, with zeros. int8 comes as bytes, with 128
    added: for every ``GROUP`` numbers along K first the outputs' scales in bfloat16, then the numbers.
    """
    n, k = weight.shape
    wide = F.pad(weight.float(), (0, -k % GROUP, 0, -n % SLAB))
    if kind != "int8":
        wide = wide.bfloat16() if kind == "bfloat16" else wide
        return _in_slabs(wide, 2 if kind == "bfloat16" else 1)
    groups = wide.view(len(wide), -1, GROUP)
    most = groups.abs().amax(-1)  # [N, K / GROUP]
    scales = (most / 127).bfloat16()
    # A scale that was rounded down would clip the largest weight: take the next bfloat16 up.
    scales = (scales.view(torch.int16) + (scales.float() * 127 < most)).view(torch.bfloat16)
    codes = (groups / scales.float().clamp(min=torch.finfo(torch.float32).tiny)[..., None]).round().clamp(-127, 127)
    numbers = _in_slabs((codes + 128).to(torch.uint8).flatten(1), 4).view(len(wide) // SLAB, -1, SLAB * GROUP)
    return torch.cat([_in_slabs(scales, 1).view(torch.uint8).flatten(2), numbers], dim=2)


def _in_slabs(wide: Tensor, adjacent: int) -> Tensor:
    n, k = wide.shape
    return wide.view(n // SLAB, SLAB, k // adjacent, adjacent).transpose(1, 2).contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _linears(model: Decoder) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Weights and biases in the kernel's order: of each layer q k v fused, out, up, down; then the head.

    A gated MLP's up has gate and up alternating every 16 rows.
    """
    block: Any
    for block in model.blocks:
        if isinstance(model, GPT2):
            for linear in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj):
                yield linear.weight, linear.bias
            continue
        attention, mlp = block.self_attn, block.mlp
        yield torch.cat([linear.weight for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]), None
        yield attention.o_proj.weight, None
        gate_and_up = [w.view(-1, 16, model.config.d_model) for w in (mlp.gate_proj.weight, mlp.up_proj.weight)]
        yield torch.stack(gate_and_up, dim=1).flatten(0, 2), None
        yield mlp.down_proj.weight, None
    yield (model.embedding if model.lm_head is None else model.lm_head).weight, None


def _norms(model: Decoder) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Weights and biases of each layer's attention norm and MLP norm, then of the last norm."""
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, RMSNorm)):
            yield module.weight, getattr(module, "bias", None)

"""GGUF: one file that holds a model's shape, tokenizer and quantised weights.

The header is read here, in one pass, because the gguf package's reader makes an array of every token (seconds) and
cannot say which tensor a truncated file misses. Weights are kept as safetensors in the user's cache, for the next load.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import shutil
import struct
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from nanoinfer.configs.config import ModelConfig
from nanoinfer.configs.gguf import from_gguf
from nanoinfer.errors import ModelError
from nanoinfer.models.llama import inverse_frequencies
from nanoinfer.models.weights import (
    HEAD,
    State,
    StoredTensor,
    check_tensors,
    expected_shapes,
    read_header,
    read_tensors,
)

#: Value types of the format, by number: how :mod:`struct` reads each.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
#: Dequantised this many numbers at a time, so that the fp32 scratch stays small.
CHUNK = 1 << 20
#: safetensors' names of the types we write.
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
ROPE_FREQS = "rope_freqs.weight"
_GLOBAL = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight", HEAD: "output.weight"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor's place in the file. ``shape`` is in our order, the rows first."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF's header: metadata by key, tensors by name, and the model shape that follows."""

    path: Path
    meta: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    @property
    def config(self) -> ModelConfig:
        """The model's shape; tied if the file holds no head."""
        config = from_gguf(self.meta, tied="output.weight" not in self.tensors, where=str(self.path))
        if config.n_layers > len(self.tensors):  # before that many are built
            raise ModelError(f"{self.path}: {config.n_layers} layers but {len(self.tensors)} tensors; fetch it again")
        return config


class _Cursor:
    """Reads little-endian values one after the other; struct.error where the file ends."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> Any:
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return value

    def text(self) -> str:
        length = self.take("Q")
        if length > len(self.data) - self.at:
            raise struct.error("string beyond the end of the file")
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            inner, count = self.take("I"), self.take("Q")
            if inner in SCALARS:
                start, form = self.at, f"<{count}{SCALARS[inner]}"
                if count > len(self.data):
                    raise struct.error("array beyond the end of the file")
                self.at += struct.calcsize(form)
                return list(struct.unpack_from(form, self.data, start))
            return [self.value(inner) for _ in range(count)]
        return self.take(SCALARS[kind])


def read_gguf(path: Path) -> GGUFFile:
    """Read and check a GGUF's header; no weight is touched. Raises :class:`ModelError` naming the file and tensor."""
    again = "fetch or copy the file again"
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}); {again}") from None
    # A ValueError too where the file is empty and cannot be mapped.
    except (ValueError, KeyError, OverflowError, RecursionError, TypeError, struct.error) as error:
        raise ModelError(f"{path}: damaged or cut short within the GGUF header ({error}); {again}") from None


def _parse(path: Path, data: mmap.mmap) -> GGUFFile:
    cursor = _Cursor(data)
    if data[:4] != b"GGUF":
        raise ModelError(f"{path}: not a GGUF file; give a .gguf file or a folder with config.json and safetensors")
    cursor.at = 4
    if (version := cursor.take("I")) not in (2, 3):
        raise ModelError(f"{path}: GGUF version {version} is not supported (known: 2 and 3, little-endian)")
    n_tensors, n_values = cursor.take("Q"), cursor.take("Q")
    meta = {cursor.text(): cursor.value(cursor.take("I")) for _ in range(n_values)}
    infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(n_tensors):
        name = cursor.text()
        shape = tuple(cursor.take("Q") for _ in range(cursor.take("I")))[::-1]
        infos[name] = (shape, cursor.take("I"), cursor.take("Q"))
    align = max(1, int(meta.get("general.alignment", 32)))
    start = -(-cursor.at // align) * align
    tensors: dict[str, GGUFTensor] = {}
    for name, (shape, number, offset) in infos.items():
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise ModelError(f"{path}: tensor '{name}' has type {number}, unknown to gguf; update gguf") from None
        block, size = GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block:
            wrong = f"tensor '{name}' has shape {list(shape)}, not whole {kind.name} blocks"
            raise ModelError(f"{path}: {wrong}; fetch it again")
        n_bytes = math.prod(shape) // block * size
        if (end := start + offset + n_bytes) > len(data):
            wrong = f"cut short, tensor '{name}' ends at byte {end:,} of {len(data):,}"
            raise ModelError(f"{path}: {wrong}; fetch or copy the file again")
        tensors[name] = GGUFTensor(shape, kind, start + offset, n_bytes)
    return GGUFFile(path, meta, tensors)


# --- weights ------------------------------------------------------------------


def gguf_name(name: str) -> str:
    """GGUF's name of one of our parameters: ``layers.3.mlp.up_proj.weight`` is ``blk.3.ffn_up.weight``."""
    if name in _GLOBAL:
        return _GLOBAL[name]
    _, layer, module = name.removesuffix(".weight").split(".", 2)
    return f"blk.{layer}.{_LAYER[module]}.weight"


def dequantised(gguf: GGUFFile, name: str, dtype: torch.dtype) -> Tensor:
    """One tensor in ``dtype``, read and dequantised a few rows at a time."""
    info = gguf.tensors[name]
    rows, width = math.prod(info.shape[:-1]), info.shape[-1]
    row_bytes, step = info.n_bytes // max(rows, 1), max(1, CHUNK // width)
    out = torch.empty((rows, width), dtype=dtype)
    try:
        with gguf.path.open("rb") as file:
            file.seek(info.offset)
            for first in range(0, rows, step):
                count = min(step, rows - first)
                raw = np.frombuffer(file.read(count * row_bytes), dtype=np.uint8).reshape(count, row_bytes).copy()
                plain = dequantize(raw, info.kind).astype(np.float32, copy=False)
                out[first : first + count] = torch.from_numpy(plain)
    except NotImplementedError:
        wrong = f"tensor '{name}' has type {info.kind.name}, which gguf cannot dequantise"
        raise ModelError(f"{gguf.path}: {wrong}; take a file of another type") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{gguf.path}: tensor '{name}' cannot be read ({error}); fetch it again") from None
    return out.view(info.shape)


def unpermute(weight: Tensor, n_heads: int) -> Tensor:
    """Undo llama.cpp's order of q and k rows: within a head, rotary pairs are adjacent there, in two halves here."""
    rows, width = weight.shape
    return weight.view(n_heads, rows // n_heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def stream(gguf: GGUFFile, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Our name and weight of every parameter, one at a time, so that only one is held, once all are checked."""
    config, tensors = gguf.config, gguf.tensors.items()
    shapes = expected_shapes(config)
    expected = {gguf_name(name): shape for name, shape in shapes.items()}
    stored = {name: StoredTensor(gguf.path, name, t.kind.name, t.shape) for name, t in tensors if name != ROPE_FREQS}
    check_tensors(stored, expected, gguf.path, "its header")
    heads = {"q_proj.weight": config.n_heads, "k_proj.weight": config.n_kv_heads}
    for name in shapes:
        weight = dequantised(gguf, gguf_name(name), dtype)
        n_heads = heads.get(".".join(name.split(".")[-2:]))
        yield name, weight if n_heads is None else unpermute(weight, n_heads)


def inv_freq(gguf: GGUFFile) -> Tensor | None:
    """Rotary frequencies ``[d_h / 2]`` where the file scales them (Llama 3 does), else None."""
    if ROPE_FREQS not in gguf.tensors:
        return None
    plain, divisors = inverse_frequencies(gguf.config), dequantised(gguf, ROPE_FREQS, torch.float32)
    if divisors.shape != plain.shape:
        wrong = f"tensor '{ROPE_FREQS}' has shape {list(divisors.shape)}, expected {list(plain.shape)}"
        raise ModelError(f"{gguf.path}: {wrong}; fetch the file again")
    return plain / divisors


def load_gguf(gguf: GGUFFile, dtype: torch.dtype, cache: Path) -> State:
    """All weights, as views of a safetensors file in ``cache`` that the first call writes (whole or not at all).

    If it cannot be written, they are loaded all the same, with a warning.
    """
    path = cache / "converted" / f"{gguf.path.stem}-{_identity(gguf.path)}-{DTYPE_NAMES[dtype].lower()}.safetensors"
    if (state := _mapped(path, gguf.config)) is not None:
        return state
    try:
        _write(path, gguf, dtype)
    except OSError as error:
        reason = error.strerror or error
        warnings.warn(f"{path.parent}: {reason}; loading without a cache, slower each time", stacklevel=2)
    return _mapped(path, gguf.config) or dict(stream(gguf, dtype))


def _identity(path: Path) -> str:
    """A digest that tells one GGUF from another without reading all of it: path, size, time and first mebibyte."""
    stat = path.stat()
    with path.open("rb") as file:
        start = file.read(1 << 20)
    return hashlib.sha256(start + f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]


def _mapped(path: Path, config: ModelConfig) -> State | None:
    """The converted file's tensors, or None if it is missing or damaged (then it is written again)."""
    try:
        stored = read_header(path)
        fits = {name: entry.shape for name, entry in stored.items()} == expected_shapes(config)
        return dict(read_tensors(stored)) if fits else None
    except ModelError:
        return None


def _write(path: Path, gguf: GGUFFile, dtype: torch.dtype) -> None:
    """Stream the weights to a safetensors file, one tensor at a time; refuse to fill the disk."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "source": gguf.path.name}}
    end = 0
    for name, shape in expected_shapes(gguf.config).items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64 + 56)  # the weights begin at a multiple of 64 bytes
    path.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(path.parent).free < end + (64 << 20):
        raise OSError(f"no room for {end / 1e6:,.0f} MB")
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for _, weight in stream(gguf, dtype):
                out.write(weight.contiguous().view(torch.uint8).numpy().reshape(-1).data)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)

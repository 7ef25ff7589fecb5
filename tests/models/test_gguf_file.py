"""GGUF headers, every quantisation, and the converted file that makes the second load quick."""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import _type_traits, dequantize, quantize

from nanoinfer.errors import ModelError, NanoinferError
from nanoinfer.models import fetch, gguf_file
from nanoinfer.models.gguf_file import dequantised, gguf_name, inv_freq, load_gguf, read_gguf, stream, unpermute
from nanoinfer.models.model import n_parameters
from nanoinfer.models.registry import LoadedModel
from nanoinfer.models.weights import expected_shapes

D, HEADS, KV, FF, VOCAB, LAYERS = 64, 4, 2, 96, 40, 2
SHAPES = {
    "token_embd.weight": (VOCAB, D),
    "output_norm.weight": (D,),
    **{
        f"blk.{i}.{name}.weight": shape
        for i in range(LAYERS)
        for name, shape in {
            "attn_norm": (D,),
            "attn_q": (D, D),
            "attn_k": (D // 2, D),
            "attn_v": (D // 2, D),
            "attn_output": (D, D),
            "ffn_norm": (D,),
            "ffn_gate": (FF, D),
            "ffn_up": (FF, D),
            "ffn_down": (D, FF),
        }.items()
    },
}


def permute(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to q and k, written down from its description."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def write(path: Path, change: dict[str, Any] | None = None, kind: str = "F32", **meta: Any) -> dict[str, Any]:
    """A tiny llama GGUF, written by the gguf package; returns our names and the weights in it."""
    draw = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(32)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    for key, value in meta.items():
        writer.add_string(key.replace("__", "."), value)
    plain: dict[str, Any] = {}
    shapes: dict[str, Any] = SHAPES | (change or {})
    for name, shape in shapes.items():
        if shape is None:
            continue
        weight = shape if isinstance(shape, np.ndarray) else draw.standard_normal(shape).astype(np.float32)
        plain[name] = weight
        if weight.ndim == 2 and ("attn_q" in name or "attn_k" in name):
            weight = permute(weight, HEADS if "attn_q" in name else KV)
        raw = GGMLQuantizationType[kind if weight.ndim == 2 else "F32"]
        writer.add_tensor(name, quantize(weight, raw), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return plain


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_header_equals_that_of_the_gguf_package(real: bool, tmp_path: Path) -> None:
    path = fetch.fetch(fetch.SMOLLM2) if real else tmp_path / "m.gguf"
    if not real:
        write(path, kind="Q8_0", tokenizer__ggml__model="gpt2")
    ours, theirs = read_gguf(path), GGUFReader(path)
    fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert list(ours.meta) == list(fields)
    assert all(ours.meta[key] == field.contents() for key, field in fields.items())
    assert {t.name: (tuple(map(int, t.shape[::-1])), t.data_offset, t.n_bytes) for t in theirs.tensors} == {
        name: (t.shape, t.offset, t.n_bytes) for name, t in ours.tensors.items()
    }


def test_weights_come_back_unpermuted(tmp_path: Path) -> None:
    plain = write(tmp_path / "m.gguf")
    gguf = read_gguf(tmp_path / "m.gguf")
    state = dict(stream(gguf, torch.float32))
    assert gguf.config.tied and {n: tuple(t.shape) for n, t in state.items()} == expected_shapes(gguf.config)
    assert all(np.array_equal(state[name].numpy(), plain[gguf_name(name)]) for name in state)


def test_unpermute_by_hand() -> None:
    rows = torch.arange(8.0)[:, None]  # two heads of four rows; pairs (0, 2), (1, 3) lie together in the file
    assert unpermute(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


KINDS = [kind for kind in GGMLQuantizationType if kind in _type_traits or kind.name in ("F16", "F32")]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_type_the_package_dequantises(tmp_path: Path, kind: GGMLQuantizationType, monkeypatch: Any) -> None:
    monkeypatch.setattr(gguf_file, "CHUNK", 1000)  # several blocks of rows
    block, size = GGML_QUANT_SIZES[kind]
    width = max(block, 256)
    raw = np.random.default_rng(1).integers(0, 60, (7, width // block * size), dtype=np.uint8)
    (tmp_path / "t").write_bytes(b"skip" + raw.tobytes())
    info = gguf_file.GGUFTensor((7, width), kind, 4, raw.nbytes)
    ours = dequantised(gguf_file.GGUFFile(tmp_path / "t", {}, {"x": info}), "x", torch.float32)
    assert np.array_equal(ours.numpy(), dequantize(raw, kind).astype(np.float32), equal_nan=True)


def test_a_type_the_package_cannot_dequantise(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(bytes(1024))
    info = gguf_file.GGUFTensor((1, 256), GGMLQuantizationType.Q8_K, 0, 292)
    with pytest.raises(ModelError, match="tensor 'x' has type Q8_K, which gguf cannot dequantise"):
        dequantised(gguf_file.GGUFFile(tmp_path / "t", {}, {"x": info}), "x", torch.float32)


def test_rope_freqs_divide_the_plain_frequencies(tmp_path: Path) -> None:
    write(tmp_path / "plain.gguf")
    assert inv_freq(read_gguf(tmp_path / "plain.gguf")) is None
    divisors = np.array([1, 1, 1, 1, 1.5, 2, 4, 8], dtype=np.float32)
    write(tmp_path / "m.gguf", {"rope_freqs.weight": divisors})
    gguf = read_gguf(tmp_path / "m.gguf")
    found = inv_freq(gguf)
    assert found is not None
    torch.testing.assert_close(found, 10_000.0 ** -(torch.arange(8) / 8) / torch.from_numpy(divisors))
    assert set(dict(stream(gguf, torch.float32))) == set(expected_shapes(gguf.config))


def test_head_of_its_own(tmp_path: Path) -> None:
    plain = write(tmp_path / "m.gguf", {"output.weight": (VOCAB, D)})
    gguf = read_gguf(tmp_path / "m.gguf")
    state = dict(stream(gguf, torch.float32))
    assert not gguf.config.tied and np.array_equal(state["lm_head.weight"].numpy(), plain["output.weight"])


# --- the converted copy -------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_second_load_maps_the_first_ones_file(tmp_path: Path, dtype: torch.dtype, monkeypatch: Any) -> None:
    write(tmp_path / "m.gguf", kind="Q8_0")
    gguf = read_gguf(tmp_path / "m.gguf")
    first = load_gguf(gguf, dtype, tmp_path / "cache")
    (file,) = (tmp_path / "cache" / "converted").iterdir()
    expected = dict(stream(gguf, dtype))
    with monkeypatch.context() as patch:
        patch.setattr(gguf_file, "stream", None)  # nothing is dequantised again
        second = load_gguf(gguf, dtype, tmp_path / "cache")
    for state in (first, second):
        assert all(torch.equal(state[name], expected[name]) and state[name].dtype == dtype for name in expected)
    file.write_bytes(file.read_bytes()[:-5])  # damaged: made anew
    again = load_gguf(gguf, dtype, tmp_path / "cache")
    assert all(torch.equal(again[name], expected[name]) for name in expected)


def test_another_file_of_the_same_name_is_not_taken_for_the_first(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    load_gguf(read_gguf(tmp_path / "m.gguf"), torch.float32, tmp_path / "cache")
    changed = write(tmp_path / "m.gguf", {"output_norm.weight": np.full(D, 7, dtype=np.float32)})
    state = load_gguf(read_gguf(tmp_path / "m.gguf"), torch.float32, tmp_path / "cache")
    assert np.array_equal(state["norm.weight"].numpy(), changed["output_norm.weight"])


def test_without_room_or_right_to_write(tmp_path: Path, monkeypatch: Any) -> None:
    write(tmp_path / "m.gguf")
    gguf = read_gguf(tmp_path / "m.gguf")
    (tmp_path / "file").write_text("not a folder")
    with pytest.warns(UserWarning, match="loading without a cache"):
        assert len(load_gguf(gguf, torch.float32, tmp_path / "file")) == len(SHAPES)
    full = namedtuple("full", "total used free")(1, 1, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.warns(UserWarning, match="no room for .* MB; loading without a cache"):
        assert len(load_gguf(gguf, torch.float32, tmp_path / "cache")) == len(SHAPES)
    assert not [*(tmp_path / "cache" / "converted").iterdir()]


# --- damaged files ------------------------------------------------------------


def test_cut_short_names_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    with pytest.raises(ModelError, match=r"m\.gguf: cut short, tensor 'blk\.1\.ffn_down\.weight' ends at byte"):
        read_gguf(path)
    for damaged, says in [
        (b"", "damaged or cut short"),
        (whole[:20], "damaged or cut short"),
        (whole[:300], "damaged or cut short"),
        (b"PK" + whole[2:], "not a GGUF file"),
        (whole[:4] + struct.pack("<I", 9) + whole[8:], "GGUF version 9"),
    ]:
        path.write_bytes(damaged)
        with pytest.raises(ModelError, match=rf"m\.gguf: .*{says}"):
            read_gguf(path)
    with pytest.raises(ModelError, match="No such file"):
        read_gguf(tmp_path / "absent.gguf")


def test_damage_anywhere_in_the_header_is_our_error_or_none(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write(path)
    whole, draw = path.read_bytes(), random.Random(0)
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[draw.randrange(8, 1600)] = draw.randrange(256)
        path.write_bytes(damaged)
        try:
            gguf = read_gguf(path)
            dict(stream(gguf, torch.float32)) if gguf.config.vocab_size < 1000 else None
        except NanoinferError as error:
            assert str(error).count("\n") == 0


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for change, says in [
        ({"blk.1.ffn_up.weight": None}, r"'blk\.1\.ffn_up\.weight' is missing"),
        ({"output_norm.weight": (D * 2,)}, r"'output_norm\.weight' has shape \[128\], its header asks for \[64\]"),
        ({"blk.0.attn_q.bias": (D,)}, r"unexpected tensor 'blk\.0\.attn_q\.bias'"),
    ]:
        write(path, change)
        with pytest.raises(ModelError, match=says):
            dict(stream(read_gguf(path), torch.float32))


# --- the real thing -----------------------------------------------------------


def test_smollm2_parameters(loaded_smollm2: LoadedModel) -> None:
    assert n_parameters(loaded_smollm2.model) == 134_515_008
    assert loaded_smollm2.eos_ids == {2} and "b179c952" in loaded_smollm2.source


MEASURE = """
import pathlib, sys, time, torch
from nanoinfer.models.registry import load_model
def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024
before, start = status("VmRSS"), time.perf_counter()
model = load_model("smollm2-135m", dtype=sys.argv[1]).model
seconds = time.perf_counter() - start
assert all(torch.isfinite(p.sum()) for p in model.parameters())  # every page is touched
print((status("VmHWM") - before) / sum(p.nbytes for p in model.parameters()), seconds)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2_load_is_quick_and_small(tmp_path: Path, dtype: str) -> None:
    fetched = fetch.fetch(fetch.SMOLLM2)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / fetched.name).hardlink_to(fetched) if fetched.stat().st_dev == tmp_path.stat().st_dev else (
        shutil.copy(fetched, tmp_path / "files")
    )
    runs = []
    for _ in range(2):
        env = os.environ | {"NANOINFER_CACHE": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, dtype], env=env, capture_output=True, text=True, check=True
        )
        runs.append([float(word) for word in done.stdout.split()])
    (first_peak, first_seconds), (second_peak, second_seconds) = runs
    assert first_peak < 1.6 and second_peak < 1.6
    assert first_seconds < 60 and second_seconds < first_seconds

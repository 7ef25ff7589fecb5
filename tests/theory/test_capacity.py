"""What fits, against hand-worked cases and against real allocations."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoinfer.cache.contiguous import ContiguousCache
from nanoinfer.configs.config import SHAPES
from nanoinfer.errors import RequestError
from nanoinfer.measure.memory import MemoryMeter
from nanoinfer.models.registry import load_model
from nanoinfer.models.weights import build
from nanoinfer.theory import arithmetic
from nanoinfer.theory.capacity import fit, where_bytes_go

LLAMA, SMOL = SHAPES["llama-3.1-8b"], SHAPES["smollm2-135m"]


def test_llama_on_an_80_gb_device() -> None:
    found = fit(LLAMA, 80e9, 2048, utilisation=0.9)
    room = 72e9 - 2 * 8_030_261_248
    per_row = 2048 * 131_072
    assert found.blocks == int(room // (16 * 131_072))
    assert found.max_batch == int(room // (per_row + arithmetic.activation_bytes(LLAMA, 1, 1, dtype="bfloat16")))
    assert found.used.total <= found.usable < found.used.total + per_row * 1.01


def test_8_gib_of_cache_are_4096_blocks() -> None:
    assert 2**33 // (16 * arithmetic.kv_bytes_per_token(LLAMA, "float16")) == 4096


@pytest.mark.parametrize(("tokens", "unused"), [(15, 1), (16, 0), (17, 15)])
def test_the_end_of_the_last_block_is_fragmentation(tokens: int, unused: int) -> None:
    used = where_bytes_go(LLAMA, 3, tokens, block=16)
    assert used.fragmentation == 3 * unused * 131_072
    assert used.kv == 3 * tokens * 131_072


def test_tensor_parallel_shares_weights_and_heads() -> None:
    one, eight, sixteen = (where_bytes_go(LLAMA, 1, 1024, tp=tp) for tp in (1, 8, 16))
    assert eight.weights == one.weights / 8
    assert eight.kv == one.kv / 8 == sixteen.kv  # 8 KV heads: the ninth device holds a copy


def test_predicted_bytes_are_what_is_allocated() -> None:
    used = where_bytes_go(SMOL, 4, 128, "float32")
    assert used.kv == ContiguousCache(SMOL, 4, 128, "cpu", torch.float32).nbytes
    with torch.device("meta"):
        assert used.weights == sum(p.nbytes for p in build(SMOL).parameters())


@given(memory=st.floats(1e9, 1e12), context=st.integers(1, 8192))
def test_one_more_never_fits(memory: float, context: int) -> None:
    found = fit(SMOL, memory, context)
    if found.max_batch:
        assert where_bytes_go(SMOL, found.max_batch, context, block=16).total <= found.usable
    assert where_bytes_go(SMOL, found.max_batch + 1, context, block=16).total > found.usable


def test_errors_say_what_would_help() -> None:
    with pytest.raises(RequestError, match=r"16\.1 GB a device in bfloat16 and 14\.4 GB may be used: take at least 2"):
        fit(LLAMA, 16e9, 1024)
    with pytest.raises(RequestError, match="utilisation"):
        fit(LLAMA, 80e9, 1024, utilisation=1.5)
    with pytest.raises(RequestError, match="beyond the model's 131072"):
        fit(LLAMA, 80e9, 200_000)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read exactly on Linux alone")
def test_predicted_bytes_are_what_becomes_resident() -> None:
    config = SHAPES["gpt2"]
    used = where_bytes_go(config, 2, 1024, "float32")
    with MemoryMeter() as meter:
        model = load_model("random:gpt2").model
        cache = ContiguousCache(config, 2, 1024, "cpu", torch.float32)
        cache.k.fill_(1.0)  # zeros cost no memory until they are written
        cache.v.fill_(1.0)
    assert model.config == config and cache.nbytes == used.kv
    assert meter.use.above_start == pytest.approx(used.weights + used.kv, rel=0.05)

"""Counts against published figures and against the true tensors."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from nanoinfer.errors import DeviceError, RequestError
from nanoinfer.models.config import SHAPES, ModelConfig
from nanoinfer.models.model import build, n_parameters
from nanoinfer.theory import arithmetic as a

GPT2 = [
    # name, total, without positions, blocks' matrices
    ("gpt2", 124_439_808, 123_653_376, 84_934_656),
    ("gpt2-medium", 354_823_168, 353_774_592, 301_989_888),
    ("gpt2-large", 774_030_080, 772_719_360, 707_788_800),
    ("gpt2-xl", 1_557_611_200, 1_555_972_800, 1_474_560_000),
]


@pytest.mark.parametrize(("name", "total", "active", "matrices"), GPT2)
def test_gpt2_counts(name: str, total: int, active: int, matrices: int) -> None:
    config = SHAPES[name]
    v, t, layers, d = config.vocab_size, config.context, config.n_layers, config.d_model
    assert a.parameters(config) == total == v * d + t * d + layers * (12 * d**2 + 13 * d) + 2 * d
    assert a.active_parameters(config) == active
    assert 12 * layers * d**2 == matrices


def test_head_counted_twice_is_the_well_known_slip() -> None:
    config = SHAPES["gpt2"]
    assert a.parameters(config) + config.vocab_size * config.d_model == 163_037_184


def test_llama_counts() -> None:
    assert a.parameters(SHAPES["smollm2-135m"]) == a.active_parameters(SHAPES["smollm2-135m"]) == 134_515_008
    assert a.parameters(SHAPES["llama-3.1-8b"]) == 8_030_261_248
    assert a.active_parameters(SHAPES["llama-3.1-8b"]) == 7_504_924_672


@pytest.mark.parametrize("name", SHAPES)
def test_counts_equal_the_true_tensors(name: str) -> None:
    with torch.device("meta"):
        assert n_parameters(build(SHAPES[name])) == a.parameters(SHAPES[name])


def test_weight_bytes() -> None:
    assert round(a.weight_bytes(SHAPES["gpt2-xl"], "float32") / 2**20, 1) == 5941.8
    assert round(a.weight_bytes(SHAPES["gpt2-xl"], "float16") / 2**20, 1) == 2970.9


@pytest.mark.parametrize(
    ("shape", "per_token", "gib"),
    [
        ((32, 8, 128), 131_072, (0.5, 4, 16)),
        ((80, 8, 128), 327_680, (1.25, 10, 40)),
        ((126, 8, 128), 516_096, (1.96875, 15.75, 63)),
    ],
)
def test_kv_bytes_of_the_llama_family(shape: tuple[int, int, int], per_token: int, gib: tuple[float, ...]) -> None:
    layers, n_kv, d_h = shape
    config = ModelConfig("llama", layers, 8 * d_h, 8, n_kv, d_h, 8, 8, 131_072)
    assert a.kv_bytes_per_token(config, "float16") == per_token
    assert tuple(a.kv_bytes(config, 1, s, "float16") / 2**30 for s in (4096, 32_768, 131_072)) == gib


def test_kv_bytes_of_gpt2_xl() -> None:
    assert a.kv_bytes_per_token(SHAPES["gpt2-xl"], "float16") == 307_200


def test_flops_of_decode_and_prefill() -> None:
    config = SHAPES["gpt2"]
    assert a.decode_flops(config, 1) == 2 * 123_653_376 + 4 * 12 * 768
    assert a.prefill_flops(config, 10, last_only=False) == 20 * 123_653_376 + 2 * 12 * 768 * 100
    assert a.prefill_flops(config, 10, last_only=False) - a.prefill_flops(config, 10) == 2 * 50_257 * 768 * 9


def test_counted_flops_of_a_real_pass() -> None:
    """PyTorch's own counter, on a shape without biases or positions, agrees with the formula to 1%."""
    from torch.utils.flop_counter import FlopCounterMode

    config = SHAPES["smollm2-135m"]
    with torch.device("meta"):
        model = build(config)
        ids = torch.zeros(1, 64, dtype=torch.long)
    model.set_inv_freq(torch.zeros(32, device="meta"))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids, ids)
    # The counter charges attention its full square; norms are no products, so the two differ by those alone.
    square = 2 * config.n_layers * config.n_heads * config.d_head * 64**2
    assert counter.get_total_flops() == pytest.approx(a.prefill_flops(config, 64, last_only=False) + square, rel=1e-2)


def test_generate_flops_naive_against_cached() -> None:
    config = SHAPES["gpt2"]
    assert a.generate_flops(config, 10, 1, cached=True) == a.generate_flops(config, 10, 1, cached=False)
    assert a.generate_flops(config, 64, 64, cached=False) / a.generate_flops(config, 64, 64, cached=True) > 30


def test_errors_name_the_thing() -> None:
    with pytest.raises(DeviceError, match="did you mean 'float16'"):
        a.weight_bytes(SHAPES["gpt2"], "flaot16")
    with pytest.raises(RequestError, match="context must be at least 1, got 0"):
        a.decode_flops(SHAPES["gpt2"], 0)
    with pytest.raises(RequestError, match="batch must be at least 1, got -1"):
        a.kv_bytes(SHAPES["gpt2"], -1, 5)


def test_theory_imports_no_torch() -> None:
    modules = ("nanoinfer", "nanoinfer.theory.arithmetic", "nanoinfer.measure.metrics", "nanoinfer.measure.trace")
    code = f"import sys, {', '.join(modules)}; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

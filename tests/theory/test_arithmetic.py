"""Counts against published figures and against the true tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanoinfer.configs.catalog import MODELS
from nanoinfer.configs.config import SHAPES, ModelConfig, SlidingWindow, every
from nanoinfer.configs.huggingface import from_hf
from nanoinfer.errors import DeviceError, RequestError
from nanoinfer.models.model import n_parameters
from nanoinfer.models.weights import build
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


def test_the_slips_that_were_posted_about_these_caches() -> None:
    """Case by case: what a post says, and which mistake gives it."""
    large = from_hf(MODELS["Llama-3-70B"][0])
    huge = from_hf(MODELS["Llama-3.1-405B"][0])
    small = from_hf(MODELS["Llama-3-8B"][0])
    for name in ("Llama-3-8B", "Mistral-7B-v0.1", "Mixtral-8x7B"):
        assert a.kv_bytes_per_token(from_hf(MODELS[name][0]), "float16") == 131_072
    # A blog's table is in GiB at 128,000 tokens, not GB at 131,072; its 405B has 16 KV heads for 8.
    assert round(a.kv_bytes(small, 1, 128_000, "float16") / 2**30, 3) == 15.625
    assert round(a.kv_bytes(large, 1, 128_000, "float16") / 2**30, 2) == 39.06
    assert round(a.kv_bytes(huge, 1, 128_000, "float16") / 2**30, 3) == 61.523
    doubled = replace(huge, n_kv_heads=16)
    assert a.kv_bytes_per_token(doubled, "float16") == 1_032_192
    assert round(a.kv_bytes(doubled, 1, 128_000, "float16") / 2**30, 2) == 123.05
    # "5 / 40 / 160 GB" for the 70B is four times the right 1.25 / 10 / 40 GiB.
    right = [a.kv_bytes(large, 1, s, "float16") / 2**30 for s in (4096, 32_768, 131_072)]
    assert [4 * gib for gib in right] == [5, 40, 160]
    # "340 GB" leaves out that queries share keys: 64 heads for 8.
    ungrouped = replace(large, n_kv_heads=64)
    assert round(a.kv_bytes(ungrouped, 1, 131_072, "float16") / 1e9, 3) == 343.597
    assert round(a.kv_bytes(large, 1, 131_072, "float16") / 1e9, 3) == 42.950
    # 8 GiB hold 65,536 tokens of the 8B: 4,096 blocks of 16.
    assert 8 * 2**30 // a.kv_bytes_per_token(small, "float16") == 65_536 == 4096 * 16


def test_kv_bytes_of_latents_and_windows() -> None:
    v3 = from_hf(MODELS["DeepSeek-V3"][0])
    assert a.kv_bytes_per_token(v3, "bfloat16") == 61 * (512 + 64) * 2 == 70_272
    mistral = from_hf(MODELS["Mistral-7B-v0.1"][0])
    assert a.kv_bytes(mistral, 2, 4096, "float16") == a.kv_bytes(mistral, 2, 100_000, "float16") == 2**30
    gemma = from_hf(MODELS["gemma-3-1b"][0])  # 26 layers, every sixth of them full: 4
    assert a.tokens_seen(gemma, 500) == 26 * 500
    assert a.tokens_seen(gemma, 32_768) == 4 * 32_768 + 22 * 512


def test_windowed_flops_by_counting_pairs() -> None:
    config = replace(SHAPES["tiny-llama"], n_layers=3, window=SlidingWindow(5, every(3, 3)))
    products = 2 * a.active_parameters(config)
    pair = a.pair_flops(config)
    assert a.decode_flops(config, 9) == products + pair * (5 + 5 + 9)
    # The formula halves the square, so leaves out half a pair per token and layer that every token has with itself.
    pairs = sum(min(t, 5) + min(t, 5) + t for t in range(1, 10))
    half_diagonal = (5 + 5 + 9) / 2
    assert a.prefill_flops(config, 9, last_only=False) == products * 9 + pair * (pairs - half_diagonal)


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


def test_latent_attention_two_ways() -> None:
    v3 = from_hf(MODELS["DeepSeek-V3"][0])
    assert a.pair_flops(v3) == 2 * 128 * (192 + 128)
    assert a.pair_flops(v3, absorbed=True) == 2 * 128 * (2 * 512 + 64)
    assert a.decode_flops(v3, 7) == 2 * a.active_parameters(v3) + 61 * 7 * a.pair_flops(v3, absorbed=True)


class Live(TorchDispatchMode):
    """Bytes of the tensors that operators made and that are alive after each of them: the peak."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.known = {StorageWeakRef(t.untyped_storage()).cdata for t in known}
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                ref = StorageWeakRef(tensor.untyped_storage())
                if ref.cdata not in self.known:
                    self.held[ref.cdata] = (ref, tensor.untyped_storage().nbytes())
        self.held = {key: value for key, value in self.held.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(n_bytes for _, n_bytes in self.held.values()))
        return out


WIDTHS = {
    "gpt2": replace(SHAPES["gpt2"], n_layers=2, vocab_size=4000),
    "grouped": replace(SHAPES["smollm2-135m"], n_layers=2, vocab_size=4000),
    "one KV head each": replace(SHAPES["smollm2-135m"], n_layers=2, n_kv_heads=9, vocab_size=4000),
    "attention widest": replace(SHAPES["smollm2-135m"], n_layers=2, d_ff=64, vocab_size=100),
}


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize(("batch", "tokens", "last_only"), [(1, 64, True), (2, 32, True), (1, 33, False), (4, 1, True)])
def test_activations_are_what_tensors_take(name: str, batch: int, tokens: int, last_only: bool) -> None:
    config = WIDTHS[name]
    model = build(config).eval()
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    positions = torch.arange(tokens).expand(batch, tokens)
    with torch.no_grad(), Live([*model.parameters(), *model.buffers(), ids, positions]) as live:
        model(ids, positions, last_only=last_only)
    assert live.peak == a.activation_bytes(config, batch, tokens, last_only=last_only)


def test_activations_by_hand() -> None:
    config = SHAPES["gpt2"]
    assert a.activation_bytes(config, 8, 1024, "bfloat16") == 8 * 1024 * (3 * 768 + 2 * 3072) * 2


def test_intensity_of_products() -> None:
    assert a.gemm_intensity_small(1, 2) == 1 and a.gemm_intensity_small(64, 0.5) == 256
    exact = a.gemm_intensity(32, 4096, 4096, 2)
    assert exact == pytest.approx(2 * 32 * 4096**2 / (2 * (4096**2 + 2 * 32 * 4096)))
    assert exact < a.gemm_intensity_small(32, 2)
    assert a.gemm_intensity(1, 10**6, 10**6, 2) == pytest.approx(1, rel=1e-5)


def test_intensity_of_attention() -> None:
    large = from_hf(MODELS["Llama-3-70B"][0])
    assert a.attention_intensity_decode(SHAPES["gpt2"], "float16") == 1
    assert a.attention_intensity_decode(large, "bfloat16") == 8
    v3 = from_hf(MODELS["DeepSeek-V3"][0])
    assert round(a.attention_intensity_decode(v3, "bfloat16")) == 242
    assert a.causal_flops(large, 4096) == 2 * 80 * 64 * 128 * 4096**2
    windowed = replace(large, window=SlidingWindow(128))
    assert a.causal_flops(windowed, 4096) == 2 * 80 * 64 * 128 * (2 * 128 * 4096 - 128**2)
    assert a.causal_flops(v3, 4096) == 61 * 128 * (192 + 128) * 4096**2


def test_intensity_of_whole_steps() -> None:
    config = from_hf(MODELS["Llama-3-8B"][0])
    weights = 2 * a.active_parameters(config)
    assert a.decode_bytes(config, 4, 100) == weights + 4 * 100 * 131_072
    assert a.decode_intensity(config, 4, 100) == 4 * a.decode_flops(config, 100) / (weights + 4 * 100 * 131_072)
    assert a.prefill_bytes(config, 1, 512) == weights + 512 * 131_072
    mixtral = from_hf(MODELS["Mixtral-8x7B"][0])
    assert a.decode_intensity(mixtral, 8, 100) < 8 * a.decode_intensity(mixtral, 1, 100) / 3


def test_errors_name_the_thing() -> None:
    with pytest.raises(DeviceError, match="did you mean 'float16'"):
        a.weight_bytes(SHAPES["gpt2"], "flaot16")
    with pytest.raises(RequestError, match="context must be at least 1, got 0"):
        a.decode_flops(SHAPES["gpt2"], 0)
    with pytest.raises(RequestError, match="batch must be at least 1, got -1"):
        a.kv_bytes(SHAPES["gpt2"], -1, 5)

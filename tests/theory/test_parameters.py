"""Parameter counts against published ones and against Hugging Face's own modules; quantised and MoE bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from nanoinfer.configs.catalog import MODELS
from nanoinfer.configs.config import MLA, SHAPES, ModelConfig, MoE, SlidingWindow, every
from nanoinfer.configs.huggingface import from_hf
from nanoinfer.errors import DeviceError, ModelError, RequestError
from nanoinfer.theory import arithmetic as a
from nanoinfer.theory.arithmetic import head_matrix, layer_matrices
from tests.examples import examples

#: Small shapes with every option that a reader knows, written as Hugging Face's config classes take them.
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "head_dim": 24,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20, "n_routed_experts": 8}
DEEPSEEK = {**SMALL, **EXPERTS, **LATENT, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 20, "vocab_size": 50, "n_inner": 72}),
    (
        "gpt2",
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 9, "vocab_size": 50, "tie_word_embeddings": False},
    ),
    ("llama", {**SMALL, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {**SMALL, "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
    ("mistral", {**SMALL, "sliding_window": 16}),
    ("mixtral", {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    ("qwen2", {k: v for k, v in SMALL.items() if k != "head_dim"}),
    ("qwen2", {**SMALL, "head_dim": 16, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}),
    ("qwen3", {**SMALL, "attention_bias": True}),
    ("qwen3_moe", {**SMALL, **EXPERTS, "num_experts": 8, "decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    ("gemma2", {**SMALL, "sliding_window": 16}),
    ("gemma3_text", {**SMALL, "sliding_window": 16, "sliding_window_pattern": 2}),
    ("phi3", {**{k: v for k, v in SMALL.items() if k != "head_dim"}, "sliding_window": 16, "pad_token_id": 0}),
    ("olmo2", {**SMALL, "head_dim": 16}),
    ("deepseek_v2", {**DEEPSEEK, "first_k_dense_replace": 2, "n_shared_experts": 2, "q_lora_rank": None}),
    ("deepseek_v3", {**DEEPSEEK, "first_k_dense_replace": 1, "n_shared_experts": 1, "q_lora_rank": 28}),
    ("gpt_oss", {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
]


def transformers_count(family: str, values: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Parameters of transformers' own model, built without memory, and its config as it would be saved.

    DeepSeek-V3's selection bias is a tensor of the checkpoint but a buffer there: it is added.
    """
    config = AutoConfig.for_model(family, **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    bias = sum(b.numel() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))
    return sum(p.numel() for p in model.parameters()) + bias, config.to_dict()


@pytest.mark.parametrize("name", MODELS)
def test_published_counts(name: str) -> None:
    values, published = MODELS[name]
    assert a.parameters(from_hf(values, name)) == published


#: One published model a family; transformers takes up to a second to build each of the others, too.
FIRST = {values["model_type"]: name for name, (values, _) in reversed(MODELS.items())}.values()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FIRST else pytest.mark.slow) for name in MODELS]
)
def test_transformers_agree_with_published_counts(name: str) -> None:
    values, published = MODELS[name]
    built, saved = transformers_count(values["model_type"], {k: v for k, v in values.items() if k != "model_type"})
    assert built == published
    assert a.parameters(from_hf(saved)) == published


@pytest.mark.parametrize(("family", "values"), VARIANTS, ids=[f"{f}-{i}" for i, (f, _) in enumerate(VARIANTS)])
def test_every_option_equals_transformers(family: str, values: dict[str, Any]) -> None:
    built, saved = transformers_count(family, values)
    assert a.parameters(from_hf(saved)) == built
    assert a.parameters(from_hf({"model_type": family, **values})) == built


#: Parameters that a token uses, in billions as the model cards print them, without the input embedding
#: (Mixtral's and Qwen's count it: the flag).
ACTIVE: dict[str, tuple[float, float, bool]] = {
    "Mixtral-8x7B": (12.9, 0.05, True),
    "Mixtral-8x22B": (39, 0.5, True),
    "Qwen3-30B-A3B": (3.3, 0.06, True),
    "Qwen3-235B-A22B": (22, 0.5, True),
    "DeepSeek-V2-Lite": (2.4, 0.06, False),
    "DeepSeek-V2": (21, 0.5, False),
    "DeepSeek-V3": (37, 0.5, False),
    "gpt-oss-20b": (3.61, 0.005, False),
    "gpt-oss-120b": (5.13, 0.005, False),
}


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_of_model_cards(name: str) -> None:
    billions, slack, embedding = ACTIVE[name]
    config = from_hf(MODELS[name][0])
    active = a.active_parameters(config) + (config.vocab_size * config.d_model if embedding else 0)
    assert active / 1e9 == pytest.approx(billions, abs=slack)


def test_matrices_are_the_modules_weights() -> None:
    names = [m.name for m in layer_matrices(SHAPES["llama-3.1-8b"], 0)]
    assert names == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    v3 = from_hf(MODELS["DeepSeek-V3"][0])
    assert [m.name for m in layer_matrices(v3, 0)][-3:] == ["gate_proj", "up_proj", "down_proj"]
    experts = {m.name: m for m in layer_matrices(v3, 3)}
    assert (experts["expert_up_proj"].copies, experts["expert_up_proj"].used) == (256, 8)
    assert (experts["shared_up_proj"].rows, experts["router"].rows) == (2048, 256)
    assert (head_matrix(v3).rows, head_matrix(v3).columns) == (129_280, 7168)


# --- experts --------------------------------------------------------------------

MIXTRAL = from_hf(MODELS["Mixtral-8x7B"][0])


def test_experts_touched() -> None:
    assert a.experts_touched(8, 2, 1) == 2
    assert a.experts_touched(8, 2, 2) == pytest.approx(3.5)
    assert a.experts_touched(256, 8, 32) == pytest.approx(256 * (1 - (1 - 8 / 256) ** 32))
    assert a.experts_touched(4, 4, 7) == 4


def test_a_step_of_one_token_reads_what_it_uses_and_a_big_one_reads_all() -> None:
    assert a.step_weight_bytes(MIXTRAL, 1, "bfloat16") == 2 * a.active_parameters(MIXTRAL)
    everything = 2 * (a.parameters(MIXTRAL) - 32_000 * 4096)  # but for the embedding, of which rows are looked up
    assert a.step_weight_bytes(MIXTRAL, 1000, "bfloat16") == pytest.approx(everything)
    assert a.step_weight_bytes(MIXTRAL, 2, "bfloat16") < 2 * a.step_weight_bytes(MIXTRAL, 1, "bfloat16")


def test_a_dense_step_reads_the_same_whatever_its_batch() -> None:
    config = SHAPES["llama-3.1-8b"]
    assert a.step_weight_bytes(config, 1, "bfloat16") == a.step_weight_bytes(config, 99, "bfloat16")
    assert a.step_weight_bytes(config, 1, "bfloat16") == 2 * 7_504_924_672


# --- quantised weights ----------------------------------------------------------


def test_bytes_of_quantised_weights_by_hand() -> None:
    config = SHAPES["tiny-llama"]  # d 32, d_kv 16, f 64, V 256, two layers
    rows, weights = 32 + 16 + 16 + 32 + 64 + 64 + 32, 32 * (32 + 16 + 16 + 32) + 3 * 32 * 64
    plain = 256 * 32 + 5 * 32  # the tied embedding, five norms
    assert a.weight_bytes(config, "bfloat16", a.Quantisation(8)) == 2 * plain + 2 * (weights + 2 * rows)
    groups = weights // 32
    q4 = a.Quantisation(4, 32, zero_bits=4)
    assert a.weight_bytes(config, "bfloat16", q4) == 2 * plain + 2 * (weights // 2 + groups * 2 + groups // 2)


def test_a_gguf_block_has_its_scale() -> None:
    """llama.cpp's Q8_0 takes 34 bytes for 32 weights, Q4_0 18, the embedding of a tied model too."""
    config = SHAPES["smollm2-135m"]
    norms = 61 * 576
    matrices = a.parameters(config) - norms
    for name, block in (("q8_0", 34), ("q4_0", 18)):
        assert a.weight_bytes(config, "float32", a.QUANTISATIONS[name]) == matrices // 32 * block + 4 * norms


def test_a_group_that_does_not_divide_the_row_rounds_up() -> None:
    config = SHAPES["tiny-llama"]
    assert a.weight_bytes(config, "bfloat16", a.Quantisation(8, 24)) == a.weight_bytes(
        config, "bfloat16", a.Quantisation(8, 24, scale_bytes=0)
    ) + 2 * 2 * ((32 + 16 + 16 + 32 + 64 + 64) * 2 + 32 * 3)


def test_errors_name_the_thing() -> None:
    with pytest.raises(DeviceError, match="unknown dtype 'int3'"):
        a.weight_bytes(SHAPES["gpt2"], "int3")
    with pytest.raises(RequestError, match="bits must be at least 1, got 0"):
        a.Quantisation(0)
    with pytest.raises(RequestError, match="group must be at least 1, got -1"):
        a.Quantisation(4, -1)
    with pytest.raises(RequestError, match=r"top_k \(9\) must not exceed n_experts \(8\)"):
        a.experts_touched(8, 9, 1)
    with pytest.raises(RequestError, match="tokens must be at least 1, got 0"):
        a.step_weight_bytes(SHAPES["gpt2"], 0)


# --- properties -----------------------------------------------------------------

relaxed = examples(60)
size = st.integers(1, 40)
WIDE = st.integers(16, 400)


@st.composite
def configs(draw: st.DrawFn, sizes: st.SearchStrategy[int] = size) -> ModelConfig:
    """Any llama-like shape, with experts, latents, a window, biases and norms or without."""
    kv, layers = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    heads, d_head = kv * draw(st.integers(1, 4)), draw(sizes)
    mla = None
    if draw(st.booleans()):
        mla = MLA(draw(sizes), draw(st.none() | sizes), draw(sizes), draw(sizes), draw(sizes))
        kv, d_head = heads, mla.d_qk
    moe = None
    if draw(st.booleans()):
        experts = draw(st.integers(1, 8))
        dense = tuple(range(draw(st.integers(0, layers))))
        moe = MoE(experts, draw(st.integers(1, experts)), draw(sizes), draw(st.just(0) | sizes), dense)
    window = draw(st.none() | st.builds(SlidingWindow, size, st.sampled_from([(), every(2, layers)])))
    return ModelConfig(
        "llama", layers, draw(sizes), heads, kv, d_head, draw(sizes), draw(sizes), 512,
        tied=draw(st.booleans()), qkv_bias=mla is None and draw(st.booleans()), out_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()), mla=mla, moe=moe, window=window,
    )  # fmt: skip


def grown(config: ModelConfig) -> list[ModelConfig]:
    """The same shape, each size in turn one larger."""
    names = ["n_layers", "d_model", "d_ff", "vocab_size"]
    larger = [replace(config, **{name: getattr(config, name) + 1}) for name in names]
    if config.mla is None:
        larger += [
            replace(config, d_head=config.d_head + 1),
            replace(config, n_heads=config.n_heads + config.n_kv_heads),
            replace(config, n_kv_heads=config.n_heads),
        ]
    else:
        more = [
            replace(config.mla, **{n: getattr(config.mla, n) + 1})
            for n in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        ]
        larger += [replace(config, mla=mla, d_head=mla.d_qk) for mla in more]
    if config.moe is not None:
        names = ["n_experts", "d_expert", "d_shared"]
        larger += [replace(config, moe=replace(config.moe, **{n: getattr(config.moe, n) + 1})) for n in names]
    return larger


@relaxed
@given(configs(), st.integers(1, 60), st.integers(1, 20))
def test_nothing_shrinks_when_a_size_grows(config: ModelConfig, tokens: int, batch: int) -> None:
    for larger in grown(config):
        assert a.parameters(larger) >= a.parameters(config)
        assert a.active_parameters(larger) >= a.active_parameters(config)
        assert a.weight_bytes(larger) >= a.weight_bytes(config)
        assert a.kv_bytes(larger, batch, tokens) >= a.kv_bytes(config, batch, tokens)
        assert a.decode_flops(larger, tokens) >= a.decode_flops(config, tokens)
        assert a.prefill_flops(larger, tokens) >= a.prefill_flops(config, tokens)
        if larger.n_kv_heads == config.n_kv_heads:  # one KV head per query head needs no repeating, so less
            assert a.activation_bytes(larger, batch, tokens) >= a.activation_bytes(config, batch, tokens)
    assert a.step_weight_bytes(config, batch + 1) >= a.step_weight_bytes(config, batch) * (1 - 1e-12)
    assert a.prefill_flops(config, tokens + 1) > a.prefill_flops(config, tokens) > 0
    assert a.decode_flops(config, tokens + 1) >= a.decode_flops(config, tokens)


@relaxed
@given(configs(), st.integers(1, 10_000))
def test_a_window_bounds_the_cache(config: ModelConfig, tokens: int) -> None:
    full = replace(config, window=None)
    assert a.kv_bytes(full, 1, tokens) == tokens * a.kv_bytes_per_token(full)
    windowed = replace(config, window=SlidingWindow(32))
    assert a.kv_bytes(windowed, 1, tokens) == min(tokens, 32) * a.kv_bytes_per_token(windowed)
    assert a.kv_bytes(config, 1, tokens) <= a.kv_bytes(full, 1, tokens)
    assert a.decode_flops(config, tokens) <= a.decode_flops(full, tokens)
    assert a.prefill_flops(config, tokens) <= a.prefill_flops(full, tokens)


@relaxed
@given(configs(), st.integers(1, 8), size, st.integers(1, 99))
def test_all_experts_at_once_are_one_wide_dense_layer(config: ModelConfig, experts: int, d: int, batch: int) -> None:
    plain = replace(config, moe=None, mlp_bias=False)
    moe = replace(plain, moe=MoE(experts, experts, d))
    dense = replace(plain, d_ff=experts * d)
    routers = config.n_layers * experts * config.d_model
    assert a.parameters(moe) == a.parameters(dense) + routers
    assert a.active_parameters(moe) == a.active_parameters(dense) + routers
    assert a.step_weight_bytes(moe, batch) == a.step_weight_bytes(dense, batch) + 4 * routers


@relaxed
@given(
    configs(WIDE),
    st.builds(
        a.Quantisation,
        st.integers(1, 8),
        st.none() | st.integers(16, 256),
        st.integers(0, 2),
        st.integers(0, 8),
        st.booleans(),
    ),
)
def test_quantised_is_never_more(config: ModelConfig, quantisation: a.Quantisation) -> None:
    assert a.weight_bytes(config, "bfloat16", quantisation) <= a.weight_bytes(config, "bfloat16")
    assert a.step_weight_bytes(config, 3, "bfloat16", quantisation) <= a.step_weight_bytes(config, 3, "bfloat16")


# --- config's own rules ---------------------------------------------------------


def test_parts_that_cannot_be() -> None:
    plain = SHAPES["tiny-llama"]
    with pytest.raises(ModelError, match="MLA: kv_lora_rank must be at least 1"):
        MLA(0, None, 1, 1, 1)
    with pytest.raises(ModelError, match=r"top_k \(3\) must not exceed n_experts \(2\)"):
        MoE(2, 3, 4)
    with pytest.raises(ModelError, match="d_shared must be at least 0"):
        MoE(2, 1, 4, d_shared=-1)
    with pytest.raises(ModelError, match="sliding window: size must be at least 1"):
        SlidingWindow(0)
    with pytest.raises(ModelError, match="MLA needs d_head"):
        replace(plain, mla=MLA(8, None, 8, 8, 8))
    with pytest.raises(ModelError, match="gpt2 has none of"):
        replace(SHAPES["tiny-gpt2"], window=SlidingWindow(4))
    assert every(6, 13) == (5, 11) and every(1, 2) == (0, 1)

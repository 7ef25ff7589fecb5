"""Config files as they are found: key spellings, defaults, refusals."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from nanoinfer.configs.catalog import MODELS
from nanoinfer.configs.config import MLA, SHAPES, ModelConfig, MoE, RopeScaling, SlidingWindow, check_runnable
from nanoinfer.configs.gguf import from_gguf
from nanoinfer.configs.huggingface import from_hf
from nanoinfer.errors import ModelError
from nanoinfer.models import fetch
from nanoinfer.models.llama import inverse_frequencies
from nanoinfer.models.lookup import config_of, config_of_file
from nanoinfer.models.registry import LoadedModel, load_model
from nanoinfer.models.weights import build

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SPELLINGS = [
    {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **SCALING}},
    {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **SCALING}},
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **SCALING}},
]


@pytest.mark.parametrize("rope", SPELLINGS)
def test_llama3_rope_in_every_spelling(rope: dict[str, object]) -> None:
    config = from_hf({**LLAMA, **rope})
    assert config == SHAPES["llama-3.1-8b"]
    f = inverse_frequencies(config).tolist()
    assert f[0] == 1.0
    expected = {
        28: 3.211446e-3,
        29: 2.166571e-3,
        30: 1.371894e-3,
        31: 8.567514e-4,
        32: 5.248462e-4,
        33: 3.126938e-4,
        34: 1.785078e-4,
        35: 9.556212e-5,
        63: 3.068926e-7,
    }
    for i, value in expected.items():
        assert f[i] == pytest.approx(value, rel=1e-6)


def test_null_scaling_is_plain() -> None:
    config = from_hf({**LLAMA, "rope_theta": 500000.0, "rope_scaling": None})
    assert config.rope_scaling is None
    assert inverse_frequencies(config)[63].item() == pytest.approx(2.455141e-6, rel=1e-6)


def test_default_rope_in_the_new_spelling_keeps_its_theta() -> None:
    assert from_hf({**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}).rope_theta == 1e5


@pytest.mark.parametrize(
    "rope", [{"rope_scaling": {"type": "yarn", "factor": 4.0}}, {"rope_parameters": {"rope_type": "longrope"}}]
)
def test_a_rope_that_no_engine_has_is_counted_but_not_run(rope: dict[str, object]) -> None:
    config = from_hf({**LLAMA, **rope})
    assert config.rope_other in ("yarn", "longrope")
    with pytest.raises(ModelError, match=r"can be counted, not run \(rope_other\)"):
        build(config)


def test_unknown_rope_is_refused() -> None:
    with pytest.raises(ModelError, match="rope type 'mrope' is not supported"):
        from_hf({**LLAMA, "rope_scaling": {"type": "mrope", "factor": 4.0}})
    with pytest.raises(ModelError, match="rope_scaling 'twice' is not supported"):
        from_hf({**LLAMA, "rope_scaling": "twice"})


def test_tie_flag_defaults_by_family() -> None:
    assert from_hf(LLAMA).tied is False
    assert (
        from_hf({"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257, "n_ctx": 1024})
        == SHAPES["gpt2"]
    )


def test_gpt2_inner_size() -> None:
    base = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 10, "n_positions": 4}
    assert from_hf(base).d_ff == 32
    assert from_hf({**base, "n_inner": 20}).d_ff == 20
    assert from_hf({**base, "n_inner": None}).d_ff == 32


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": None}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "gemma3", "text_config": {}}, "gemma3.*give its text_config"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers 'many' is not supported"),
        ({"num_hidden_layers": 2.5}, r"num_hidden_layers 2\.5"),
        ({"num_hidden_layers": float("inf")}, "num_hidden_layers inf"),
        ({"rms_norm_eps": True}, "rms_norm_eps True"),
        ({"model_type": "gemma2", "head_dim": 8, "num_hidden_layers": 10**15}, "at most 10,000"),
        ({"model_type": "gemma2", "head_dim": 8, "hidden_act": "relu"}, "'relu'.*gelu_pytorch_tanh"),
        ({"model_type": "mistral", "sliding_window": 8, "layer_types": ["linear"] * 32}, "layer_types 'linear'"),
        ({"model_type": "mistral", "sliding_window": 8, "layer_types": ["full_attention"]}, "one name per layer"),
        ({"model_type": "mistral", "num_key_value_heads": None}, "num_key_value_heads"),
        ({"model_type": "qwen3"}, "head_dim"),
        ({"model_type": "deepseek_v3", "moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"model_type": "deepseek_v2", "attention_bias": True}, "attention_bias True"),
        ({"model_type": "qwen3_moe", "head_dim": 8, "use_sliding_window": True}, "use_sliding_window True"),
        ({"num_hidden_layers": 0}, "n_layers"),
        ({"num_key_value_heads": 5}, "n_kv_heads"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_what_is_not_known_is_refused(change: dict[str, object], names: str) -> None:
    with pytest.raises(ModelError, match=names):
        from_hf({**LLAMA, **change})


def test_erf_gelu_is_refused() -> None:
    with pytest.raises(ModelError, match="activation_function"):
        from_hf(
            {
                "model_type": "gpt2",
                "n_embd": 8,
                "n_head": 2,
                "n_layer": 1,
                "vocab_size": 9,
                "n_ctx": 4,
                "activation_function": "gelu",
            }
        )


def test_gguf_header() -> None:
    meta = {
        "general.architecture": "llama",
        "llama.block_count": 30,
        "llama.embedding_length": 576,
        "llama.attention.head_count": 9,
        "llama.attention.head_count_kv": 3,
        "llama.feed_forward_length": 1536,
        "llama.context_length": 8192,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 1e5,
        "llama.vocab_size": 49152,
    }
    assert from_gguf(meta, tied=True) == SHAPES["smollm2-135m"]
    with pytest.raises(ModelError, match="architecture 'mamba'"):
        from_gguf({**meta, "general.architecture": "mamba"}, tied=True)
    with pytest.raises(ModelError, match=r"llama\.rope\.scaling\.type 'odd'"):
        from_gguf({**meta, "llama.rope.scaling.type": "odd"}, tied=True)
    with pytest.raises(ModelError, match=r"'llama\.block_count' is missing"):
        from_gguf({**meta, "llama.block_count": None}, tied=True)


# --- models that are counted, not run -------------------------------------------


@pytest.mark.parametrize("family", sorted({values["model_type"] for values, _ in MODELS.values()}))
def test_only_gpt2_llama_and_mixtral_run(family: str) -> None:
    config = from_hf(next(values for values, _ in MODELS.values() if values["model_type"] == family))
    if family in ("gpt2", "llama", "mixtral"):
        return check_runnable(config)
    with pytest.raises(ModelError, match=rf"^this model: can be counted, not run \(family {family}[^\n]*$"):
        build(config)


def test_a_folder_that_cannot_run_says_so_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "attention_bias": True}))
    assert config_of_file(tmp_path) == config_of_file(tmp_path / "config.json")
    with pytest.raises(ModelError, match=r"can be counted, not run \(qkv_bias, out_bias\)"):
        load_model(str(tmp_path))


def test_a_model_by_name_or_by_file(tmp_path: Path) -> None:
    assert config_of("gpt2") is config_of("random:gpt2") is SHAPES["gpt2"]
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen3-0.6B"][0]))
    assert config_of(str(tmp_path)).family == "qwen3"
    with pytest.raises(ModelError, match=r"unknown model 'gpt3'.* did you mean 'gpt2'"):
        config_of("gpt3")
    with pytest.raises(ModelError, match="no such file"):
        config_of(str(tmp_path / "none.gguf"))
    with pytest.raises(ModelError, match="damaged"):
        (tmp_path / "config.json").write_text("{")
        config_of(str(tmp_path))


def test_the_default_models_header_adds_up(loaded_smollm2: LoadedModel) -> None:
    config = config_of_file(fetch.SMOLLM2.path)
    assert config == loaded_smollm2.model.config
    assert replace(config, norm_eps=1e-5) == SHAPES["smollm2-135m"]  # a header keeps numbers in fp32


def test_parts_of_real_configs() -> None:
    config = {name: from_hf(values) for name, (values, _) in MODELS.items()}
    v3 = config["DeepSeek-V3"]
    assert v3.mla == MLA(512, 1536, 128, 64, 128) and (v3.d_head, v3.n_kv_heads) == (192, 128)
    assert v3.moe == MoE(256, 8, 2048, 2048, (0, 1, 2), selection_bias=True)
    assert config["Mistral-7B-v0.1"].window == SlidingWindow(4096)
    assert config["gemma-3-1b"].window == SlidingWindow(512, (5, 11, 17, 23))
    gemma, oss = config["gemma-2-2b"].window, config["gpt-oss-20b"].window
    assert gemma is not None and gemma.size == 4096 and gemma.full_layers == tuple(range(1, 26, 2))
    assert oss is not None and oss.size == 128 and oss.full_layers == tuple(range(1, 24, 2))
    assert config["Qwen2.5-7B"].window is None and config["Qwen2.5-7B"].qkv_bias and not config["Qwen2.5-7B"].out_bias


def header(arch: str, values: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes for a Hugging Face config."""
    keys = {
        "block_count": values["num_hidden_layers"],
        "embedding_length": values["hidden_size"],
        "feed_forward_length": values["intermediate_size"],
        "attention.head_count": values["num_attention_heads"],
        "attention.head_count_kv": values["num_key_value_heads"],
        "context_length": values["max_position_embeddings"],
        "attention.layer_norm_rms_epsilon": 1e-6,
        "vocab_size": values["vocab_size"],
        **{name.replace("__", "."): value for name, value in more.items()},
    }
    if "head_dim" in values:
        keys["attention.key_length"] = values["head_dim"]
    return {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in keys.items()}}


GGUF: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen2", "Qwen2.5-7B", {}),
    ("qwen3", "Qwen3-8B", {}),
    ("qwen3moe", "Qwen3-30B-A3B", {"expert_count": 128, "expert_used_count": 8, "expert_feed_forward_length": 768}),
    ("gemma2", "gemma-2-9b", {"attention__sliding_window": 4096}),
    ("gemma3", "gemma-3-1b", {"attention__sliding_window": 512}),
    (
        "gemma3",
        "gemma-3-1b",
        {
            "attention__sliding_window": 512,
            "attention__sliding_window_pattern": [i not in (5, 11, 17, 23) for i in range(26)],
        },
    ),
    ("phi3", "Phi-3-mini-4k", {"attention__sliding_window": 2047}),
    ("olmo2", "OLMo-2-7B", {}),
    ("llama", "Mixtral-8x7B", {"expert_count": 8, "expert_used_count": 2}),
    (
        "gpt-oss",
        "gpt-oss-20b",
        {
            "expert_count": 32,
            "expert_used_count": 4,
            "expert_feed_forward_length": 2880,
            "attention__sliding_window": 128,
        },
    ),
]
DEEPSEEK = {
    "attention__kv_lora_rank": 512,
    "rope__dimension_count": 64,
    "expert_shared_count": 2,
    "expert_count": 64,
    "expert_used_count": 6,
    "expert_feed_forward_length": 1408,
    "leading_dense_block_count": 1,
}
GGUF += [
    ("deepseek2", "DeepSeek-V2-Lite", {**DEEPSEEK, "attention__key_length": 192, "attention__value_length": 128}),
    (
        "deepseek2",
        "DeepSeek-V2-Lite",
        {
            **DEEPSEEK,
            "attention__head_count_kv": 1,
            "attention__key_length": 576,
            "attention__value_length": 512,
            "attention__key_length_mla": 192,
            "attention__value_length_mla": 128,
        },
    ),
    (
        "deepseek2",
        "DeepSeek-V3",
        {
            **DEEPSEEK,
            "attention__q_lora_rank": 1536,
            "attention__key_length": 192,
            "attention__value_length": 128,
            "expert_shared_count": 1,
            "expert_count": 256,
            "expert_used_count": 8,
            "expert_feed_forward_length": 2048,
            "leading_dense_block_count": 3,
            "expert_gating_func": 2,
        },
    ),
]


@pytest.mark.parametrize(("arch", "name", "more"), GGUF, ids=[f"{a}-{n}" for a, n, _ in GGUF])
def test_headers_describe_what_configs_describe(arch: str, name: str, more: dict[str, Any]) -> None:
    values, _ = MODELS[name]
    expected = from_hf(values)
    assert from_gguf(header(arch, values, **more), tied=expected.tied) == expected


def test_a_gguf_is_held_to_its_tensors(tmp_path: Path) -> None:
    """A qwen2 file adds up, biases and all; without them, which the header cannot tell, it is refused."""
    sizes = {"block_count": 1, "context_length": 8, "embedding_length": 8, "feed_forward_length": 16}
    plain = {"token_embd": (12, 8), "output_norm": (8,), "blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,)}
    plain |= {f"blk.0.attn_{n}": (rows, 8) for n, rows in {"q": 8, "k": 4, "v": 4, "output": 8}.items()}
    plain |= {"blk.0.ffn_gate": (16, 8), "blk.0.ffn_up": (16, 8), "blk.0.ffn_down": (8, 16)}
    biases = {f"blk.0.attn_{n}.bias": (rows,) for n, rows in {"q": 8, "k": 4, "v": 4}.items()}

    def write(path: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
        writer = GGUFWriter(path, "qwen2")
        for key, value in sizes.items():
            writer.add_uint32(f"qwen2.{key}", value)
        writer.add_head_count(2)
        writer.add_head_count_kv(1)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_vocab_size(12)
        for name, shape in shapes.items():
            writer.add_tensor(name, np.zeros(shape, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    weights = {f"{name}.weight": shape for name, shape in plain.items()}
    config = config_of_file(write(tmp_path / "whole.gguf", weights | biases))
    assert (config.family, config.qkv_bias, config.tied) == ("qwen2", True, True)
    with pytest.raises(ModelError, match="its tensors hold 696 parameters, its header describes 712"):
        config_of_file(write(tmp_path / "odd.gguf", weights))
    with pytest.raises(ModelError, match="can be counted, not run"):
        load_model(str(tmp_path / "whole.gguf"))


def test_wavelength_rule() -> None:
    config = ModelConfig(
        "llama", 1, 128, 1, 1, 128, 8, 8, 8192, rope_theta=5e5, rope_scaling=RopeScaling(8, 1, 4, 8192)
    )
    plain = ModelConfig("llama", 1, 128, 1, 1, 128, 8, 8, 8192, rope_theta=5e5)
    for f, p in zip(inverse_frequencies(config).tolist(), inverse_frequencies(plain).tolist(), strict=True):
        wavelength = 2 * math.pi / p
        if wavelength < 8192 / 4:
            assert f == p
        elif wavelength > 8192:
            assert f == pytest.approx(p / 8, rel=1e-6)
        else:
            assert p / 8 < f < p

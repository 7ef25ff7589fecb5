"""Config files as they are found: key spellings, defaults, refusals."""

from __future__ import annotations

import math

import pytest

from nanoinfer.errors import ModelError
from nanoinfer.models.config import SHAPES, ModelConfig, RopeScaling, from_gguf, from_hf
from nanoinfer.models.llama import inverse_frequencies

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
def test_unknown_rope_is_refused(rope: dict[str, object]) -> None:
    with pytest.raises(ModelError, match=r"rope type '(yarn|longrope)'"):
        from_hf({**LLAMA, **rope})


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
        ({"attention_bias": True}, "biases"),
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
    with pytest.raises(ModelError, match="qwen2"):
        from_gguf({**meta, "general.architecture": "qwen2"}, tied=True)


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

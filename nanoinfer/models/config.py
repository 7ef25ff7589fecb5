"""What a model's shape is: pure data, no torch.

Everything countable about a model (parameters, FLOPs, bytes of cache) follows
from this handful of integers, so :mod:`nanoinfer.theory` needs nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from nanoinfer.errors import ModelError

Family = Literal["gpt2", "llama"]


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's rotary scaling: stretch long wavelengths, leave short ones alone."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one decoder-only transformer.

    Symbols as in the book: ``L`` layers, ``d`` model width, ``n_q`` query heads,
    ``n_kv`` key/value heads, ``d_h`` head width, ``f`` feed-forward width, ``V``
    vocabulary, ``context`` the most tokens a sequence may hold.
    """

    family: Family
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_ff: int
    vocab_size: int
    context: int
    norm_eps: float = 1e-5
    tied: bool = True
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        for field in ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_head", "d_ff", "vocab_size", "context"):
            if (value := getattr(self, field)) < 1:
                raise ModelError(f"model config: {field} must be at least 1, got {value}")
        if self.n_heads % self.n_kv_heads:
            raise ModelError(
                f"model config: n_heads ({self.n_heads}) must be a multiple of n_kv_heads ({self.n_kv_heads})"
            )
        if self.family == "gpt2" and (self.n_heads * self.d_head != self.d_model or self.n_kv_heads != self.n_heads):
            raise ModelError("model config: gpt2 needs n_heads * d_head == d_model and one KV head per query head")


# --- shapes with a name -------------------------------------------------------


def _gpt2(n_layers: int, d_model: int, n_heads: int, vocab_size: int = 50_257, context: int = 1024) -> ModelConfig:
    return ModelConfig(
        family="gpt2",
        n_layers=n_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        d_head=d_model // n_heads,
        d_ff=4 * d_model,
        vocab_size=vocab_size,
        context=context,
    )


SMOLLM2_135M = ModelConfig(
    family="llama",
    n_layers=30,
    d_model=576,
    n_heads=9,
    n_kv_heads=3,
    d_head=64,
    d_ff=1536,
    vocab_size=49_152,
    context=8192,
    tied=True,
    rope_theta=100_000.0,
)

#: Shapes that ``random:NAME`` can build. The ``tiny`` ones are for tests and smoke runs.
SHAPES: Mapping[str, ModelConfig] = {
    "tiny-gpt2": _gpt2(2, 32, 4, vocab_size=256, context=128),
    "tiny-llama": replace(
        SMOLLM2_135M, n_layers=2, d_model=32, n_heads=4, n_kv_heads=2, d_head=8, d_ff=64, vocab_size=256, context=256
    ),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "smollm2-135m": SMOLLM2_135M,
    "llama-3.2-1b": ModelConfig(
        "llama", 16, 2048, 32, 8, 64, 8192, 128_256, 131_072, 1e-5, True, 500_000.0, RopeScaling(32.0, 1.0, 4.0, 8192)
    ),
    "llama-3.1-8b": ModelConfig(
        "llama",
        32,
        4096,
        32,
        8,
        128,
        14_336,
        128_256,
        131_072,
        1e-5,
        False,
        500_000.0,
        RopeScaling(8.0, 1.0, 4.0, 8192),
    ),
}


# --- reading other people's files ---------------------------------------------


def _need(data: Mapping[str, Any], key: str, where: str) -> Any:
    if data.get(key) is None:
        raise ModelError(f"{where}: '{key}' is missing; is this a model's config.json?")
    return data[key]


def _rope_from_hf(data: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Find theta and scaling under any of the three spellings in use.

    Older files hold ``rope_theta`` at the top and ``rope_scaling`` with ``type`` or
    ``rope_type``; transformers 5 writes one ``rope_parameters`` that holds both.
    """
    rope: Mapping[str, Any] = data.get("rope_parameters") or data.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or data.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelError(f"{where}: rope type '{kind}' is not supported (known: default, llama3)")
    scaling = RopeScaling(
        factor=float(_need(rope, "factor", where)),
        low_freq_factor=float(_need(rope, "low_freq_factor", where)),
        high_freq_factor=float(_need(rope, "high_freq_factor", where)),
        original_context=int(_need(rope, "original_max_position_embeddings", where)),
    )
    return theta, scaling


def from_hf(data: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Read a Hugging Face ``config.json`` that was parsed to a dict.

    Raises :class:`ModelError` for a family, activation or rope type we do not
    implement: a wrong formula that runs is worse than a refusal.
    """
    kind = _need(data, "model_type", where)
    if kind == "gpt2":
        act = data.get("activation_function", "gelu_new")
        if act not in ("gelu_new", "gelu_pytorch_tanh"):
            raise ModelError(
                f"{where}: activation_function '{act}' is not supported (GPT-2 uses tanh-GELU, 'gelu_new')"
            )
        d_model, n_heads = int(_need(data, "n_embd", where)), int(_need(data, "n_head", where))
        return ModelConfig(
            family="gpt2",
            n_layers=int(_need(data, "n_layer", where)),
            d_model=d_model,
            n_heads=n_heads,
            n_kv_heads=n_heads,
            d_head=d_model // n_heads,
            d_ff=int(data.get("n_inner") or 4 * d_model),
            vocab_size=int(_need(data, "vocab_size", where)),
            context=int(data.get("n_positions") or _need(data, "n_ctx", where)),
            norm_eps=float(data.get("layer_norm_epsilon", 1e-5)),
            tied=bool(data.get("tie_word_embeddings", True)),
        )
    if kind == "llama":
        act = data.get("hidden_act", "silu")
        if act != "silu":
            raise ModelError(f"{where}: hidden_act '{act}' is not supported (Llama uses 'silu')")
        if data.get("attention_bias") or data.get("mlp_bias"):
            raise ModelError(f"{where}: biases in attention or MLP are not supported for the llama family")
        theta, scaling = _rope_from_hf(data, where)
        d_model, n_heads = int(_need(data, "hidden_size", where)), int(_need(data, "num_attention_heads", where))
        return ModelConfig(
            family="llama",
            n_layers=int(_need(data, "num_hidden_layers", where)),
            d_model=d_model,
            n_heads=n_heads,
            n_kv_heads=int(data.get("num_key_value_heads") or n_heads),
            d_head=int(data.get("head_dim") or d_model // n_heads),
            d_ff=int(_need(data, "intermediate_size", where)),
            vocab_size=int(_need(data, "vocab_size", where)),
            context=int(data.get("max_position_embeddings", 2048)),
            norm_eps=float(data.get("rms_norm_eps", 1e-6)),
            tied=bool(data.get("tie_word_embeddings", False)),
            rope_theta=theta,
            rope_scaling=scaling,
        )
    raise ModelError(f"{where}: model_type '{kind}' is not supported (known: gpt2, llama)")


def from_gguf(meta: Mapping[str, Any], tied: bool, where: str = "GGUF header") -> ModelConfig:
    """Read a GGUF header (key to value). ``tied`` is whether ``output.weight`` is absent.

    Rotary scaling of Llama 3 is not in the header but in the tensor
    ``rope_freqs.weight``; :mod:`nanoinfer.models.gguf_file` hands it to the model.
    """
    arch = _need(meta, "general.architecture", where)
    if arch != "llama":
        raise ModelError(f"{where}: architecture '{arch}' is not supported in GGUF files (known: llama)")
    if (kind := meta.get("llama.rope.scaling.type", "none")) not in ("none", "", None):
        raise ModelError(f"{where}: rope scaling '{kind}' is not supported")
    d_model, n_heads = (
        int(_need(meta, "llama.embedding_length", where)),
        int(_need(meta, "llama.attention.head_count", where)),
    )
    vocab = meta.get("llama.vocab_size") or len(meta.get("tokenizer.ggml.tokens", ()))
    return ModelConfig(
        family="llama",
        n_layers=int(_need(meta, "llama.block_count", where)),
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=int(meta.get("llama.attention.head_count_kv", n_heads)),
        d_head=int(meta.get("llama.attention.key_length", d_model // n_heads)),
        d_ff=int(_need(meta, "llama.feed_forward_length", where)),
        vocab_size=int(vocab),
        context=int(_need(meta, "llama.context_length", where)),
        norm_eps=float(_need(meta, "llama.attention.layer_norm_rms_epsilon", where)),
        tied=tied,
        rope_theta=float(meta.get("llama.rope.freq_base", 10_000.0)),
    )

"""A model's shape from a GGUF header, by the keys that llama.cpp's converter writes.

A header does not tell everything (a bias is only seen among the tensors); who counts a file
checks the count against its tensors: :func:`nanoinfer.models.lookup.config_of_file`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoinfer.configs.config import MLA, ModelConfig, MoE, SlidingWindow, every
from nanoinfer.configs.huggingface import ROPE_OTHER, ConfigReader, Read, read_fields, whole
from nanoinfer.errors import ModelError


def _window_but_every(period: int | None) -> Read:
    """What reads a window that holds in all layers but every ``period``-th, or as a pattern in the header says."""

    def read(file: ConfigReader) -> SlidingWindow | None:
        size, layers = file.whole("attention.sliding_window", 0), file.layers("block_count")
        if size < 1:
            return None
        pattern = file.get("attention.sliding_window_pattern")
        if isinstance(pattern, list):  # one flag per layer: true where the window holds
            return SlidingWindow(size, tuple(i for i, windowed in enumerate(pattern[:layers]) if not windowed))
        n = period if pattern is None else file.whole("attention.sliding_window_pattern")
        return SlidingWindow(size, () if n is None else every(n, layers))

    return read


def _experts(d_expert: str, **more: Any) -> Read:
    """What reads a mixture of experts whose width stands under this key."""
    return lambda file: MoE(file.whole("expert_count"), file.whole("expert_used_count"), file.whole(d_expert), **more)


def _is_mixtral(file: ConfigReader) -> bool:
    return bool(file.whole("expert_count", 0))


def _mla(file: ConfigReader) -> MLA:
    # Newer files describe the cache (one latent head) and keep the widths of a head under ..._mla.
    d_rope, suffix = file.whole("rope.dimension_count"), "_mla" if file.get("attention.key_length_mla") else ""
    return MLA(
        file.whole("attention.kv_lora_rank"),
        file.whole("attention.q_lora_rank", 0) or None,
        file.whole(f"attention.key_length{suffix}") - d_rope,
        d_rope,
        file.whole(f"attention.value_length{suffix}"),
    )


def _is_deepseek_v3(file: ConfigReader) -> bool:
    """V3 chooses experts by a sigmoid, with a bias; V2 by a softmax, without."""
    return file.whole("expert_gating_func", 1) == 2


def _deepseek_moe(file: ConfigReader) -> MoE:
    return MoE(
        file.whole("expert_count"),
        file.whole("expert_used_count"),
        file.whole("expert_feed_forward_length"),
        d_shared=file.whole("expert_feed_forward_length") * file.whole("expert_shared_count", 0),
        dense_layers=tuple(range(min(file.whole("leading_dense_block_count", 0), file.layers("block_count")))),
        selection_bias=_is_deepseek_v3(file),
    )


#: Fields of a :class:`ModelConfig`: a fixed value, or what reads it. Each architecture adds to or replaces llama's.
_LLAMA: Mapping[str, Any] = {
    "n_layers": lambda file: file.layers("block_count"),
    "d_model": whole("embedding_length"),
    "n_heads": whole("attention.head_count"),
    "n_kv_heads": lambda file: file.whole("attention.head_count_kv", file.whole("attention.head_count")),
    "d_head": lambda file: file.whole(
        "attention.key_length", file.whole("embedding_length") // max(file.whole("attention.head_count"), 1)
    ),
    "d_ff": whole("feed_forward_length"),
    "context": whole("context_length"),
    "norm_eps": lambda file: file.number("attention.layer_norm_rms_epsilon"),
    "rope_theta": lambda file: file.number("rope.freq_base", 10_000.0),
    "rope_other": lambda file: file.get("rope.scaling.type") if file.get("rope.scaling.type") in ROPE_OTHER else None,
}
_ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "family": lambda file: "mixtral" if _is_mixtral(file) else "llama",
        "moe": lambda file: _experts("feed_forward_length")(file) if _is_mixtral(file) else None,
    },
    "qwen2": {"family": "qwen2", "qkv_bias": True},
    "qwen3": {"family": "qwen3", "qk_norm": "head"},
    "qwen3moe": {"family": "qwen3_moe", "qk_norm": "head", "moe": _experts("expert_feed_forward_length")},
    "gemma2": {"family": "gemma2", "norms_per_layer": 4, "window": _window_but_every(2)},
    "gemma3": {"family": "gemma3_text", "qk_norm": "head", "norms_per_layer": 4, "window": _window_but_every(6)},
    "phi3": {"family": "phi3", "window": _window_but_every(None)},
    "olmo2": {"family": "olmo2", "qk_norm": "width"},
    "deepseek2": {
        "family": lambda file: "deepseek_v3" if _is_deepseek_v3(file) else "deepseek_v2",
        "n_kv_heads": whole("attention.head_count"),
        "d_head": lambda file: _mla(file).d_qk,
        "mla": _mla,
        "moe": _deepseek_moe,
    },
    "gpt-oss": {
        "family": "gpt_oss",
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias", "sinks"), True),
        "moe": _experts("expert_feed_forward_length", router_bias=True),
        "window": _window_but_every(2),
    },
}


def from_gguf(meta: Mapping[str, Any], tied: bool, where: str = "GGUF header") -> ModelConfig:
    """Read a GGUF header (key to value). ``tied`` is whether ``output.weight`` is absent.

    Rotary scaling of Llama 3 is not in the header but in the tensor
    ``rope_freqs.weight``; :mod:`nanoinfer.models.gguf_file` hands it to the model.
    """
    arch = str(ConfigReader(meta, where).need("general.architecture"))
    if arch not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelError(f"{where}: architecture '{arch}' is not supported in GGUF files (known: {known})")
    file = ConfigReader(meta, where, f"{arch}.")
    file.must("rope.scaling.type", "none", "", *ROPE_OTHER)
    vocab_size = file.whole("vocab_size", len(meta.get("tokenizer.ggml.tokens") or ()))
    return ModelConfig(tied=tied, vocab_size=vocab_size, **read_fields(file, {**_LLAMA, **_ARCHITECTURES[arch]}))

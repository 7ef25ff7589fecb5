"""What a GGUF header says about a model's shape, family by family, in the keys that llama.cpp's converter writes.

A header does not tell everything (a bias is only seen among the tensors); who counts a file
checks the count against its tensors: :func:`nanoinfer.models.lookup.config_of_file`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanoinfer.configs.config import MLA, ModelConfig, MoE, SlidingWindow, every
from nanoinfer.configs.huggingface import ROPE_OTHER, File
from nanoinfer.errors import ModelError


def _window(file: File, period: int | None) -> SlidingWindow | None:
    """``period``: every n-th layer is full unless the header has a pattern of its own; None: no layer is."""
    size, layers = file.whole("attention.sliding_window", 0), file.layers("block_count")
    if size < 1:
        return None
    pattern = file.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):  # one flag per layer: true where the window holds
        return SlidingWindow(size, tuple(i for i, windowed in enumerate(pattern[:layers]) if not windowed))
    period = period if pattern is None else file.whole("attention.sliding_window_pattern")
    return SlidingWindow(size, () if period is None else every(period, layers))


def _moe(file: File, d_expert: str) -> MoE:
    return MoE(file.whole("expert_count"), file.whole("expert_used_count"), file.whole(d_expert))


def _llama(file: File) -> dict[str, Any]:
    if not file.whole("expert_count", 0):
        return {}
    return {"family": "mixtral", "moe": _moe(file, "feed_forward_length")}


def _gpt_oss(file: File) -> dict[str, Any]:
    moe = replace(_moe(file, "expert_feed_forward_length"), router_bias=True)
    biases = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias", "sinks"), True)
    return {**biases, "family": "gpt_oss", "moe": moe, "window": _window(file, 2)}


def _deepseek(file: File) -> dict[str, Any]:
    # Newer files describe the cache (one latent head) and keep the widths of a head under ..._mla.
    d_rope, suffix = file.whole("rope.dimension_count"), "_mla" if file.get("attention.key_length_mla") else ""
    mla = MLA(
        file.whole("attention.kv_lora_rank"),
        file.whole("attention.q_lora_rank", 0) or None,
        file.whole(f"attention.key_length{suffix}") - d_rope,
        d_rope,
        file.whole(f"attention.value_length{suffix}"),
    )
    sigmoid = file.whole("expert_gating_func", 1) == 2  # DeepSeek-V3; V2 chooses by softmax, without a bias
    moe = _moe(file, "expert_feed_forward_length")
    moe = replace(
        moe,
        d_shared=moe.d_expert * file.whole("expert_shared_count", 0),
        dense_layers=tuple(range(min(file.whole("leading_dense_block_count", 0), file.layers("block_count")))),
        selection_bias=sigmoid,
    )
    family = "deepseek_v3" if sigmoid else "deepseek_v2"
    heads = file.whole("attention.head_count")
    return {"family": family, "mla": mla, "moe": moe, "d_head": mla.d_qk, "n_kv_heads": heads}


_ARCHITECTURES: Mapping[str, Callable[[File], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": lambda file: {"family": "qwen2", "qkv_bias": True},
    "qwen3": lambda file: {"family": "qwen3", "qk_norm": "head"},
    "qwen3moe": lambda file: {
        "family": "qwen3_moe",
        "qk_norm": "head",
        "moe": _moe(file, "expert_feed_forward_length"),
    },
    "gemma2": lambda file: {"family": "gemma2", "norms_per_layer": 4, "window": _window(file, 2)},
    "gemma3": lambda file: {
        "family": "gemma3_text",
        "qk_norm": "head",
        "norms_per_layer": 4,
        "window": _window(file, 6),
    },
    "phi3": lambda file: {"family": "phi3", "window": _window(file, None)},
    "olmo2": lambda file: {"family": "olmo2", "qk_norm": "width"},
    "deepseek2": _deepseek,
    "gpt-oss": _gpt_oss,
}


def from_gguf(meta: Mapping[str, Any], tied: bool, where: str = "GGUF header") -> ModelConfig:
    """Read a GGUF header (key to value). ``tied`` is whether ``output.weight`` is absent.

    Rotary scaling of Llama 3 is not in the header but in the tensor
    ``rope_freqs.weight``; :mod:`nanoinfer.models.gguf_file` hands it to the model.
    """
    arch = str(File(meta, where).need("general.architecture"))
    if arch not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelError(f"{where}: architecture '{arch}' is not supported in GGUF files (known: {known})")
    file = File(meta, where, f"{arch}.")
    file.must("rope.scaling.type", "none", "", *ROPE_OTHER)
    d_model, n_heads = file.whole("embedding_length"), file.whole("attention.head_count")
    plain: dict[str, Any] = {
        "family": "llama",
        "n_layers": file.layers("block_count"),
        "d_model": d_model,
        "n_heads": n_heads,
        "n_kv_heads": file.whole("attention.head_count_kv", n_heads),
        "d_head": file.whole("attention.key_length", d_model // max(n_heads, 1)),
        "d_ff": file.whole("feed_forward_length"),
        "vocab_size": file.whole("vocab_size", len(meta.get("tokenizer.ggml.tokens") or ())),
        "context": file.whole("context_length"),
        "norm_eps": file.number("attention.layer_norm_rms_epsilon"),
        "tied": tied,
        "rope_theta": file.number("rope.freq_base", 10_000.0),
        "rope_other": file.get("rope.scaling.type") if file.get("rope.scaling.type") in ROPE_OTHER else None,
    }
    return ModelConfig(**{**plain, **_ARCHITECTURES[arch](file)})

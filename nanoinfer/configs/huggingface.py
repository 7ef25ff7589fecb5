"""Other people's descriptions of a model, without any weight: Hugging Face's config.json, and the door to GGUF headers.

Each family is read by what its published files are known to mean. Whatever is not known - a family,
an activation, a rotary scaling, a kind of layer - is refused: a wrong count that prints is worse than none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoinfer.configs.config import MLA, Family, ModelConfig, MoE, RopeScaling, SlidingWindow, every
from nanoinfer.errors import ModelError

#: Rotary scalings that change angles but no shape: a model that has one can be counted, not run.
ROPE_OTHER = ("linear", "dynamic", "yarn", "longrope", "su")
MOST_LAYERS = 10_000


@dataclass(frozen=True)
class File:
    """Keys and values of a config or header, and where they came from; each getter says what is wrong in one line."""

    data: Mapping[str, Any]
    where: str
    prefix: str = ""

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or ``default`` where it is absent or null."""
        value = self.data.get(self.prefix + key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        """The value. Raises :class:`ModelError` where there is none; so do the others for a wrong one."""
        if (value := self.get(key)) is None:
            what = "a whole GGUF file" if self.prefix else "a model's config.json"
            raise ModelError(f"{self.where}: '{self.prefix + key}' is missing; is this {what}?")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number; needed where no default is given."""
        value = self.need(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not float(value).is_integer():
            raise self.wrong(key, value, "a whole number")
        return int(value)

    def layers(self, key: str) -> int:
        """The number of layers, refused where damage makes it one that lists of layers could not hold."""
        if (value := self.whole(key)) > MOST_LAYERS:
            raise self.wrong(key, value, f"at most {MOST_LAYERS:,}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number; needed where no default is given."""
        value = self.need(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, value, "a number")
        return float(value)

    def must(self, key: str, *allowed: Any) -> None:
        """Refuse a value that changes the model in a way we do not know. The first one is the default."""
        if (value := self.get(key, allowed[0])) not in allowed:
            raise self.wrong(key, value, " or ".join(str(v) for v in allowed))

    def wrong(self, key: str, value: Any, known: str) -> ModelError:
        """The error that names the key, its value and what is known instead."""
        return ModelError(f"{self.where}: {self.prefix}{key} {value!r} is not supported (known: {known})")


# --- Hugging Face -------------------------------------------------------------


def _rope(file: File) -> dict[str, Any]:
    """Find theta and scaling under any of the spellings in use.

    Older files hold ``rope_theta`` at the top and ``rope_scaling`` with ``type`` or ``rope_type``;
    transformers 5 writes one ``rope_parameters`` that holds both, per kind of layer where they differ.
    """
    rope = file.get("rope_parameters") or file.get("rope_scaling") or {}
    if isinstance(rope, Mapping) and isinstance(rope.get("full_attention"), Mapping):
        rope = rope["full_attention"]
    if not isinstance(rope, Mapping):
        raise file.wrong("rope_scaling", rope, "an object with a rope_type")
    inner = File(rope, f"{file.where}: rope")
    theta = inner.number("rope_theta", file.number("rope_theta", 10_000.0))
    kind = inner.get("rope_type") or inner.get("type") or "default"
    if kind in ROPE_OTHER:
        return {"rope_theta": theta, "rope_other": kind}
    if kind == "default":
        return {"rope_theta": theta}
    if kind != "llama3":
        known = ", ".join(("default", "llama3", *ROPE_OTHER))
        raise ModelError(f"{file.where}: rope type '{kind}' is not supported (known: {known})")
    scaling = RopeScaling(
        factor=inner.number("factor"),
        low_freq_factor=inner.number("low_freq_factor"),
        high_freq_factor=inner.number("high_freq_factor"),
        original_context=inner.whole("original_max_position_embeddings"),
    )
    return {"rope_theta": theta, "rope_scaling": scaling}


def _window(file: File, full: tuple[int, ...] = ()) -> SlidingWindow | None:
    """The window of a file that has one; ``layer_types``, where given, say which layers do without."""
    size, types = file.get("sliding_window"), file.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != file.layers("num_hidden_layers"):
            raise file.wrong("layer_types", types, "one name per layer")
        if other := set(types) - {"full_attention", "sliding_attention"}:
            raise file.wrong("layer_types", sorted(other)[0], "full_attention or sliding_attention")
        full = tuple(i for i, kind in enumerate(types) if kind == "full_attention")
    if size is None or len(full) == file.layers("num_hidden_layers"):
        return None
    return SlidingWindow(file.whole("sliding_window"), full)


def _llama(file: File) -> dict[str, Any]:
    bias = bool(file.get("attention_bias"))
    return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bool(file.get("mlp_bias"))}


def _mistral(file: File) -> dict[str, Any]:
    return {"window": _window(file)}


def _mixtral(file: File) -> dict[str, Any]:
    moe = MoE(file.whole("num_local_experts"), file.whole("num_experts_per_tok"), file.whole("intermediate_size"))
    return {"moe": moe, "window": _window(file)}


def _qwen_window(file: File) -> SlidingWindow | None:
    """Qwen names a window that it does not use unless told; then the first layers are full."""
    if not file.get("use_sliding_window"):
        return None
    layers = file.layers("num_hidden_layers")
    return _window(file, tuple(range(min(file.whole("max_window_layers", layers), layers))))


def _qwen2(file: File) -> dict[str, Any]:
    return {"qkv_bias": True, "window": _qwen_window(file)}


def _qwen3(file: File) -> dict[str, Any]:
    bias = bool(file.get("attention_bias"))
    return {"qkv_bias": bias, "out_bias": bias, "qk_norm": "head", "window": _qwen_window(file)}


def _qwen3_moe(file: File) -> dict[str, Any]:
    file.must("use_sliding_window", False)
    layers, step = file.layers("num_hidden_layers"), file.whole("decoder_sparse_step", 1)
    dense = set(file.get("mlp_only_layers", ())) | (set(range(layers)) - set(every(step, layers)))
    experts = "num_experts" if file.get("num_experts") is not None else "num_local_experts"
    moe = MoE(
        file.whole(experts),
        file.whole("num_experts_per_tok"),
        file.whole("moe_intermediate_size"),
        dense_layers=tuple(sorted(dense)),
    )
    return {**_qwen3(file), "moe": moe, "window": None}


def _gemma2(file: File) -> dict[str, Any]:
    file.must("use_bidirectional_attention", False)
    bias, layers = bool(file.get("attention_bias")), file.layers("num_hidden_layers")
    window = _window(file, every(2, layers))
    return {"qkv_bias": bias, "out_bias": bias, "norms_per_layer": 4, "window": window}


def _gemma3(file: File) -> dict[str, Any]:
    period = file.whole("sliding_window_pattern", file.whole("_sliding_window_pattern", 6))
    window = _window(file, every(period, file.layers("num_hidden_layers")))
    return {**_gemma2(file), "qk_norm": "head", "window": window}


def _olmo2(file: File) -> dict[str, Any]:
    bias = bool(file.get("attention_bias"))
    return {"qkv_bias": bias, "out_bias": bias, "qk_norm": "width"}


def _deepseek(file: File) -> dict[str, Any]:
    for key in ("attention_bias", "mlp_bias"):
        file.must(key, False)
    file.must("moe_layer_freq", 1)
    mla = MLA(
        file.whole("kv_lora_rank"),
        None if file.get("q_lora_rank") is None else file.whole("q_lora_rank"),
        file.whole("qk_nope_head_dim"),
        file.whole("qk_rope_head_dim"),
        file.whole("v_head_dim"),
    )
    d_expert = file.whole("moe_intermediate_size")
    moe = MoE(
        file.whole("n_routed_experts"),
        file.whole("num_experts_per_tok"),
        d_expert,
        d_shared=d_expert * file.whole("n_shared_experts", 0),
        dense_layers=tuple(range(min(file.whole("first_k_dense_replace", 0), file.layers("num_hidden_layers")))),
        selection_bias=file.need("model_type") == "deepseek_v3",
    )
    return {"mla": mla, "moe": moe, "d_head": mla.d_qk, "n_kv_heads": file.whole("num_attention_heads")}


def _gpt_oss(file: File) -> dict[str, Any]:
    experts, d_expert = file.whole("num_local_experts"), file.whole("intermediate_size")
    chosen = "num_experts_per_tok" if file.get("num_experts_per_tok") is not None else "experts_per_token"
    bias, layers = bool(file.get("attention_bias", True)), file.layers("num_hidden_layers")
    return {
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": True,
        "sinks": True,
        "moe": MoE(experts, file.whole(chosen), d_expert, router_bias=True),
        "window": _window(file, every(2, layers)),
    }


#: What each family adds to the plain llama shape.
_FAMILIES: Mapping[Family, Callable[[File], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _mistral,
    "olmo2": _olmo2,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
}
#: Families whose own default, where the file is silent, is not "as many KV heads as heads" or "d / heads".
_OWN_KV_HEADS = ("mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss")
_OWN_HEAD_WIDTH = ("qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss")


def from_hf(data: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Read a Hugging Face ``config.json`` that was parsed to a dict.

    A model that only predicts further tokens for speed (DeepSeek's MTP layers) is counted without them.
    Raises :class:`ModelError` for a family, activation, rope type or kind of layer we do not know.
    """
    file = File(data, where)
    family: Any = str(file.need("model_type"))  # damage makes it a list, which no table can look up
    if family == "gpt2":
        return _gpt2(file)
    if family not in _FAMILIES:
        hint = "; give its text_config" if isinstance(data.get("text_config"), Mapping) else ""
        known = ", ".join(("gpt2", *_FAMILIES))
        raise ModelError(f"{where}: model_type '{family}' is not supported (known: {known}){hint}")
    gemma = family in ("gemma2", "gemma3_text")
    if gemma:
        act = file.get("hidden_activation") or file.get("hidden_act", "gelu_pytorch_tanh")
        allowed = ("gelu_pytorch_tanh",)
    else:
        act, allowed = file.get("hidden_act", "silu"), ("silu",)
    if act not in allowed:
        raise file.wrong("hidden_act", act, allowed[0])
    d_model, n_heads = file.whole("hidden_size"), file.whole("num_attention_heads")
    kv_default = None if family in _OWN_KV_HEADS else n_heads
    head_default = None if family in _OWN_HEAD_WIDTH else d_model // max(n_heads, 1)
    plain: dict[str, Any] = {
        "family": family,
        "n_layers": file.layers("num_hidden_layers"),
        "d_model": d_model,
        "n_heads": n_heads,
        "n_kv_heads": file.whole("num_key_value_heads", kv_default),
        "d_head": 1 if family.startswith("deepseek") else file.whole("head_dim", head_default),
        "d_ff": file.whole("intermediate_size"),
        "vocab_size": file.whole("vocab_size"),
        "context": file.whole("max_position_embeddings", 2048),
        "norm_eps": file.number("rms_norm_eps", 1e-6),
        "tied": bool(file.get("tie_word_embeddings", gemma)),
    }
    return ModelConfig(**{**plain, **_rope(file), **_FAMILIES[family](file)})


def _gpt2(file: File) -> ModelConfig:
    act = file.get("activation_function", "gelu_new")
    if act not in ("gelu_new", "gelu_pytorch_tanh"):
        raise ModelError(
            f"{file.where}: activation_function '{act}' is not supported (GPT-2 uses tanh-GELU, 'gelu_new')"
        )
    file.must("add_cross_attention", False)
    file.must("scale_attn_weights", True)
    file.must("scale_attn_by_inverse_layer_idx", False)
    d_model, n_heads = file.whole("n_embd"), file.whole("n_head")
    return ModelConfig(
        family="gpt2",
        n_layers=file.whole("n_layer"),
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        d_head=d_model // max(n_heads, 1),
        d_ff=file.whole("n_inner", 4 * d_model),
        vocab_size=file.whole("vocab_size"),
        context=file.whole("n_positions" if file.get("n_positions") is not None else "n_ctx"),
        norm_eps=file.number("layer_norm_epsilon", 1e-5),
        tied=bool(file.get("tie_word_embeddings", True)),
    )


# --- one door -----------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """A config.json as a dict. Raises :class:`ModelError` naming the file."""
    if not path.is_file():
        raise ModelError(f"{path}: missing; a model folder holds config.json beside its safetensors")
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: damaged ({error}); fetch or copy the file again") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: not a model's config.json; fetch or copy the file again")
    return data

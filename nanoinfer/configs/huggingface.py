"""A model's shape from Hugging Face's config.json.

Each family is read by what its published files are known to mean. Whatever is not known (a family, an activation, a
rotary scaling, a kind of layer) is refused: a wrong count that prints is worse than none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nanoinfer.configs.config import MLA, Family, ModelConfig, MoE, RopeScaling, SlidingWindow, every
from nanoinfer.errors import ModelError

#: Rotary scalings that change angles but no shape: a model that has one can be counted, not run.
ROPE_OTHER = ("linear", "dynamic", "yarn", "longrope", "su")
MOST_LAYERS = 10_000


@dataclass(frozen=True)
class ConfigReader:
    """Keys and values of a config or header, and where they came from; each method raises a one-line ModelError."""

    data: Mapping[str, Any]
    where: str
    prefix: str = ""

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or ``default`` where it is absent or null. ``a|b`` is a key with two spellings."""
        values = (self.data.get(self.prefix + spelling) for spelling in key.split("|"))
        return next((value for value in values if value is not None), default)

    def need(self, key: str) -> Any:
        """The value, which must be there."""
        if (value := self.get(key)) is None:
            what = "a whole GGUF file" if self.prefix else "a model's config.json"
            raise ModelError(f"{self.where}: '{self._spelt(key)}' is missing; is this {what}?")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number, which must be there if no default is given."""
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
        """A number, which must be there if no default is given."""
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
        return ModelError(f"{self.where}: {self._spelt(key)} {value!r} is not supported (known: {known})")

    def _spelt(self, key: str) -> str:
        return self.prefix + key.replace("|", " or ")


Read = Callable[[ConfigReader], Any]


def whole(key: str, default: int | None = None) -> Read:
    """What reads a whole number."""
    return lambda file: file.whole(key, default)


def flag(key: str, default: bool = False) -> Read:
    """What reads a key that is true or false."""
    return lambda file: bool(file.get(key, default))


def read_fields(file: ConfigReader, table: Mapping[str, Any]) -> dict[str, Any]:
    """A family's table of :class:`ModelConfig` fields applied to a file: what is callable reads, the rest is fixed."""
    return {name: value(file) if callable(value) else value for name, value in table.items()}


# --- parts that families share --------------------------------------------------


def _rope(file: ConfigReader) -> dict[str, Any]:
    """Theta and scaling under any of the spellings in use.

    Older files hold ``rope_theta`` at the top and ``rope_scaling`` with ``type`` or ``rope_type``;
    transformers 5 writes one ``rope_parameters`` that holds both, per kind of layer where they differ.
    """
    rope = file.get("rope_parameters") or file.get("rope_scaling") or {}
    if isinstance(rope, Mapping) and isinstance(rope.get("full_attention"), Mapping):
        rope = rope["full_attention"]
    if not isinstance(rope, Mapping):
        raise file.wrong("rope_scaling", rope, "an object with a rope_type")
    inner = ConfigReader(rope, f"{file.where}: rope")
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


def _window(file: ConfigReader, full: tuple[int, ...] = ()) -> SlidingWindow | None:
    """The window of a file that has one; ``layer_types``, if present, say which layers do without."""
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


def _qwen_window(file: ConfigReader) -> SlidingWindow | None:
    """Qwen names a window that it uses only if ``use_sliding_window`` is true; then the first layers are full."""
    if not file.get("use_sliding_window"):
        return None
    layers = file.layers("num_hidden_layers")
    return _window(file, tuple(range(min(file.whole("max_window_layers", layers), layers))))


def _window_but_every(period: int, key: str = "") -> Read:
    """What reads a window that holds in all layers but every ``period``-th, or as the file's ``key`` says."""

    def read(file: ConfigReader) -> SlidingWindow | None:
        n = file.whole(key, period) if key else period
        return _window(file, every(n, file.layers("num_hidden_layers")))

    return read


def _experts(n_experts: str, d_expert: str, top_k: str = "num_experts_per_tok", **more: Any) -> Read:
    """What reads a mixture of experts from these keys."""
    return lambda file: MoE(file.whole(n_experts), file.whole(top_k), file.whole(d_expert), **more)


def _qwen3_moe(file: ConfigReader) -> MoE:
    layers, step = file.layers("num_hidden_layers"), file.whole("decoder_sparse_step", 1)
    dense = set(file.get("mlp_only_layers", ())) | (set(range(layers)) - set(every(step, layers)))
    experts, top_k = file.whole("num_experts|num_local_experts"), file.whole("num_experts_per_tok")
    return MoE(experts, top_k, file.whole("moe_intermediate_size"), dense_layers=tuple(sorted(dense)))


def _deepseek_moe(file: ConfigReader) -> MoE:
    return MoE(
        file.whole("n_routed_experts"),
        file.whole("num_experts_per_tok"),
        file.whole("moe_intermediate_size"),
        d_shared=file.whole("moe_intermediate_size") * file.whole("n_shared_experts", 0),
        dense_layers=tuple(range(min(file.whole("first_k_dense_replace", 0), file.layers("num_hidden_layers")))),
        selection_bias=file.need("model_type") == "deepseek_v3",
    )


def _mla(file: ConfigReader) -> MLA:
    return MLA(
        file.whole("kv_lora_rank"),
        None if file.get("q_lora_rank") is None else file.whole("q_lora_rank"),
        file.whole("qk_nope_head_dim"),
        file.whole("qk_rope_head_dim"),
        file.whole("v_head_dim"),
    )


# --- families -------------------------------------------------------------------

#: Fields of a :class:`ModelConfig`: a fixed value, or what reads it. Each family adds to or replaces llama's.
_LLAMA: Mapping[str, Any] = {
    "n_layers": lambda file: file.layers("num_hidden_layers"),
    "d_model": whole("hidden_size"),
    "n_heads": whole("num_attention_heads"),
    "n_kv_heads": lambda file: file.whole("num_key_value_heads", file.whole("num_attention_heads")),
    "d_head": lambda file: file.whole(
        "head_dim", file.whole("hidden_size") // max(file.whole("num_attention_heads"), 1)
    ),
    "d_ff": whole("intermediate_size"),
    "vocab_size": whole("vocab_size"),
    "context": whole("max_position_embeddings", 2048),
    "norm_eps": lambda file: file.number("rms_norm_eps", 1e-6),
    "tied": flag("tie_word_embeddings"),
}
_BIAS: Mapping[str, Any] = {"qkv_bias": flag("attention_bias"), "out_bias": flag("attention_bias")}
#: For families whose default, where the file is silent, is neither "as many KV heads as heads" nor "d / heads".
_KV_HEADS: Mapping[str, Any] = {"n_kv_heads": whole("num_key_value_heads")}
_HEADS: Mapping[str, Any] = {**_KV_HEADS, "d_head": whole("head_dim")}
_QWEN3: Mapping[str, Any] = {**_HEADS, **_BIAS, "qk_norm": "head", "window": _qwen_window}
_GEMMA: Mapping[str, Any] = {
    **_HEADS,
    **_BIAS,
    "tied": flag("tie_word_embeddings", True),
    "norms_per_layer": 4,
    "window": _window_but_every(2),
}
_DEEPSEEK: Mapping[str, Any] = {
    "n_kv_heads": whole("num_attention_heads"),
    "d_head": lambda file: _mla(file).d_qk,
    "mla": _mla,
    "moe": _deepseek_moe,
}
_FAMILIES: Mapping[Family, Mapping[str, Any]] = {
    "gpt2": {
        "n_layers": whole("n_layer"),
        "d_model": whole("n_embd"),
        "n_heads": whole("n_head"),
        "n_kv_heads": whole("n_head"),
        "d_head": lambda file: file.whole("n_embd") // max(file.whole("n_head"), 1),
        "d_ff": lambda file: file.whole("n_inner", 4 * file.whole("n_embd")),
        "context": whole("n_positions|n_ctx"),
        "norm_eps": lambda file: file.number("layer_norm_epsilon", 1e-5),
        "tied": flag("tie_word_embeddings", True),
    },
    "llama": {**_BIAS, "mlp_bias": flag("mlp_bias")},
    "mistral": {**_KV_HEADS, "window": _window},
    "mixtral": {**_KV_HEADS, "window": _window, "moe": _experts("num_local_experts", "intermediate_size")},
    "qwen2": {**_KV_HEADS, "qkv_bias": True, "window": _qwen_window},
    "qwen3": _QWEN3,
    "qwen3_moe": {**_QWEN3, "window": None, "moe": _qwen3_moe},
    "gemma2": _GEMMA,
    "gemma3_text": {
        **_GEMMA,
        "qk_norm": "head",
        "window": _window_but_every(6, "sliding_window_pattern|_sliding_window_pattern"),
    },
    "phi3": {"window": _window},
    "olmo2": {**_BIAS, "qk_norm": "width"},
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "gpt_oss": {
        **_HEADS,
        "qkv_bias": flag("attention_bias", True),
        "out_bias": flag("attention_bias", True),
        "mlp_bias": True,
        "sinks": True,
        "moe": _experts(
            "num_local_experts", "intermediate_size", "num_experts_per_tok|experts_per_token", router_bias=True
        ),
        "window": _window_but_every(2),
    },
}
_SILU = {"hidden_act": ("silu",)}
_TANH_GELU = {"hidden_activation|hidden_act": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (False,)}
_PLAIN_DEEPSEEK = {**_SILU, "attention_bias": (False,), "mlp_bias": (False,), "moe_layer_freq": (1,)}
#: Keys that may have only these values, of which the first is the default; plain SiLU for families not listed.
_KNOWN: Mapping[Family, Mapping[str, tuple[Any, ...]]] = {
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "add_cross_attention": (False,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    },
    "qwen3_moe": {**_SILU, "use_sliding_window": (False,)},
    "gemma2": _TANH_GELU,
    "gemma3_text": _TANH_GELU,
    "deepseek_v2": _PLAIN_DEEPSEEK,
    "deepseek_v3": _PLAIN_DEEPSEEK,
}


def from_hf(data: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Read a Hugging Face ``config.json`` that was parsed to a dict.

    A model that only predicts further tokens for speed (DeepSeek's MTP layers) is counted without them.
    Raises :class:`ModelError` for a family, activation, rope type or kind of layer we do not know.
    """
    file = ConfigReader(data, where)
    family: Any = str(file.need("model_type"))  # damage makes it a list, which no table can look up
    if family not in _FAMILIES:
        hint = "; give its text_config" if isinstance(data.get("text_config"), Mapping) else ""
        known = ", ".join(_FAMILIES)
        raise ModelError(f"{where}: model_type '{family}' is not supported (known: {known}){hint}")
    for key, allowed in _KNOWN.get(family, _SILU).items():
        file.must(key, *allowed)
    rope = {} if family == "gpt2" else _rope(file)
    return ModelConfig(family=family, **rope, **read_fields(file, {**_LLAMA, **_FAMILIES[family]}))

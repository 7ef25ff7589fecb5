"""What a model's shape is: pure data, no torch.

Everything countable about a model (parameters, FLOPs, bytes of cache) follows
from this handful of integers, so :mod:`nanoinfer.theory` needs nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from nanoinfer.errors import ModelError, check

Family = Literal[
    "gpt2",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
]
#: What the engines can run; the others can be counted.
RUNNABLE = ("gpt2", "llama", "mixtral")
#: Parts of a :class:`ModelConfig` that no engine implements; of ``moe`` they have Mixtral's form.
EXTRAS = (
    "qkv_bias",
    "out_bias",
    "mlp_bias",
    "qk_norm",
    "norms_per_layer",
    "sinks",
    "mla",
    "moe",
    "window",
    "rope_other",
)


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's rotary scaling: stretch long wavelengths, leave short ones alone."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class MLA:
    """DeepSeek's multi-head latent attention: keys and values compressed into one latent vector a token.

    ``kv_lora_rank`` is ``r``, the latent's width, and ``qk_rope_head_dim`` ``d_rope``, the one rotary key
    that all heads share: the cache holds ``r + d_rope`` numbers per token and layer. ``q_lora_rank`` is None
    where queries are not compressed.
    """

    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        _at_least_one("MLA", self, [f.name for f in fields(self) if getattr(self, f.name) is not None])

    @property
    def d_qk(self) -> int:
        """Width of one head's query and expanded key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class MoE:
    """A mixture of experts in place of the feed-forward part, in all layers but ``dense_layers``.

    ``n_experts`` is ``E``, ``top_k`` ``k``, ``d_expert`` the width of one expert, ``d_shared`` the total width
    of the experts that every token takes. ``router_bias``: the router has a bias (gpt-oss);
    ``selection_bias``: one number per expert that only steers the choice (DeepSeek-V3).
    """

    n_experts: int
    top_k: int
    d_expert: int
    d_shared: int = 0
    dense_layers: tuple[int, ...] = ()
    router_bias: bool = False
    selection_bias: bool = False

    def __post_init__(self) -> None:
        _at_least_one("MoE", self, ("n_experts", "top_k", "d_expert"))
        if self.top_k > self.n_experts:
            raise ModelError(f"model config: top_k ({self.top_k}) must not exceed n_experts ({self.n_experts})")
        check("model config: d_shared", self.d_shared, at_least=0, error=ModelError)


@dataclass(frozen=True)
class SlidingWindow:
    """Attention to the last ``size`` tokens, the current one included, in all layers but ``full_layers``."""

    size: int
    full_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _at_least_one("sliding window", self, ("size",))


def every(n: int, n_layers: int) -> tuple[int, ...]:
    """Each ``n``-th layer, counted from one: ``every(6, 13)`` is ``(5, 11)``; for ``full_layers`` and the like."""
    check("model config: a period of layers", n, at_least=1, error=ModelError)
    return tuple(range(n - 1, n_layers, n))


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one decoder-only transformer.

    Symbols as in the book: ``L`` layers, ``d`` model width, ``n_q`` query heads,
    ``n_kv`` key/value heads, ``d_h`` head width, ``f`` feed-forward width, ``V``
    vocabulary, ``context`` the most tokens a sequence may hold.

    What follows ``rope_scaling`` is for models that can be counted but not run, Mixtral's ``moe`` excepted:
    biases of the q, k, v and of the output projection and of the MLP (gpt2 has them all without saying so);
    norms of q and k per head or over the full width; norms per layer (gemma: 4); a learned attention
    sink per head; the parts above; and the name of a rotary scaling that no engine implements.
    With ``mla``, ``d_head`` is the width of a head's query.
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
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["head", "width"] | None = None
    norms_per_layer: int = 2
    sinks: bool = False
    mla: MLA | None = None
    moe: MoE | None = None
    window: SlidingWindow | None = None
    rope_other: str | None = None

    def __post_init__(self) -> None:
        sizes = ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_head", "d_ff", "vocab_size", "context")
        _at_least_one("model config", self, sizes)
        if self.n_heads % self.n_kv_heads:
            raise ModelError(
                f"model config: n_heads ({self.n_heads}) must be a multiple of n_kv_heads ({self.n_kv_heads})"
            )
        if self.family == "gpt2" and (self.n_heads * self.d_head != self.d_model or self.n_kv_heads != self.n_heads):
            raise ModelError("model config: gpt2 needs n_heads * d_head == d_model and one KV head per query head")
        if self.family == "gpt2" and any(getattr(self, name) for name in EXTRAS if name != "norms_per_layer"):
            raise ModelError(f"model config: gpt2 has none of {', '.join(EXTRAS)} to set")
        if self.mla is not None and (self.d_head != self.mla.d_qk or self.n_kv_heads != self.n_heads):
            raise ModelError(
                f"model config: MLA needs d_head == qk_nope_head_dim + qk_rope_head_dim ({self.mla.d_qk}) "
                "and as many KV heads as query heads"
            )

    def window_of(self, layer: int) -> int | None:
        """The most tokens that ``layer`` attends to, or None where it sees all."""
        return None if self.window is None or layer in self.window.full_layers else self.window.size

    def has_experts(self, layer: int) -> bool:
        """Whether ``layer`` has a mixture of experts."""
        return self.moe is not None and layer not in self.moe.dense_layers


def _at_least_one(what: str, part: object, names: Iterable[str]) -> None:
    for name in names:
        check(f"{what}: {name}", getattr(part, name), at_least=1, error=ModelError)


def check_runnable(config: ModelConfig, where: str = "this model") -> None:
    """Raise :class:`ModelError` for a shape that can be counted but that no engine here can run."""
    odd = [] if config.family in RUNNABLE else [f"family {config.family}"]
    odd += [f.name for f in fields(config) if f.name in EXTRAS and getattr(config, f.name) != f.default]
    moe = config.moe
    if config.family == "mixtral" and moe is not None and moe == MoE(moe.n_experts, moe.top_k, moe.d_expert):
        odd.remove("moe")
    if odd:
        raise ModelError(
            f"{where}: can be counted, not run ({', '.join(odd)}); the engines run {', '.join(RUNNABLE)} without extras"
        )


# --- shapes with a name -------------------------------------------------------


def _gpt2(n_layers: int, d_model: int, n_heads: int, vocab_size: int = 50_257, context: int = 1024) -> ModelConfig:
    return ModelConfig(
        "gpt2", n_layers, d_model, n_heads, n_heads, d_model // n_heads, 4 * d_model, vocab_size, context
    )


def _llama(
    n_layers: int, d_model: int, heads: tuple[int, int], d_ff: int, vocab_size: int, context: int, **more: Any
) -> ModelConfig:
    """``heads`` are query heads and KV heads."""
    sizes = (n_layers, d_model, *heads, d_model // heads[0], d_ff, vocab_size, context)
    return ModelConfig(more.pop("family", "llama"), *sizes, **{"rope_theta": 100_000.0, **more})


#: Shapes that ``random:NAME`` can build. The ``tiny`` ones are for tests and smoke runs.
SHAPES: Mapping[str, ModelConfig] = {
    "tiny-gpt2": _gpt2(2, 32, 4, vocab_size=256, context=128),
    "tiny-llama": _llama(2, 32, (4, 2), 64, 256, 256),
    "tiny-moe": _llama(
        4, 32, (4, 2), 64, 256, 256, family="mixtral", tied=False, moe=MoE(n_experts=8, top_k=2, d_expert=64)
    ),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "smollm2-135m": _llama(30, 576, (9, 3), 1536, 49_152, 8192),
    "llama-3.2-1b": _llama(
        16, 2048, (32, 8), 8192, 128_256, 131_072, rope_theta=5e5, rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192)
    ),
    "llama-3-8b": _llama(32, 4096, (32, 8), 14_336, 128_256, 8192, rope_theta=5e5, tied=False),
    "llama-3.1-8b": _llama(
        32,
        4096,
        (32, 8),
        14_336,
        128_256,
        131_072,
        rope_theta=5e5,
        tied=False,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
    ),
}

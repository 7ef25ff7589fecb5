"""Every weight of a model, matrix by matrix: what is stored, what a token uses, what quantising saves.

All counts follow from :class:`~nanoinfer.configs.config.ModelConfig` and are exact. They are checked against
the true tensors of the models we run and, for the families we only count, of Hugging Face transformers.

Sources: Chen, "Transformer parameter counting" (2022); the families' published configs; for MLA and its experts
DeepSeek-AI, "DeepSeek-V2" (2024); for the experts' odds, drawing ``k`` of ``E`` at random for each token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Final

from nanoinfer.configs.config import ModelConfig
from nanoinfer.errors import DeviceError, RequestError, check, nearest

BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1}


def bytes_per_element(dtype: str) -> int:
    """Bytes of one element. Raises :class:`DeviceError` for a dtype we do not count."""
    if dtype not in BYTES:
        raise DeviceError(f"unknown dtype '{dtype}'; {nearest(dtype, BYTES)}")
    return BYTES[dtype]


def check_sizes(**sizes: int) -> None:
    """Raise :class:`RequestError` for the first size below one, by name."""
    for name, value in sizes.items():
        check(name, value, at_least=1)


# --- matrices -------------------------------------------------------------------


@dataclass(frozen=True)
class Matrix:
    """A weight ``[rows, columns]`` that maps ``columns`` inputs to ``rows`` outputs.

    ``copies`` are stored (experts), ``used`` of them multiply each token. ``quantised`` tells whether
    quantising touches it: routers are left alone.
    """

    name: str
    rows: int
    columns: int
    bias: bool = False
    copies: int = 1
    used: int = 1
    quantised: bool = True

    @property
    def size(self) -> int:
        """Parameters of one copy, its bias included."""
        return self.rows * (self.columns + self.bias)


def attention_matrices(config: ModelConfig) -> tuple[Matrix, ...]:
    """One layer's projections: q, k, v and output, or MLA's down and up projections."""
    d, gpt2 = config.d_model, config.family == "gpt2"
    if (mla := config.mla) is not None:
        d_q = config.n_heads * mla.d_qk
        if mla.q_lora_rank is None:
            query: tuple[Matrix, ...] = (Matrix("q_proj", d_q, d),)
        else:
            query = (Matrix("q_a_proj", mla.q_lora_rank, d), Matrix("q_b_proj", d_q, mla.q_lora_rank))
        return (
            *query,
            Matrix("kv_a_proj", mla.kv_lora_rank + mla.qk_rope_head_dim, d),
            Matrix("kv_b_proj", config.n_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
            Matrix("o_proj", d, config.n_heads * mla.v_head_dim, config.out_bias),
        )
    d_q, d_kv = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
    bias = config.qkv_bias or gpt2
    return (
        Matrix("q_proj", d_q, d, bias),
        Matrix("k_proj", d_kv, d, bias),
        Matrix("v_proj", d_kv, d, bias),
        Matrix("o_proj", d, d_q, config.out_bias or gpt2),
    )


def mlp_matrices(config: ModelConfig, layer: int = 0) -> tuple[Matrix, ...]:
    """One layer's feed-forward part: two matrices (GPT-2), three (gated), or a router and gated experts."""
    d, f = config.d_model, config.d_ff
    if config.family == "gpt2":
        return Matrix("up_proj", f, d, True), Matrix("down_proj", d, f, True)
    moe = config.moe
    if moe is None or not config.has_experts(layer):
        return _gated("", d, f, config.mlp_bias)
    shared = _gated("shared_", d, moe.d_shared, config.mlp_bias) if moe.d_shared else ()
    return (
        Matrix("router", moe.n_experts, d, moe.router_bias, quantised=False),
        *shared,
        *_gated("expert_", d, moe.d_expert, config.mlp_bias, moe.n_experts, moe.top_k),
    )


def _gated(prefix: str, d: int, f: int, bias: bool, copies: int = 1, used: int = 1) -> tuple[Matrix, ...]:
    return (
        Matrix(f"{prefix}gate_proj", f, d, bias, copies, used),
        Matrix(f"{prefix}up_proj", f, d, bias, copies, used),
        Matrix(f"{prefix}down_proj", d, f, bias, copies, used),
    )


def layer_matrices(config: ModelConfig, layer: int) -> tuple[Matrix, ...]:
    """All matrices of one layer (counted from 0), in the order in which a token meets them."""
    return (*attention_matrices(config), *mlp_matrices(config, layer))


def head_matrix(config: ModelConfig) -> Matrix:
    """The output head ``[V, d]``; where ``tied``, the same numbers as the embedding."""
    return Matrix("lm_head", config.vocab_size, config.d_model, quantised=False)


def vectors(config: ModelConfig, layer: int) -> int:
    """Numbers of one layer that are in no matrix: norms, attention sinks, an expert's selection bias."""
    norms = config.norms_per_layer * norm_parameters(config)
    sinks = config.n_heads if config.sinks else 0
    selection = config.moe.n_experts if config.moe and config.moe.selection_bias and config.has_experts(layer) else 0
    latent = 0 if config.mla is None else config.mla.kv_lora_rank + (config.mla.q_lora_rank or 0)
    heads = {None: 0, "head": 2, "width": config.n_heads + config.n_kv_heads}[config.qk_norm]
    return norms + sinks + selection + latent + heads * config.d_head


# --- counts ---------------------------------------------------------------------


def attention_parameters(config: ModelConfig) -> int:
    """One layer's q, k, v and output projections, biases included."""
    return sum(m.size for m in attention_matrices(config))


def mlp_parameters(config: ModelConfig, layer: int = 0) -> int:
    """One layer's feed-forward part, biases and all experts included."""
    return sum(m.copies * m.size for m in mlp_matrices(config, layer))


def norm_parameters(config: ModelConfig) -> int:
    """One norm: weight and bias (GPT-2), or weight alone (the others)."""
    return config.d_model * (2 if config.family == "gpt2" else 1)


def position_parameters(config: ModelConfig) -> int:
    """Learned positions ``[context, d]`` (GPT-2); rotary ones have none."""
    return config.context * config.d_model if config.family == "gpt2" else 0


@cache
def parameters(config: ModelConfig) -> int:
    """All parameters; a tied head is the embedding and is counted once."""
    layers = sum(
        vectors(config, i) + sum(m.copies * m.size for m in layer_matrices(config, i)) for i in range(config.n_layers)
    )
    embeddings = head_matrix(config).size * (1 if config.tied else 2)
    return embeddings + position_parameters(config) + layers + norm_parameters(config)


@cache
def active_parameters(config: ModelConfig) -> int:
    """P': the parameters that each token is multiplied by; for a dense model also what each step reads.

    Learned positions and an untied input embedding are looked up, so left out. Of the experts, ``top_k`` count.
    """
    layers = sum(
        vectors(config, i) + sum(m.used * m.size for m in layer_matrices(config, i)) for i in range(config.n_layers)
    )
    return layers + norm_parameters(config) + head_matrix(config).size


def experts_touched(n_experts: int, top_k: int, tokens: int) -> float:
    """Expected number of distinct experts that ``tokens`` tokens use in a layer: ``E (1 - (1 - k/E)^B)``.

    Each token is taken to draw its ``k`` of ``E`` evenly and on its own; real routers are less even, so touch fewer.
    """
    check_sizes(n_experts=n_experts, top_k=top_k, tokens=tokens)
    if top_k > n_experts:
        raise RequestError(f"top_k ({top_k}) must not exceed n_experts ({n_experts})")
    return n_experts * (1 - (1 - top_k / n_experts) ** tokens)


# --- bytes ----------------------------------------------------------------------


@dataclass(frozen=True)
class Quantisation:
    """Weights of ``bits`` each, with what it takes to read them back.

    Every ``group`` weights along a row share a scale of ``scale_bytes`` and a zero point of ``zero_bits``
    (0 for symmetric schemes); ``group`` None gives each row one. Norms, biases, routers and positions keep their
    dtype, and so do embedding and head, unless ``head`` is true.
    """

    bits: int
    group: int | None = None
    scale_bytes: int = 2
    zero_bits: int = 0
    head: bool = False

    def __post_init__(self) -> None:
        check_sizes(bits=self.bits, group=1 if self.group is None else self.group)
        if self.scale_bytes < 0 or self.zero_bits < 0:
            raise RequestError("scale_bytes and zero_bits must not be negative")

    def matrix_bits(self, matrix: Matrix) -> int:
        """Bits of one copy's weights with scales and zero points, without its bias."""
        groups = matrix.rows * (1 if self.group is None else math.ceil(matrix.columns / self.group))
        return matrix.rows * matrix.columns * self.bits + groups * (8 * self.scale_bytes + self.zero_bits)


#: Schemes in use. GGUF's blocks of 32 (llama.cpp), GPTQ and AWQ as published, OCP's MXFP4.
QUANTISATIONS: Final = {
    "int8": Quantisation(8),
    "fp8": Quantisation(8),
    "int4-g128": Quantisation(4, 128, zero_bits=4),
    "mxfp4": Quantisation(4, 32, scale_bytes=1),
    "q8_0": Quantisation(8, 32, head=True),
    "q4_0": Quantisation(4, 32, head=True),
}


def _bits(matrix: Matrix, element: int, quantisation: Quantisation | None, head: bool = False) -> int:
    """Bits of one copy, its bias in the plain dtype of ``element`` bytes."""
    if quantisation is None or not (quantisation.head if head else matrix.quantised):
        return 8 * element * matrix.size
    return quantisation.matrix_bits(matrix) + 8 * element * matrix.rows * matrix.bias


@cache
def weight_bytes(config: ModelConfig, dtype: str = "float32", quantisation: Quantisation | None = None) -> int:
    """Bytes of all weights in memory, in ``dtype`` where they are not quantised."""
    b = bytes_per_element(dtype)
    bits = 8 * b * (norm_parameters(config) + position_parameters(config))
    bits += _bits(head_matrix(config), b, quantisation, head=True) * (1 if config.tied else 2)
    for layer in range(config.n_layers):
        matrices = layer_matrices(config, layer)
        bits += 8 * b * vectors(config, layer) + sum(m.copies * _bits(m, b, quantisation) for m in matrices)
    return math.ceil(bits / 8)


@cache
def step_weight_bytes(
    config: ModelConfig, tokens: int, dtype: str = "float32", quantisation: Quantisation | None = None
) -> float:
    """Expected bytes of weights that one step over ``tokens`` tokens (of all rows) reads, each once.

    All of P' for a dense model; of the experts, those that some token chose (:func:`experts_touched`).
    The ``tokens`` rows looked up in embedding and positions are left out.
    """
    check_sizes(tokens=tokens)
    b, moe = bytes_per_element(dtype), config.moe
    touched = 0.0 if moe is None else experts_touched(moe.n_experts, moe.top_k, tokens)
    bits = 8.0 * b * norm_parameters(config) + _bits(head_matrix(config), b, quantisation, head=True)
    for layer in range(config.n_layers):
        bits += 8 * b * vectors(config, layer)
        for m in layer_matrices(config, layer):
            bits += _bits(m, b, quantisation) * (touched if m.copies > 1 else 1)
    return bits / 8

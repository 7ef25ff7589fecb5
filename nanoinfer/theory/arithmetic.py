"""A model counted before it runs: every weight, FLOP, byte of cache and activations, and FLOPs per byte.

All counts follow from :class:`~nanoinfer.configs.config.ModelConfig`, whose symbols stand here too; ``s`` is a context
length in tokens, ``b`` bytes per element. Counts of weights are exact, and checked against the true tensors of the
models we run and, for the families we only count, of Hugging Face transformers. A multiply and an add are two FLOPs;
only matrix products are counted: norms, activations and softmax are a few per cent of the work.

Sources: Chen, "Transformer parameter counting" and "Transformer Inference Arithmetic" (2022); Williams et al.,
"Roofline" (2009); the families' published configs; DeepSeek-AI, "DeepSeek-V2" (2024) for MLA and its experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

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
    """A weight ``[rows, columns]`` that maps ``columns`` inputs to ``rows`` outputs."""

    name: str
    rows: int
    columns: int
    bias: bool = False
    copies: int = 1  # that are stored: experts
    used: int = 1  # of them, that multiply each token
    quantised: bool = True  # whether quantising touches it: routers are left alone

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

    def gated(prefix: str, f: int, copies: int = 1, used: int = 1) -> tuple[Matrix, ...]:
        shapes = {"gate_proj": (f, d), "up_proj": (f, d), "down_proj": (d, f)}
        return tuple(Matrix(prefix + name, *shape, config.mlp_bias, copies, used) for name, shape in shapes.items())

    moe = config.moe
    if moe is None or not config.has_experts(layer):
        return gated("", f)
    return (
        Matrix("router", moe.n_experts, d, moe.router_bias, quantised=False),
        *(gated("shared_", moe.d_shared) if moe.d_shared else ()),
        *gated("expert_", moe.d_expert, moe.n_experts, moe.top_k),
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


# --- parameters -----------------------------------------------------------------


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
    embeddings = head_matrix(config).size * (1 if config.tied else 2)
    return embeddings + position_parameters(config) + norm_parameters(config) + _in_layers(config, "copies")


@cache
def active_parameters(config: ModelConfig) -> int:
    """P': the parameters that each token is multiplied by; for a dense model also what each step reads.

    Learned positions and an untied input embedding are looked up, so left out. Of the experts, ``top_k`` count.
    """
    return head_matrix(config).size + norm_parameters(config) + _in_layers(config, "used")


def _in_layers(config: ModelConfig, number: Literal["copies", "used"]) -> int:
    layers = range(config.n_layers)
    matrices: int = sum(getattr(m, number) * m.size for layer in layers for m in layer_matrices(config, layer))
    return matrices + sum(vectors(config, layer) for layer in layers)


def experts_touched(n_experts: int, top_k: int, tokens: int) -> float:
    """Expected number of distinct experts that ``tokens`` tokens use in a layer: ``E (1 - (1 - k/E)^B)``.

    Each token is taken to draw its ``k`` of ``E`` evenly and on its own; real routers are less even, so touch fewer.
    """
    check_sizes(n_experts=n_experts, top_k=top_k, tokens=tokens)
    if top_k > n_experts:
        raise RequestError(f"top_k ({top_k}) must not exceed n_experts ({n_experts})")
    return n_experts * (1 - (1 - top_k / n_experts) ** tokens)


# --- bytes of weights -----------------------------------------------------------


@dataclass(frozen=True)
class Quantisation:
    """Weights of ``bits`` each, with what it takes to read them back. Norms, biases, routers and positions stay."""

    bits: int
    group: int | None = None  # weights along a row that share a scale and a zero point; None: the whole row
    scale_bytes: int = 2
    zero_bits: int = 0  # 0 for symmetric schemes
    head: bool = False  # whether embedding and head are quantised too

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


def _bits(matrix: Matrix, element: int, quantisation: Quantisation | None) -> int:
    """Bits of one copy, its bias in the plain dtype of ``element`` bytes."""
    if quantisation is None or not (quantisation.head if matrix.name == "lm_head" else matrix.quantised):
        return 8 * element * matrix.size
    return quantisation.matrix_bits(matrix) + 8 * element * matrix.rows * matrix.bias


@cache
def weight_bytes(config: ModelConfig, dtype: str = "float32", quantisation: Quantisation | None = None) -> int:
    """Bytes of all weights in memory, in ``dtype`` where they are not quantised."""
    b = bytes_per_element(dtype)
    bits = 8 * b * (norm_parameters(config) + position_parameters(config))
    bits += _bits(head_matrix(config), b, quantisation) * (1 if config.tied else 2)
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
    bits = 8.0 * b * norm_parameters(config) + _bits(head_matrix(config), b, quantisation)
    for layer in range(config.n_layers):
        bits += 8 * b * vectors(config, layer)
        for m in layer_matrices(config, layer):
            bits += _bits(m, b, quantisation) * (touched if m.copies > 1 else 1)
    return bits / 8


# --- the KV cache ---------------------------------------------------------------


def kv_width(config: ModelConfig) -> int:
    """Numbers that one token leaves in one layer's cache: ``2 n_kv d_h``, or ``r + d_rope`` with MLA."""
    if config.mla is not None:
        return config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
    return 2 * config.n_kv_heads * config.d_head


def kv_bytes_per_token(config: ModelConfig, dtype: str = "float32") -> int:
    """Bytes that one token leaves in all layers' cache; in a sliding window until it is full (:func:`kv_bytes`)."""
    return config.n_layers * kv_width(config) * bytes_per_element(dtype)


def tokens_seen(config: ModelConfig, context: int) -> int:
    """Tokens that the last of ``context`` ones attends to, summed over layers: ``sum_l min(s, w_l)``."""
    check_sizes(context=context)
    windows = (config.window_of(layer) for layer in range(config.n_layers))
    return sum(context if window is None else min(context, window) for window in windows)


def kv_bytes(config: ModelConfig, batch: int, tokens: int, dtype: str = "float32") -> int:
    """Bytes of a cache for ``batch`` rows of ``tokens`` each.

    Linear in ``tokens`` but for layers with a sliding window, which drop what has left it (a cache that
    keeps it all the same takes ``batch * tokens * kv_bytes_per_token``).
    """
    check_sizes(batch=batch, tokens=tokens)
    return batch * tokens_seen(config, tokens) * kv_width(config) * bytes_per_element(dtype)


# --- FLOPs ----------------------------------------------------------------------


def pair_flops(config: ModelConfig, absorbed: bool = False) -> int:
    """FLOPs of attention for one query token and one token that it sees, in one layer, all heads.

    ``4 n_q d_h``: a dot product with the key, an update with the value. MLA: ``2 n_q (d_qk + d_v)`` over expanded
    keys and values; ``absorbed``, over the latents as they lie in the cache, ``2 n_q (2 r + d_rope)``.
    """
    if (mla := config.mla) is None:
        return 4 * config.n_heads * config.d_head
    if absorbed:
        return 2 * config.n_heads * (2 * mla.kv_lora_rank + mla.qk_rope_head_dim)
    return 2 * config.n_heads * (mla.d_qk + mla.v_head_dim)


def decode_flops(config: ModelConfig, context: int) -> int:
    """FLOPs to process one token that sees ``context`` tokens, itself included: ``2 P' + 4 L n_q d_h s``.

    A window caps ``s`` in its layers. MLA is taken in its absorbed form: folding the up projection into query and
    output costs as much as expanding the new token would, so ``2 P'`` stands.
    """
    return 2 * active_parameters(config) + pair_flops(config, absorbed=True) * tokens_seen(config, context)


def causal_flops(config: ModelConfig, tokens: int) -> int:
    """FLOPs of causal attention over ``tokens``, all layers: ``2 L n_q d_h S^2``, of a window ``w`` ``2 w S - w^2``.

    Half of the square, up to a term in ``S`` that vanishes for long prompts.
    """
    windows = [min(tokens, config.window_of(layer) or tokens) for layer in range(config.n_layers)]
    return pair_flops(config) * sum(2 * window * tokens - window**2 for window in windows) // 2


def prefill_flops(config: ModelConfig, tokens: int, last_only: bool = True) -> int:
    """FLOPs of one causal pass over ``tokens``; with ``last_only`` the head runs for one position.

    ``2 P' S`` and :func:`causal_flops`, less ``2 V d (S - 1)`` where only the last logits are computed.
    """
    check_sizes(tokens=tokens)
    head = 2 * config.vocab_size * config.d_model * (tokens - 1) if last_only else 0
    return 2 * active_parameters(config) * tokens + causal_flops(config, tokens) - head


def generate_flops(config: ModelConfig, prompt: int, new: int, cached: bool) -> int:
    """FLOPs to generate ``new`` tokens after ``prompt`` ones, for one row, head on the last position only.

    Without a cache every step is a prefill of all tokens so far; with one, the prompt is
    prefilled once and each further token is a decode step.
    """
    check_sizes(prompt=prompt, new=new)
    if not cached:
        return sum(prefill_flops(config, prompt + i) for i in range(new))
    return prefill_flops(config, prompt) + sum(decode_flops(config, prompt + i) for i in range(1, new))


# --- activations ----------------------------------------------------------------


def activation_bytes(
    config: ModelConfig, batch: int, tokens: int, dtype: str = "float32", last_only: bool = True
) -> int:
    """Most bytes that tensors of one forward pass over ``[batch, tokens]`` hold at once, weights and cache left out.

    The largest of three moments, in numbers per token; rotary models hold ``d_h`` of sines and cosines throughout:

    - attention: input and norm ``2 d``, queries ``n_q d_h``, keys and values ``2 n_kv d_h``, both repeated for
      grouped queries ``2 n_q d_h`` (prefill only), output ``n_q d_h``, then its copy (prefill) or projection ``d``;
    - feed-forward: the block's input, what attention made of it and its norm ``3 d``, then ``2 f`` (GPT-2) or gate,
      up and product ``3 f``; with experts ``3 (k d_expert + d_shared)``;
    - head: the last norm ``d`` and the logits ``V``, of the last position alone with ``last_only``.

    Equal to what PyTorch's tensors take, masks left out, for the models that run here; for others unchecked.
    """
    check_sizes(batch=batch, tokens=tokens)
    d, gpt2, one_token = config.d_model, config.family == "gpt2", tokens == 1
    d_q, d_kv = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
    rope = 0 if gpt2 else config.d_head
    repeated = 0 if one_token or config.n_heads == config.n_kv_heads else 2 * d_q
    attention = 2 * d + d_q + 2 * d_kv + repeated + d_q + (d if one_token else d_q)
    f = config.d_ff
    if config.moe is not None:
        experts = config.moe.top_k * config.moe.d_expert + config.moe.d_shared
        f = max(experts, f) if config.moe.dense_layers else experts
    feed_forward = 3 * d + (2 if gpt2 else 3) * f
    head = (d + config.vocab_size) * (1 if last_only else tokens)
    widest = max(tokens * attention, tokens * feed_forward, head)
    return batch * (tokens * rope + widest) * bytes_per_element(dtype)


# --- bytes of a step, and FLOPs per byte ----------------------------------------


def decode_bytes(config: ModelConfig, batch: int, context: int, dtype: str = "bfloat16") -> float:
    """Least bytes that one decode step of ``batch`` rows moves: weights once, each row's cache of ``context`` once."""
    return step_weight_bytes(config, batch, dtype) + kv_bytes(config, batch, context, dtype)


def prefill_bytes(config: ModelConfig, batch: int, tokens: int, dtype: str = "bfloat16") -> float:
    """Least bytes that a prefill of ``[batch, tokens]`` moves: weights once, the new cache written once."""
    return step_weight_bytes(config, batch * tokens, dtype) + kv_bytes(config, batch, tokens, dtype)


def decode_intensity(config: ModelConfig, batch: int, context: int, dtype: str = "bfloat16") -> float:
    """FLOPs per byte of a whole decode step."""
    return batch * decode_flops(config, context) / decode_bytes(config, batch, context, dtype)


def attention_intensity_decode(config: ModelConfig, dtype: str = "bfloat16") -> float:
    """FLOPs per byte of cache read by one token's attention: ``2 (n_q / n_kv) / b``, whatever batch and context.

    Absorbed MLA, where all heads read the same latents: ``2 n_q (2 r + d_rope) / ((r + d_rope) b)``, 242 for 128
    heads of DeepSeek-V3 in 16 bits.
    """
    return pair_flops(config, absorbed=True) / (kv_width(config) * bytes_per_element(dtype))


def gemm_intensity_small(batch: int, weight_bytes_each: float) -> float:
    """FLOPs per byte of weights, ``2 B / b``: what a product comes to while its inputs and outputs are small."""
    check_sizes(batch=batch)
    return 2 * batch / weight_bytes_each


def gemm_intensity(batch: int, rows: int, columns: int, element_bytes: float) -> float:
    """FLOPs per byte of ``[B, N] x [N, M]``, each operand and the result moved once: ``2 B M N / b(MN + BN + BM)``."""
    check_sizes(batch=batch, rows=rows, columns=columns)
    return 2 * batch * rows * columns / (element_bytes * (rows * columns + batch * (rows + columns)))

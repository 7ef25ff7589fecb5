"""Counting a model before it runs: FLOPs, bytes of cache and activations, and FLOPs per byte.

Every count follows from the shape alone. Symbols as in
:class:`~nanoinfer.configs.config.ModelConfig`; ``s`` is a context length in tokens, ``b``
bytes per element. A multiply and an add are two FLOPs. Only matrix products are counted:
norms, activations and softmax are a few per cent of the work and are not products.

Sources: Chen, "Transformer Inference Arithmetic" (2022); Williams et al., "Roofline" (2009); DeepSeek-AI,
"DeepSeek-V2" (2024) for MLA; parameters are counted in :mod:`nanoinfer.theory.parameters` and named here too.
"""

from __future__ import annotations

from nanoinfer.configs.config import ModelConfig
from nanoinfer.theory import parameters as counts
from nanoinfer.theory.parameters import check_sizes

# One module for a reader who counts: what a model holds goes with what it does.
QUANTISATIONS = counts.QUANTISATIONS
Quantisation = counts.Quantisation
active_parameters = counts.active_parameters
attention_parameters = counts.attention_parameters
bytes_per_element = counts.bytes_per_element
experts_touched = counts.experts_touched
layer_matrices = counts.layer_matrices
mlp_parameters = counts.mlp_parameters
parameters = counts.parameters
step_weight_bytes = counts.step_weight_bytes
weight_bytes = counts.weight_bytes

# --- the KV cache ---------------------------------------------------------------


def kv_width(config: ModelConfig) -> int:
    """Numbers that one token leaves in one layer's cache: ``2 n_kv d_h``, or ``r + d_rope`` with MLA."""
    if config.mla is not None:
        return config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
    return 2 * config.n_kv_heads * config.d_head


def kv_bytes_per_token(config: ModelConfig, dtype: str = "float32") -> int:
    """Bytes that one token leaves in the cache: ``2 L n_kv d_h b``, with MLA ``L (r + d_rope) b``.

    With a sliding window only until the window is full: see :func:`kv_bytes`.
    """
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
    pairs_doubled = 0
    for layer in range(config.n_layers):
        window = min(tokens, config.window_of(layer) or tokens)
        pairs_doubled += 2 * window * tokens - window**2
    return pair_flops(config) * pairs_doubled // 2


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

    The largest of three moments, in numbers per token (eager PyTorch as in :mod:`nanoinfer.models`; attention that
    does not write its scores); rotary models hold ``d_h`` of sines and cosines throughout:

    - attention: input and norm ``2 d``, queries ``n_q d_h``, keys and values ``2 n_kv d_h``, both repeated for
      grouped queries ``2 n_q d_h`` (prefill only), output ``n_q d_h``, then its copy (prefill) or projection ``d``;
    - feed-forward: the block's input, what attention made of it and its norm ``3 d``, then ``2 f`` (GPT-2) or gate,
      up and product ``3 f``; with experts ``3 (k d_expert + d_shared)``;
    - head: the last norm ``d`` and the logits ``V``, of the last position alone with ``last_only``.

    Equal to what PyTorch's tensors take for the models that run here (masks, a few bytes, left out); for the others
    the same account, unchecked.
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


# --- intensity: FLOPs per byte moved --------------------------------------------


def gemm_intensity_small(batch: int, weight_bytes_each: float) -> float:
    """FLOPs per byte of weights, ``2 B / b``: what a product comes to while its inputs and outputs are small."""
    check_sizes(batch=batch)
    return 2 * batch / weight_bytes_each


def gemm_intensity(
    batch: int, rows: int, columns: int, element_bytes: float, weight_bytes_each: float | None = None
) -> float:
    """FLOPs per byte of ``[batch, columns] x [columns, rows]``: every operand read, the result written, once.

    ``2 B M N / (b_w M N + b (B N + B M))``; ``weight_bytes_each`` is ``b_w`` where weights are stored in another width.
    """
    check_sizes(batch=batch, rows=rows, columns=columns)
    weights = rows * columns * (element_bytes if weight_bytes_each is None else weight_bytes_each)
    return 2 * batch * rows * columns / (weights + element_bytes * batch * (rows + columns))


def attention_intensity_decode(config: ModelConfig, dtype: str = "bfloat16") -> float:
    """FLOPs per byte of cache read by one token's attention: ``2 (n_q / n_kv) / b``, whatever batch and context.

    Absorbed MLA, where all heads read the same latents: ``2 n_q (2 r + d_rope) / ((r + d_rope) b)``, 242 for 128
    heads of DeepSeek-V3 in 16 bits.
    """
    return pair_flops(config, absorbed=True) / (kv_width(config) * bytes_per_element(dtype))


def decode_bytes(
    config: ModelConfig,
    batch: int,
    context: int,
    dtype: str = "bfloat16",
    quantisation: Quantisation | None = None,
    kv_dtype: str | None = None,
) -> float:
    """Least bytes that one decode step of ``batch`` rows moves: weights once, each row's cache of ``context`` once."""
    weights = step_weight_bytes(config, batch, dtype, quantisation)
    return weights + kv_bytes(config, batch, context, kv_dtype or dtype)


def decode_intensity(
    config: ModelConfig,
    batch: int,
    context: int,
    dtype: str = "bfloat16",
    quantisation: Quantisation | None = None,
    kv_dtype: str | None = None,
) -> float:
    """FLOPs per byte of a whole decode step."""
    moved = decode_bytes(config, batch, context, dtype, quantisation, kv_dtype)
    return batch * decode_flops(config, context) / moved


def prefill_bytes(
    config: ModelConfig,
    batch: int,
    tokens: int,
    dtype: str = "bfloat16",
    quantisation: Quantisation | None = None,
    kv_dtype: str | None = None,
) -> float:
    """Least bytes that a prefill of ``[batch, tokens]`` moves: weights once, the new cache written once."""
    check_sizes(batch=batch, tokens=tokens)
    weights = step_weight_bytes(config, batch * tokens, dtype, quantisation)
    return weights + kv_bytes(config, batch, tokens, kv_dtype or dtype)

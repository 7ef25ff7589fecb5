"""Counting a model before it runs: parameters, FLOPs, bytes.

Every count is exact and follows from the shape alone. Symbols as in
:class:`~nanoinfer.models.config.ModelConfig`; ``s`` is a context length in tokens, ``b``
bytes per element. A multiply and an add are two FLOPs. Only matrix products are counted:
norms, activations and softmax are a few per cent of the work and are not products.

Sources: Chen, "Transformer Inference Arithmetic" and "Transformer parameter counting" (2022);
the counts themselves are checked against the true tensors of every model we load.
"""

from __future__ import annotations

from typing import Final

from nanoinfer.errors import DeviceError, RequestError, nearest
from nanoinfer.models.config import ModelConfig

BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


def bytes_per_element(dtype: str) -> int:
    """Bytes of one element. Raises :class:`DeviceError` for a dtype we do not count."""
    if dtype not in BYTES:
        raise DeviceError(f"unknown dtype '{dtype}'; {nearest(dtype, BYTES)}")
    return BYTES[dtype]


def attention_parameters(config: ModelConfig) -> int:
    """One layer's q, k, v and output projections; GPT-2 adds a bias to each."""
    d, d_q, d_kv = config.d_model, config.n_heads * config.d_head, config.n_kv_heads * config.d_head
    matrices = d * (d_q + 2 * d_kv) + d_q * d
    return matrices + (d_q + 2 * d_kv + d if config.family == "gpt2" else 0)


def mlp_parameters(config: ModelConfig) -> int:
    """One layer's feed-forward part: two matrices and biases (GPT-2), or three matrices (Llama)."""
    d, f = config.d_model, config.d_ff
    return 2 * d * f + f + d if config.family == "gpt2" else 3 * d * f


def norm_parameters(config: ModelConfig) -> int:
    """One norm: weight and bias (GPT-2), or weight alone (Llama)."""
    return config.d_model * (2 if config.family == "gpt2" else 1)


def parameters(config: ModelConfig) -> int:
    """All parameters; a tied head is the embedding and is counted once."""
    layer = attention_parameters(config) + mlp_parameters(config) + 2 * norm_parameters(config)
    positions = config.context * config.d_model if config.family == "gpt2" else 0
    embeddings = config.vocab_size * config.d_model * (1 if config.tied else 2)
    return embeddings + positions + config.n_layers * layer + norm_parameters(config)


def active_parameters(config: ModelConfig) -> int:
    """P': the parameters that each token is multiplied by, and that each step reads.

    Rows are looked up, not multiplied, in learned positions and in an untied input
    embedding, so those are left out; a tied matrix is the head too and stays.
    """
    positions = config.context * config.d_model if config.family == "gpt2" else 0
    untied_input = 0 if config.tied else config.vocab_size * config.d_model
    return parameters(config) - positions - untied_input


def weight_bytes(config: ModelConfig, dtype: str = "float32") -> int:
    """Bytes of all weights in memory."""
    return parameters(config) * bytes_per_element(dtype)


def kv_bytes_per_token(config: ModelConfig, dtype: str = "float32") -> int:
    """Bytes of keys and values that one token leaves in the cache: ``2 L n_kv d_h b``."""
    return 2 * config.n_layers * config.n_kv_heads * config.d_head * bytes_per_element(dtype)


def kv_bytes(config: ModelConfig, batch: int, tokens: int, dtype: str = "float32") -> int:
    """Bytes of a cache for ``batch`` rows of ``tokens`` each."""
    _sizes(batch=batch, tokens=tokens)
    return batch * tokens * kv_bytes_per_token(config, dtype)


def decode_flops(config: ModelConfig, context: int) -> int:
    """FLOPs to process one token that sees ``context`` tokens, itself included: ``2 P' + 4 L n_q d_h s``."""
    _sizes(context=context)
    return 2 * active_parameters(config) + 4 * config.n_layers * config.n_heads * config.d_head * context


def prefill_flops(config: ModelConfig, tokens: int, last_only: bool = True) -> int:
    """FLOPs of one causal pass over ``tokens``; with ``last_only`` the head runs for one position.

    ``2 P' S + 2 L n_q d_h S^2``: causal attention does half of the square, up to a term in S that
    vanishes for long prompts. Less ``2 V d (S - 1)`` where only the last logits are computed.
    """
    _sizes(tokens=tokens)
    square = 2 * config.n_layers * config.n_heads * config.d_head * tokens**2
    head = 2 * config.vocab_size * config.d_model * (tokens - 1) if last_only else 0
    return 2 * active_parameters(config) * tokens + square - head


def generate_flops(config: ModelConfig, prompt: int, new: int, cached: bool) -> int:
    """FLOPs to generate ``new`` tokens after ``prompt`` ones, for one row, head on the last position only.

    Without a cache every step is a prefill of all tokens so far; with one, the prompt is
    prefilled once and each further token is a decode step.
    """
    _sizes(prompt=prompt, new=new)
    if not cached:
        return sum(prefill_flops(config, prompt + i) for i in range(new))
    return prefill_flops(config, prompt) + sum(decode_flops(config, prompt + i) for i in range(1, new))


def _sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise RequestError(f"{name} must be at least 1, got {value}")

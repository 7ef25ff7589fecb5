"""What fits: where each byte goes, and the largest batch or context that memory allows.

    B_max = floor((u * M - weights - activations) / (ceil(S / block) * block * KV bytes per token))

with M the memory of one device, u the share of it that may be used, and weights, KV heads
and activations divided among ``tp`` devices (a KV head is never divided, only copied).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from nanoinfer.configs.config import ModelConfig
from nanoinfer.errors import RequestError, check
from nanoinfer.theory.arithmetic import activation_bytes, check_sizes, kv_bytes, kv_bytes_per_token, weight_bytes


@dataclass(frozen=True)
class Bytes:
    """Bytes of one device by what they hold. ``fragmentation`` is the unused end of each row's last block."""

    weights: float
    kv: float
    activations: float
    fragmentation: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.kv + self.activations + self.fragmentation


@dataclass(frozen=True)
class Fit:
    """What one device of ``memory`` bytes holds. ``limit`` says what prevents more."""

    memory: float
    usable: float
    context: int
    max_batch: int
    max_context: int
    blocks: int
    used: Bytes
    limit: str


def check_tp(config: ModelConfig, tp: int) -> None:
    """Raise :class:`RequestError` where ``tp`` devices cannot share the heads evenly."""
    check_sizes(tp=tp)
    if not divides(config, tp):
        even = [str(n) for n in range(1, config.n_heads + 1) if divides(config, n)]
        raise RequestError(
            f"tp {tp} does not divide {config.n_heads} query heads and {config.n_kv_heads} KV heads evenly; "
            f"take one of {', '.join(even)}"
        )


def divides(config: ModelConfig, tp: int) -> bool:
    """Whether ``tp`` devices get equal shares of the heads; KV heads may be copied instead."""
    return config.n_heads % tp == 0 and (config.n_kv_heads % tp == 0 or tp % config.n_kv_heads == 0)


def kv_share(config: ModelConfig, tp: int) -> float:
    """The part of the KV cache that each of ``tp`` devices holds: ``max(n_kv / tp, 1) / n_kv``; a latent one whole."""
    if config.mla is not None:
        return 1.0
    return max(config.n_kv_heads / tp, 1) / config.n_kv_heads


def where_bytes_go(
    config: ModelConfig, batch: int, context: int, dtype: str = "bfloat16", *, tp: int = 1, block: int = 1
) -> Bytes:
    """Bytes of one device that serves ``batch`` rows of ``context`` tokens each, in blocks of ``block`` tokens.

    Activations are those of a decode step; a long prefill needs more for as long as it lasts.
    """
    check_sizes(batch=batch, context=context, tp=tp, block=block)
    share = kv_share(config, tp)
    kv = kv_bytes(config, batch, context, dtype) * share
    whole = kv_bytes(config, batch, math.ceil(context / block) * block, dtype) * share
    activations = activation_bytes(config, batch, 1, dtype=dtype)
    return Bytes(weight_bytes(config, dtype) / tp, kv, activations, whole - kv)


def fit(
    config: ModelConfig,
    memory: float,
    context: int,
    dtype: str = "bfloat16",
    *,
    tp: int = 1,
    utilisation: float = 0.9,
    block: int = 16,
) -> Fit:
    """The largest batch at ``context`` tokens a row, and the longest context of a single row.

    Raises :class:`RequestError` for a context beyond the model's, and where the weights alone do not fit.
    """
    check_sizes(context=context, block=block)
    check_tp(config, tp)
    if context > config.context:
        raise RequestError(f"context {context} is beyond the model's {config.context}")
    check("utilisation", utilisation, above=0, at_most=1)
    usable = memory * utilisation
    weights = weight_bytes(config, dtype) / tp
    if weights >= usable:
        least = math.ceil(weights * tp / usable)
        devices = next((n for n in range(least, config.n_heads + 1) if divides(config, n)), least)
        raise RequestError(
            f"the weights take {weights / 1e9:.1f} GB a device in {dtype} and {usable / 1e9:.1f} GB may be used: "
            f"take at least {devices} devices (--tp {devices}) or a smaller dtype"
        )

    def total(batch: int, tokens: int) -> float:
        return where_bytes_go(config, batch, tokens, dtype, tp=tp, block=block).total

    batch = largest(lambda n: total(n, context) <= usable, 2**40)
    longest = largest(lambda n: total(1, n) <= usable, config.context)
    per_block = kv_bytes_per_token(config, dtype) * kv_share(config, tp) * block
    blocks = int((usable - weights) // per_block)
    limit = "the model's context" if longest == config.context and batch else "memory for the KV cache"
    used = where_bytes_go(config, max(batch, 1), context, dtype, tp=tp, block=block)
    return Fit(memory, usable, context, batch, longest, blocks, used, limit)


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest n up to ``most`` that fits, 0 if not even 1 does; ``fits`` is true up to some n and false beyond."""
    return bisect_right(range(1, most + 1), False, key=lambda n: not fits(n))

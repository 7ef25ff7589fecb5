"""What fits, where each byte goes, and what would change it: the record behind ``nanoinfer fit``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nanoinfer.configs.config import ModelConfig
from nanoinfer.models.lookup import config_of
from nanoinfer.predict.target import bytes_row, dtype_named, model_row, target_named
from nanoinfer.theory import arithmetic, capacity
from nanoinfer.theory.parameters import BYTES


def fit(
    model: str,
    gpu: str,
    *,
    context: int = 1024,
    dtype: str = "bfloat16",
    tp: int = 1,
    utilisation: float = 0.9,
    block: int = 16,
) -> dict[str, Any]:
    """Where each byte of one device goes with the largest batch at ``context`` tokens a row, and what would change it.

    Raises:
        NanoinferError: as :func:`predict`, and for a utilisation outside (0, 1].
    """
    config, dtype = config_of(model), dtype_named(dtype)
    capacity.check_tp(config, tp)
    target = target_named(gpu, dtype)
    found = capacity.fit(config, target.memory_bytes, context, dtype, tp=tp, utilisation=utilisation, block=block)
    used = found.used if found.max_batch else capacity.Bytes(found.used.weights, 0, 0, 0)
    one = capacity.where_bytes_go(config, 1, context, dtype, tp=tp, block=block)
    return {
        "model": model_row(model, config),
        "machine": {
            "name": target.name,
            "devices": tp,
            "dtype": dtype,
            "memory_bytes": found.memory,
            "usable_bytes": found.usable,
            "utilisation": utilisation,
        },
        "request": {"context_tokens": context, "block_tokens": block},
        "weights_bytes": arithmetic.weight_bytes(config, dtype),
        "kv_bytes_per_token": arithmetic.kv_bytes_per_token(config, dtype),
        "row_per_device_bytes": one.total - one.weights,
        "max_batch_rows": found.max_batch,
        "max_context_tokens": found.max_context,
        "kv_blocks": found.blocks,
        "used_per_device_bytes": {
            **bytes_row(used),
            "free": found.usable - used.total,
            "kept_back": found.memory - found.usable,
        },
        "why": _why_fit(config, found, one),
        "changes": list(_fit_changes(config, found, one, dtype, tp, utilisation, block)),
    }


def _why_fit(config: ModelConfig, found: capacity.Fit, one: capacity.Bytes) -> str:
    row, left = one.total - one.weights, found.usable - one.weights
    batch = (
        f"Memory limits the batch: beside {one.weights / 1e9:.2f} GB of weights {left / 1e9:.2f} GB are left, "
        f"and a row of {found.context:,} tokens takes {row / 1e9:.3f} GB."
    )
    longest = "the model's own context" if found.max_context == config.context else "memory"
    return f"{batch} The length of a single row is limited by {longest}."


def _fit_changes(
    config: ModelConfig, found: capacity.Fit, one: capacity.Bytes, dtype: str, tp: int, utilisation: float, block: int
) -> Iterator[dict[str, Any]]:
    """One thing changed at a time, and the largest batch worked out again."""
    half, context = 8 * BYTES[dtype] // 2, found.context
    cache = one.kv + one.fragmentation

    def rows(weights: float, row: float) -> int:
        return int((found.usable - weights) // row)

    yield {"change": f"KV cache in {half} bits", "max_batch_rows": rows(one.weights, cache / 2 + one.activations)}
    yield {"change": f"weights in {half} bits", "max_batch_rows": rows(one.weights / 2, cache + one.activations)}

    def again(change: str, context: int, tp: int) -> dict[str, Any]:
        fits = capacity.fit(config, found.memory, context, dtype, tp=tp, utilisation=utilisation, block=block)
        return {"change": change, "max_batch_rows": fits.max_batch}

    if context > 1:
        yield again(f"half the context ({context // 2})", context // 2, tp)
    if capacity.divides(config, 2 * tp):
        yield again(f"twice the devices (--tp {2 * tp})", context, 2 * tp)

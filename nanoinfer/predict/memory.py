"""What fits, where each byte goes, and what would change it: the record behind ``nanoinfer fit``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from nanoinfer.configs.config import ModelConfig
from nanoinfer.models.lookup import config_of
from nanoinfer.predict.options import FitOptions
from nanoinfer.predict.target import bytes_row, dtype_named, model_row, target_named
from nanoinfer.theory import arithmetic, capacity
from nanoinfer.theory.arithmetic import BYTES


def fit(options: FitOptions) -> dict[str, Any]:
    """Where each byte of one device goes with the largest batch at ``context`` tokens a row, and what would change it.

    Raises :class:`NanoinferError` for heads that ``tp`` does not divide, or weights that alone do not fit.
    """
    config, dtype = config_of(options.model), dtype_named(options.dtype)
    capacity.check_tp(config, options.tp)
    target = target_named(options.gpu, dtype)
    options = replace(options, dtype=dtype)
    largest = _fit(config, target.memory_bytes, options)
    used = largest.used if largest.max_batch else capacity.Bytes(largest.used.weights, 0, 0, 0)
    one = capacity.where_bytes_go(config, 1, options.context, dtype, tp=options.tp, block=options.block)
    return {
        "model": model_row(options.model, config),
        "machine": {
            "name": target.name,
            "devices": options.tp,
            "dtype": dtype,
            "memory_bytes": largest.memory,
            "usable_bytes": largest.usable,
            "utilisation": options.utilisation,
        },
        "request": {"context_tokens": options.context, "block_tokens": options.block},
        "weights_bytes": arithmetic.weight_bytes(config, dtype),
        "kv_bytes_per_token": arithmetic.kv_bytes_per_token(config, dtype),
        "row_per_device_bytes": one.total - one.weights,
        "max_batch_rows": largest.max_batch,
        "max_context_tokens": largest.max_context,
        "kv_blocks": largest.blocks,
        "used_per_device_bytes": {
            **bytes_row(used),
            "free": largest.usable - used.total,
            "kept_back": largest.memory - largest.usable,
        },
        "why": _why(config, largest, one),
        "changes": list(_changes(config, largest, one, options)),
    }


def _fit(config: ModelConfig, memory_bytes: float, options: FitOptions) -> capacity.Fit:
    return capacity.fit(
        config,
        memory_bytes,
        options.context,
        options.dtype,
        tp=options.tp,
        utilisation=options.utilisation,
        block=options.block,
    )


def _why(config: ModelConfig, largest: capacity.Fit, one: capacity.Bytes) -> str:
    row, left = one.total - one.weights, largest.usable - one.weights
    batch = (
        f"Memory limits the batch: next to {one.weights / 1e9:.2f} GB of weights {left / 1e9:.2f} GB are left, "
        f"and a row of {largest.context:,} tokens takes {row / 1e9:.3f} GB."
    )
    limit = "the model's own context" if largest.max_context == config.context else "memory"
    return f"{batch} The length of a single row is limited by {limit}."


def _changes(
    config: ModelConfig, largest: capacity.Fit, one: capacity.Bytes, options: FitOptions
) -> Iterator[dict[str, Any]]:
    """One thing changed at a time, and the largest batch worked out again."""
    half, context, tp = 8 * BYTES[options.dtype] // 2, options.context, options.tp
    cache = one.kv + one.fragmentation

    def row(change: str, rows: float) -> dict[str, Any]:
        return {"change": change, "max_batch_rows": int(rows)}

    yield row(f"KV cache in {half} bits", (largest.usable - one.weights) // (cache / 2 + one.activations))
    yield row(f"weights in {half} bits", (largest.usable - one.weights / 2) // (cache + one.activations))
    changed = [(f"half the context ({context // 2})", replace(options, context=context // 2))] if context > 1 else []
    if capacity.divides(config, 2 * tp):
        changed.append((f"twice the devices (--tp {2 * tp})", replace(options, tp=2 * tp)))
    for change, other in changed:
        yield row(change, _fit(config, largest.memory, other).max_batch)

"""How fast, why, and what would change it: the record behind ``nanoinfer predict``.

The theory gives numbers; a reader who plans a deployment also needs the reason and the next
lever. The levers are found by predicting again with one thing changed. Every figure goes into
one dict with its unit in the key, which is the JSON; :mod:`nanoinfer.predict.tables` prints
the same dict, so the two cannot differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

from nanoinfer.errors import RequestError
from nanoinfer.models.config import ModelConfig
from nanoinfer.predict.shapes import config_of
from nanoinfer.predict.target import (
    Target,
    bytes_row,
    dtype_named,
    machine_of,
    model_row,
    target_named,
)
from nanoinfer.theory import arithmetic, capacity, cost
from nanoinfer.theory.parameters import BYTES, check_sizes, head_matrix, layer_matrices
from nanoinfer.theory.roofline import Machine, Step, decode_step, prefill_step

#: Decode steps of one generation that are computed; those between lie on lines, as the cache grows by one a step.
POINTS: Final = 33


def _finite(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise RequestError(f"--{name} must be a number and not negative, got {value}")


def predict(
    model: str,
    gpu: str,
    *,
    batch: int = 1,
    context: int = 1024,
    dtype: str = "bfloat16",
    tp: int = 1,
    new: int | None = None,
    launch_us: float = 0.0,
    usd_per_hour: float | None = None,
) -> dict[str, Any]:
    """Predicted times, rates, memory and price of ``batch`` requests with prompts of ``context`` tokens.

    The decode step is the one whose rows hold ``context`` tokens; with ``new``, a whole generation of so many
    tokens is added up too. ``usd_per_hour`` is the price of one of the ``tp`` devices.

    Raises:
        NanoinferError: an unknown model, device or dtype, sizes below 1, a context beyond the model's,
            heads that ``tp`` does not divide, or more than the memory holds.
    """
    config, dtype = config_of(model), dtype_named(dtype)
    check_sizes(batch=batch, context=context, **({} if new is None else {"new": new}))
    capacity.check_tp(config, tp)
    _finite(**{"launch-us": launch_us, "usd-per-hour": usd_per_hour or 0.0})
    longest = context + (new or 1) - 1
    if longest > config.context:
        asked = f"context {context}" + (f" and {new} new tokens need {longest}, which" if longest > context else "")
        raise RequestError(f"{asked} is beyond the {config.context} tokens that {model} can hold")
    notes: list[str] = []
    target = target_named(gpu, dtype)
    _check_memory(config, target, batch, longest, dtype, tp)
    machine = machine_of(target, dtype, launch_us, notes)
    first = prefill_step(config, machine, batch, context, tp)
    step = decode_step(config, machine, batch, context, tp)
    row_s = decode_step(config, machine, batch + 1, context, tp).seconds - step.seconds
    used = capacity.where_bytes_go(config, batch, longest, dtype, tp=tp)
    rates = {"input": batch * context / first.seconds, "output": batch / step.seconds}
    return {
        "model": model_row(model, config),
        "machine": {
            "name": target.name,
            "rates_from": target.source,
            "datasheet": target.page,
            "devices": tp,
            "dtype": dtype,
            "peak_flops_per_s": machine.peak,
            "bandwidth_bytes_per_s": machine.bandwidth,
            "ridge_flops_per_byte": machine.ridge,
            "launch_s": machine.launch_s,
            "memory_bytes": target.memory_bytes,
        },
        "request": {"batch_rows": batch, "context_tokens": context, "new_tokens": new},
        "weights_bytes": arithmetic.weight_bytes(config, dtype),
        "kv_bytes_per_token": arithmetic.kv_bytes_per_token(config, dtype),
        "kv_bytes": arithmetic.kv_bytes(config, batch, longest, dtype),
        "used_per_device_bytes": {**bytes_row(used), "total": used.total},
        "prefill": {**_step(first), "input_tokens_per_s": rates["input"], "why": _why_prefill(first)},
        "decode": {
            **_step(step),
            "tokens_per_s_per_request": 1 / step.seconds,
            "tokens_per_s": rates["output"],
            "another_row_s": row_s,
            "why": _why_decode(config, step, row_s, dtype, tp),
        },
        "generation": None if new is None else _generation(config, machine, batch, context, new, tp, first.seconds),
        "price": None if usd_per_hour is None else _price(usd_per_hour, tp, rates),
        "energy": None if target.watts is None else _energy(target.watts, tp, rates),
        "changes": list(_changes(config, target, step, longest, dtype, tp)),
        "notes": notes,
    }


def _check_memory(config: ModelConfig, target: Target, batch: int, context: int, dtype: str, tp: int) -> None:
    found = capacity.fit(config, target.memory_bytes, context, dtype, tp=tp, utilisation=1.0, block=1)
    if found.max_batch < batch:
        raise RequestError(
            f"{batch} rows of {context} tokens do not fit {target.name} ({target.memory_bytes / 1e9:.0f} GB a device) "
            f"in {dtype}: at most {found.max_batch} do; take fewer, a shorter context or more devices (--tp)"
        )


def _step(step: Step) -> dict[str, Any]:
    return {
        "seconds": step.seconds,
        "flops_per_device": step.flops,
        "bytes_per_device": step.nbytes,
        "flops_per_byte": step.flops / step.nbytes,
        "bound": step.bound,
        "bound_share_of_time": _share(step),
        "operators": [
            {
                "name": op.name,
                "calls": op.calls,
                "flops": op.flops,
                "bytes": op.nbytes,
                "flops_per_byte": op.flops / op.nbytes if op.nbytes else None,
                "seconds": op.seconds,
                "bound": op.bound,
            }
            for op in step.operators
        ],
    }


def _share(step: Step) -> float:
    """Share of the step's time in operators on the side that rules it."""
    return sum(op.seconds for op in step.operators if op.bound == step.bound) / step.seconds


def _generation(
    config: ModelConfig, machine: Machine, batch: int, context: int, new: int, tp: int, first_s: float
) -> dict[str, float]:
    """A prefill, which gives the first token, and ``new - 1`` decode steps, the cache one token longer each time."""
    steps = new - 1
    at = sorted({1 + round(i * (steps - 1) / (POINTS - 1)) for i in range(POINTS)}) if steps else []
    times = [decode_step(config, machine, batch, context + i, tp).seconds for i in at]
    # Whole steps from one point up to the next, on the line between them.
    decode_s = sum((b - a) * (s + t) / 2 for a, b, s, t in zip(at, at[1:], times, times[1:], strict=False))
    decode_s += (times[0] + times[-1]) / 2 if times else 0.0
    seconds = first_s + decode_s
    return {
        "seconds": seconds,
        "decode_seconds": decode_s,
        "tokens_per_s_per_request": new / seconds,
        "tokens_per_s": batch * new / seconds,
    }


def _price(usd_per_hour: float, tp: int, rates: dict[str, float]) -> dict[str, float]:
    price = cost.Workload(usd_per_hour * tp, rates["input"], rates["output"]).price
    return {
        "usd_per_hour_per_device": usd_per_hour,
        "input_usd_per_mtok": price.input,
        "output_usd_per_mtok": price.output,
    }


def _energy(watts: float, tp: int, rates: dict[str, float]) -> dict[str, Any]:
    return {
        "watts_per_device": watts,
        "watts_from": "datasheet: the board's limit, so an upper bound",
        "joules_per_input_token": cost.joules_per_token(watts * tp, rates["input"]),
        "joules_per_output_token": cost.joules_per_token(watts * tp, rates["output"]),
    }


# --- why, and what would change it --------------------------------------------------


def _why_prefill(step: Step) -> str:
    rows, ridge = step.batch * step.context, step.machine.ridge
    head = f"Prefill is {step.bound}-bound ({_share(step):.0%} of its time)"
    met = f"{step.flops / step.nbytes:,.0f} FLOP/B against a ridge of {ridge:,.0f}"
    if step.bound == "compute":
        return (
            f"{head}: each weight that is read meets {rows:,} tokens, {met}. A smaller batch or a shorter prompt (or a "
            f"cached prefix), arithmetic in fewer bits or more devices shorten it; faster memory only the other "
            f"{1 - _share(step):.0%}."
        )
    if step.bound == "memory":
        small = [op for op in step.operators if op.bound == "memory" and not op.flops]
        if (seconds := sum(op.seconds for op in small)) > _share(step) * step.seconds / 2:
            return (
                f"{head}: its norms, activations and residuals, run one by one, move "
                f"{sum(op.nbytes for op in small) / 1e9:,.0f} GB and take {seconds / step.seconds:.0%} of the time. "
                "Fused kernels move a fraction of that."
            )
        return f"{head}: {rows:,} tokens are too few to keep the arithmetic busy, {met}. More of them are nearly free."
    return f"{head}: {_overhead(step)}"


def _overhead(step: Step) -> str:
    """The sentence for a step that neither arithmetic nor memory rules."""
    if step.bound == "link":
        calls = sum(op.calls for op in step.operators if op.bound == "link")
        return f"its {calls} all-reduces cost more than its reading. Fewer devices or a faster link shorten it."
    calls = sum(op.calls for op in step.operators)
    return (
        f"starting its {calls:,} operators takes longer than their work. Fused operators, recorded graphs or a "
        "larger batch (nearly free) spread that cost."
    )


def _read(config: ModelConfig, batch: int, context: int, dtype: str, tp: int) -> tuple[float, float]:
    """Bytes of weights and of KV cache that a decode step reads on each device."""
    kv = arithmetic.kv_bytes(config, batch, context, dtype) * capacity.kv_share(config, tp)
    return arithmetic.step_weight_bytes(config, batch, dtype) / tp, kv


def _why_decode(config: ModelConfig, step: Step, row_s: float, dtype: str, tp: int) -> str:
    head = f"Decode is {step.bound}-bound ({_share(step):.0%} of its time)"
    if step.bound in ("launch", "link"):
        return f"{head}: {_overhead(step)}"
    machine, row = step.machine, f"another row adds {row_s / step.seconds:.1%} to the step"
    if step.bound == "compute":
        return (
            f"{head}: {step.flops / step.nbytes:,.0f} FLOP/B against a ridge of {machine.ridge:,.0f}. More rows do not "
            f"come free ({row}): arithmetic in fewer bits or more devices shorten the step."
        )
    weights, kv = _read(config, step.batch, step.context, dtype, tp)
    reads = f"{head}: a step reads {weights / 1e9:.2f} GB of weights and {kv / 1e9:.2f} GB of KV cache a device."
    if weights < kv:
        return (
            f"{reads} The cache is the larger part and no two rows share theirs, so {row}: a shorter context, a "
            "cache in fewer bits or more devices shorten it."
        )
    # Rows at which a weight's arithmetic takes as long as its reading; experts see a part of the rows each.
    full = machine.ridge * BYTES[dtype] / 2 * (config.moe.n_experts / config.moe.top_k if config.moe else 1)
    measured = machine.linear or machine.curves  # then there is no one ridge at which the rates turn
    until = "" if measured else f", until at about {full:,.0f} rows their arithmetic takes as long as their reading"
    return (
        f"{reads} The weights are the larger part and are read once for all rows, so {row}{until}. Half the bits a "
        "weight, half that reading."
    )


def _changes(
    config: ModelConfig, target: Target, step: Step, longest: int, dtype: str, tp: int
) -> Iterator[dict[str, Any]]:
    """One thing changed at a time, and the decode step predicted again."""
    batch, context, machine = step.batch, step.context, step.machine

    def row(change: str, seconds: float, rows: int = batch) -> dict[str, Any]:
        return {"change": change, "decode_seconds": seconds, "tokens_per_s": rows / seconds}

    if capacity.where_bytes_go(config, 2 * batch, longest, dtype, tp=tp).total <= target.memory_bytes:
        doubled = decode_step(config, machine, 2 * batch, context, tp)
        yield row(f"twice the batch ({2 * batch})", doubled.seconds, 2 * batch)
    if context > 1:
        yield row(f"half the context ({context // 2})", decode_step(config, machine, batch, context // 2, tp).seconds)
    if machine.link is not None and capacity.divides(config, 2 * tp):
        yield row(f"twice the devices (--tp {2 * tp})", decode_step(config, machine, batch, context, 2 * tp).seconds)
    if target.device is not None:
        return  # products in fewer bits have not been measured here
    weights, kv = _read(config, batch, context, dtype, tp)
    names = {head_matrix(config).name}.union(m.name for i in range(config.n_layers) for m in layer_matrices(config, i))
    half = 8 * BYTES[dtype] // 2
    for what, nbytes, products in (("weights", weights, True), ("KV cache", kv, False)):
        operators = [op for op in step.operators if (op.name in names) is products and op.flops]
        # No more can be saved than what reading takes beyond arithmetic.
        spare = sum(max(0.0, op.nbytes / machine.bandwidth - op.flops / machine.peak) for op in operators)
        yield row(f"{what} in {half} bits", step.seconds - min(nbytes / 2 / machine.bandwidth, spare))

"""How fast, why, and what would change it: the record behind ``nanoinfer predict``.

Every figure goes into one dict with its unit in the key, which is the JSON; :mod:`nanoinfer.predict.terminal` prints
that dict. What would change it is found by predicting again with one thing changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

from nanoinfer.configs.config import ModelConfig
from nanoinfer.errors import RequestError, check
from nanoinfer.models.lookup import config_of
from nanoinfer.predict.advice import Demand, Preferences, advise
from nanoinfer.predict.options import PredictOptions
from nanoinfer.predict.target import (
    Links,
    TargetDevice,
    bytes_row,
    dtype_named,
    links_row,
    machine_of,
    machine_row,
    model_row,
    target_named,
)
from nanoinfer.theory import arithmetic, capacity, cost
from nanoinfer.theory.arithmetic import BYTES
from nanoinfer.theory.parallel import ParallelConfig, decode_step, largest_batch, memory, prefill_step
from nanoinfer.theory.roofline import Step

#: Decode steps of one generation that are computed; those between lie on lines, as the cache grows by one a step.
POINTS: Final = 33
#: The decode step of n rows that hold n tokens each, under a split.
Decode = Callable[[int, int, ParallelConfig], Step]


def predict(options: PredictOptions) -> dict[str, Any]:
    """Predicted times, rates, memory and price.

    The decode step is the one whose rows hold ``context`` tokens; with ``new``, a whole generation of that many tokens
    is added up too. Raises :class:`NanoinferError` for what the model, the devices or their memory do not allow.
    """
    config, dtype = config_of(options.model), dtype_named(options.dtype)
    split = ParallelConfig(options.tp, options.pp, options.cp, options.ep, options.replicas)
    longest = options.context + (options.new or 1) - 1
    batch, context, micro_batches = options.batch, options.context, options.micro_batches
    preferences = Preferences(options.want, options.shared_prefix, options.models)
    links = Links(options.link, options.nodes_link, options.gpus_per_node, options.alpha_us, options.nodes_alpha_us)
    _check(options, config, split, longest)
    preferences.check(context)
    notes: list[str] = []
    target = target_named(options.gpu, dtype)
    _check_memory(config, target, split, batch, longest, dtype)
    machine = links.connect(machine_of(target, dtype, options.launch_us, notes), split, notes)

    def decode(rows: int, tokens: int, split: ParallelConfig) -> Step:
        m = None if split.pp == 1 or micro_batches is None else min(micro_batches, rows)
        return decode_step(config, machine, split, rows, tokens, micro_batches=m, imbalance=options.imbalance)

    if split.pp > 1 and micro_batches is not None and micro_batches < split.pp:
        notes.append(f"{micro_batches} micro-batches cannot keep {split.pp} stages at work: some always wait.")
    prefill = prefill_step(
        config, machine, split, batch, context, micro_batches=micro_batches, imbalance=options.imbalance
    )
    step = decode(batch, context, split)
    row_s = decode(batch + 1, context, split).seconds - step.seconds
    used = memory(config, split, batch, longest, dtype)
    rates = {
        "input": split.replicas * batch * context / prefill.seconds,
        "output": split.replicas * batch / step.seconds,
    }
    return {
        "model": model_row(options.model, config),
        "machine": machine_row(target, machine, split.devices, dtype) | {"ridge_flops_per_byte": machine.ridge},
        "split": {
            **vars(split),
            "micro_batches": None if split.pp == 1 else micro_batches or min(split.pp, batch),
            "imbalance": options.imbalance,
        },
        "links": links_row(machine, split),
        "request": {"batch_rows": batch, "context_tokens": context, "new_tokens": options.new},
        "weights_bytes": arithmetic.weight_bytes(config, dtype),
        "kv_bytes_per_token": arithmetic.kv_bytes_per_token(config, dtype),
        "kv_bytes": arithmetic.kv_bytes(config, batch, longest, dtype),
        "used_per_device_bytes": {**bytes_row(used), "total": used.total},
        "prefill": {
            **_step_row(prefill, batch * context),
            "input_tokens_per_s": rates["input"],
            "why": why_prefill(prefill),
        },
        "decode": {
            **_step_row(step, batch),
            "tokens_per_s_per_request": 1 / step.seconds,
            "tokens_per_s": rates["output"],
            "another_row_s": row_s,
            "why": why_decode(config, step, row_s, split),
        },
        "generation": None
        if options.new is None
        else _generation(lambda tokens: decode(batch, tokens, split).seconds, prefill, options.new, split.replicas),
        "price": None if options.usd_per_hour is None else _price(options.usd_per_hour, split.devices, rates),
        "energy": None if target.watts is None else _energy(target.watts, split.devices, rates),
        "changes": list(_changes(config, target, step, longest, split, decode)),
        "questions": advise(Demand(config, machine, target.memory_bytes, batch, context, longest), split, preferences),
        "notes": notes,
    }


def _check(options: PredictOptions, config: ModelConfig, split: ParallelConfig, longest: int) -> None:
    for name in ("batch", "context", "new", "micro_batches"):
        if (size := getattr(options, name)) is not None:
            check(f"--{name.replace('_', '-')}", size, at_least=1)
    split.check(config)
    check("--launch-us", options.launch_us, at_least=0)
    if options.usd_per_hour is not None:
        check("--usd-per-hour", options.usd_per_hour, above=0)
    if longest > config.context:
        more = f" and {options.new} new tokens need {longest}, which" if longest > options.context else ""
        raise RequestError(
            f"context {options.context}{more} is beyond the {config.context} tokens that {options.model} can hold"
        )
    if (options.micro_batches or 1) > options.batch:
        raise RequestError(
            f"{options.batch} rows do not fill {options.micro_batches} micro-batches; take at most {options.batch}"
        )


def _check_memory(
    config: ModelConfig, target: TargetDevice, split: ParallelConfig, batch: int, tokens: int, dtype: str
) -> None:
    if split.group == split.tp:  # its error says how many devices would hold the weights
        capacity.fit(config, target.memory_bytes, tokens, dtype, tp=split.tp, utilisation=1.0, block=1)
    most = largest_batch(config, split, tokens, target.memory_bytes, dtype, utilisation=1.0, block=1)
    if most < batch:
        weights = memory(config, split, 1, 1, dtype).weights / 1e9
        raise RequestError(
            f"{batch} rows of {tokens} tokens do not fit {target.name} ({target.memory_bytes / 1e9:.0f} GB a device) "
            f"in {dtype}: at most {most} do next to {weights:.1f} GB of weights; take fewer, a shorter context or more "
            "devices (--tp)"
        )


def _step_row(step: Step, tokens: int) -> dict[str, Any]:
    links = [op for op in step.operators if op.bound == "link"]
    return {
        "seconds": step.seconds,
        "flops_per_device": step.flops,
        "bytes_per_device": step.nbytes,
        "flops_per_byte": step.flops / step.nbytes,
        "bound": step.bound,
        "bound_share_of_time": step.share(step.bound),
        "communication": {
            "calls": sum(op.calls for op in links),
            "sent_per_device_bytes": step.sent,
            "sent_per_device_and_token_bytes": step.sent / tokens,
            "seconds": sum(op.seconds for op in links),
            "waiting_for_others_s": sum(op.seconds for op in step.operators if op.bound == "idle"),
            "share_of_time": step.share("link", "idle"),
        },
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


def _generation(decode_s: Callable[[int], float], first: Step, new: int, replicas: int) -> dict[str, float]:
    """A prefill, which gives the first token, and ``new - 1`` decode steps, the cache one token longer each time."""
    steps, batch = new - 1, first.batch
    at = sorted({1 + round(i * (steps - 1) / (POINTS - 1)) for i in range(POINTS)}) if steps else []
    times = [decode_s(first.context + i) for i in at]
    # Whole steps from one point up to the next, on the line between them.
    decode = sum((b - a) * (s + t) / 2 for a, b, s, t in zip(at, at[1:], times, times[1:], strict=False))
    decode += (times[0] + times[-1]) / 2 if times else 0.0
    seconds = first.seconds + decode
    return {
        "seconds": seconds,
        "decode_seconds": decode,
        "tokens_per_s_per_request": new / seconds,
        "tokens_per_s": replicas * batch * new / seconds,
    }


def _price(usd_per_hour: float, devices: int, rates: dict[str, float]) -> dict[str, float]:
    price = cost.Workload(usd_per_hour * devices, rates["input"], rates["output"]).price
    return {
        "usd_per_hour_per_device": usd_per_hour,
        "usd_per_hour": usd_per_hour * devices,
        "input_usd_per_mtok": price.input,
        "output_usd_per_mtok": price.output,
    }


def _energy(watts: float, devices: int, rates: dict[str, float]) -> dict[str, Any]:
    return {
        "watts_per_device": watts,
        "watts_from": "datasheet: the board's limit, so an upper bound",
        "joules_per_input_token": cost.joules_per_token(watts * devices, rates["input"]),
        "joules_per_output_token": cost.joules_per_token(watts * devices, rates["output"]),
    }


def _changes(
    config: ModelConfig, target: TargetDevice, step: Step, longest: int, split: ParallelConfig, decode: Decode
) -> Iterator[dict[str, Any]]:
    """One thing changed at a time, and the decode step predicted again."""
    batch, context, machine = step.batch, step.context, step.machine

    def row(change: str, seconds: float, rows: int = batch) -> dict[str, Any]:
        return {"change": change, "decode_seconds": seconds, "tokens_per_s": split.replicas * rows / seconds}

    if memory(config, split, 2 * batch, longest, machine.dtype).total <= target.memory_bytes:
        yield row(f"twice the batch ({2 * batch})", decode(2 * batch, context, split).seconds, 2 * batch)
    if context > 1:
        yield row(f"half the context ({context // 2})", decode(batch, context // 2, split).seconds)
    for name, n in vars(split).items():
        if machine.network is None or name == "replicas" or (n == 1 and not (name == "tp" and split.group == 1)):
            continue
        doubled = replace(split, **{name: 2 * n})
        try:
            yield row(f"twice the devices (--{name} {2 * n})", decode(batch, context, doubled).seconds)
        except RequestError:
            continue  # the model does not divide so
    if target.device is not None:
        return  # products in fewer bits have not been measured here
    weights, kv = bytes_read(config, step, split)
    half = 8 * BYTES[machine.dtype] // 2
    for what, nbytes, products in (("weights", weights, True), ("KV cache", kv, False)):
        operators = [op for op in step.operators if op.flops and (op.name != "attention") is products]
        # No more can be saved than what reading takes beyond arithmetic.
        spare = sum(max(0.0, op.nbytes / machine.bandwidth - op.flops / machine.peak) for op in operators)
        yield row(f"{what} in {half} bits", step.seconds - min(nbytes / 2 / machine.bandwidth, spare))


# --- why ----------------------------------------------------------------------------------


def bytes_read(config: ModelConfig, step: Step, split: ParallelConfig) -> tuple[float, float]:
    """Bytes of weights and of KV cache that a decode step reads on the busiest device."""
    dtype, tp = step.machine.dtype, split.tp
    if split.group == tp:
        kv = arithmetic.kv_bytes(config, step.batch, step.context, dtype) * capacity.kv_share(config, tp)
        return arithmetic.step_weight_bytes(config, step.batch, dtype) / tp, kv
    kv = sum(op.nbytes for op in step.operators if op.name == "attention")
    return sum(op.nbytes for op in step.operators if op.flops) - kv, kv


def why_prefill(step: Step) -> str:
    """Why a prefill takes as long as it does, and what shortens it."""
    rows, ridge = step.batch * step.context, step.machine.ridge
    head = f"Prefill is {step.bound}-bound ({step.share(step.bound):.0%} of its time)"
    met = f"{step.flops / step.nbytes:,.0f} FLOP/B against a ridge of {ridge:,.0f}"
    if step.bound == "compute":
        return (
            f"{head}: each weight that is read meets {rows:,} tokens, {met}. A smaller batch or a shorter prompt (or a "
            f"cached prefix), arithmetic in fewer bits or more devices shorten it; faster memory only the other "
            f"{1 - step.share(step.bound):.0%}."
        )
    if step.bound == "memory":
        small = [op for op in step.operators if op.bound == "memory" and not op.flops]
        if (seconds := sum(op.seconds for op in small)) > step.share(step.bound) * step.seconds / 2:
            return (
                f"{head}: its norms, activations and residuals, run one by one, move "
                f"{sum(op.nbytes for op in small) / 1e9:,.0f} GB and take {seconds / step.seconds:.0%} of the time. "
                "Fused kernels move a fraction of that."
            )
        return f"{head}: {rows:,} tokens are too few to keep the arithmetic busy, {met}. More of them are nearly free."
    return f"{head}: {_why_overhead(step)}"


def why_decode(config: ModelConfig, step: Step, row_s: float, split: ParallelConfig) -> str:
    """Why a decode step, to which another row adds ``row_s``, takes as long as it does, and what shortens it."""
    head = f"Decode is {step.bound}-bound ({step.share(step.bound):.0%} of its time)"
    if step.bound in ("launch", "link", "idle"):
        return f"{head}: {_why_overhead(step)}"
    machine, row = step.machine, f"another row adds {row_s / step.seconds:.1%} to the step"
    if step.bound == "compute":
        return (
            f"{head}: {step.flops / step.nbytes:,.0f} FLOP/B against a ridge of {machine.ridge:,.0f}. More rows do not "
            f"come free ({row}): arithmetic in fewer bits or more devices shorten the step."
        )
    weights, kv = bytes_read(config, step, split)
    reads = f"{head}: a step reads {weights / 1e9:.2f} GB of weights and {kv / 1e9:.2f} GB of KV cache a device."
    if weights < kv:
        return (
            f"{reads} The cache is the larger part and no two rows share theirs, so {row}: a shorter context, a "
            "cache in fewer bits or more devices shorten it."
        )
    # Rows at which a weight's arithmetic takes as long as its reading; experts see a part of the rows each.
    full = machine.ridge * BYTES[machine.dtype] / 2 * (config.moe.n_experts / config.moe.top_k if config.moe else 1)
    # Measured rates do not turn at one ridge; pipelines and experts see a part of the rows at a time.
    several = machine.linear or machine.curves or split.group > split.tp
    until = "" if several else f", until at about {full:,.0f} rows their arithmetic takes as long as their reading"
    return (
        f"{reads} The weights are the larger part and are read once for all rows, so {row}{until}. Half the bits a "
        "weight, half that reading."
    )


def _why_overhead(step: Step) -> str:
    """Why a step takes its time that neither arithmetic nor memory bounds."""
    if step.bound == "idle":
        return (
            "the stages wait for each other while rows come to them and leave. More micro-batches than stages fill "
            "the pipeline (--micro-batches), fewer stages empty it sooner."
        )
    if step.bound == "link":
        most = max((op for op in step.operators if op.bound == "link"), key=lambda op: op.seconds)
        they = f"{most.calls:,} {most.name}{'s' if most.calls > 1 else ''}"
        return f"its {they} cost more than its reading. Fewer devices or a faster link shorten it."
    calls = sum(op.calls for op in step.operators)
    return (
        f"starting its {calls:,} operators takes longer than their work. Fused operators, recorded graphs or a "
        "larger batch (nearly free) spread that cost."
    )

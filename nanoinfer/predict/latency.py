"""How fast, why, and what would change it: the record behind ``nanoinfer predict``.

The theory gives numbers; a reader who plans a deployment also needs the reason and the next
lever. The levers are found by predicting again with one thing changed. Every figure goes into
one dict with its unit in the key, which is the JSON; :mod:`nanoinfer.predict.tables` prints
the same dict, so the two cannot differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Final

from nanoinfer.configs.config import ModelConfig
from nanoinfer.errors import RequestError
from nanoinfer.models.lookup import config_of
from nanoinfer.predict import questions, reasons
from nanoinfer.predict.links import Links
from nanoinfer.predict.target import Target, bytes_row, dtype_named, machine_of, model_row, target_named
from nanoinfer.theory import arithmetic, capacity, cost
from nanoinfer.theory.parameters import BYTES, check_sizes
from nanoinfer.theory.roofline import Step
from nanoinfer.theory.scaling import waiting
from nanoinfer.theory.split import Split, largest_batch, memory
from nanoinfer.theory.split_steps import decode_step, prefill_step

#: Decode steps of one generation that are computed; those between lie on lines, as the cache grows by one a step.
POINTS: Final = 33
#: Seconds and step of so many rows that hold so many tokens, on so many devices.
Decode = Callable[[int, int, Split], Step]


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
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    replicas: int = 1,
    links: Links | None = None,
    micro_batches: int | None = None,
    imbalance: float = 1.0,
    new: int | None = None,
    launch_us: float = 0.0,
    usd_per_hour: float | None = None,
    asked: questions.Asked | None = None,
) -> dict[str, Any]:
    """Predicted times, rates, memory and price of ``batch`` requests with prompts of ``context`` tokens.

    The decode step is the one whose rows hold ``context`` tokens; with ``new``, a whole generation of so many
    tokens is added up too.

    Args:
        model: a name of a shape, or a file or folder that has one.
        gpu: a datasheet's name or ``here``.
        batch: rows of each replica.
        context: tokens of each row.
        dtype: of weights, cache and arithmetic.
        tp: devices that share each layer; ``pp``, ``cp``, ``ep`` and ``replicas`` as in
            :class:`~nanoinfer.theory.split.Split`.
        pp: stages.
        cp: parts of each prompt.
        ep: parts of a mixture of experts.
        replicas: copies of all that.
        links: between the devices.
        micro_batches: of a pipeline; as many as stages, or rows if those are fewer.
        imbalance: the busiest device's share of the experts' tokens over the mean one.
        new: tokens of an answer.
        launch_us: microseconds to start an operator.
        usd_per_hour: the price of one device.
        asked: what only who asks can know, for :mod:`nanoinfer.predict.questions`.

    Raises:
        NanoinferError: an unknown model, device, link or dtype, sizes below 1, a context beyond the model's,
            a split that the model or the devices do not allow, or more than the memory holds.
    """
    config, dtype = config_of(model), dtype_named(dtype)
    split, links, asked = Split(tp, pp, cp, ep, replicas), links or Links(), asked or questions.Asked()
    check_sizes(batch=batch, context=context, **({} if new is None else {"new": new}))
    split.check(config)
    asked.check(context)
    _finite(**{"launch-us": launch_us, "usd-per-hour": usd_per_hour or 0.0})
    longest = context + (new or 1) - 1
    if longest > config.context:
        beyond = f"context {context}" + (f" and {new} new tokens need {longest}, which" if longest > context else "")
        raise RequestError(f"{beyond} is beyond the {config.context} tokens that {model} can hold")
    notes: list[str] = []
    target = target_named(gpu, dtype)
    _check_memory(config, target, batch, longest, dtype, split)
    machine = links.of(machine_of(target, dtype, launch_us, notes), split, notes)

    def decode(rows: int, tokens: int, shared: Split) -> Step:
        m = None if shared.pp == 1 or micro_batches is None else min(micro_batches, rows)
        return decode_step(config, machine, shared, rows, tokens, micro_batches=m, imbalance=imbalance)

    if micro_batches is not None:
        notes += _check_micro_batches(micro_batches, batch, split)
    first = prefill_step(config, machine, split, batch, context, micro_batches=micro_batches, imbalance=imbalance)
    step = decode(batch, context, split)
    row_s = decode(batch + 1, context, split).seconds - step.seconds
    used = memory(config, split, batch, longest, dtype)
    rates = {"input": replicas * batch * context / first.seconds, "output": replicas * batch / step.seconds}
    return {
        "model": model_row(model, config),
        "machine": {
            "name": target.name,
            "rates_from": target.source,
            "datasheet": target.page,
            "devices": split.devices,
            "dtype": dtype,
            "peak_flops_per_s": machine.peak,
            "bandwidth_bytes_per_s": machine.bandwidth,
            "ridge_flops_per_byte": machine.ridge,
            "launch_s": machine.launch_s,
            "memory_bytes": target.memory_bytes,
        },
        "split": {**vars(split), "micro_batches": _micro_batches(micro_batches, batch, split), "imbalance": imbalance},
        "links": links.record(machine, split),
        "request": {"batch_rows": batch, "context_tokens": context, "new_tokens": new},
        "weights_bytes": arithmetic.weight_bytes(config, dtype),
        "kv_bytes_per_token": arithmetic.kv_bytes_per_token(config, dtype),
        "kv_bytes": arithmetic.kv_bytes(config, batch, longest, dtype),
        "used_per_device_bytes": {**bytes_row(used), "total": used.total},
        "prefill": {
            **_step(first, batch * context),
            "input_tokens_per_s": rates["input"],
            "why": reasons.why_prefill(first),
        },
        "decode": {
            **_step(step, batch),
            "tokens_per_s_per_request": 1 / step.seconds,
            "tokens_per_s": rates["output"],
            "another_row_s": row_s,
            "why": reasons.why_decode(config, step, row_s, split),
        },
        "generation": None
        if new is None
        else _generation(lambda tokens: decode(batch, tokens, split).seconds, first, new, replicas),
        "price": None if usd_per_hour is None else _price(usd_per_hour, split.devices, rates),
        "energy": None if target.watts is None else _energy(target.watts, split.devices, rates),
        "changes": list(_changes(config, target, step, longest, split, decode)),
        "questions": questions.answer(config, machine, target.memory_bytes, split, batch, context, longest, asked),
        "notes": notes,
    }


def _check_memory(config: ModelConfig, target: Target, batch: int, context: int, dtype: str, split: Split) -> None:
    if split.group == split.tp:  # says how many devices would hold the weights
        capacity.fit(config, target.memory_bytes, context, dtype, tp=split.tp, utilisation=1.0, block=1)
    most = largest_batch(config, split, context, target.memory_bytes, dtype, utilisation=1.0, block=1)
    if most < batch:
        beside = f" beside {memory(config, split, 1, 1, dtype).weights / 1e9:.1f} GB of weights"
        raise RequestError(
            f"{batch} rows of {context} tokens do not fit {target.name} ({target.memory_bytes / 1e9:.0f} GB a device) "
            f"in {dtype}: at most {most} do{beside}; take fewer, a shorter context or more devices (--tp)"
        )


def _check_micro_batches(micro_batches: int, batch: int, split: Split) -> Iterator[str]:
    check_sizes(**{"micro-batches": micro_batches})
    if micro_batches > batch:
        raise RequestError(f"{batch} rows do not fill {micro_batches} micro-batches; take at most {batch}")
    if split.pp > 1 and micro_batches < split.pp:
        yield f"{micro_batches} micro-batches cannot keep {split.pp} stages at work: some always wait."


def _micro_batches(micro_batches: int | None, batch: int, split: Split) -> int | None:
    return None if split.pp == 1 else micro_batches or min(split.pp, batch)


def _step(step: Step, tokens: int) -> dict[str, Any]:
    links = [op for op in step.operators if op.bound == "link"]
    return {
        "seconds": step.seconds,
        "flops_per_device": step.flops,
        "bytes_per_device": step.nbytes,
        "flops_per_byte": step.flops / step.nbytes,
        "bound": step.bound,
        "bound_share_of_time": reasons.share(step),
        "communication": {
            "calls": sum(op.calls for op in links),
            "sent_per_device_bytes": step.sent,
            "sent_per_device_and_token_bytes": step.sent / tokens,
            "seconds": sum(op.seconds for op in links),
            "waiting_for_others_s": sum(op.seconds for op in step.operators if op.bound == "idle"),
            "share_of_time": waiting(step),
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
    config: ModelConfig, target: Target, step: Step, longest: int, split: Split, decode: Decode
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
        if machine.link is None or name == "replicas" or (n == 1 and not (name == "tp" and split.group == 1)):
            continue
        doubled = Split(**{**vars(split), name: 2 * n})
        try:
            yield row(f"twice the devices (--{name} {2 * n})", decode(batch, context, doubled).seconds)
        except RequestError:
            continue  # the model does not divide so
    if target.device is not None:
        return  # products in fewer bits have not been measured here
    weights, kv = reasons.read(config, step, split)
    half = 8 * BYTES[machine.dtype] // 2
    for what, nbytes, products in (("weights", weights, True), ("KV cache", kv, False)):
        operators = [op for op in step.operators if op.flops and (op.name != "attention") is products]
        # No more can be saved than what reading takes beyond arithmetic.
        spare = sum(max(0.0, op.nbytes / machine.bandwidth - op.flops / machine.peak) for op in operators)
        yield row(f"{what} in {half} bits", step.seconds - min(nbytes / 2 / machine.bandwidth, spare))

"""Prints the records of predict, fit, gpus, plan and simulate. Reads the JSON alone, so that both say the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.console import Console

from nanoinfer.bench.tables import closing_lines, goodput_share, interval_text, latency_cells, show_parts
from nanoinfer.show.text import Rows, format_number, ms, si

PARALLELISM: Final = ("tp", "pp", "cp", "ep", "replicas")
#: Figures and rates of a simulation, in the order of its tables.
FIGURES: Final = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL, amortised",
    "e2e": "end to end",
    "normalized_latency": "end to end / tokens",
    "wait": "waiting for a first step",
}
RATES: Final = {"output_tok_s": "output tokens/s", "input_tok_s": "prompt tokens/s", "requests_s": "requests/s"}


def _devices(machine: Mapping[str, Any]) -> str:
    count = f"{machine['devices']} x " if machine["devices"] > 1 else ""
    return f"{count}{machine['name']}"


# --- predict ------------------------------------------------------------------------------


def show_predict(console: Console, record: dict[str, Any]) -> None:
    """The figures, each phase's operators with the reason, what would change it, and what decides the split."""
    show_parts(console, *_predict_parts(record))


def _predict_parts(record: dict[str, Any]) -> Iterator[Rows | str]:
    machine, request = record["machine"], record["request"]
    split = [f"{name} {n}" for name, n in record["split"].items() if name in PARALLELISM and n > 1]
    yield (
        f"{record['model']['name']} on {_devices(machine)} ({machine['rates_from']}), {machine['dtype']}, "
        f"batch {request['batch_rows']:,}, context {request['context_tokens']:,}{', '.join(['', *split])}"
    )
    yield ("", ""), _figures(record)
    for phase in ("prefill", "decode"):
        yield (phase, "calls", "FLOPs", "bytes", "FLOP/B", "time", "bound"), _operators(record[phase])
        yield record[phase]["why"]
    changes = [("as asked", record["decode"]["seconds"], record["decode"]["tokens_per_s"])]
    changes += [(row["change"], row["decode_seconds"], row["tokens_per_s"]) for row in record["changes"]]
    header = ("what would change it", "decode step", "tokens/s in all")
    yield header, [(name, si(seconds, "s"), f"{rate:,.0f}") for name, seconds, rate in changes]
    if (links := record["links"]) is not None:
        yield ("between devices, busiest one", "prefill", "decode"), _communication(record, links)
    yield from _advice(record["questions"])
    yield from record["notes"]


def _figures(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    model, machine, request = record["model"], record["machine"], record["request"]
    prefill, decode, used = record["prefill"], record["decode"], record["used_per_device_bytes"]
    yield "parameters", f"{model['parameters']:,}"
    if model["active_parameters"] < model["parameters"]:
        yield "parameters a token is multiplied by", f"{model['active_parameters']:,}"
    yield "weights", si(record["weights_bytes"], "B")
    yield "KV cache per token", f"{record['kv_bytes_per_token']:,} B"
    yield "KV cache in all", si(record["kv_bytes"], "B")
    yield "memory used of each device", f"{si(used['total'], 'B')} of {si(machine['memory_bytes'], 'B')}"
    yield (
        "peak, bandwidth",
        f"{si(machine['peak_flops_per_s'], 'FLOP/s')}, {si(machine['bandwidth_bytes_per_s'], 'B/s')}",
    )
    yield "ridge", f"{machine['ridge_flops_per_byte']:,.0f} FLOP/B"
    prompts = f" ({request['batch_rows']:,} prompts at once)" if request["batch_rows"] > 1 else ""
    yield f"prefill = TTFT{prompts}", si(prefill["seconds"], "s")
    yield "prefill rate", f"{prefill['input_tokens_per_s']:,.0f} tokens/s"
    yield "decode step = TPOT", si(decode["seconds"], "s")
    yield "another row adds", si(decode["another_row_s"], "s")
    yield "decode rate per request", f"{decode['tokens_per_s_per_request']:,.1f} tokens/s"
    yield "decode rate in all", f"{decode['tokens_per_s']:,.0f} tokens/s"
    if (whole := record["generation"]) is not None:
        yield f"{request['new_tokens']:,} new tokens, prefill included", si(whole["seconds"], "s")
        yield "rate over all of that, per request", f"{whole['tokens_per_s_per_request']:,.1f} tokens/s"
        yield "rate over all of that, in all", f"{whole['tokens_per_s']:,.0f} tokens/s"
    if (price := record["price"]) is not None:
        both = f"${price['input_usd_per_mtok']:.4g} in, ${price['output_usd_per_mtok']:.4g} out"
        yield f"per million tokens, at ${price['usd_per_hour_per_device']:g}/h a device, never idle", both
    if (energy := record["energy"]) is not None:
        both = f"{energy['joules_per_input_token']:.4g} J in, {energy['joules_per_output_token']:.4g} J out"
        yield f"energy per token, at most ({energy['watts_per_device']:g} W a device, datasheet)", both


def _operators(step: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for op in step["operators"]:
        ratio = op["flops_per_byte"]
        yield (
            op["name"],
            f"{op['calls']:,}",
            si(op["flops"], "FLOP"),
            si(op["bytes"], "B"),
            "" if ratio is None else f"{ratio:,.1f}",
            si(op["seconds"], "s"),
            op["bound"],
        )
    flops, nbytes, ratio = step["flops_per_device"], step["bytes_per_device"], step["flops_per_byte"]
    total = (si(flops, "FLOP"), si(nbytes, "B"), f"{ratio:,.1f}", si(step["seconds"], "s"), step["bound"])
    yield ("all, per device", "", *total)


def _communication(record: dict[str, Any], links: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    phases = [record[phase]["communication"] for phase in ("prefill", "decode")]
    yield "calls", *(f"{phase['calls']:,}" for phase in phases)
    for name, key, unit in (
        ("bytes that it sends", "sent_per_device_bytes", "B"),
        ("the same a token", "sent_per_device_and_token_bytes", "B"),
        ("time for that", "seconds", "s"),
        ("waiting for other devices", "waiting_for_others_s", "s"),
    ):
        yield name, *(si(phase[key], unit) for phase in phases)
    yield "share of the time in both", *(f"{phase['share_of_time']:.1%}" for phase in phases)
    for name, rate, alpha in (("link", "link", "alpha"), ("link between servers", "nodes_link", "nodes_alpha")):
        if (rate_s := links[f"{rate}_bytes_per_s"]) is not None:
            yield f"{name}: rate, and time of a call", si(rate_s, "B/s"), si(links[f"{alpha}_s"], "s")


def _advice(advice: dict[str, Any]) -> Iterator[Rows | str]:
    """The five answers, which of them decides, and the splits compared."""
    answers = [(a["asks"], a["answer"] or f"not given ({a['give']})") for a in advice["answers"]]
    yield ("the five questions", ""), [(f"{i}. {asks}", answer) for i, (asks, answer) in enumerate(answers, 1)]
    decides = next(a for a in advice["answers"] if a["question"] == advice["decides"])
    yield f"What decides: {decides['question']}. {decides['asks']} {advice['why']}"
    yield f"Suggestion: {advice['suggestion']}"
    options = [
        (
            option["name"] + (" (as asked)" if option["as_asked"] and len(advice["choices"]) > 1 else ""),
            si(option["ttft_s"], "s"),
            si(option["decode_seconds"], "s"),
            f"{option['most_rows']:,}",
            f"{option['tokens_per_s_with_most_rows']:,.0f}",
        )
        for option in advice["choices"]
    ]
    yield ("as many devices, shared so", "one prompt", "decode step", "rows that fit", "tokens/s then"), options


# --- fit and gpus -------------------------------------------------------------------------


def show_fit(console: Console, record: dict[str, Any]) -> None:
    """What fits, where the bytes go, the reason, and what would change it."""
    machine, request, rows = record["machine"], record["request"], record["max_batch_rows"]
    memory = machine["memory_bytes"]
    figures = [
        (f"largest batch at {request['context_tokens']:,} tokens a row", f"{rows:,}"),
        ("longest context of a single row", f"{record['max_context_tokens']:,}"),
        (f"KV blocks of {request['block_tokens']:,} tokens", f"{record['kv_blocks']:,}"),
        ("KV cache per token", f"{record['kv_bytes_per_token']:,} B"),
        ("weights", si(record["weights_bytes"], "B")),
    ]
    where = f"bytes of each device with {rows:,} rows"
    if not rows:
        where = f"not one row of {request['context_tokens']:,} tokens fits"
    used = [*record["used_per_device_bytes"].items(), ("memory", memory)]
    show_parts(
        console,
        f"{record['model']['name']} on {_devices(machine)}, {machine['dtype']}, "
        f"{machine['utilisation']:.0%} of {si(memory, 'B')} to use",
        (("", ""), figures),
        ((where, "", "share"), [(name.replace("_", " "), si(n, "B"), f"{n / memory:.1%}") for name, n in used]),
        record["why"],
        (
            ("what would change it", "largest batch"),
            [("as asked", f"{rows:,}"), *((c["change"], f"{c['max_batch_rows']:,}") for c in record["changes"])],
        ),
    )


def show_gpus(console: Console, devices: list[dict[str, Any]]) -> None:
    """One line a device; an empty cell is a dtype it lacks, ``?`` one without an agreed figure."""
    dtypes = ("fp32", "bf16", "fp16", "fp8", "int8", "fp4")

    def rate(device: dict[str, Any], dtype: str) -> str:
        if dtype not in device["dense_tflops"]:
            return ""
        return "?" if (value := device["dense_tflops"][dtype]) is None else f"{value:g}"

    rows = [
        (
            device["name"],
            f"{device['memory_gb']:g}",
            f"{device['bandwidth_gb_per_s']:g}",
            *(rate(device, dtype) for dtype in dtypes),
            "" if device["watts"] is None else f"{device['watts']:g}",
            device["link"] or "",
        )
        for device in devices
    ]
    header = ("device (dense TFLOP/s by dtype; ? unpublished or contested)", "GB", "GB/s", *dtypes, "W", "link")
    show_parts(console, (header, rows))


# --- simulate and plan --------------------------------------------------------------------


def show_simulate(console: Console, record: Mapping[str, Any]) -> None:
    """What was simulated, the tables, each definition, and what must be known before it is believed."""
    machine, load, engine = record["machine"], record["load"], record["engine_settings"]
    split = f", {engine['replicas']} replicas of tp {machine['tp']}" if machine["devices"] > 1 else ""
    header = ("ms", "n", "mean", "median", "95% interval", "p90", "p95", "p99", "95% interval")
    figures = {title: record["latency"][name] for name, title in FIGURES.items()}
    latencies = [
        (t, *latency_cells(figure), interval_text(figure["intervals"]["p99"])) for t, figure in figures.items()
    ]
    show_parts(
        console,
        f"Simulated: {record['model']['name']} on {_devices(machine)} ({machine['rates_from']}){split}, "
        f"{machine['dtype']}; {load['requests']:,} requests, {load['arrivals']} at {load['rate_per_s']:g}/s, "
        f"prompts {load['prompt_tokens']}, answers {load['output_tokens']}, seed {load['seed']}; "
        f"{engine['kv_blocks']:,} KV blocks of {engine['block_tokens']} tokens a replica",
        (header, latencies),
        _use(record),
        *([_goodput(record)] if record["goodput"] else []),
        "",
        *closing_lines(_definitions(record), record["notes"]),
    )


def _use(record: Mapping[str, Any]) -> Rows:
    """Rates over the window, and how busy the engine was."""
    engine, requests = record["engine"], record["concurrency"]
    return ("over the window", "value"), [
        *((title, format_number(record["rates"][name]["value"], 4)) for name, title in RATES.items()),
        ("requests there, mean", format_number(requests["mean"])),
        ("of them waiting for a first step", format_number(requests["queued"]["mean"])),
        ("time in which a step ran", f"{engine['busy']['share']:.1%}"),
        ("sequences in a step, mean", format_number(engine["running"]["mean"])),
        ("a step, mean", f"{ms(engine['step_mean_s'])} ms"),
        ("KV blocks held, mean", _percent(engine["kv_used"]["mean"])),
        ("KV blocks held, most", _percent(engine["kv_used"]["max"])),
        ("preemptions", f"{engine['preemptions']:,}"),
    ]


def _percent(share: float | None) -> str:
    return format_number(None) if share is None else f"{share:.1%}"


def _limits(slo: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {ms(limit)} ms" for name, limit in slo.items())


def _goodput(record: Mapping[str, Any]) -> Rows:
    """The share that met every limit, and which limit the others broke."""
    goodput, highest = record["goodput"], record["highest_rate"]
    rows = [
        ("limits", _limits(goodput["slo_s"])),
        ("share of good requests", goodput_share(goodput)),
        ("good requests/s", format_number(goodput["requests_s"])),
        *((f"broke {name}", f"{n:,}") for name, n in goodput["broken_by"].items()),
    ]
    if goodput["excluded"]:
        rows.append(("without a value to judge, left out", f"{goodput['excluded']:,}"))
    if highest is not None:
        rate = f"{format_number(highest['rate_per_s'])}/s"
        rows.append((f"highest rate with {highest['needed_share']:.0%} good", rate))
    return ("goodput", "value"), rows


def _definitions(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and definition of what the tables show."""
    yield from ((title, record["latency"][name]["definition"]) for name, title in FIGURES.items())
    yield from ((title, record["rates"][name]["definition"]) for name, title in RATES.items())
    if record["goodput"]:
        yield "goodput", record["goodput"]["definition"]
    yield "intervals", record["interval_definition"]


def show_plan(console: Console, record: dict[str, Any]) -> None:
    """A row for each number of users."""
    machine = record["machine"]
    header = ("users", "requests/s", "replicas", "devices", "load", "TTFT p99", "TPOT p99")
    numbers = {
        "output_tokens_per_s": "tokens/s",
        "usd_per_hour": "$/h",
        "output_usd_per_mtok": "$/Mtok out",
        "watts": "W",
        "tokens_per_joule": "tokens/J",
    }
    rows = [
        (
            f"{plan['users']:,}",
            format_number(plan["load_per_s"]),
            f"{plan['replicas']:,} + {plan['spares']}",
            f"{plan['devices']:,}",
            f"{plan['load_share']:.0%}",
            f"{ms(plan['ttft_p99_s'])} ms",
            f"{ms(plan['tpot_p99_s'])} ms",
            *(format_number(plan[key]) for key in numbers),
        )
        for plan in record["plans"]
    ]
    rate = f"{format_number(record['replica_rate_per_s'])} requests/s"
    show_parts(
        console,
        f"{record['model']['name']} on {machine['tp']} x {machine['name']} a replica, {machine['dtype']}: "
        f"{rate} with {record['needed_share']:.0%} within {_limits(record['slo_s'])}",
    )
    show_parts(console, ((*header, *numbers.values()), rows), *record["notes"])

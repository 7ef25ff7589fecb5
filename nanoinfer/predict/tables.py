"""Prints what the commands worked out. Reads its dict alone, so that text and JSON say the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nanoinfer.show.text import as_table, si

WAYS = ("tp", "pp", "cp", "ep", "replicas")


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    return as_table((header, rows))


def _print(console: Console, *parts: Table | str) -> None:
    for part in parts:
        if isinstance(part, Table):
            console.print()
        console.print(Text(part) if isinstance(part, str) else part)


def show_predict(console: Console, record: dict[str, Any]) -> None:
    """The figures, each phase's operators with the reason, and what would change it."""
    machine, request = record["machine"], record["request"]
    devices = f"{machine['devices']} x " if machine["devices"] > 1 else ""
    ways = [f"{way} {n}" for way, n in record["split"].items() if way in WAYS and n > 1]
    _print(
        console,
        f"{record['model']['name']} on {devices}{machine['name']} ({machine['rates_from']}), {machine['dtype']}, "
        f"batch {request['batch_rows']:,}, context {request['context_tokens']:,}{', '.join(['', *ways])}",
        _table(("", ""), _figures(record)),
    )
    for phase in ("prefill", "decode"):
        step = record[phase]
        _print(console, _table((phase, *_OPERATOR[1:]), _operators(step)), step["why"])
    rows = [("as asked", record["decode"]["seconds"], record["decode"]["tokens_per_s"])]
    rows += [tuple(change.values()) for change in record["changes"]]
    header = ("what would change it", "decode step", "tokens/s in all")
    _print(console, _table(header, [(name, si(s, "s"), f"{rate:,.0f}") for name, s, rate in rows]))
    if (links := record["links"]) is not None:
        _print(console, _table(("between devices, busiest one", "prefill", "decode"), _communication(record, links)))
    show_questions(console, record["questions"])
    _print(console, *record["notes"])


def _communication(record: dict[str, Any], links: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    phases = [record[phase]["communication"] for phase in ("prefill", "decode")]

    def row(name: str, key: str, unit: str) -> tuple[str, str, str]:
        first, second = (si(phase[key], unit) for phase in phases)
        return name, first, second

    yield "calls", f"{phases[0]['calls']:,}", f"{phases[1]['calls']:,}"
    yield row("bytes that it sends", "sent_per_device_bytes", "B")
    yield row("the same a token", "sent_per_device_and_token_bytes", "B")
    yield row("time for that", "seconds", "s")
    yield row("waiting for other devices", "waiting_for_others_s", "s")
    first, second = (f"{phase['share_of_time']:.1%}" for phase in phases)
    yield "share of the time in both", first, second
    for name, rate, alpha in (("link", "link", "alpha"), ("link between servers", "nodes_link", "nodes_alpha")):
        if (rate_s := links[f"{rate}_bytes_per_s"]) is not None:
            yield f"{name}: rate, and time of a call", si(rate_s, "B/s"), si(links[f"{alpha}_s"], "s")


def show_questions(console: Console, found: dict[str, Any]) -> None:
    """The five answers, which of them decides, and the splits side by side."""
    rows = [(a["asks"], a["answer"] or f"not given ({a['give']})") for a in found["answers"]]
    decides = next(a for a in found["answers"] if a["question"] == found["decides"])
    ways = [
        (
            way["name"] + (" (as asked)" if way["as_asked"] and len(found["choices"]) > 1 else ""),
            si(way["ttft_s"], "s"),
            si(way["decode_seconds"], "s"),
            f"{way['most_rows']:,}",
            f"{way['tokens_per_s_with_most_rows']:,.0f}",
        )
        for way in found["choices"]
    ]
    _print(
        console,
        _table(("the five questions", ""), [(f"{i}. {asks}", said) for i, (asks, said) in enumerate(rows, 1)]),
        f"What decides: {decides['question']}. {decides['asks']} {found['why']}",
        f"Suggestion: {found['suggestion']}",
        _table(("as many devices, shared so", "one prompt", "decode step", "rows that fit", "tokens/s then"), ways),
    )


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


_OPERATOR = ("operator", "calls", "FLOPs", "bytes", "FLOP/B", "time", "bound")


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


def show_fit(console: Console, record: dict[str, Any]) -> None:
    """What fits, where the bytes go, the reason, and what would change it."""
    machine, request = record["machine"], record["request"]
    devices = f"{machine['devices']} x " if machine["devices"] > 1 else ""
    used = record["used_per_device_bytes"]
    rows = record["max_batch_rows"]
    if not rows:
        where = f"not one row of {request['context_tokens']:,} tokens fits"
    else:
        where = f"bytes of each device with {rows:,} rows"
    figures = [
        (f"largest batch at {request['context_tokens']:,} tokens a row", f"{rows:,}"),
        ("longest context of a single row", f"{record['max_context_tokens']:,}"),
        (f"KV blocks of {request['block_tokens']:,} tokens", f"{record['kv_blocks']:,}"),
        ("KV cache per token", f"{record['kv_bytes_per_token']:,} B"),
        ("weights", si(record["weights_bytes"], "B")),
    ]
    bytes_rows = [(n.replace("_", " "), si(v, "B"), f"{v / machine['memory_bytes']:.1%}") for n, v in used.items()]
    _print(
        console,
        f"{record['model']['name']} on {devices}{machine['name']}, {machine['dtype']}, "
        f"{machine['utilisation']:.0%} of {si(machine['memory_bytes'], 'B')} to use",
        _table(("", ""), figures),
        _table((where, "", "share"), [*bytes_rows, ("memory", si(machine["memory_bytes"], "B"), "100.0%")]),
        record["why"],
        _table(
            ("what would change it", "largest batch"),
            [("as asked", f"{rows:,}"), *((c["change"], f"{c['max_batch_rows']:,}") for c in record["changes"])],
        ),
    )


def show_gpus(console: Console, rows: list[dict[str, Any]]) -> None:
    """One line a device; an empty cell is a dtype it lacks, ``?`` one without an agreed figure."""
    dtypes = ("fp32", "bf16", "fp16", "fp8", "int8", "fp4")

    def rate(row: dict[str, Any], dtype: str) -> str:
        if dtype not in row["dense_tflops"]:
            return ""
        return "?" if (value := row["dense_tflops"][dtype]) is None else f"{value:g}"

    console.print(
        _table(
            ("device (dense TFLOP/s by dtype; ? unpublished or contested)", "GB", "GB/s", *dtypes, "W", "link"),
            [
                (
                    row["name"],
                    f"{row['memory_gb']:g}",
                    f"{row['bandwidth_gb_per_s']:g}",
                    *(rate(row, dtype) for dtype in dtypes),
                    "" if row["watts"] is None else f"{row['watts']:g}",
                    row["link"] or "",
                )
                for row in rows
            ],
        ),
    )

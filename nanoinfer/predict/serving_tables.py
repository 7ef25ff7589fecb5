"""Prints what ``nanoinfer simulate`` worked out. Reads the record alone, so that text and JSON say the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from nanoinfer.show.text import Rows, as_table, format_number, ms

NAMES: Final = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL, amortised",
    "e2e": "end to end",
    "normalized_latency": "end to end / tokens",
    "wait": "waiting for a first step",
}
RATES: Final = {"output_tok_s": "output tokens/s", "input_tok_s": "prompt tokens/s", "requests_s": "requests/s"}


def latency(record: Mapping[str, Any]) -> Rows:
    """A row a figure; the intervals are the median's and p99's."""
    header = ("ms", "n", "mean", "median", "95% interval", "p90", "p95", "p99", "95% interval")
    rows = []
    for name, title in NAMES.items():
        figure = record["latency"][name]
        tails = ["n too small" if figure["n"] and q in figure["too_small"] else ms(figure[q]) for q in header[5:8]]
        middle, last = (_interval(figure["intervals"][q]) for q in ("median", "p99"))
        rows.append((title, f"{figure['n']:,}", ms(figure["mean"]), ms(figure["median"]), middle, *tails, last))
    return header, rows


def _interval(pair: tuple[float | None, float | None]) -> str:
    low, high = pair
    return "n too small" if low is None or high is None else f"{ms(low)} to {ms(high)}"


def use(record: Mapping[str, Any]) -> Rows:
    """Rates over the window, and how busy the engine was."""
    engine, there = record["engine"], record["concurrency"]
    rows: list[tuple[str, ...]] = [
        (title, format_number(record["rates"][name]["value"], 4)) for name, title in RATES.items()
    ]
    rows += [
        ("requests there, mean", format_number(there["mean"])),
        ("of them waiting for a first step", format_number(there["queued"]["mean"])),
        ("time in which a step ran", f"{engine['busy']['share']:.1%}"),
        ("sequences in a step, mean", format_number(engine["running"]["mean"])),
        ("a step, mean", f"{ms(engine['step_mean_s'])} ms"),
        ("KV blocks held, mean", _percent(engine["kv_used"]["mean"])),
        ("KV blocks held, most", _percent(engine["kv_used"]["max"])),
        ("preemptions", f"{engine['preemptions']:,}"),
    ]
    return ("over the window", "value"), rows


def _percent(share: float | None) -> str:
    return format_number(None) if share is None else f"{share:.1%}"


def goodput(record: Mapping[str, Any]) -> Rows:
    """The share that met every limit, and which limit the others broke."""
    found, highest = record["goodput"], record["highest_rate"]
    share = _percent(found["share"])
    if found["interval"]:
        share += f" (95% interval {found['interval'][0]:.1%} to {found['interval'][1]:.1%})"
    rows: list[tuple[str, ...]] = [
        ("limits", ", ".join(f"{name} {ms(limit)} ms" for name, limit in found["slo_s"].items())),
        ("share of good requests", share),
        ("good requests/s", format_number(found["requests_s"])),
        *((f"broke {name}", f"{n:,}") for name, n in found["broken_by"].items()),
    ]
    if found["excluded"]:
        rows.append(("without a value to judge, left out", f"{found['excluded']:,}"))
    if highest is not None:
        rows.append(
            (f"highest rate with {highest['needed_share']:.0%} good", f"{format_number(highest['rate_per_s'])}/s")
        )
    return ("goodput", "value"), rows


def definitions(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and definition of what the tables show."""
    for name, title in NAMES.items():
        yield title, record["latency"][name]["definition"]
    for name, title in RATES.items():
        yield title, record["rates"][name]["definition"]
    if record["goodput"]:
        yield "goodput", record["goodput"]["definition"]
    yield "intervals", record["interval_definition"]


def show_simulate(console: Console, record: Mapping[str, Any]) -> None:
    """What was simulated, the tables, each definition, and what must be known before it is believed."""
    machine, load, engine = record["machine"], record["load"], record["engine_settings"]
    devices = f"{machine['devices']} x " if machine["devices"] > 1 else ""
    split = f", {engine['replicas']} replicas of tp {machine['tp']}" if machine["devices"] > 1 else ""
    console.print(
        Text(
            f"Simulated: {record['model']['name']} on {devices}{machine['name']} ({machine['rates_from']}){split}, "
            f"{machine['dtype']}; {load['requests']:,} requests, {load['arrivals']} at {load['rate_per_s']:g}/s, "
            f"prompts {load['prompt_tokens']}, answers {load['output_tokens']}, seed {load['seed']}; "
            f"{engine['kv_blocks']:,} KV blocks of {engine['block_tokens']} tokens a replica"
        )
    )
    for part in (latency(record), use(record), *([goodput(record)] if record["goodput"] else [])):
        console.print()
        console.print(as_table(part))
    console.print()
    for name, line in definitions(record):
        console.print(Text(f"{name}: {line}"))
    for note in record["notes"]:
        console.print(Text(f"Note: {note}"))

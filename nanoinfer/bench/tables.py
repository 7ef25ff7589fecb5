"""A summary as rows of text: the terminal and the page show the same ones, so they cannot differ.

Times are in milliseconds. A dash stands for what was not measured, and ``n too small`` for a percentile
that so few samples cannot bear.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from nanoinfer.bench.slo import slo_text
from nanoinfer.show.text import DASH, Rows, as_table, format_number, ms

#: Figures of the latency table, in its order, as people call them.
NAMES: Final = {
    "ttft": "TTFT",
    "ttft_service": "TTFT, from sending",
    "tpot": "TPOT",
    "itl": "ITL, amortised",
    "chunk_gap": "gap between chunks",
    "e2e": "end to end",
    "normalized_latency": "end to end / tokens",
    "client_delay": "send lag",
}
RATES: Final = {
    "output_tok_s": "output tokens/s",
    "peak_tok_s": "output tokens/s, peak",
    "drained_tok_s": "output tokens/s, drained",
    "input_tok_s": "input tokens/s",
    "requests_s": "requests/s",
}


def _interval(pair: Iterable[float | None] | None) -> str:
    if pair is None:
        return DASH
    low, high = pair
    return "n too small" if low is None or high is None else f"{ms(low)} to {ms(high)}"


def latency(record: Mapping[str, Any]) -> Rows:
    """A row a figure: samples, mean, median with its interval (of independent requests), tails."""
    header = ("ms", "n", "mean", "median", "95% interval", "p90", "p95", "p99", "max")
    rows = []
    for name, title in NAMES.items():
        figure = record["latency"][name]
        mark = " (estimated)" if figure.get("estimated_requests") else ""
        tails = ["n too small" if figure["n"] and q in figure["too_small"] else ms(figure[q]) for q in header[5:8]]
        interval = _interval(figure["intervals"]["median"] if figure["n"] and figure["intervals"] else None)
        middle = (f"{figure['n']:,}", ms(figure["mean"]), ms(figure["median"]), interval)
        rows.append((title + mark, *middle, *tails, ms(figure["max"])))
    return header, rows


def adjusted(record: Mapping[str, Any]) -> Rows:
    """Percentiles with each failed request as infinitely slow."""
    header = ("ms", "failed", "p50", "p90", "p95", "p99")
    rows = []
    for name, title in NAMES.items():
        if "adjusted" in (figure := record["latency"][name]):
            rows.append((title, f"{figure['failed']:,}", *(ms(figure["adjusted"][q]) for q in header[2:])))
    return header, rows


def rates(record: Mapping[str, Any]) -> Rows:
    """Rates over the window, concurrency, and Little's law."""
    rows = []
    for key, title in RATES.items():
        rate = record["rates"][key]
        rows.append((title + (" (estimated)" if rate["estimated"] else ""), format_number(rate["value"], 4)))
    concurrency = record["concurrency"]
    rows.append(("requests in flight, mean", format_number(concurrency["mean"])))
    if (law := concurrency["little"]) is not None:
        product = law["rate_per_s"] * law["time_s"]
        rows.append((f"Little: {format_number(law['rate_per_s'])}/s x {ms(law['time_s'])} ms", format_number(product)))
    return ("rate", "over the window"), rows


def requests(record: Mapping[str, Any]) -> Rows:
    """How the requests ended, and failures by kind."""
    found, tokens = record["requests"], record["tokens"]
    rows = [("attempted", f"{found['attempted']:,}"), ("ended well", f"{found['ok']:,}")]
    said = record["load"].get("error_messages", {})
    rows += [(_failure(kind, said.get(kind)), f"{n:,}") for kind, n in found["failures"].items()]
    rows += [("warm-up, left out", f"{found['warmup']:,}")]
    if found["cut_short"]:
        rows.append(("cut short by Ctrl-C, left out", f"{found['cut_short']:,}"))
    for name in ("prompt", "output"):
        rows.append((f"{name} tokens", DASH if tokens[name] is None else f"{tokens[name]:,}"))
    return ("requests", "number"), rows


def _failure(kind: str, said: str | None) -> str:
    """A kind of failure with the first words that came with it; they are a server's, so nothing unprintable passes."""
    words = "" if said is None else " ".join("".join(c if c.isprintable() else " " for c in said).split())
    return f"failed: {kind}" + (f" ({words[:77] + '...' if len(words) > 80 else words})" if words else "")


def goodput(record: Mapping[str, Any]) -> Rows:
    """The share that met every limit, and which limit the others broke."""
    found = record["goodput"]
    share = DASH if found["share"] is None else f"{found['share']:.1%}"
    if found["interval"]:
        share += f" (95% interval {found['interval'][0]:.1%} to {found['interval'][1]:.1%})"
    rows = [
        ("limits", slo_text(found["slo_s"])),
        ("share of good requests", share),
        ("good requests", f"{found['good']:,} of {found['attempted'] - found['excluded']:,}"),
        ("good requests/s", format_number(found["requests_s"])),
        ("their tokens/s", format_number(found["tok_s"], 4)),
        ("failed", f"{found['failed']:,}"),
        *((f"broke {name}", f"{n:,}") for name, n in found["broken_by"].items()),
        ("without a value to judge, left out", f"{found['excluded']:,}"),
    ]
    return ("goodput", "value"), rows


def levels(record: Mapping[str, Any]) -> Rows:
    """A sweep's levels: rates, medians, and goodput where there are limits."""
    header = ["n", "ok", "tok/s", "requests/s", "in flight", "TTFT", "TPOT", "end to end", "power"]
    header = [record["unit"], *header, *(["good", "good/s"] if record["slo_s"] else []), "remarks"]
    rows = []
    for point in record["points"]:
        found = point["summary"]
        row = [f"{point['level']:g}", f"{found['requests']['attempted']:,}", f"{found['requests']['ok']:,}"]
        row += [format_number(found["rates"][key]["value"]) for key in ("output_tok_s", "requests_s")]
        row += [format_number(found["concurrency"]["mean"])]
        row += [ms(found["latency"][name]["median"]) for name in ("ttft", "tpot", "e2e")]
        row += [format_number(point["power"])]
        if record["slo_s"]:
            share = found["goodput"]["share"]
            row += [DASH if share is None else f"{share:.1%}", format_number(found["goodput"]["requests_s"])]
        marks = ["knee"] if point["level"] == record["knee"]["level"] else []
        marks += ["highest good"] if point["level"] == record["highest_good"]["level"] else []
        marks += ["beyond its error budget"] if found["beyond_budget"] else []
        rows.append((*row, ", ".join(marks)))
    return tuple(header), rows


def client(record: Mapping[str, Any]) -> Rows:
    """How late our own side was."""
    rows = []
    for key, title in (("send_lag", "request sent late"), ("loop_stalls", "event loop late")):
        found = record["client"][key]
        rows.append((title, f"{found['n']:,}", ms(found["p50_s"]), ms(found["p99_s"]), ms(found["max_s"])))
    return ("ms", "n", "p50", "p99", "max"), rows


def definitions(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and definition of everything the tables show."""
    for name, title in NAMES.items():
        yield title, record["latency"][name]["definition"]
    for key, title in RATES.items():
        yield title, record["rates"][key]["definition"]
    yield "requests in flight, mean", record["concurrency"]["definition"]
    if (law := record["concurrency"]["little"]) is not None:
        yield "Little", law["definition"]
    if record["goodput"]:
        yield "goodput", record["goodput"]["definition"]
    yield "event loop late", record["client"]["loop_stalls"]["definition"]


def show(console: Console, record: Mapping[str, Any]) -> None:
    """Print a run's summary: tables, then each definition, then what must be known before it is believed."""
    parts = [requests(record), latency(record), rates(record), client(record)]
    if record["requests"]["attempted"] > record["requests"]["ok"]:
        parts.insert(2, adjusted(record))
    if record["goodput"]:
        parts.insert(-1, goodput(record))
    for part in parts:
        console.print(as_table(part))
        console.print()
    for name, line in definitions(record):
        console.print(Text(f"{name}: {line}"))
    for note in record["notes"]:
        console.print(Text(f"Note: {note}"))
    for reason in record["beyond_budget"]:
        console.print(Text(f"BEYOND ITS ERROR BUDGET: {reason}"))


def show_sweep(console: Console, record: Mapping[str, Any]) -> None:
    """Print a sweep: its levels, what was read off them with the rules, and what must be known."""
    console.print(as_table(levels(record)))
    console.print()
    console.print(Text(verdict(record)))
    for key in ("knee", "highest_good"):
        console.print(Text(f"{key.replace('_', ' ')}: {record[key]['definition']}"))
    if record["points"]:
        for name, line in definitions(record["points"][-1]["summary"]):
            console.print(Text(f"{name}: {line}"))
    for note in [*([record["stopped"]] if record["stopped"] else []), *record["notes"]]:
        console.print(Text(f"Note: {note}"))
    for level, reasons in record["beyond_budget"].items():
        for reason in reasons:
            console.print(Text(f"BEYOND ITS ERROR BUDGET at {level}: {reason}"))


def verdict(record: Mapping[str, Any]) -> str:
    """Where a sweep's knee lies and how high the SLO is still met."""
    unit, knee, highest = record["unit"], record["knee"]["level"], record["highest_good"]["level"]
    text = "No level gave a figure." if knee is None else f"The knee lies at {knee:g} {unit}."
    if record["slo_s"]:
        reached = "no level" if highest is None else f"{highest:g} {unit}"
        text += f" Highest that still meets the SLO ({slo_text(record['slo_s'])}): {reached}."
    return text

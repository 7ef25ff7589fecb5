"""A summary as rows of text, the same for the terminal and the page; times in milliseconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from nanoinfer.bench.summary import RATES
from nanoinfer.show.text import DASH, Rows, as_table, format_number, ms

TOO_SMALL: Final = "n too small"  # samples for a percentile; a dash stands for what was not measured
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


def slo_text(slo: Mapping[str, float]) -> str:
    """The limits in words: ``ttft at most 200 ms, tpot at most 50 ms``."""
    return ", ".join(f"{name} at most {seconds * 1e3:g} ms" for name, seconds in slo.items())


def interval_text(pair: Iterable[float | None] | None) -> str:
    """An interval in milliseconds; a dash for ``None``."""
    if pair is None:
        return DASH
    low, high = pair
    return TOO_SMALL if low is None or high is None else f"{ms(low)} to {ms(high)}"


def latency_cells(figure: Mapping[str, Any]) -> tuple[str, ...]:
    """Samples, mean, median with its interval, and tails of one figure."""
    intervals = figure["intervals"] if figure["n"] else None
    tails = (TOO_SMALL if figure["n"] and q in figure["too_small"] else ms(figure[q]) for q in ("p90", "p95", "p99"))
    middle = interval_text(None if intervals is None else intervals["median"])
    return (f"{figure['n']:,}", ms(figure["mean"]), ms(figure["median"]), middle, *tails)


def latency(record: Mapping[str, Any]) -> Rows:
    """A row a figure: samples, mean, median with its interval (of independent requests), tails."""
    rows = []
    for name, title in NAMES.items():
        figure = record["latency"][name]
        mark = " (estimated)" if figure.get("estimated_requests") else ""
        rows.append((title + mark, *latency_cells(figure), ms(figure["max"])))
    return ("ms", "n", "mean", "median", "95% interval", "p90", "p95", "p99", "max"), rows


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
    for key, (title, *_) in RATES.items():
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
    counts, tokens = record["requests"], record["tokens"]
    rows = [("attempted", f"{counts['attempted']:,}"), ("ended well", f"{counts['ok']:,}")]
    messages = record["load"].get("error_messages", {})
    rows += [(_failure(kind, messages.get(kind)), f"{n:,}") for kind, n in counts["failures"].items()]
    rows += [("warm-up, left out", f"{counts['warmup']:,}")]
    if counts["cut_short"]:
        rows.append(("cut short by Ctrl-C, left out", f"{counts['cut_short']:,}"))
    rows += [(f"{name} tokens", format_number(tokens[name])) for name in ("prompt", "output")]
    return ("requests", "number"), rows


def _failure(kind: str, message: str | None) -> str:
    """A kind of failure with its first message; that comes from a server, so unprintable characters are removed."""
    text = " ".join("".join(c if c.isprintable() else " " for c in message or "").split())
    return f"failed: {kind}" + (f" ({text[:77] + '...' if len(text) > 80 else text})" if text else "")


def goodput(record: Mapping[str, Any]) -> Rows:
    """The share that met every limit, and which limit the others broke."""
    goodput = record["goodput"]
    return ("goodput", "value"), [
        ("limits", slo_text(goodput["slo_s"])),
        ("share of good requests", goodput_share(goodput)),
        ("good requests", f"{goodput['good']:,} of {goodput['attempted'] - goodput['excluded']:,}"),
        ("good requests/s", format_number(goodput["requests_s"])),
        ("their tokens/s", format_number(goodput["tok_s"], 4)),
        ("failed", f"{goodput['failed']:,}"),
        *((f"broke {name}", f"{n:,}") for name, n in goodput["broken_by"].items()),
        ("without a value to judge, left out", f"{goodput['excluded']:,}"),
    ]


def goodput_share(goodput: Mapping[str, Any]) -> str:
    """The share of good requests with its interval."""
    share = DASH if goodput["share"] is None else f"{goodput['share']:.1%}"
    if goodput["interval"] is None:
        return share
    low, high = goodput["interval"]
    return f"{share} (95% interval {low:.1%} to {high:.1%})"


def levels(record: Mapping[str, Any]) -> Rows:
    """A sweep's levels: rates, medians, and goodput where there are limits."""
    header = ["n", "ok", "tok/s", "requests/s", "in flight", "TTFT", "TPOT", "end to end", "power"]
    header = [record["unit"], *header, *(["good", "good/s"] if record["slo_s"] else []), "remarks"]
    rows = []
    for point in record["points"]:
        summary = point["summary"]
        row = [f"{point['level']:g}", f"{summary['requests']['attempted']:,}", f"{summary['requests']['ok']:,}"]
        row += [format_number(summary["rates"][key]["value"]) for key in ("output_tok_s", "requests_s")]
        row += [format_number(summary["concurrency"]["mean"])]
        row += [ms(summary["latency"][name]["median"]) for name in ("ttft", "tpot", "e2e")]
        row += [format_number(point["power"])]
        if record["slo_s"]:
            share = summary["goodput"]["share"]
            row += [DASH if share is None else f"{share:.1%}", format_number(summary["goodput"]["requests_s"])]
        remarks = [
            name.replace("_", " ") for name in ("knee", "highest_good") if point["level"] == record[name]["level"]
        ]
        remarks += ["beyond its error budget"] if summary["beyond_budget"] else []
        rows.append((*row, ", ".join(remarks)))
    return tuple(header), rows


def client(record: Mapping[str, Any]) -> Rows:
    """How late the load generator was."""
    tails = {"request sent late": record["client"]["send_lag"], "event loop late": record["client"]["loop_stalls"]}
    header = ("ms", "n", "p50", "p99", "max")
    return header, [(title, f"{t['n']:,}", *(ms(t[f"{q}_s"]) for q in header[2:])) for title, t in tails.items()]


def of_run(record: Mapping[str, Any]) -> dict[str, tuple[str, Rows]]:
    """The tables of a run, in their order, each with its caption."""
    latencies = "Latencies of the requests that ended well, ms; the interval is the median's"
    found = {"requests": ("How the requests ended", requests(record)), "latency": (latencies, latency(record))}
    if record["requests"]["attempted"] > record["requests"]["ok"]:
        caption = "Percentiles with each failed request as infinitely slow, in milliseconds"
        found["adjusted"] = (caption, adjusted(record))
    found["rates"] = ("Rates over the window", rates(record))
    if record["goodput"]:
        found["goodput"] = ("Goodput under the SLO", goodput(record))
    return found | {"client": ("How late the load generator was, in milliseconds", client(record))}


def definitions(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and definition of everything the tables show."""
    named = [(title, record["latency"][name]) for name, title in NAMES.items()]
    named += [(title, record["rates"][key]) for key, (title, *_) in RATES.items()]
    named += [("requests in flight, mean", record["concurrency"]), ("Little", record["concurrency"]["little"])]
    named += [("goodput", record["goodput"]), ("event loop late", record["client"]["loop_stalls"])]
    return ((title, figure["definition"]) for title, figure in named if figure)


def show_parts(console: Console, *parts: Rows | str) -> None:
    """Print lines and tables, an empty line before each table but one that comes first."""
    for i, part in enumerate(parts):
        if isinstance(part, str):
            console.print(Text(part))
            continue
        if i:
            console.print()
        console.print(as_table(part))


def closing_lines(
    definitions: Iterable[tuple[str, str]], notes: Iterable[str], beyond: Iterable[str] = ()
) -> Iterator[str]:
    """Each definition, then what must be known before the figures are believed."""
    yield from (f"{name}: {line}" for name, line in definitions)
    yield from (f"Note: {note}" for note in notes)
    yield from (f"BEYOND ITS ERROR BUDGET{reason}" for reason in beyond)


def show(console: Console, record: Mapping[str, Any]) -> None:
    """Print a run's summary."""
    beyond = (f": {reason}" for reason in record["beyond_budget"])
    found = [rows for _, rows in of_run(record).values()]
    show_parts(console, *found, "", *closing_lines(definitions(record), record["notes"], beyond))


def show_sweep(console: Console, record: Mapping[str, Any]) -> None:
    """Print a sweep: its levels, what was read off them by which rules, and what must be known."""
    rules = [(key.replace("_", " "), record[key]["definition"]) for key in ("knee", "highest_good")]
    last = definitions(record["points"][-1]["summary"]) if record["points"] else ()
    notes = [*filter(None, [record["stopped"]]), *record["notes"]]
    beyond = (f" at {level}: {reason}" for level, reasons in record["beyond_budget"].items() for reason in reasons)
    show_parts(console, levels(record), "", verdict(record), *closing_lines([*rules, *last], notes, beyond))


def verdict(record: Mapping[str, Any]) -> str:
    """Where a sweep's knee lies and how high the SLO is still met."""
    unit, knee, highest = record["unit"], record["knee"]["level"], record["highest_good"]["level"]
    text = "No level gave a figure." if knee is None else f"The knee lies at {knee:g} {unit}."
    if record["slo_s"]:
        reached = "no level" if highest is None else f"{highest:g} {unit}"
        text += f" Highest that still meets the SLO ({slo_text(record['slo_s'])}): {reached}."
    return text

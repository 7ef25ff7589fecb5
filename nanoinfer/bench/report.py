"""The page of a run or a sweep: one file, no script, nothing fetched, readable in light and in dark.

Names and errors come from servers, so the template escapes every word.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from nanoinfer.bench import tables
from nanoinfer.bench.loadgen import Run
from nanoinfer.bench.tables import slo_text
from nanoinfer.measure import metrics
from nanoinfer.measure.stats import percentile, present, sorted_percentile
from nanoinfer.show.figures import DARK, LIGHT, figure
from nanoinfer.show.outputs import table
from nanoinfer.show.text import Rows, format_number, ms

SIZE: Final = (6.0, 3.6)  # inches of 96 CSS pixels: its text is still read at a phone's width
PARTS: Final = 20  # of the window, equal ones, in the figures over time
#: Percentiles of a distribution that are drawn, and those in its table.
DRAWN: Final = tuple(q / 2 for q in range(1, 200))
IN_TABLE: Final = (10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0)
WIDE: Final = 10  # from this ratio of the largest to the smallest value on, an axis is logarithmic


def run_page(run: Run, record: Mapping[str, Any]) -> str:
    """The page of a run, with :func:`~nanoinfer.bench.summary.summarise`'s record."""
    found = tables.of_run(record)
    headings = {"": ["latency"], "Rates and requests": ["rates", "requests", "adjusted", "goodput"]}
    headings["The client itself"] = ["client"]
    sections = [(heading, [_table(*found[n]) for n in names if n in found]) for heading, names in headings.items()]
    return _page(
        record,
        title="nanoinfer bench: one run",
        lead=headline(record),
        beyond=record["beyond_budget"],
        notes=record["notes"],
        sections=sections,
        plots=list(_run_plots(run)),
        definitions=list(tables.definitions(record)),
    )


def sweep_page(record: Mapping[str, Any]) -> str:
    """The page of a sweep, from its record."""
    last = record["points"][-1]["summary"] if record["points"] else None
    rules = [("knee", record["knee"]["definition"]), ("highest good level", record["highest_good"]["definition"])]
    return _page(
        last,
        title="nanoinfer bench: sweep",
        lead=tables.verdict(record),
        beyond=[f"At {level}: {reason}" for level, reasons in record["beyond_budget"].items() for reason in reasons],
        notes=[*record["notes"], *filter(None, [record["stopped"]])],
        sections=[("", [_table("Level by level; times are medians in milliseconds", tables.levels(record))])],
        plots=list(_sweep_plots(record)),
        definitions=[] if last is None else [*rules, *tables.definitions(last)],
    )


def headline(record: Mapping[str, Any]) -> str:
    """The result of a run in a sentence or two."""
    requests, rates, goodput = record["requests"], record["rates"], record["goodput"]
    text = (
        f"{requests['ok']:,} of {requests['attempted']:,} requests ended well; "
        f"{format_number(rates['output_tok_s']['value'])} output tokens/s "
        f"in a window of {format_number(record['window']['seconds'])} s."
    )
    medians = {name: record["latency"][name]["median"] for name in ("ttft", "tpot", "e2e")}
    known = [f"{tables.NAMES[name]} {ms(value)} ms" for name, value in medians.items() if value is not None]
    if known:
        text += f" Medians: {', '.join(known)}."
    if goodput and goodput["share"] is not None:
        text += f" {goodput['share']:.1%} met the SLO ({slo_text(goodput['slo_s'])})."
    return text


def _page(record: Mapping[str, Any] | None, **parts: object) -> str:
    settings = {} if record is None else {"Settings": record["load"], "Provenance": record["provenance"]}
    about = [_table(name, (("name", "value"), _flat(rows))) for name, rows in settings.items()]
    loader = FileSystemLoader(Path(__file__).parent)
    jinja = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return jinja.get_template("report.html.jinja").render(about=about, light=LIGHT, dark=DARK, **parts)


def _table(caption: str, rows: Rows) -> Markup:
    return Markup(table(rows[0], list(rows[1]), caption).body)


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key} ")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


def _plot(
    draw: Callable[[Axes], object], labels: tuple[str, str], alt: str, caption: str, rows: Rows, **limits: object
) -> Markup:
    """A figure with its numbers as a table; the legend stands above the drawing, where it hides nothing."""

    def finished(axes: Axes) -> None:
        draw(axes)
        axes.set(xlabel=labels[0], ylabel=labels[1], **limits)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)

    return Markup(figure(finished, alt=alt, caption=caption, table=(rows[0], list(rows[1])), size=SIZE).body)


def _logarithmic(axes: Axes, name: Literal["x", "y"]) -> None:
    """A logarithmic axis with plain numbers at 1, 2, 5, 10 ..."""
    axes.set(**{f"{name}scale": "log"})
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _run_plots(run: Run) -> Iterator[Markup]:
    """Distributions and what happened over time; a figure without numbers is left out."""
    good = [trace for trace in run.measured() if trace.status == "ok"]
    ttft, sent = (metrics.collect(good, name).values for name in ("ttft", "ttft_service"))
    itl, gaps = ([gap for t in good for gap in of(t)] for of in (metrics.itl_samples, metrics.chunk_gaps))
    for title, samples in (
        ("Time to first token", {"from schedule": ttft, "from sending": sent}),
        ("Inter-token latency", {"amortised, a token": itl, "between chunks": gaps}),
    ):
        if ordered := {name: sorted(values) for name, values in samples.items() if values}:
            yield _distribution(title, ordered)
    if run.traces and run.end > run.start:
        yield from _over_time(run)


def _distribution(title: str, ordered: Mapping[str, Sequence[float]]) -> Markup:
    def draw(axes: Axes) -> None:
        for name, values in ordered.items():
            axes.step([1e3 * sorted_percentile(values, q) for q in DRAWN], DRAWN, where="post", label=name)
        low, high = min(values[0] for values in ordered.values()), max(values[-1] for values in ordered.values())
        if 0 < WIDE * low < high:
            _logarithmic(axes, "x")

    rows = {q: [ms(sorted_percentile(values, q)) for values in ordered.values()] for q in IN_TABLE}
    counts = ", ".join(f"{name} n={len(values):,}" for name, values in ordered.items())
    middles = "; ".join(
        f"{name}: half at or below {half} ms, 90% at or below {most} ms"
        for name, half, most in zip(ordered, rows[50], rows[90], strict=True)
    )
    alt = f"{title}: the share of samples at or below each value. {middles}."
    labels, caption = (f"{title}, ms", "% of samples at or below"), f"{title}: distribution ({counts})"
    return _plot(draw, labels, alt, caption, (("ms", *ordered), [(f"p{q:g}", *row) for q, row in rows.items()]))


def _over_time(run: Run) -> Iterator[Markup]:
    part = (run.end - run.start) / PARTS
    edges = [*(run.start + i * part for i in range(PARTS)), run.end]
    tokens = [0] * PARTS
    for trace in run.traces:
        for t, n in trace.token_chunks:
            if run.start <= t < run.end:
                tokens[min(int((t - run.start) / part), PARTS - 1)] += n
    flight = [metrics.mean_concurrency(run.traces, low, high) for low, high in pairwise(edges)]
    seconds = [edge - run.start for edge in edges]
    yield _bars("Output tokens per second", "tok/s", seconds, [n / part for n in tokens])
    yield _bars("Requests in flight", "requests in flight, mean", seconds, flight)
    due = ([trace for trace in run.traces if low <= trace.t_scheduled < high] for low, high in pairwise(edges))
    ttfts = [metrics.collect(traces, "ttft") for traces in due]
    if any(ttft.values for ttft in ttfts):
        yield _first_tokens(seconds, ttfts)


def _spans(edges: Sequence[float]) -> list[str]:
    return [f"{low:.4g} to {high:.4g}" for low, high in pairwise(edges)]


def _bars(title: str, unit: str, edges: Sequence[float], values: Sequence[float]) -> Markup:
    mean, best = math.fsum(values) / len(values), max(values)

    def draw(axes: Axes) -> None:
        axes.stairs(values, edges, baseline=None, color="C0", linewidth=2.2)
        axes.axhline(mean, color="C1", linestyle="--", label=f"mean {format_number(mean)}")

    rows = zip(_spans(edges), map(format_number, values), strict=True)
    alt = (
        f"{title} over the window, in {len(values)} parts of {format_number(edges[1])} s: mean {format_number(mean)}, "
        f"lowest {format_number(min(values))}, highest {format_number(best)}."
    )
    labels, caption = ("seconds since the window began", unit), f"{title} over the window"
    return _plot(draw, labels, alt, caption, (("seconds", unit), rows), ylim=(0, best * 1.1 or 1))


def _first_tokens(edges: Sequence[float], ttfts: Sequence[metrics.Collected]) -> Markup:
    """TTFT by when the request was due: a line that climbs is a queue that grows."""
    middles = [percentile(ttft.values, 50) for ttft in ttfts]
    worsts = [max(ttft.values, default=None) for ttft in ttfts]
    lines = {"median": present(middles), "worst": present(worsts)}
    at = [(low + high) / 2 for (low, high), ttft in zip(pairwise(edges), ttfts, strict=True) if ttft.values]

    def draw(axes: Axes) -> None:
        for (name, values), look in zip(lines.items(), ("o-", "s--"), strict=True):
            axes.plot(at, [1e3 * value for value in values], look, label=name)

    rows = [
        (span, f"{len(ttft.values):,}", f"{ttft.failed:,}", ms(middle), ms(worst))
        for span, ttft, middle, worst in zip(_spans(edges), ttfts, middles, worsts, strict=True)
    ]
    alt = (
        f"Time to first token by when the request was due, in parts of {format_number(edges[1])} s: the median is "
        f"{ms(lines['median'][0])} ms in the first part with requests and {ms(lines['median'][-1])} ms in the last."
    )
    labels = ("seconds since the window began, when due", "TTFT, ms")
    caption = "Time to first token over the window: a line that climbs is a queue that grows"
    header = ("due, seconds", "n", "failed", "median ms", "worst ms")
    return _plot(draw, labels, alt, caption, (header, rows), ylim=(0, 1.1e3 * max(lines["worst"]) or 1.0))


def _sweep_plots(record: Mapping[str, Any]) -> Iterator[Markup]:
    """The frontier, and goodput where there are limits."""
    points = [p for p in record["points"] if p["summary"]["latency"]["e2e"]["n"]]
    points = [p for p in points if p["summary"]["rates"]["output_tok_s"]["value"] is not None]
    if points:
        yield _frontier(record, points)
        if record["slo_s"] and (judged := [p for p in points if p["summary"]["goodput"]["share"] is not None]):
            yield _goodput(record, judged)


def _frontier(record: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> Markup:
    x = [p["summary"]["rates"]["output_tok_s"]["value"] for p in points]
    lines: dict[str, list[float]] = {}
    for name in ("ttft", "tpot", "e2e"):
        if None not in (medians := [p["summary"]["latency"][name]["median"] for p in points]):
            lines[tables.NAMES[name]] = medians
    knee, unit, e2e = record["knee"]["level"], record["unit"], lines["end to end"]

    def draw(axes: Axes) -> None:
        for (title, values), marker in zip(lines.items(), "osD", strict=False):
            axes.plot(x, [1e3 * value for value in values], marker=marker, label=f"{title}, median")
        for rate, value, point in zip(x, e2e, points, strict=True):
            name, at = f"{point['level']:g}", (rate, 1e3 * value)
            axes.annotate(name, at, xytext=(0, 8), textcoords="offset points", ha="center")
            if point["level"] == knee:
                axes.axvline(rate, color="C5", linestyle=":", label=f"knee: {knee:g} {unit}")
        _logarithmic(axes, "y")
        axes.margins(y=0.15)

    rows = [
        (f"{point['level']:g}", format_number(rate, 4), *map(ms, medians))
        for point, rate, *medians in zip(points, x, *lines.values(), strict=True)
    ]
    alt = (
        f"Median latencies against output tokens per second, a point a level, labelled in {unit}: from "
        f"{format_number(x[0])} tokens/s at {ms(e2e[0])} ms end to end to {format_number(x[-1])} tokens/s at "
        f"{ms(e2e[-1])} ms. The knee lies at {knee:g} {unit}."
    )
    header = (unit, "tok/s", *(f"{title}, ms" for title in lines))
    return _plot(draw, ("output tokens/s", "ms"), alt, "Latency against throughput", (header, rows))


def _goodput(record: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> Markup:
    levels, unit, needed = [p["level"] for p in points], record["unit"], 100 * record["needed_share"]
    goodputs = [p["summary"]["goodput"] for p in points]
    shares, lows, highs = 100 * np.array([(goodput["share"], *goodput["interval"]) for goodput in goodputs]).T

    def draw(axes: Axes) -> None:
        errors = np.maximum(0, [shares - lows, highs - shares])
        axes.errorbar(levels, shares, yerr=errors, fmt="o-", color="C0", capsize=4, label="95% interval")
        axes.axhline(needed, color="C1", linestyle="--", label=f"needed: {needed:g}%")

    rows = [
        (f"{level:g}", f"{share:.1f}%", f"{low:.1f} to {high:.1f}%", format_number(goodput["requests_s"]))
        for level, share, low, high, goodput in zip(levels, shares, lows, highs, goodputs, strict=True)
    ]
    alt = (
        f"Share of requests that met the SLO at each level: {shares[0]:.1f}% at {levels[0]:g} {unit}, "
        f"{shares[-1]:.1f}% at {levels[-1]:g} {unit}; {needed:g}% are needed."
    )
    caption = f"Goodput under the SLO: {slo_text(record['slo_s'])}"
    header = (unit, "good", "95% interval", "good requests/s")
    return _plot(draw, (unit, "% of requests that were good"), alt, caption, (header, rows), ylim=(0, 105))

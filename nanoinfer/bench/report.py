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

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from nanoinfer.bench import tables
from nanoinfer.bench.run import Run
from nanoinfer.bench.tables import slo_text
from nanoinfer.measure import metrics
from nanoinfer.measure.stats import percentile, sorted_percentile
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
    requests = [_table(tables.rates(record), "Rates over the window")]
    requests += [_table(tables.requests(record), "How the requests ended")]
    if record["requests"]["attempted"] > record["requests"]["ok"]:
        caption = "Percentiles with each failed request as infinitely slow, in milliseconds"
        requests.append(_table(tables.adjusted(record), caption))
    if record["goodput"]:
        requests.append(_table(tables.goodput(record), "Goodput under the SLO"))
    latency = "Latencies of the requests that ended well, ms; the interval is the median's"
    sections = [
        ("", [_table(tables.latency(record), latency)]),
        ("Rates and requests", requests),
        ("The client itself", [_table(tables.client(record), "How late the load generator was, in milliseconds")]),
    ]
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
        sections=[("", [_table(tables.levels(record), "Level by level; times are medians in milliseconds")])],
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
    about = [_table((("name", "value"), _flat(rows)), name) for name, rows in settings.items()]
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.jinja").render(about=about, light=LIGHT, dark=DARK, **parts)


def _table(rows: Rows, caption: str) -> Markup:
    return Markup(table(rows[0], list(rows[1]), caption).body)


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key} ")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


def _plot(draw: Callable[[Axes], object], alt: str, caption: str, rows: Rows) -> Markup:
    """A figure under both themes, with its alternative text, its caption, and its numbers as a table."""
    return Markup(figure(draw, alt=alt, caption=caption, table=(rows[0], list(rows[1])), size=SIZE).body)


def _run_plots(run: Run) -> Iterator[Markup]:
    """Distributions and what happened over time; a figure without numbers is left out."""
    good = [trace for trace in run.measured() if trace.status == "ok"]
    ttft = [metrics.collect(good, name).values for name in ("ttft", "ttft_service")]
    gaps = [[gap for trace in good for gap in gaps_of(trace)] for gaps_of in (metrics.itl_samples, metrics.chunk_gaps)]
    for title, names, samples in (
        ("Time to first token", ("from schedule", "from sending"), ttft),
        ("Inter-token latency", ("amortised, a token", "between chunks"), gaps),
    ):
        if ordered := {name: sorted(values) for name, values in zip(names, samples, strict=True) if values}:
            yield _distribution(title, ordered)
    if run.traces and run.end > run.start:
        yield from _over_time(run)


def _finish(axes: Axes, xlabel: str, ylabel: str, **limits: tuple[float, float]) -> None:
    """Name the axes; the legend stands above the drawing, where it hides nothing."""
    axes.set(xlabel=xlabel, ylabel=ylabel, **limits)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)


def _logarithmic(axes: Axes, name: Literal["x", "y"]) -> None:
    """A logarithmic axis with plain numbers at 1, 2, 5, 10 ..."""
    axes.set(**{f"{name}scale": "log"})
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _distribution(title: str, ordered: Mapping[str, Sequence[float]]) -> Markup:
    lines = {name: [1e3 * sorted_percentile(values, q) for q in DRAWN] for name, values in ordered.items()}

    def draw(axes: Axes) -> None:
        for name, points in lines.items():
            axes.step(points, DRAWN, where="post", label=name)
        low, high = min(values[0] for values in ordered.values()), max(values[-1] for values in ordered.values())
        if 0 < WIDE * low < high:
            _logarithmic(axes, "x")
        _finish(axes, f"{title}, ms", "% of samples at or below")

    rows = [(f"p{q:g}", *(ms(sorted_percentile(values, q)) for values in ordered.values())) for q in IN_TABLE]
    counts = ", ".join(f"{name} n={len(values):,}" for name, values in ordered.items())
    half, most = (dict(zip(ordered, rows[IN_TABLE.index(q)][1:], strict=True)) for q in (50.0, 90.0))
    middles = [f"{name}: half at or below {half[name]} ms, 90% at or below {most[name]} ms" for name in ordered]
    return _plot(
        draw,
        f"{title}: the share of samples at or below each value. {'; '.join(middles)}.",
        f"{title}: distribution ({counts})",
        (("ms", *ordered), rows),
    )


def _over_time(run: Run) -> Iterator[Markup]:
    part = (run.end - run.start) / PARTS
    spans = list(pairwise([*(run.start + i * part for i in range(PARTS)), run.end]))
    tokens = [0] * PARTS
    for trace in run.traces:
        for t, n in trace.token_chunks:
            if run.start <= t < run.end:
                tokens[min(int((t - run.start) / part), PARTS - 1)] += n
    starts = [a - run.start for a, _ in spans]
    flight = [metrics.mean_concurrency(run.traces, a, b) for a, b in spans]
    yield _bars("Output tokens per second", "tok/s", starts, part, [n / part for n in tokens])
    yield _bars("Requests in flight", "requests in flight, mean", starts, part, flight)
    yield from _first_tokens(run, spans, part)


def _bars(title: str, unit: str, starts: Sequence[float], part: float, values: Sequence[float]) -> Markup:
    mean, best = math.fsum(values) / len(values), max(values)

    def draw(axes: Axes) -> None:
        axes.stairs(values, [*starts, starts[-1] + part], baseline=None, color="C0", linewidth=2.2)
        axes.axhline(mean, color="C1", linestyle="--", label=f"mean {format_number(mean)}")
        _finish(axes, "seconds since the window began", unit, ylim=(0, best * 1.1 or 1))

    rows = [
        (f"{start:.4g} to {start + part:.4g}", format_number(value))
        for start, value in zip(starts, values, strict=True)
    ]
    alt = (
        f"{title} over the window, in {len(values)} parts of {format_number(part)} s: mean {format_number(mean)}, "
        f"lowest {format_number(min(values))}, highest {format_number(best)}."
    )
    return _plot(draw, alt, f"{title} over the window", (("seconds", unit), rows))


def _first_tokens(run: Run, spans: Sequence[tuple[float, float]], part: float) -> Iterator[Markup]:
    """TTFT by when the request was due: a line that climbs is a queue that grows."""
    rows: list[tuple[str, ...]] = []
    points: list[tuple[float, float, float]] = []
    for low, high in spans:
        due = [trace for trace in run.traces if low <= trace.t_scheduled < high]
        ttft = metrics.collect(due, "ttft")
        middle, worst = percentile(ttft.values, 50), max(ttft.values, default=None)
        span = f"{low - run.start:.4g} to {high - run.start:.4g}"
        rows.append((span, f"{len(ttft.values):,}", f"{ttft.failed:,}", ms(middle), ms(worst)))
        if middle is not None and worst is not None:
            points.append(((low + high) / 2 - run.start, 1e3 * middle, 1e3 * worst))
    if not points:
        return
    at, medians, worsts = zip(*points, strict=True)

    def draw(axes: Axes) -> None:
        axes.plot(at, medians, "o-", color="C0", label="median")
        axes.plot(at, worsts, "s--", color="C1", label="worst")
        top = 1.1 * max(worsts) or 1.0
        _finish(axes, "seconds since the window began, when due", "TTFT, ms", ylim=(0, top))

    yield _plot(
        draw,
        f"Time to first token by when the request was due, in parts of {format_number(part)} s: the median is "
        f"{format_number(medians[0])} ms in the first part with requests and {format_number(medians[-1])} ms in "
        "the last.",
        "Time to first token over the window: a line that climbs is a queue that grows",
        (("due, seconds", "n", "failed", "median ms", "worst ms"), rows),
    )


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
        _finish(axes, "output tokens/s", "ms")

    rows = [
        (f"{p['level']:g}", format_number(rate, 4), *(ms(values[i]) for values in lines.values()))
        for i, (p, rate) in enumerate(zip(points, x, strict=True))
    ]
    alt = (
        f"Median latencies against output tokens per second, a point a level, labelled in {unit}: from "
        f"{format_number(x[0])} tokens/s at {ms(e2e[0])} ms end to end to {format_number(x[-1])} tokens/s at "
        f"{ms(e2e[-1])} ms. The knee lies at {knee:g} {unit}."
    )
    return _plot(draw, alt, "Latency against throughput", ((unit, "tok/s", *(f"{t}, ms" for t in lines)), rows))


def _goodput(record: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> Markup:
    levels, unit, needed = [p["level"] for p in points], record["unit"], 100 * record["needed_share"]
    goodputs = [p["summary"]["goodput"] for p in points]
    shares = [100 * goodput["share"] for goodput in goodputs]
    lows, highs = ([100 * goodput["interval"][i] for goodput in goodputs] for i in (0, 1))

    def draw(axes: Axes) -> None:
        below = [max(0.0, share - low) for share, low in zip(shares, lows, strict=True)]
        above = [max(0.0, high - share) for share, high in zip(shares, highs, strict=True)]
        axes.errorbar(levels, shares, yerr=[below, above], fmt="o-", color="C0", capsize=4, label="95% interval")
        axes.axhline(needed, color="C1", linestyle="--", label=f"needed: {needed:g}%")
        _finish(axes, unit, "% of requests that were good", ylim=(0, 105))

    rows = [
        (f"{level:g}", f"{share:.1f}%", f"{low:.1f} to {high:.1f}%", format_number(goodput["requests_s"]))
        for level, share, low, high, goodput in zip(levels, shares, lows, highs, goodputs, strict=True)
    ]
    alt = (
        f"Share of requests that met the SLO at each level: {shares[0]:.1f}% at {levels[0]:g} {unit}, "
        f"{shares[-1]:.1f}% at {levels[-1]:g} {unit}; {needed:g}% are needed."
    )
    caption = f"Goodput under the SLO: {slo_text(record['slo_s'])}"
    return _plot(draw, alt, caption, ((unit, "good", "95% interval", "good requests/s"), rows))

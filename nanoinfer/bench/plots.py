"""What the report draws, and for each drawing the sentence and the numbers that say the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from nanoinfer.bench.run import Run
from nanoinfer.bench.slo import slo_text
from nanoinfer.measure import metrics
from nanoinfer.measure.stats import percentile
from nanoinfer.show.text import Rows, format_number, ms

#: Equal parts of the window in the figures over time.
PARTS: Final = 20
#: Percentiles that a distribution is drawn and told by.
DRAWN: Final = tuple(q / 2 for q in range(1, 200))
#: From this ratio of the largest to the smallest value on an axis is logarithmic.
WIDE: Final = 10
TOLD: Final = (10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0)


@dataclass(frozen=True)
class Plot:
    """``draw`` fills the axes, ``alt`` says what it shows, ``table`` holds its numbers."""

    draw: Callable[[Axes], object]
    alt: str
    caption: str
    table: Rows


# --- a run ----------------------------------------------------------------------------


def run_plots(run: Run, record: Mapping[str, Any]) -> Iterable[Plot]:
    """Distributions and what happened over time; a figure without numbers is left out."""
    good = [trace for trace in run.measured() if trace.status == "ok"]
    firsts = {"from schedule": metrics.collect(good, "ttft"), "from sending": metrics.collect(good, "ttft_service")}
    if any(found.values for found in firsts.values()):
        yield _distribution("Time to first token", {name: found.values for name, found in firsts.items()})
    gaps = {
        "amortised, a token": [value for trace in good for value in metrics.itl_samples(trace)],
        "between chunks": [value for trace in good for value in metrics.chunk_gaps(trace)],
    }
    if any(gaps.values()):
        yield _distribution("Inter-token latency", gaps)
    if run.traces and run.end > run.start:
        yield from _over_time(run, record)


def _at(ordered: Sequence[float], q: float) -> float:
    """The percentile of sorted samples, as :func:`nanoinfer.measure.stats.percentile` has it: hundreds are needed."""
    return ordered[max(math.ceil(q * len(ordered) / 100), 1) - 1]


def _legend(axes: Axes) -> None:
    """Above the drawing, where it hides nothing."""
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)


def _logarithmic(axes: Axes, name: Literal["x", "y"]) -> None:
    """A logarithmic axis with plain numbers at 1, 2, 5, 10 ..."""
    axes.set(**{f"{name}scale": "log"})
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _distribution(title: str, groups: Mapping[str, Sequence[float]]) -> Plot:
    ordered = {name: sorted(values) for name, values in groups.items() if values}

    def draw(axes: Axes) -> None:
        for name, values in ordered.items():
            points = [1e3 * _at(values, q) for q in DRAWN]
            axes.step(points, DRAWN, where="post", label=name)
        low, high = min(values[0] for values in ordered.values()), max(values[-1] for values in ordered.values())
        if 0 < WIDE * low < high:
            _logarithmic(axes, "x")
        axes.set(xlabel=f"{title}, ms", ylabel="% of samples at or below")
        _legend(axes)

    middles = [
        f"{name}: half at or below {ms(_at(values, 50))} ms, 90% at or below {ms(_at(values, 90))} ms"
        for name, values in ordered.items()
    ]
    rows = [(f"p{q:g}", *(ms(_at(values, q)) for values in ordered.values())) for q in TOLD]
    counts = ", ".join(f"{name} n={len(values):,}" for name, values in ordered.items())
    return Plot(
        draw,
        f"{title}: the share of samples at or below each value. {'; '.join(middles)}.",
        f"{title}: distribution ({counts})",
        (("ms", *ordered), rows),
    )


def _over_time(run: Run, record: Mapping[str, Any]) -> Iterable[Plot]:
    part = (run.end - run.start) / PARTS
    edges = [run.start + i * part for i in range(PARTS)] + [run.end]
    spans = list(pairwise(edges))
    tokens = [0] * PARTS
    for trace in run.traces:
        for t, n in trace.token_chunks:
            if run.start <= t < run.end:
                tokens[min(int((t - run.start) / part), PARTS - 1)] += n
    rates = [n / part for n in tokens]
    flight = [metrics.mean_concurrency(run.traces, a, b) for a, b in spans]
    starts = [a - run.start for a, _ in spans]
    yield _bars("Output tokens per second", "tok/s", starts, part, rates)
    yield _bars("Requests in flight", "requests in flight, mean", starts, part, flight)
    yield from _first_tokens(run, spans, part)


def _bars(title: str, unit: str, starts: Sequence[float], part: float, values: Sequence[float]) -> Plot:
    mean, best = math.fsum(values) / len(values), max(values)

    def draw(axes: Axes) -> None:
        axes.stairs(values, [*starts, starts[-1] + part], baseline=None, color="C0", linewidth=2.2)
        axes.axhline(mean, color="C1", linestyle="--", label=f"mean {format_number(mean)}")
        axes.set(xlabel="seconds since the window began", ylabel=unit, ylim=(0, best * 1.1 or 1))
        _legend(axes)

    rows = [
        (f"{start:.4g} to {start + part:.4g}", format_number(value))
        for start, value in zip(starts, values, strict=True)
    ]
    alt = (
        f"{title} over the window, in {len(values)} parts of {format_number(part)} s: mean {format_number(mean)}, "
        f"lowest {format_number(min(values))}, highest {format_number(best)}."
    )
    return Plot(draw, alt, f"{title} over the window", (("seconds", unit), rows))


def _first_tokens(run: Run, spans: Sequence[tuple[float, float]], part: float) -> Iterable[Plot]:
    """TTFT by when the request was due: a line that climbs is a queue that grows."""
    rows: list[tuple[str, ...]] = []
    lines: dict[str, list[float]] = {"at": [], "median": [], "worst": []}
    for low, high in spans:
        due = [trace for trace in run.traces if low <= trace.t_scheduled < high]
        found = metrics.collect(due, "ttft")
        middle = percentile(found.values, 50)
        worst = max(found.values, default=None)
        span = f"{low - run.start:.4g} to {high - run.start:.4g}"
        rows.append((span, f"{len(found.values):,}", f"{found.failed:,}", ms(middle), ms(worst)))
        if middle is not None and worst is not None:
            lines["at"].append((low + high) / 2 - run.start)
            lines["median"].append(1e3 * middle)
            lines["worst"].append(1e3 * worst)
    if not lines["at"]:
        return

    def draw(axes: Axes) -> None:
        axes.plot(lines["at"], lines["median"], "o-", color="C0", label="median")
        axes.plot(lines["at"], lines["worst"], "s--", color="C1", label="worst")
        top = 1.1 * max(lines["worst"]) or 1.0
        axes.set(xlabel="seconds since the window began, when due", ylabel="TTFT, ms", ylim=(0, top))
        _legend(axes)

    first, last = lines["median"][0], lines["median"][-1]
    yield Plot(
        draw,
        f"Time to first token by when the request was due, in parts of {format_number(part)} s: the median is "
        f"{format_number(first)} ms in the first part with requests and {format_number(last)} ms in the last.",
        "Time to first token over the window: a line that climbs is a queue that grows",
        (("due, seconds", "n", "failed", "median ms", "worst ms"), rows),
    )


# --- a sweep --------------------------------------------------------------------------


def sweep_plots(record: Mapping[str, Any]) -> Iterable[Plot]:
    """The frontier, and goodput where there are limits."""
    points = [p for p in record["points"] if p["summary"]["latency"]["e2e"]["n"]]
    points = [p for p in points if p["summary"]["rates"]["output_tok_s"]["value"] is not None]
    if not points:
        return
    yield _frontier(record, points)
    if record["slo_s"] and (judged := [p for p in points if p["summary"]["goodput"]["share"] is not None]):
        yield _goodput(record, judged)


def _frontier(record: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> Plot:
    x = [p["summary"]["rates"]["output_tok_s"]["value"] for p in points]
    found = {
        title: [p["summary"]["latency"][name]["median"] for p in points]
        for name, title in (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2e", "end to end"))
    }
    lines = {title: values for title, values in found.items() if None not in values}
    knee, unit = record["knee"]["level"], record["unit"]

    def draw(axes: Axes) -> None:
        for (title, values), marker in zip(lines.items(), "osD", strict=False):
            axes.plot(x, [1e3 * value for value in values], marker=marker, label=f"{title}, median")
        for rate, value, point in zip(x, lines["end to end"], points, strict=True):
            name, at = f"{point['level']:g}", (rate, 1e3 * value)
            axes.annotate(name, at, xytext=(0, 8), textcoords="offset points", ha="center")
            if point["level"] == knee:
                axes.axvline(rate, color="C5", linestyle=":", label=f"knee: {knee:g} {unit}")
        _logarithmic(axes, "y")
        axes.set(xlabel="output tokens/s", ylabel="ms")
        axes.margins(y=0.15)
        _legend(axes)

    rows = [
        (f"{p['level']:g}", format_number(rate, 4), *(ms(values[i]) for values in lines.values()))
        for i, (p, rate) in enumerate(zip(points, x, strict=True))
    ]
    alt = (
        f"Median latencies against output tokens per second, a point a level, labelled in {unit}: from "
        f"{format_number(x[0])} tokens/s at {ms(lines['end to end'][0])} ms end to end "
        f"to {format_number(x[-1])} tokens/s at "
        f"{ms(lines['end to end'][-1])} ms. The knee lies at {knee:g} {unit}."
    )
    return Plot(draw, alt, "Latency against throughput", ((unit, "tok/s", *(f"{t}, ms" for t in lines)), rows))


def _goodput(record: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> Plot:
    levels, unit, needed = [p["level"] for p in points], record["unit"], 100 * record["needed_share"]
    shares = [100 * p["summary"]["goodput"]["share"] for p in points]
    intervals = [p["summary"]["goodput"]["interval"] for p in points]
    rates = [p["summary"]["goodput"]["requests_s"] for p in points]

    def draw(axes: Axes) -> None:
        below = [max(0.0, share - 100 * low) for share, (low, _) in zip(shares, intervals, strict=True)]
        above = [max(0.0, 100 * high - share) for share, (_, high) in zip(shares, intervals, strict=True)]
        axes.errorbar(levels, shares, yerr=[below, above], fmt="o-", color="C0", capsize=4, label="95% interval")
        axes.axhline(needed, color="C1", linestyle="--", label=f"needed: {needed:g}%")
        axes.set(xlabel=unit, ylabel="% of requests that were good", ylim=(0, 105))
        _legend(axes)

    rows = [
        (f"{level:g}", f"{share:.1f}%", f"{100 * low:.1f} to {100 * high:.1f}%", format_number(rate))
        for level, share, (low, high), rate in zip(levels, shares, intervals, rates, strict=True)
    ]
    alt = (
        f"Share of requests that met the SLO at each level: {shares[0]:.1f}% at {levels[0]:g} {unit}, "
        f"{shares[-1]:.1f}% at {levels[-1]:g} {unit}; {needed:g}% are needed."
    )
    caption = f"Goodput under the SLO: {slo_text(record['slo_s'])}"
    return Plot(draw, alt, caption, ((unit, "good", "95% interval", "good requests/s"), rows))

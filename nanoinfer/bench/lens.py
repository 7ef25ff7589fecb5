"""The definition lens: the same requests under every tool's rules, side by side.

Two tools that say "ITL" rarely mean the same number. Here is what each would have said of these very traces, the
rule in words beside every figure, and where that rule was read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nanoinfer.bench.lens_parts import Figure, Percentile, Stream, Tool
from nanoinfer.bench.lens_rules import TOOLS
from nanoinfer.errors import NanoinferError
from nanoinfer.measure.stats import least_n
from nanoinfer.measure.trace import Trace

TITLES: Mapping[str, str] = {
    "ttft": "TTFT, time to first token, ms",
    "tpot": "TPOT, time per output token, ms",
    "itl": "ITL, inter-token latency, ms",
    "e2e": "End-to-end latency, ms",
    "throughput": "Output tokens/s",
}
PERCENTILES: Mapping[Percentile, str] = {
    "inverted": "a sample (inverted CDF)",
    "linear": "between two samples (NumPy's default)",
    "truncated": "the sample at index n q, cut to a whole number",
}
Weighted = tuple[float, float]


@dataclass(frozen=True)
class Cell:
    """A figure by one tool's rule, s (tokens/s for throughput). ``guessed``: kinds of frames were missing for it."""

    rule: str
    n: int
    mean: float | None
    median: float | None
    p99: float | None
    guessed: bool


@dataclass(frozen=True)
class Row:
    """What one tool of one version says."""

    tool: str
    version: str
    percentile: str
    cells: Mapping[str, Cell]
    sources: tuple[str, ...]
    note: str

    @property
    def title(self) -> str:
        """Name and version."""
        return f"{self.tool}, {self.version}"


@dataclass(frozen=True)
class LensTable:
    """All rows; ``failed`` of the ``requests`` are left out of latencies, ``without_kinds`` told no kinds of frames."""

    requests: int
    failed: int
    without_kinds: int
    rows: tuple[Row, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data, times in seconds."""
        return asdict(self)


def lens(traces: Sequence[Trace], tools: Iterable[Tool] = TOOLS) -> LensTable:
    """Score the traces by every tool's rules.

    Raises:
        NanoinferError: no traces; a clock that ran backwards; kinds that do not fit their chunks.
    """
    if not traces:
        raise NanoinferError("lens: no traces to look at; give a file with one at least")
    streams = [Stream.of(trace) for trace in traces]
    good = [stream for stream, trace in zip(streams, traces, strict=True) if trace.status == "ok"]
    without = sum(not stream.told for stream in streams)
    return LensTable(
        requests=len(traces),
        failed=len(traces) - len(good),
        without_kinds=without,
        rows=tuple(_row(tool, good, streams, without > 0) for tool in tools),
    )


def _row(tool: Tool, good: Sequence[Stream], streams: Sequence[Stream], without: bool) -> Row:
    cells = {name: _cell(figure, tool.percentile, good, without) for name, figure in tool.figures.items()}
    if tool.throughput is not None:
        value = tool.throughput.of(good, streams)
        guessed = without and tool.throughput.kinds
        cells["throughput"] = Cell(tool.throughput.rule, len(good), value, None, None, guessed)
    return Row(tool.name, tool.version, PERCENTILES[tool.percentile], cells, tool.sources, tool.note)


def _cell(figure: Figure, percentile: Percentile, good: Sequence[Stream], without: bool) -> Cell:
    samples = sorted(_samples(figure, good))
    total = math.fsum(weight for _, weight in samples)
    mean = math.fsum(value * weight for value, weight in samples) / total if total else None
    median, p99 = (POINT[percentile](samples, q) if samples else None for q in (50, 99))
    return Cell(figure.rule, len(samples), mean, median, p99, without and figure.kinds)


def _samples(figure: Figure, good: Sequence[Stream]) -> Iterable[Weighted]:
    for stream in good:
        values = figure.samples(stream)
        if not values and figure.missing is not None:
            values = [figure.missing]
        if (weight := figure.weight(stream)) > 0:
            yield from ((value, weight) for value in values)


# --- percentiles of sorted samples, as each tool takes them; q in percent --------------------


def inverted(samples: Sequence[Weighted], q: int) -> float:
    """The first sample at which ``q`` percent of the weight is reached."""
    reached = list(accumulate(weight for _, weight in samples))
    return next(value for (value, _), so_far in zip(samples, reached, strict=True) if so_far * 100 >= q * reached[-1])


def linear(samples: Sequence[Weighted], q: int) -> float:
    """Between the two samples around rank ``q (n - 1) / 100``; weights are not looked at."""
    low, part = divmod(q * (len(samples) - 1), 100)
    below, above = samples[low][0], samples[min(low + 1, len(samples) - 1)][0]
    return below + (above - below) * part / 100


def truncated(samples: Sequence[Weighted], q: int) -> float:
    """The sample at index ``q n / 100``, counted from 0; weights are not looked at."""
    return samples[q * len(samples) // 100][0]


POINT: Mapping[Percentile, Callable[[Sequence[Weighted], int], float]] = {
    "inverted": inverted,
    "linear": linear,
    "truncated": truncated,
}


# --- on the screen ---------------------------------------------------------------------------


def show_lens(console: Console, table: LensTable) -> None:
    """Print a table for each figure, with the rule in words in every row; then percentiles, notes and sources."""
    for name, title in TITLES.items():
        view = Table(title=title, title_justify="left", title_style="bold", expand=False)
        view.add_column("tool", ratio=3)
        for heading in ("tokens/s",) if name == "throughput" else ("mean", "median", "p99"):
            view.add_column(heading, justify="right", no_wrap=True)
        view.add_column("n", justify="right", no_wrap=True)
        view.add_column("rule", ratio=4)
        for row in table.rows:
            if (cell := row.cells.get(name)) is not None:
                view.add_row(*(Text(text) for text in (row.title, *_values(name, cell), f"{cell.n:,}", cell.rule)))
        console.print(view)
    for line in _footnotes(table):
        console.print(Text(line))


def _values(name: str, cell: Cell) -> list[str]:
    scale, mark = (1.0 if name == "throughput" else 1e3), "~" if cell.guessed else ""
    values = [cell.mean] if name == "throughput" else [cell.mean, cell.median, cell.p99]
    return ["–" if value is None else f"{mark}{value * scale:,.1f}" for value in values]


def _footnotes(table: LensTable) -> Iterable[str]:
    yield f"Requests: {table.requests:,}. Left out of latencies, because they did not end well: {table.failed:,}."
    yield "N is the served number of output tokens. A dash: no request has such a value."
    if table.requests - table.failed < least_n(99):
        yield f"p99: fewer than {least_n(99)} requests cannot bear one, whatever a tool prints."
    if table.without_kinds:
        yield (
            f"~: {table.without_kinds:,} traces do not tell the kinds of their chunks: one without tokens is taken "
            "for a role before the first token and for usage after it, and the request's end for [DONE]."
        )
    for number, row in enumerate(table.rows, start=1):
        yield f"[{number}] {row.title}. A percentile is {row.percentile}." + (f" Note: {row.note}." if row.note else "")
        yield from (f"    {source}" for source in row.sources)

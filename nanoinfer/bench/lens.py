"""The same requests scored by the rules of other tools, which are data (``nanoinfer/data/lens.toml``).

``N`` is the served number of output tokens, for every tool: one that counts the text's tokens again differs by that.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from itertools import pairwise
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nanoinfer.errors import NanoinferError
from nanoinfer.measure import metrics
from nanoinfer.measure.stats import least_n, sorted_percentile
from nanoinfer.measure.trace import ChunkKind, Trace
from nanoinfer.show.text import DASH

TITLES: Final = {
    "ttft": "TTFT, time to first token, ms",
    "tpot": "TPOT, time per output token, ms",
    "itl": "ITL, inter-token latency, ms",
    "e2e": "End-to-end latency, ms",
    "throughput": "Output tokens/s",
}


class StreamFrame(NamedTuple):
    """One frame of a stream."""

    t: float  # s
    n: int  # tokens
    kind: ChunkKind


@dataclass(frozen=True)
class FrameStream:
    """The frames of a request. ``has_kinds``: what they are was recorded, not guessed."""

    scheduled: float
    sent: float
    frames: tuple[StreamFrame, ...]
    tokens: int
    has_kinds: bool

    @classmethod
    def of(cls, trace: Trace) -> FrameStream:
        """Read a trace; where it has no kinds, guess: without tokens before the first token a role, after it usage.

        ``t_end`` stands for an end of stream that was not recorded. A clock that ran backwards is refused.
        """
        metrics.client_delay(trace)  # refuses such a clock
        kinds = list(trace.kinds)
        if not kinds:
            for _, n in trace.chunks:
                kinds.append("content" if n > 0 else "usage" if "content" in kinds else "role")
        if len(kinds) != len(trace.chunks):
            raise NanoinferError(f"trace: {len(trace.chunks)} chunks but {len(kinds)} kinds; note one for each chunk")
        frames = [StreamFrame(t, n, kind) for (t, n), kind in zip(trace.chunks, kinds, strict=True)]
        if trace.t_end is not None and "done" not in kinds:
            frames.append(StreamFrame(trace.t_end, 0, "done"))
        tokens = metrics.output_tokens(trace)
        return cls(trace.t_scheduled, trace.t_sent, tuple(frames), tokens, has_kinds=bool(trace.kinds))

    @property
    def with_tokens(self) -> list[StreamFrame]:
        """The frames that hold tokens."""
        return list(filter(_has_tokens, self.frames))


#: A percentile of sorted (value, weight); q in percent.
Percentile = Callable[[Sequence[tuple[float, float]], int], float]
#: Kinds of frames that are chunks to some tool, and what it says of them.
CHUNKS: Final[Mapping[str, tuple[frozenset[ChunkKind], str]]] = {
    "choices": (frozenset({"role", "reasoning", "content", "finish"}), "a role's and an empty one too"),
    "text": (frozenset({"reasoning", "content"}), "text"),
    "content": (frozenset({"content"}), "content"),
}


def _has_tokens(frame: StreamFrame) -> bool:
    return frame.n > 0


def _is(chunks: str) -> Callable[[StreamFrame], bool]:
    kinds = CHUNKS[chunks][0]
    return lambda frame: frame.kind in kinds


class Moment(NamedTuple):
    """The time of the first (0) or last (-1) of certain frames. ``needs_kinds``: it takes their kinds to tell."""

    words: str
    position: int
    holds: Callable[[StreamFrame], bool]
    needs_kinds: bool = False

    def at(self, stream: FrameStream) -> float | None:
        """When that was; ``None`` where there is no such frame."""
        times = [frame.t for frame in stream.frames if self.holds(frame)]
        return times[self.position] if times else None


MOMENTS: Final = {
    "first token": Moment("first token", 0, _has_tokens),
    "last token": Moment("last token", -1, _has_tokens),
    "first text": Moment("first text", 0, _is("text")),
    "last text": Moment("last text", -1, _is("text")),
    "first content": Moment("first content (not reasoning)", 0, _is("content"), True),
    "last content": Moment("last content (not reasoning)", -1, _is("content"), True),
    "first chunk": Moment("first chunk, a role's too", 0, _is("choices"), True),
    "last chunk": Moment("last chunk before usage", -1, _is("choices"), True),
    "last frame": Moment("last frame, usage too", -1, lambda frame: frame.kind != "done", True),
    "end of stream": Moment("end of stream ([DONE])", -1, lambda frame: True, True),
}


def _after_first_chunk(stream: FrameStream) -> int:
    chunks = stream.with_tokens
    return stream.tokens - chunks[0].n if len(chunks) > 1 else 0


#: What a time is divided by: the words, and the number, below 1 of which there is no figure.
DIVISORS: Final[Mapping[str, tuple[str, Callable[[FrameStream], int]]]] = {
    "N": ("N", lambda stream: stream.tokens),
    "N - 1": ("(N - 1)", lambda stream: stream.tokens - 1),
    "N - first chunk": ("(N - tokens of the first chunk)", _after_first_chunk),
    "text chunks": ("chunks with text", lambda stream: sum(map(_is("text"), stream.frames))),
}


class ToolFigure(NamedTuple):
    """A figure of a tool: its rule in words, a stream's values in seconds, and whether it needs kinds of frames."""

    rule: str
    values: Callable[[FrameStream], list[float]]
    needs_kinds: bool


def _figure(spec: Mapping[str, Any]) -> ToolFigure:
    """A figure as ``lens.toml`` describes it; a ``LookupError`` for a name that none of the tables here has."""
    if "gaps" in spec:
        return _gaps(spec["gaps"])
    last, missing = MOMENTS[spec["to"]], [spec["missing"]] if "missing" in spec else []
    first = None if spec["from"] in ("sent", "scheduled") else MOMENTS[spec["from"]]
    words, divisor = DIVISORS[spec["per"]] if "per" in spec else ("", lambda stream: 1)

    def values(stream: FrameStream) -> list[float]:
        start: float | None = getattr(stream, spec["from"]) if first is None else first.at(stream)
        end, by = last.at(stream), divisor(stream)
        if start is None or end is None or by < 1 or stream.tokens < spec.get("least_tokens", 1):
            return missing
        return [(end - start) / by]

    rule = f"{last.words} - {spec['from'] if first is None else first.words}"
    needs_kinds = last.needs_kinds or (first is not None and first.needs_kinds)
    return ToolFigure(f"({rule}) / {words}" if words else rule, values, needs_kinds)


TOKEN_GAPS: Final = {
    "shared": "gap between chunks / tokens of the later one, once a token",
    "perceived": "gaps between tokens, those of one chunk 0 apart",
}


def _gaps(name: str) -> ToolFigure:
    holds = _has_tokens if name in TOKEN_GAPS else _is(name)

    def gaps(stream: FrameStream) -> list[float]:
        chunks = list(filter(holds, stream.frames))
        if name == "shared":
            return [(b.t - a.t) / b.n for a, b in pairwise(chunks) for _ in range(b.n)]
        within = [0.0] * sum(frame.n - 1 for frame in chunks) if name == "perceived" else []
        return within + [b.t - a.t for a, b in pairwise(chunks)]

    if name in TOKEN_GAPS:
        return ToolFigure(TOKEN_GAPS[name], gaps, False)
    return ToolFigure(f"gaps between chunks ({CHUNKS[name][1]})", gaps, name != "text")


#: A run's rates: whose tokens, until which moment, since when, and that time in words.
THROUGHPUTS: Final = {
    "drained": ("all", "last token", "scheduled", "last token - first scheduled"),
    "wall": ("good", "end of stream", "sent", "last end of stream - first sent"),
    "to last text": ("good", "last text", "sent", "last text - first sent"),
    "last query": ("good", "last token", "scheduled", "last token of the request scheduled last - first scheduled"),
}


def _throughput(name: str, good: Sequence[FrameStream], streams: Sequence[FrameStream], without: bool) -> LensCell:
    """A run's output tokens/s; ``None`` without time to divide by."""
    whose, until, since, words = THROUGHPUTS[name]
    timed = good if name == "to last text" else streams
    ending = [max(streams, key=lambda stream: stream.scheduled)] if name == "last query" else timed
    start: float = min((getattr(stream, since) for stream in timed), default=0.0)
    seconds = max((t for t in map(MOMENTS[until].at, ending) if t is not None), default=start) - start
    tokens = sum(stream.tokens for stream in good)
    if whose == "all":
        tokens = sum(frame.n for stream in streams for frame in stream.frames)
    value, guessed = tokens / seconds if seconds > 0 else None, without and name == "wall"
    return LensCell(f"tokens of {whose} requests / ({words})", len(good), value, None, None, guessed)


def inverted(samples: Sequence[tuple[float, float]], q: int) -> float:
    """The first sample at which ``q`` percent of the weight is reached."""
    return sorted_percentile([value for value, _ in samples], q, [weight for _, weight in samples])


def linear(samples: Sequence[tuple[float, float]], q: int) -> float:
    """Between the two samples around rank ``q (n - 1) / 100``, whatever their weights."""
    low, part = divmod(q * (len(samples) - 1), 100)
    below, above = samples[low][0], samples[min(low + 1, len(samples) - 1)][0]
    return below + (above - below) * part / 100


def truncated(samples: Sequence[tuple[float, float]], q: int) -> float:
    """The sample at index ``q n / 100``, counted from 0, whatever the weights."""
    return samples[q * len(samples) // 100][0]


PERCENTILES: Final[Mapping[str, tuple[str, Percentile]]] = {
    "inverted": ("a sample (inverted CDF)", inverted),
    "linear": ("between two samples (NumPy's default)", linear),
    "truncated": ("the sample at index n q, cut to a whole number", truncated),
}


@dataclass(frozen=True)
class LensCell:
    """A figure by one tool's rule, in seconds (tokens/s for throughput)."""

    rule: str
    n: int
    mean: float | None
    median: float | None
    p99: float | None
    guessed: bool  # kinds of frames that it needs were missing


@dataclass(frozen=True)
class LensRow:
    """The figures of one tool of one version."""

    tool: str
    version: str
    percentile: str
    cells: Mapping[str, LensCell]
    sources: tuple[str, ...]
    note: str

    @property
    def title(self) -> str:
        """Name and version."""
        return f"{self.tool}, {self.version}"


@dataclass(frozen=True)
class LensTable:
    """All rows; ``failed`` of the ``requests`` are left out of latencies, ``without_kinds`` have no kinds of frames."""

    requests: int
    failed: int
    without_kinds: int
    rows: tuple[LensRow, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data, times in seconds."""
        return asdict(self)


def lens(traces: Sequence[Trace]) -> LensTable:
    """Score the traces by the rules of every tool of ``lens.toml``; none, or broken ones, are refused."""
    if not traces:
        raise NanoinferError("lens: no traces to look at; give a file with one at least")
    streams = [FrameStream.of(trace) for trace in traces]
    good = [stream for stream, trace in zip(streams, traces, strict=True) if trace.status == "ok"]
    without = sum(not stream.has_kinds for stream in streams)
    text = files("nanoinfer.data").joinpath("lens.toml").read_text(encoding="utf-8")
    rows = tuple(_row(tool, good, streams, without > 0) for tool in tomllib.loads(text)["tool"])
    return LensTable(len(traces), len(traces) - len(good), without, rows)


def _row(
    tool: Mapping[str, Any], good: Sequence[FrameStream], streams: Sequence[FrameStream], without: bool
) -> LensRow:
    words, point = PERCENTILES[tool["percentile"]]
    cells = {name: _cell(tool[name], point, good, without) for name in TITLES if isinstance(tool.get(name), dict)}
    if "throughput" in tool:
        cells["throughput"] = _throughput(tool["throughput"], good, streams, without)
    return LensRow(tool["name"], tool["version"], words, cells, tuple(tool.get("sources", ())), tool.get("note", ""))


def _cell(spec: Mapping[str, Any], point: Percentile, good: Sequence[FrameStream], without: bool) -> LensCell:
    figure = _figure(spec)
    weights = [DIVISORS[spec["weight"]][1](stream) if "weight" in spec else 1 for stream in good]
    weighted = [(weight, figure.values(stream)) for weight, stream in zip(weights, good, strict=True) if weight > 0]
    samples = sorted((value, float(weight)) for weight, values in weighted for value in values)
    total = math.fsum(weight for _, weight in samples)
    mean = math.fsum(value * weight for value, weight in samples) / total if total else None
    median, p99 = (point(samples, q) if samples else None for q in (50, 99))
    return LensCell(figure.rule, len(samples), mean, median, p99, without and figure.needs_kinds)


def show_lens(console: Console, table: LensTable) -> None:
    """Print a table for each figure, with the rule in words in every row; then percentiles, notes and sources."""
    for name, title in TITLES.items():
        view = Table(title=title, title_justify="left", title_style="bold", expand=False)
        columns, scale = {"mean": "mean", "median": "median", "p99": "p99"}, 1e3
        if name == "throughput":
            columns, scale = {"tokens/s": "mean"}, 1.0
        view.add_column("tool", ratio=3)
        for heading in (*columns, "n"):
            view.add_column(heading, justify="right", no_wrap=True)
        view.add_column("rule", ratio=4)
        for row in table.rows:
            if (cell := row.cells.get(name)) is not None:
                mark, values = "~" if cell.guessed else "", [getattr(cell, field) for field in columns.values()]
                shown = [DASH if value is None else f"{mark}{value * scale:,.1f}" for value in values]
                view.add_row(*map(Text, (row.title, *shown, f"{cell.n:,}", cell.rule)))
        console.print(view)
    for line in _footnotes(table):
        console.print(Text(line))


def _footnotes(table: LensTable) -> Iterable[str]:
    yield f"Requests: {table.requests:,}. Left out of latencies, because they did not end well: {table.failed:,}."
    yield "N is the served number of output tokens. A dash: no request has such a value."
    if table.requests - table.failed < least_n(99):
        yield f"p99: fewer than {least_n(99)} requests cannot support one, whatever a tool prints."
    if table.without_kinds:
        yield (
            f"~: {table.without_kinds:,} traces have no kinds of chunks: one without tokens is taken "
            "for a role before the first token and for usage after it, and the request's end for [DONE]."
        )
    for number, row in enumerate(table.rows, start=1):
        yield f"[{number}] {row.title}. A percentile is {row.percentile}." + (f" Note: {row.note}." if row.note else "")
        yield from (f"    {source}" for source in row.sources)

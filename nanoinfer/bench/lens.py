"""The same requests scored by the rules of other tools, which are data (``nanoinfer/data/lens.toml``).

``N`` is the served number of output tokens, for every tool: one that counts the text's tokens again differs by that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nanoinfer.data import read_toml
from nanoinfer.errors import NanoinferError
from nanoinfer.measure import metrics
from nanoinfer.measure.stats import least_n, present, sorted_percentile
from nanoinfer.measure.trace import ChunkKind, Trace
from nanoinfer.show.text import DASH

TIMES: Final = {
    "ttft": "TTFT, time to first token, ms",
    "tpot": "TPOT, time per output token, ms",
    "itl": "ITL, inter-token latency, ms",
    "e2e": "End-to-end latency, ms",
}


class StreamFrame(NamedTuple):
    """One frame of a stream."""

    t: float  # s
    n: int  # tokens
    kind: ChunkKind


#: What a frame is taken for, by some tool or other.
FRAMES: Final[Mapping[str, Callable[[StreamFrame], bool]]] = {
    "token": lambda frame: frame.n > 0,
    "text": lambda frame: frame.kind in ("reasoning", "content"),
    "content": lambda frame: frame.kind == "content",
    "choices": lambda frame: frame.kind in ("role", "reasoning", "content", "finish"),
    "frame": lambda frame: frame.kind != "done",
    "any": lambda frame: True,
}
#: Those that can be found where no kinds of frames were recorded.
STAMPED: Final = ("token", "text")
#: A request's moments: the words, the frames that are looked at, and which of them it is.
MOMENTS: Final = {
    "first token": ("first token", "token", 0),
    "last token": ("last token", "token", -1),
    "first text": ("first text", "text", 0),
    "last text": ("last text", "text", -1),
    "first content": ("first content (not reasoning)", "content", 0),
    "last content": ("last content (not reasoning)", "content", -1),
    "first chunk": ("first chunk, a role's too", "choices", 0),
    "last chunk": ("last chunk before usage", "choices", -1),
    "last frame": ("last frame, usage too", "frame", -1),
    "end of stream": ("end of stream ([DONE])", "any", -1),
}
#: Gaps between frames: the words, and the frames.
GAPS: Final = {
    "shared": ("gap between chunks / tokens of the later one, once a token", "token"),
    "perceived": ("gaps between tokens, those of one chunk 0 apart", "token"),
    "text": ("gaps between chunks (text)", "text"),
    "content": ("gaps between chunks (content)", "content"),
    "choices": ("gaps between chunks (a role's and an empty one too)", "choices"),
}
#: A run's rates: whose tokens, until which moment, since when, and that time in words.
THROUGHPUTS: Final = {
    "drained": ("all", "last token", "scheduled", "last token - first scheduled"),
    "wall": ("good", "end of stream", "sent", "last end of stream - first sent"),
    "to last text": ("good", "last text", "sent", "last text - first sent"),
    "last query": ("good", "last token", "scheduled", "last token of the request scheduled last - first scheduled"),
}


@dataclass(frozen=True)
class FrameStream:
    """The frames of a request."""

    scheduled: float
    sent: float
    frames: tuple[StreamFrame, ...]
    tokens: int
    has_kinds: bool  # recorded, not guessed

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

    def those(self, frames: str) -> list[StreamFrame]:
        """The frames that are of :data:`FRAMES`."""
        return list(filter(FRAMES[frames], self.frames))

    def at(self, moment: str) -> float | None:
        """The time of one of the :data:`MOMENTS`, of ``scheduled`` or of ``sent``; ``None`` without such a frame."""
        if moment not in MOMENTS:
            return {"scheduled": self.scheduled, "sent": self.sent}[moment]
        _, frames, position = MOMENTS[moment]
        found = self.those(frames)
        return found[position].t if found else None


def _after_first_chunk(stream: FrameStream) -> int:
    chunks = stream.those("token")
    return stream.tokens - chunks[0].n if len(chunks) > 1 else 0


#: What a time is divided by: the words, and the number, below 1 of which there is no figure.
DIVISORS: Final[Mapping[str, tuple[str, Callable[[FrameStream], int]]]] = {
    "N": ("N", lambda stream: stream.tokens),
    "N - 1": ("(N - 1)", lambda stream: stream.tokens - 1),
    "N - first chunk": ("(N - tokens of the first chunk)", _after_first_chunk),
    "text chunks": ("chunks with text", lambda stream: len(stream.those("text"))),
}


# --- percentiles of sorted (value, weight); q in percent ----------------------------------


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


Percentile = Callable[[Sequence[tuple[float, float]], int], float]
PERCENTILES: Final[Mapping[str, tuple[str, Percentile]]] = {
    "inverted": ("a sample (inverted CDF)", inverted),
    "linear": ("between two samples (NumPy's default)", linear),
    "truncated": ("the sample at index n q, cut to a whole number", truncated),
}


# --- scores -------------------------------------------------------------------------------


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
    """All rows."""

    requests: int
    failed: int  # left out of latencies
    without_kinds: int  # of frames
    rows: tuple[LensRow, ...]


def lens(traces: Sequence[Trace]) -> LensTable:
    """Score the traces by the rules of every tool of ``lens.toml``; none, or broken ones, are refused."""
    if not traces:
        raise NanoinferError("lens: no traces to look at; give a file with one at least")
    streams = [FrameStream.of(trace) for trace in traces]
    good = [stream for stream, trace in zip(streams, traces, strict=True) if trace.status == "ok"]
    without = sum(not stream.has_kinds for stream in streams)
    rows = []
    for tool in read_toml("lens")["tool"]:
        words, percentile = PERCENTILES[tool["percentile"]]
        cells = {name: _cell(tool[name], percentile, good, without > 0) for name in TIMES if name in tool}
        if "throughput" in tool:
            cells["throughput"] = _throughput(tool["throughput"], good, streams, without > 0)
        sources = tuple(tool.get("sources", ()))
        rows.append(LensRow(tool["name"], tool["version"], words, cells, sources, tool.get("note", "")))
    return LensTable(len(traces), len(traces) - len(good), without, tuple(rows))


def _cell(spec: Mapping[str, Any], percentile: Percentile, good: Sequence[FrameStream], without: bool) -> LensCell:
    weights = [DIVISORS[spec["weight"]][1](stream) if "weight" in spec else 1 for stream in good]
    weighted = [(weight, _values(spec, stream)) for weight, stream in zip(weights, good, strict=True) if weight > 0]
    samples = sorted((value, float(weight)) for weight, values in weighted for value in values)
    total = math.fsum(weight for _, weight in samples)
    mean = math.fsum(value * weight for value, weight in samples) / total if total else None
    median, p99 = (percentile(samples, q) if samples else None for q in (50, 99))
    rule, frames = _rule(spec)
    return LensCell(rule, len(samples), mean, median, p99, without and not frames <= set(STAMPED))


def _rule(spec: Mapping[str, Any]) -> tuple[str, set[str]]:
    """A figure's rule in words, and the frames that it takes to tell."""
    if "gaps" in spec:
        rule, frames = GAPS[spec["gaps"]]
        return rule, {frames}
    ends = [MOMENTS.get(moment, (moment, "token")) for moment in (spec["to"], spec["from"])]
    rule = " - ".join(end[0] for end in ends)
    return f"({rule}) / {DIVISORS[spec['per']][0]}" if "per" in spec else rule, {end[1] for end in ends}


def _values(spec: Mapping[str, Any], stream: FrameStream) -> list[float]:
    """A figure's values of one request, in seconds."""
    if "gaps" in spec:
        chunks = stream.those(GAPS[spec["gaps"]][1])
        if spec["gaps"] == "shared":
            return [(b.t - a.t) / b.n for a, b in pairwise(chunks) for _ in range(b.n)]
        within = sum(frame.n - 1 for frame in chunks) if spec["gaps"] == "perceived" else 0
        return [0.0] * within + [b.t - a.t for a, b in pairwise(chunks)]
    start, end = stream.at(spec["from"]), stream.at(spec["to"])
    by = DIVISORS[spec["per"]][1](stream) if "per" in spec else 1
    if start is None or end is None or by < 1 or stream.tokens < spec.get("least_tokens", 1):
        return [spec["missing"]] if "missing" in spec else []
    return [(end - start) / by]


def _throughput(name: str, good: Sequence[FrameStream], streams: Sequence[FrameStream], without: bool) -> LensCell:
    """A run's output tokens/s; ``None`` without time to divide by."""
    whose, until, since, words = THROUGHPUTS[name]
    timed = good if name == "to last text" else streams
    ending = [max(streams, key=lambda stream: stream.scheduled)] if name == "last query" else timed
    start = min(present(stream.at(since) for stream in timed), default=0.0)
    seconds = max(present(stream.at(until) for stream in ending), default=start) - start
    tokens = sum(stream.tokens for stream in good)
    if whose == "all":
        tokens = sum(frame.n for stream in streams for frame in stream.frames)
    value, guessed = tokens / seconds if seconds > 0 else None, without and name == "wall"
    return LensCell(f"tokens of {whose} requests / ({words})", len(good), value, None, None, guessed)


def show_lens(console: Console, table: LensTable) -> None:
    """Print a table for each figure, with the rule in words in every row; then percentiles, notes and sources."""
    for name, title in {**TIMES, "throughput": "Output tokens/s"}.items():
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

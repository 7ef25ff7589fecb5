"""What the lens's rules are made of: the frames of a stream, moments in it, spans between them, gaps, rates.

The words printed beside a figure and the sum that makes it come from the same few objects. ``N`` is the served
number of output tokens, for every tool: one that counts the tokens of the text again differs by that as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, NamedTuple

from nanoinfer.errors import NanoinferError
from nanoinfer.measure import metrics
from nanoinfer.measure.trace import ChunkKind, Trace


class Frame(NamedTuple):
    """One frame of a stream: when it came (s), the tokens in it, what it is."""

    t: float
    n: int
    kind: ChunkKind


@dataclass(frozen=True)
class Stream:
    """A trace as its client saw it. ``told``: the kinds of its frames were recorded, not guessed."""

    scheduled: float
    sent: float
    frames: tuple[Frame, ...]
    tokens: int
    told: bool

    @classmethod
    def of(cls, trace: Trace) -> Stream:
        """Read a trace; where it has no kinds, guess: without tokens before the first token a role, after it usage.

        Where no end-of-stream frame was recorded, ``t_end`` stands for it.

        Raises:
            NanoinferError: a clock that ran backwards; kinds that are not one each.
        """
        metrics.client_delay(trace)  # refuses such a clock
        kinds = trace.kinds or _guess(trace)
        if len(kinds) != len(trace.chunks):
            raise NanoinferError(f"trace: {len(trace.chunks)} chunks but {len(kinds)} kinds; note one for each chunk")
        frames = [Frame(t, n, kind) for (t, n), kind in zip(trace.chunks, kinds, strict=True)]
        if trace.t_end is not None and "done" not in kinds:
            frames.append(Frame(trace.t_end, 0, "done"))
        return cls(trace.t_scheduled, trace.t_sent, tuple(frames), metrics.output_tokens(trace), told=bool(trace.kinds))

    @property
    def held(self) -> list[Frame]:
        """The frames with tokens in them."""
        return [frame for frame in self.frames if frame.n > 0]


def _guess(trace: Trace) -> list[ChunkKind]:
    kinds: list[ChunkKind] = []
    for _, n in trace.chunks:
        kinds.append("content" if n > 0 else "usage" if "content" in kinds else "role")
    return kinds


# --- what rules are made of ----------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """A time in a stream, and its name. ``kinds``: it takes the kinds of frames to tell."""

    words: str
    of: Callable[[Stream], float | None]
    kinds: bool = False


@dataclass(frozen=True)
class Divisor:
    """What a span of time is divided by; below 1 there is no figure."""

    words: str
    of: Callable[[Stream], int]


@dataclass(frozen=True)
class Figure:
    """One figure of one tool.

    Args:
        rule: the definition, to be printed beside the number.
        samples: a stream's values, s; none where it has no such figure.
        kinds: the rule needs the kinds of frames.
        weight: what a sample of this stream counts for.
        missing: what the tool takes a missing value for; None: it leaves it out.
    """

    rule: str
    samples: Callable[[Stream], list[float]]
    kinds: bool
    weight: Callable[[Stream], float] = lambda stream: 1.0
    missing: float | None = None


CHOICES = frozenset[ChunkKind]({"role", "reasoning", "content", "finish"})
TEXT = frozenset[ChunkKind]({"reasoning", "content"})
CONTENT = frozenset[ChunkKind]({"content"})


def _first(kinds: frozenset[ChunkKind]) -> Callable[[Stream], float | None]:
    return lambda stream: next((frame.t for frame in stream.frames if frame.kind in kinds), None)


def _last(kinds: frozenset[ChunkKind]) -> Callable[[Stream], float | None]:
    return lambda stream: next((frame.t for frame in reversed(stream.frames) if frame.kind in kinds), None)


SENT = Moment("sent", lambda stream: stream.sent)
SCHEDULED = Moment("scheduled", lambda stream: stream.scheduled)
FIRST_TOKEN = Moment("first token", lambda stream: next((f.t for f in stream.frames if f.n > 0), None))
LAST_TOKEN = Moment("last token", lambda stream: next((f.t for f in reversed(stream.frames) if f.n > 0), None))
FIRST_TEXT, LAST_TEXT = Moment("first text", _first(TEXT)), Moment("last text", _last(TEXT))
FIRST_CONTENT = Moment("first content (not reasoning)", _first(CONTENT), kinds=True)
LAST_CONTENT = Moment("last content (not reasoning)", _last(CONTENT), kinds=True)
FIRST_CHUNK = Moment("first chunk, a role's too", _first(CHOICES), kinds=True)
LAST_CHUNK = Moment("last chunk before usage", _last(CHOICES), kinds=True)
LAST_DATA = Moment("last frame, usage too", _last(CHOICES | {"usage"}), kinds=True)
LAST_FRAME = Moment("end of stream ([DONE])", lambda s: s.frames[-1].t if s.frames else None, kinds=True)

N = Divisor("N", lambda stream: stream.tokens)
N_LESS_1 = Divisor("(N - 1)", lambda stream: stream.tokens - 1)
N_LESS_FIRST = Divisor("(N - tokens of the first chunk)", lambda s: s.tokens - s.held[0].n if len(s.held) > 1 else 0)
CHUNKS = Divisor("chunks with text", lambda stream: sum(frame.kind in TEXT for frame in stream.frames))


def span(
    last: Moment,
    first: Moment,
    divisor: Divisor | None = None,
    *,
    weight: Callable[[Stream], float] = lambda stream: 1.0,
    missing: float | None = None,
    tokens: int = 1,
) -> Figure:
    """``(last - first) / divisor``; none of a stream with fewer than ``tokens`` tokens."""

    def samples(stream: Stream) -> list[float]:
        a, b = first.of(stream), last.of(stream)
        by = 1 if divisor is None else divisor.of(stream)
        return [] if a is None or b is None or by < 1 or stream.tokens < tokens else [(b - a) / by]

    words = f"{last.words} - {first.words}" if divisor is None else f"({last.words} - {first.words}) / {divisor.words}"
    return Figure(words, samples, last.kinds or first.kinds, weight, missing)


def gaps(words: str, kinds: frozenset[ChunkKind]) -> Figure:
    """Gaps between such chunks, whatever they hold, all in one pool."""

    def samples(stream: Stream) -> list[float]:
        return [b.t - a.t for a, b in pairwise(f for f in stream.frames if f.kind in kinds)]

    return Figure(f"gaps between chunks ({words})", samples, kinds != TEXT)


SHARED = Figure(
    "gap between chunks / tokens of the later one, once a token",
    lambda stream: [(b.t - a.t) / b.n for a, b in pairwise(stream.held) for _ in range(b.n)],
    kinds=False,
)
PERCEIVED = Figure(
    "gaps between tokens, those of one chunk 0 apart",
    lambda s: [0.0] * sum(f.n - 1 for f in s.held) + [b.t - a.t for a, b in pairwise(s.held)],
    kinds=False,
)


@dataclass(frozen=True)
class Rate:
    """Output tokens/s of a run: ``of(good streams, all streams)``, None where there is no time to divide by."""

    rule: str
    of: Callable[[Sequence[Stream], Sequence[Stream]], float | None]
    kinds: bool = False


def _rate(tokens: int, ends: Sequence[float | None], start: float) -> float | None:
    over = max((t for t in ends if t is not None), default=start) - start
    return tokens / over if over > 0 else None


def _sum(streams: Sequence[Stream]) -> int:
    return sum(stream.tokens for stream in streams)


WALL = Rate(
    "tokens of good requests / (last end of stream - first sent)",
    lambda good, all_: _rate(_sum(good), [LAST_FRAME.of(s) for s in all_], min(s.sent for s in all_)),
    kinds=True,
)
TO_LAST_TEXT = Rate(
    "tokens of good requests / (last text - first sent)",
    lambda good, _: _rate(_sum(good), [LAST_TEXT.of(s) for s in good], min(s.sent for s in good)) if good else None,
)
LAST_QUERY = Rate(
    "tokens of good requests / (last token of the request scheduled last - first scheduled)",
    lambda good, all_: _rate(
        _sum(good), [LAST_TOKEN.of(max(all_, key=lambda s: s.scheduled))], min(s.scheduled for s in all_)
    ),
)
DRAINED = Rate(
    "tokens of all requests / (last token - first scheduled)",
    lambda _, all_: _rate(
        sum(f.n for s in all_ for f in s.held), [LAST_TOKEN.of(s) for s in all_], min(s.scheduled for s in all_)
    ),
)

#: inverted: inverted CDF, weighted where the figure is; linear: between two samples, NumPy's default;
#: truncated: ``sorted[int(n q)]``.
Percentile = Literal["inverted", "linear", "truncated"]


@dataclass(frozen=True)
class Tool:
    """A tool of a certain version: its figures, its percentile, and where that was read."""

    name: str
    version: str
    percentile: Percentile
    figures: Mapping[str, Figure]
    throughput: Rate | None
    sources: tuple[str, ...]
    note: str = ""


def tool(
    name: str, version: str, percentile: Percentile, throughput: Rate | None, *sources: str, note: str = "", **f: Figure
) -> Tool:
    """A tool; its figures by name."""
    return Tool(name, version, percentile, MappingProxyType(f), throughput, sources, note)


def at(repo: str, commit: str, path: str) -> str:
    """Where a file is, at a commit."""
    return f"https://github.com/{repo}/blob/{commit}/{path}"

"""Every serving metric, derived from traces alone; all times are seconds of one monotonic clock.

Two tools that say "ITL" rarely mean the same number, so each function here is one definition, :data:`DEFINITIONS` holds
it as a line to print next to the figure, and ``None`` (never 0) stands for "this request has no such value".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nanoinfer.errors import NanoinferError, check
from nanoinfer.measure.trace import Trace

#: By name, the line to print next to the number.
DEFINITIONS: Mapping[str, str] = {
    "client_delay": "t_sent - t_scheduled: how late the load generator was",
    "ttft": "time to first token: first chunk that holds a token - t_scheduled (waiting counts)",
    "ttft_service": "first chunk that holds a token - t_sent (the server's share of TTFT)",
    "tpot": "time per output token: (t_last - t_first) / (N - tokens in the first chunk); none where that is 0 tokens",
    "itl": "inter-token latency, amortised: gap between chunks / tokens in the later chunk, once per token",
    "chunk_gap": "raw gap between two chunks that hold tokens, whatever their number of tokens",
    "itl_perceived": "gap between tokens as they appear: a chunk of n tokens is one gap and n - 1 zeros",
    "e2e": "end-to-end latency: last token - t_scheduled",
    "normalized_latency": "end-to-end latency / output tokens",
    "throughput": "output tokens that arrived inside the window / the window's length",
    "peak_throughput": "highest output token rate over equal parts of the window",
    "goodput": "requests that met every limit / requests attempted (less those without a value for a limit)",
    "concurrency": "time-weighted mean number of requests sent and not yet ended",
}


def _token_chunks(trace: Trace) -> list[tuple[float, int]]:
    """The chunks with tokens, in time order; refuses a clock that ran backwards."""
    times = [trace.t_scheduled, trace.t_sent, *(t for t, _ in trace.chunks)]
    for before, after in pairwise(times if trace.t_end is None else [*times, trace.t_end]):
        if not before <= after:
            raise NanoinferError(f"trace: time runs backwards ({before} then {after}); use one monotonic clock")
    return trace.token_chunks


def output_tokens(trace: Trace) -> int:
    """``N``: the served count that the trace carries, or the tokens of its chunks where it carries none."""
    return trace.output_tokens or sum(n for _, n in trace.token_chunks)


# --- one request: seconds, or None where undefined ------------------------------


def client_delay(trace: Trace) -> float:
    """``t_sent - t_scheduled``."""
    _token_chunks(trace)
    return trace.t_sent - trace.t_scheduled


def ttft(trace: Trace) -> float | None:
    """Time to first token since the request was due, as its user feels it."""
    chunks = _token_chunks(trace)
    return chunks[0][0] - trace.t_scheduled if chunks else None


def ttft_service(trace: Trace) -> float | None:
    """Time to first token since the request was sent."""
    chunks = _token_chunks(trace)
    return chunks[0][0] - trace.t_sent if chunks else None


def tpot(trace: Trace) -> float | None:
    """``(t_last - t_1) / (N - n_1)``; ``None`` where all tokens came in the first chunk."""
    chunks = _token_chunks(trace)
    if not chunks or (rest := output_tokens(trace) - chunks[0][1]) <= 0 or len(chunks) < 2:
        return None
    return (chunks[-1][0] - chunks[0][0]) / rest


def itl(trace: Trace) -> list[tuple[float, int]]:
    """Amortised inter-token latency: ``(gap / n, n)`` for each chunk after the first; TTFT is no part of it."""
    chunks = _token_chunks(trace)
    return [((t - before) / n, n) for (before, _), (t, n) in pairwise(chunks)]


def itl_samples(trace: Trace) -> list[float]:
    """:func:`itl`, one value per token: what percentiles are taken of."""
    return [value for value, n in itl(trace) for _ in range(n)]


def chunk_gaps(trace: Trace) -> list[float]:
    """Raw gaps between chunks: equal to inter-token latency only where each chunk is one token."""
    chunks = _token_chunks(trace)
    return [t - before for (before, _), (t, _) in pairwise(chunks)]


def itl_perceived(trace: Trace) -> list[float]:
    """``N - 1`` unordered gaps as a reader sees them: the tokens of one chunk appear together, 0 apart."""
    return [0.0] * sum(n - 1 for _, n in _token_chunks(trace)) + chunk_gaps(trace)


def e2e(trace: Trace) -> float | None:
    """``t_last - t_scheduled``, to the last token and not to a usage frame after it."""
    chunks = _token_chunks(trace)
    return chunks[-1][0] - trace.t_scheduled if chunks else None


def normalized_latency(trace: Trace) -> float | None:
    """End-to-end latency over output tokens."""
    total = e2e(trace)
    return None if total is None else total / output_tokens(trace)


PER_REQUEST: Mapping[str, Callable[[Trace], float | None]] = {
    "client_delay": client_delay,
    "ttft": ttft,
    "ttft_service": ttft_service,
    "tpot": tpot,
    "e2e": e2e,
    "normalized_latency": normalized_latency,
}


def metric_named(name: str) -> Callable[[Trace], float | None]:
    """The per-request metric of that name. Raises :class:`NanoinferError` naming the known ones."""
    if name not in PER_REQUEST:
        raise NanoinferError(f"metric '{name}' is not a per-request metric; known: {', '.join(sorted(PER_REQUEST))}")
    return PER_REQUEST[name]


@dataclass(frozen=True)
class Collected:
    """One metric over many requests: the values, and what was left out and why."""

    values: list[float]
    failed: int
    undefined: int


def collect(traces: Iterable[Trace], name: str, *, failed_as_infinite: bool = False) -> Collected:
    """Take one metric of every request that ended well; others are counted, since a fast refusal is no low latency.

    With ``failed_as_infinite`` each failed request is one ``inf`` too (for an adjusted percentile).
    """
    metric = metric_named(name)
    values: list[float] = []
    failed = undefined = 0
    for trace in traces:
        if trace.status != "ok":
            failed += 1
            if failed_as_infinite:
                values.append(math.inf)
        elif (value := metric(trace)) is None:
            undefined += 1
        else:
            values.append(value)
    return Collected(values, failed, undefined)


# --- many requests ---------------------------------------------------------------


def _left(trace: Trace) -> float:
    """When the request left the system: its end, else its last chunk, else at once."""
    if trace.t_end is not None:
        return trace.t_end
    return trace.chunks[-1][0] if trace.chunks else trace.t_sent


def _window(start: float, end: float) -> float:
    if not end > start:
        raise NanoinferError(f"window: end ({end}) must come after start ({start})")
    return end - start


@dataclass(frozen=True)
class Throughput:
    """Rates over one window."""

    window_s: float
    output_tok_s: float  # by arrival; of failed requests too: the work was done
    requests_s: float  # good ones, by their end
    input_tok_s: float  # prompt tokens, by the first output token
    #: All tokens of the requests sent in the window, over the time from its start to their last token, if any.
    drained_tok_s: float | None


def throughput(traces: Sequence[Trace], start: float, end: float) -> Throughput:
    """Rates over the window ``start <= t < end``, to be chosen before looking at the data."""
    width = _window(start, end)
    out = sum(n for trace in traces for t, n in _token_chunks(trace) if start <= t < end)
    ended = sum(trace.status == "ok" and start <= _left(trace) < end for trace in traces)
    read = sum(trace.prompt_tokens for trace in traces for t, _ in trace.token_chunks[:1] if start <= t < end)
    drained = [chunk for trace in traces if start <= trace.t_sent < end for chunk in trace.token_chunks]
    over = max((t for t, _ in drained), default=start) - start
    drained_tok_s = sum(n for _, n in drained) / over if over > 0 else None
    return Throughput(width, out / width, ended / width, read / width, drained_tok_s)


def peak_throughput(traces: Sequence[Trace], start: float, end: float, part_s: float = 1.0) -> float:
    """The highest output token rate over equal parts of the window, at least ``part_s`` long; never below the mean."""
    width = _window(start, end)
    check("peak throughput: part_s", part_s, above=0, error=NanoinferError)
    parts = max(1, math.floor(width / part_s))
    counts = [0] * parts
    for trace in traces:
        for t, n in _token_chunks(trace):
            if start <= t < end:
                counts[min(int((t - start) / width * parts), parts - 1)] += n
    return max(counts) * parts / width


@dataclass(frozen=True)
class Goodput:
    """How many requests met the limits. ``share`` is ``None`` where none could be judged."""

    good: int
    attempted: int
    excluded: int
    share: float | None
    requests_s: float
    tok_s: float


def goodput(
    traces: Sequence[Trace], slo: Mapping[str, float], start: float | None = None, end: float | None = None
) -> Goodput:
    """Judge requests by limits such as ``{"ttft": 0.1, "tpot": 0.02}`` (seconds, inclusive).

    A request that failed or broke any limit is bad. One that broke none but has no value for some limit (TPOT of a
    single token) is excluded from the share and counted. Rates are over ``start`` to ``end``, by default from the
    first scheduled request to the last end.
    """
    if not slo:
        raise NanoinferError("goodput: give at least one limit, such as {'ttft': 0.1}")
    limits = [(metric_named(name), limit) for name, limit in slo.items()]
    good: list[Trace] = []
    excluded = 0
    for trace in traces:
        if trace.status != "ok":
            continue
        values = [(metric(trace), limit) for metric, limit in limits]
        if any(value is not None and value > limit for value, limit in values):
            continue
        if any(value is None for value, _ in values):
            excluded += 1
        else:
            good.append(trace)
    judged = len(traces) - excluded
    if not traces:
        return Goodput(0, 0, 0, None, 0.0, 0.0)
    first = min(trace.t_scheduled for trace in traces) if start is None else start
    last = max(_left(trace) for trace in traces) if end is None else end
    width = _window(first, last)
    share, tokens = len(good) / judged if judged else None, sum(output_tokens(trace) for trace in good)
    return Goodput(len(good), len(traces), excluded, share, len(good) / width, tokens / width)


def mean_concurrency(traces: Iterable[Trace], start: float, end: float) -> float:
    """Time-weighted mean number of requests in flight (sent, not yet ended) in the window."""
    busy = math.fsum(max(0.0, min(_left(trace), end) - max(trace.t_sent, start)) for trace in traces)
    return busy / _window(start, end)


@dataclass(frozen=True)
class Little:
    """Little's law, ``N = rate * time``, as a check on the records: ``error`` is ``|N - rate * time|``."""

    concurrency: float
    rate: float
    time: float
    error: float


def little(traces: Sequence[Trace], start: float, end: float) -> Little:
    """Compare mean concurrency with arrival rate times mean time in the system.

    Exact where every request begins and ends inside the window; otherwise ``error`` shows how much its edges matter.
    """
    inside = [trace for trace in traces if start <= trace.t_sent < end]
    rate = len(inside) / _window(start, end)
    time = math.fsum(_left(trace) - trace.t_sent for trace in inside) / len(inside) if inside else 0.0
    concurrency = mean_concurrency(traces, start, end)
    return Little(concurrency, rate, time, abs(concurrency - rate * time))

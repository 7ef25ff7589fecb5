"""Runs made by hand, small enough to check on paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanoinfer.bench.loadgen import Run
from nanoinfer.measure.trace import Trace


def trace(at: float, chunks: Sequence[tuple[float, int]], *, sent: float | None = None, **more: Any) -> Trace:
    """A request due at ``at``, its chunks by seconds after that; it ends with the last unless ``t_end`` says more."""
    times = [(at + t, n) for t, n in chunks]
    more.setdefault("t_end", times[-1][0] if times else at)
    more.setdefault("prompt_tokens", 10)
    more.setdefault("output_tokens", sum(n for _, n in chunks))
    return Trace(at, at if sent is None else sent, times, **more)


def run(traces: Sequence[Trace], start: float = 0.0, end: float = 10.0, **more: Any) -> Run:
    """A run of these traces over a window of ten seconds."""
    more.setdefault("settings", {"load": "by hand"})
    more.setdefault("provenance", {"machine": {"cpu": "a desk"}, "date": "2026-01-01"})
    return Run(traces=list(traces), start=start, end=end, **more)


def golden() -> Run:
    """One of each: good, slow, a single token, an error, a timeout, a rejection, and a warm-up before the window."""
    return run(
        [
            trace(2.0, [(1.0, 1), (2.0, 1)]),  # warm-up; then the caches were flushed, until 10.0
            trace(
                10.0, [(0.05, 0), (0.2, 1), (0.26, 3), (0.32, 3), (0.38, 1), (0.381, 0)], t_end=10.382, prompt_tokens=7
            ),
            trace(11.0, [(0.5, 2), (0.9, 2)], sent=11.004, prompt_tokens=3),
            trace(12.0, [(0.5, 1)], prompt_tokens=4),
            trace(13.0, [], t_end=13.001, status="error", error="http 500"),
            trace(14.0, [(0.1, 1)], t_end=19.0, status="timeout", error="timeout", prompt_tokens=6),
            trace(15.0, [], t_end=15.002, status="rejected", error="http 429"),
        ],
        start=10.0,
        end=20.0,
    )

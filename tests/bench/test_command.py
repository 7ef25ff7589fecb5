"""What a run prints while it runs."""

from __future__ import annotations

import io

import pytest

from nanoinfer.bench.command import progress
from tests.bench.made import trace


def test_progress_writes_plain_lines_where_there_is_no_terminal() -> None:
    out, time = io.StringIO(), [100.0]
    with progress("bench", total=50, stream=out, clock=lambda: time[0]) as note:
        for i in range(44):
            time[0] += 0.25
            note(trace(i, [(0.1, 1), (0.15, 1)]))
        note(trace(99.0, [], status="timeout"))
    first, second, last = out.getvalue().splitlines()
    assert first == "bench: 20 of 50 ended, 8 tok/s | TTFT p50 100 ms | TPOT p50 50.0 ms"
    assert second.startswith("bench: 40 of 50 ended, 8 tok/s")
    assert last == ("bench: 45 of 50 ended, 8 tok/s | 1 timeout | TTFT p50 100 p90 100 ms | TPOT p50 50.0 p90 50.0 ms")


def test_progress_before_anything_has_ended() -> None:
    out = io.StringIO()
    with progress("bench", stream=out, clock=lambda: 0.0):
        pass
    assert out.getvalue() == ""
    with progress("bench", stream=out, clock=lambda: 0.0) as note:
        note(trace(0.0, [], status="timeout"))
    assert out.getvalue() == "bench: 1 ended | 1 timeout | TTFT not measured yet | TPOT not measured yet\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_draws_one_live_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out, time = Terminal(), [0.0]
    with progress("bench", stream=out, clock=lambda: time[0]) as note:
        for i in range(4):
            time[0] += 0.3
            note(trace(i, [(0.1, 1)]))
    assert out.getvalue().count("bench: 2 ended") == 1  # drawn at 0.6 s and at 1.2 s, not at each request
    assert out.getvalue().rstrip().endswith("bench: 4 ended, 3 tok/s | TTFT p50 100 ms | TPOT not measured yet")

"""The floor: measured against a real mock in a process of its own, and judged by its budget."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest

from nanoinfer.bench import mock as floor
from nanoinfer.bench.mock import Floor, measure_floor
from nanoinfer.errors import NanoinferError, RequestError

GOOD = Floor(
    rate=200.0,
    streams=500,
    chunks_s=10.0,
    at_once=520,
    chunks=15_000,
    overhead_mean_s=0.0005,
    overhead_p50_s=0.0004,
    overhead_p99_s=0.003,
    server_lag_p99_s=0.001,
    send_lag_p99_s=0.004,
    stall_p99_s=0.002,
    cpu_share=0.5,
    cpu_chunk_s=0.0001,
)


def test_the_floor_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor, "OPENING_S", 0.1)
    found = asyncio.run(measure_floor(rate=20, streams=5, chunks_s=50, seconds=0.4))
    assert 5 <= found.at_once <= 5 + 10
    # 5 streams of 50 chunks a second for 0.4 s and a bit, and the short requests meanwhile.
    assert found.chunks == pytest.approx(108, abs=25)
    assert found.overhead_mean_s is not None and found.overhead_p99_s is not None
    assert found.overhead_mean_s > 0 and found.overhead_p99_s > 0
    assert found.send_lag_p99_s is not None and found.send_lag_p99_s >= 0
    assert found.server_lag_p99_s is not None and found.server_lag_p99_s >= 0
    assert found.cpu_share > 0 and found.cpu_chunk_s
    assert json.loads(json.dumps(found.as_json()))["streams"] == 5


def test_within_the_budget() -> None:
    assert GOOD.problems() == []
    nothing: dict[str, Any] = dict.fromkeys(("streams", "overhead_mean_s", "send_lag_p99_s"))
    assert dataclasses.replace(GOOD, **nothing).problems() == []


@pytest.mark.parametrize(
    ("worse", "says"),
    [
        ({"overhead_mean_s": 0.0011}, "overhead 1.10 ms a chunk, budget 1 ms"),
        ({"send_lag_p99_s": 0.0105}, "send lag p99 10.5 ms, budget 10 ms"),
        ({"cpu_share": 0.9}, "the client used 90% of a core, budget 80%"),
        ({"at_once": 100}, "only 100 of 500 streams were open at once"),
    ],
)
def test_beyond_the_budget(worse: dict[str, Any], says: str) -> None:
    assert dataclasses.replace(GOOD, **worse).problems() == [says]


@pytest.mark.parametrize(
    "load", [{}, {"rate": 0}, {"streams": 0}, {"rate": 1, "seconds": 0}, {"rate": 1, "chunks_s": -1}]
)
def test_what_makes_no_floor(load: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="floor"):
        asyncio.run(measure_floor(**load))


def test_a_mock_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(NanoinferError, match="did not start"):
        asyncio.run(measure_floor(rate=1))


def test_the_mock_as_a_program_ends_with_its_parent() -> None:
    command = [sys.executable, "-m", "nanoinfer.bench.mock", "--port", "0", "--with-parent"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as mock:
        assert mock.stdout is not None and mock.stdin is not None
        assert 0 < int(mock.stdout.readline()) < 65536
        mock.stdin.close()
        assert mock.wait(timeout=30) == 0

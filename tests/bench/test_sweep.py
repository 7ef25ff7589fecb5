"""The knee, the highest good level and the stop, on systems whose answers are known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from nanoinfer.bench import tables
from nanoinfer.bench.loadgen import Run
from nanoinfer.bench.sweep import Sweep, parse_levels, sweep
from nanoinfer.errors import RequestError
from tests.bench.made import run, trace


def steady(rate: float, latency: float, n: int = 500, **more: Any) -> Run:
    """``n`` requests of one token, evenly through a window, each ``latency`` seconds; the edges play no part."""
    seconds = n / rate
    return run([trace(i / rate, [(latency, 1)], t_end=i / rate + latency) for i in range(n)], end=seconds, **more)


def swept(system: Callable[[float], Run], levels: Sequence[float], *args: Any, **more: Any) -> Sweep:
    async def make(level: float) -> Run:
        return system(level)

    return asyncio.run(sweep(make, levels, *args, **more))


def mm1(rate: float) -> Run:
    """M/M/1 with a capacity of 10 a second, by its formula: a request takes 1 / (10 - rate)."""
    return steady(rate, 1 / (10 - rate), n=1200)


def closed(users: float) -> Run:
    """Users without think time at 1 s a request, of which the bottleneck takes 0.1 s."""
    latency = max(1.0, 0.1 * users)
    return steady(users / latency, latency, n=1000)


def test_the_knee_of_mm1_lies_at_half_the_capacity() -> None:
    found = swept(mm1, [1, 2, 3, 4, 5, 6, 7, 8])
    assert found.knee is not None and found.knee.level == 5
    assert found.knee.power == pytest.approx(5 * 5, rel=0.01)
    record = found.as_dict()
    assert record["knee"] | {"definition": ""} == {"definition": "", "level": 5, "inside": True}
    assert record["notes"] == [] and record["stopped"] is None
    json.dumps(record, allow_nan=False)


def test_the_knee_of_a_closed_loop_is_where_the_bottleneck_fills() -> None:
    found = swept(closed, [1, 2, 5, 10, 20, 40, 80], kind="users")
    assert found.knee is not None and found.knee.level == 10
    # 20 users doubled the latency and brought nothing more: there it stops.
    assert [p.level for p in found.points] == [1, 2, 5, 10, 20]
    assert found.stopped == "saturated at 20: 100% more load brought -1% tokens/s and +100% latency"  # -1%: the edges


def test_a_level_that_gains_or_waits_little_is_not_the_end() -> None:
    assert swept(mm1, [2, 4, 8, 9, 9.5]).stopped is None  # slower and slower, but all the work gets done
    flat = swept(
        lambda level: steady(min(level, 3.0), 0.5), [2, 4, 8, 16]
    )  # no more work, and nobody waits: rejections
    assert flat.stopped is None


def test_a_level_at_which_nothing_ends_well_is_the_end() -> None:
    def system(level: float) -> Run:
        good = steady(level, 0.1, n=10)
        return good if level < 4 else run([trace(0.0, [], status="error", error="http 503")])

    found = swept(system, [1, 4, 8])
    assert found.stopped == "no request ended well at 4" and len(found.points) == 2
    assert found.knee is not None and found.knee.level == 1


def test_the_highest_level_that_meets_the_slo() -> None:
    """TTFT is 1 / (10 - rate): 0.25 s is met up to 6 a second, and what happens above a miss does not count."""
    slo = {"ttft": 0.26}
    found = swept(mm1, [2, 4, 6, 7, 8], slo)
    assert found.highest is not None and found.highest.level == 6
    assert [p.share for p in found.points] == [1.0, 1.0, 1.0, 0.0, 0.0]
    lucky = swept(lambda level: steady(level, 0.3 if level == 4 else 0.1), [2, 4, 6], slo)
    assert lucky.highest is not None and lucky.highest.level == 2
    none = swept(mm1, [7, 8], slo)
    assert none.highest is None and "No level met the SLO (ttft at most 260 ms)" in none.as_dict()["notes"][-1]
    every = swept(mm1, [1, 2], slo).as_dict()
    assert "Every level met the SLO: the limit lies above 2 requests/s." in every["notes"]
    assert swept(mm1, [1, 2]).as_dict()["highest_good"]["level"] is None  # nothing was promised


def test_the_needed_share() -> None:
    def one_slow_of_a_hundred(level: float) -> Run:
        good = steady(level, 0.1, n=500)
        for i in range(5 if level < 3 else 6):
            good.traces[i].chunks = [(good.traces[i].t_scheduled + 9, 1)]
            good.traces[i].t_end = None
        return good

    found = swept(one_slow_of_a_hundred, [1, 2, 3], {"e2e": 1.0})
    assert found.highest is not None and found.highest.level == 2  # 99% is met by 495 of 500 and not by 494
    assert swept(one_slow_of_a_hundred, [1, 3], {"e2e": 1.0}, needed=0.9).as_dict()["highest_good"]["level"] == 3


def test_few_requests_cannot_show_99_percent() -> None:
    few = swept(lambda level: steady(level, 0.1, n=458), [1, 2], {"ttft": 1.0}).as_dict()
    assert any("takes 459 requests a level to show" in note and "fewest here are 458" in note for note in few["notes"])
    enough = swept(lambda level: steady(level, 0.1, n=459), [1, 2], {"ttft": 1.0}).as_dict()
    assert not any("n too small" in note for note in enough["notes"])


def test_a_knee_at_the_edge_is_said() -> None:
    assert "may lie above 4 requests/s" in swept(mm1, [1, 2, 4]).as_dict()["notes"][0]
    assert "may lie below 6 requests/s" in swept(mm1, [6, 8]).as_dict()["notes"][0]
    assert swept(mm1, [6, 8]).as_dict()["knee"]["inside"] is False


def test_ctrl_c_ends_the_sweep_and_keeps_its_points() -> None:
    system = lambda level: steady(level, 0.1, n=10, interrupted=level == 2)  # noqa: E731
    found = swept(system, [1, 2, 4])
    assert found.stopped == "interrupted at 2" and [p.level for p in found.points] == [1, 2]


def test_what_is_no_sweep() -> None:
    for levels in ([], [0, 1], [2, 1], [1, 1]):
        with pytest.raises(RequestError, match="positive levels that rise"):
            swept(mm1, levels)
    with pytest.raises(RequestError, match="share of good requests must be above 0 and at most 1"):
        swept(mm1, [1], needed=0.0)


def test_the_table_of_levels() -> None:
    header, rows = tables.levels(swept(mm1, [2, 5, 8], {"ttft": 0.21}).as_dict())
    assert header[:4] == ("requests/s", "n", "ok", "tok/s") and header[-3:] == ("good", "good/s", "remarks")
    assert rows[1][:4] == ("5", "1,200", "1,200", "5.00")
    assert (rows[1][-1], rows[2][-1], rows[2][-3]) == ("knee, highest good", "", "0.0%")


def test_levels_as_people_write_them() -> None:
    assert parse_levels("1,2.5,10") == [1.0, 2.5, 10.0]
    assert parse_levels("1..16") == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert parse_levels("3..20") == [3.0, 6.0, 12.0, 20.0]
    assert parse_levels("4..4") == [4.0]
    assert parse_levels("7") == [7.0]


@pytest.mark.parametrize(
    "text", ["", "1,,2", "a..b", "1..", "5..1", "0..4", "-1,2", "2,1", "1,1", "nan", "1..inf", "1,inf"]
)
def test_levels_that_are_none(text: str) -> None:
    with pytest.raises(RequestError, match="--sweep '"):
        parse_levels(text)

"""Open and closed loops on virtual time: every figure can be worked out by hand."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from itertools import count, islice, repeat
from pathlib import Path
from typing import Any

import pytest

from nanoinfer.bench.loadgen import Run, closed_loop, load_run, open_loop, save_run
from nanoinfer.errors import NanoinferError, RequestError
from nanoinfer.measure import metrics
from nanoinfer.measure.clock import now
from nanoinfer.measure.stats import percentile
from nanoinfer.measure.trace import Trace
from nanoinfer.workload.arrivals import constant
from nanoinfer.workload.items import WorkItem, parse_lengths, schedule_at, synthetic
from tests.bench.virtual_time import Clock

NEAR = 1e-5  # virtual time is moved on by a hair at each leap


class Scripted:
    """A target that answers as a coroutine says; one chunk with all tokens at its end."""

    name = "script"

    def __init__(self, serve: Callable[[WorkItem], Awaitable[None]]) -> None:
        self.serve = serve
        self.messages: dict[str, str] = {}
        self.sent: list[WorkItem] = []
        self.here = self.most_at_once = 0

    @property
    def settings(self) -> dict[str, Any]:
        return {"url": "nowhere"}

    async def send(self, work: WorkItem, trace: Trace) -> None:
        trace.t_sent = now()
        self.sent.append(work)
        self.here += 1
        self.most_at_once = max(self.most_at_once, self.here)
        try:
            await self.serve(work)
            trace.token(now(), work.output)
        except asyncio.CancelledError:
            trace.status = "cancelled"
            raise
        except OSError as error:
            trace.status, trace.error = "error", str(error)
        finally:
            self.here -= 1
            trace.t_end = now()

    async def close(self) -> None:
        pass


def taking(seconds: float) -> Scripted:
    return Scripted(lambda work: asyncio.sleep(seconds))


def evenly(rate: float, n: int, prompt: str = "p") -> list[WorkItem]:
    return schedule_at((WorkItem(f"{prompt}{i}", 2) for i in count()), islice(constant(rate), n))


@pytest.fixture(autouse=True)
def no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoinfer.bench.loadgen.provenance", lambda: {"machine": "none"})


# --- the open loop ------------------------------------------------------------------------


def one_at_a_time_with_a_stall() -> Scripted:
    """10 ms a request, one after another; one of them takes 3 s."""
    turn = asyncio.Lock()

    async def serve(work: WorkItem) -> None:
        async with turn:
            await asyncio.sleep(3.0 if work.prompt == "p100" else 0.01)

    return Scripted(serve)


def test_a_stall_is_felt_by_all_who_were_due(clock: Clock) -> None:
    run = clock.run(open_loop(one_at_a_time_with_a_stall(), evenly(50, 500)))
    assert [t.t_scheduled for t in run.traces] == pytest.approx([i / 50 for i in range(500)], abs=NEAR)
    assert [t.t_sent for t in run.traces] == pytest.approx([i / 50 for i in range(500)], abs=1e-3)
    # The 100th, due at 2, ends at 5; the k-th after it at 5 + k/100, due at 2 + k/50.
    waits = [value for t in run.traces if (value := metrics.ttft(t)) is not None]
    assert waits[100:400] == pytest.approx([3 - k / 100 for k in range(300)], abs=1e-3)
    assert percentile(waits, 99) == pytest.approx(2.95, abs=1e-3)
    assert (run.start, run.end) == (0.0, pytest.approx(10.0))  # 500 requests over 10 s: the rate that was asked for


def test_a_closed_loop_hides_the_same_stall(clock: Clock) -> None:
    """One user asks the same server 50 times a second when all is well: of the stall there is a single sample."""
    run = clock.run(closed_loop(one_at_a_time_with_a_stall(), evenly(1, 500), users=1, think_s=0.01))
    waits = [value for t in run.traces if (value := metrics.ttft(t)) is not None]
    assert len(waits) == 500
    assert percentile(waits, 99) == pytest.approx(0.01, abs=1e-3)  # 295 times less
    assert max(waits) == pytest.approx(3.0, abs=1e-3)


def test_the_schedule_is_absolute(clock: Clock) -> None:
    """Half a millisecond of work at each request: added to each gap it would make 182 a second of 200."""

    async def serve(work: WorkItem) -> None:
        clock.block(0.0005)

    run = clock.run(open_loop(Scripted(serve), evenly(200, 1000)))
    assert sum(t.t_sent < 5.0 for t in run.traces) == 1000
    assert run.traces[-1].t_sent == pytest.approx(999 / 200, abs=1e-3)
    assert max(map(metrics.client_delay, run.traces)) < 0.001


def test_a_client_that_cannot_keep_up_skips_no_request_and_says_how_late_it_was(clock: Clock) -> None:
    async def serve(work: WorkItem) -> None:
        clock.block(0.01)  # twice what there is time for

    run = clock.run(open_loop(Scripted(serve), evenly(200, 100)))
    assert len(run.traces) == 100
    assert [t.t_scheduled for t in run.traces] == pytest.approx([i / 200 for i in range(100)], abs=NEAR)
    assert metrics.client_delay(run.traces[-1]) == pytest.approx(99 * 0.005, abs=0.011)


def test_arrivals_do_not_wait_for_answers(clock: Clock) -> None:
    target = taking(5.0)
    clock.run(open_loop(target, evenly(10, 40)))
    assert target.most_at_once == 40


def test_works_are_sent_in_order_of_time_and_times_are_kept(clock: Clock) -> None:
    works = [WorkItem("late", 1, 0.5015001), WorkItem("first", 1, 0.0), WorkItem("soon", 1, 0.0005005)]
    target = taking(1.0)
    run = clock.run(open_loop(target, works))
    assert [w.prompt for w in target.sent] == ["first", "soon", "late"]
    assert [t.t_scheduled for t in run.traces] == pytest.approx([0.0, 0.0005005, 0.5015001], abs=1e-9)


def test_the_window(clock: Clock) -> None:
    run = clock.run(open_loop(taking(1.0), evenly(10, 20)))
    assert (run.start, run.end) == (0.0, pytest.approx(2.0))
    run = clock.run(open_loop(taking(1.0), evenly(10, 20), seconds=5))
    assert (run.start, run.end) == (0.0, 5.0)
    run = clock.run(
        open_loop(taking(1.0), [WorkItem("a", 1), WorkItem("b", 1)])
    )  # all at once: until the last has ended
    assert (run.start, run.end) == (0.0, pytest.approx(1.0, abs=NEAR))
    assert len(run.measured()) == 2


# --- warming up -----------------------------------------------------------------------------


def test_the_window_opens_where_the_warm_up_schedule_ends_and_load_goes_on(clock: Clock) -> None:
    target = taking(3.0)
    run = clock.run(open_loop(target, evenly(10, 20), warmup=evenly(10, 10, "w")))
    assert (run.start, run.end) == (pytest.approx(1.0), pytest.approx(3.0))
    assert len(run.traces) == 30 and len(run.measured()) == 20
    assert [t.t_scheduled for t in run.traces] == pytest.approx([i / 10 for i in range(30)], abs=NEAR)  # no pause
    # By event time: at the opening ten are under way, and none of the measured ones ends before 4.
    assert metrics.mean_concurrency(run.traces, 1.0, 1.1) == pytest.approx(11, abs=0.01)


def test_a_warm_up_all_at_once_ends_before_the_window(clock: Clock) -> None:
    run = clock.run(open_loop(taking(3.0), evenly(10, 5), warmup=[WorkItem("w", 1), WorkItem("v", 1)]))
    assert run.start == pytest.approx(3.0, abs=NEAR)
    assert [t.t_scheduled for t in run.measured()] == pytest.approx([3 + i / 10 for i in range(5)], abs=NEAR)


@pytest.mark.parametrize("prompt", ["the same", (1, 2, 3)])
def test_a_prompt_cannot_warm_itself_up(clock: Clock, prompt: Any) -> None:
    target = taking(1.0)
    with pytest.raises(RequestError, match="prefix cache"):
        clock.run(
            open_loop(
                target, [WorkItem(prompt, 1)], warmup=[WorkItem(list(prompt) if prompt == (1, 2, 3) else prompt, 9)]
            )
        )
    assert target.sent == []
    with pytest.raises(RequestError, match="prefix cache"):
        clock.run(closed_loop(target, repeat(WorkItem(prompt, 1)), users=1, requests=1, warmup=[WorkItem(prompt, 9)]))


def test_the_same_seed_for_both_is_caught_and_another_stream_is_not(clock: Clock) -> None:
    lengths = (parse_lengths("8"), parse_lengths("2"))
    warm = list(islice(synthetic(*lengths, seed=1), 3))
    with pytest.raises(RequestError, match="another stream"):
        clock.run(open_loop(taking(1), list(islice(synthetic(*lengths, seed=1), 9)), warmup=warm))
    warm = list(islice(synthetic(*lengths, seed=1, stream="warm-up"), 3))
    run = clock.run(open_loop(taking(1), list(islice(synthetic(*lengths, seed=1), 9)), warmup=warm))
    assert len(run.measured()) == 9


def test_users_warm_up_and_go_on_without_a_pause(clock: Clock) -> None:
    run = clock.run(closed_loop(taking(1.0), evenly(1, 99), users=3, requests=6, warmup=evenly(1, 4, "w")))
    # Three warm-up requests at 0, one at 1 with two measured ones.
    assert run.start == pytest.approx(1.0, abs=NEAR)
    assert [round(t.t_scheduled, 3) for t in run.traces] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert run.settings["warmup"] == 4 and len(run.measured()) == 6


# --- the closed loop --------------------------------------------------------------------------


def test_each_user_waits_and_thinks(clock: Clock) -> None:
    target = taking(1.0)
    run = clock.run(closed_loop(target, map(lambda i: WorkItem(f"p{i}", 1), count()), users=2, think_s=1.0, seconds=5))
    assert [round(t.t_scheduled, 3) for t in run.traces] == [0, 0, 2, 2, 4, 4]
    assert (run.start, run.end, target.most_at_once) == (0.0, 5.0, 2)
    assert all(metrics.client_delay(t) < NEAR for t in run.traces)


def test_a_number_of_requests_and_no_more(clock: Clock) -> None:
    target = taking(1.0)
    run = clock.run(closed_loop(target, repeat(WorkItem("p", 1)), users=3, requests=7))
    assert len(run.measured()) == len(target.sent) == 7
    assert run.end == pytest.approx(3.0, abs=NEAR)


def test_works_that_run_out_close_the_window(clock: Clock) -> None:
    run = clock.run(closed_loop(taking(1.0), evenly(1, 4), users=2, seconds=60))
    assert run.end == pytest.approx(2.0, abs=NEAR) and run.settings["ran_out"]


def test_a_user_who_was_refused_at_once_pauses(clock: Clock) -> None:
    async def serve(work: WorkItem) -> None:
        raise OSError("no")

    run = clock.run(closed_loop(Scripted(serve), repeat(WorkItem("p", 1)), users=2, seconds=3.5))
    assert [round(t.t_scheduled, 2) for t in run.traces] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {t.status for t in run.traces} == {"error"}


# --- time-outs, failures, Ctrl-C ----------------------------------------------------------------


def test_a_time_out_is_no_latency(clock: Clock) -> None:
    async def serve(work: WorkItem) -> None:
        await asyncio.sleep(100 if work.prompt == "p1" else 1)

    run = clock.run(open_loop(Scripted(serve), evenly(1, 3), timeout_s=5))
    assert [(t.status, t.error) for t in run.traces] == [("ok", None), ("timeout", "timeout"), ("ok", None)]
    assert run.traces[1].t_end == pytest.approx(1 + 5, abs=1e-3)
    found = metrics.collect(run.traces, "e2e")
    assert (found.values, found.failed) == (pytest.approx([1.0, 1.0], abs=1e-3), 1)


def test_failed_requests_are_counted_and_not_mixed_in(clock: Clock) -> None:
    async def serve(work: WorkItem) -> None:
        if work.prompt in ("p1", "p2"):
            raise OSError("http 500")
        await asyncio.sleep(1)

    run = clock.run(open_loop(Scripted(serve), evenly(1, 4)))
    found = metrics.collect(run.traces, "ttft")
    assert (found.values, found.failed) == (pytest.approx([1.0, 1.0], abs=1e-3), 2)
    assert [t.error for t in run.traces] == [None, "http 500", "http 500", None]


def test_ctrl_c_keeps_what_was_measured(clock: Clock) -> None:
    watched: list[Trace] = []

    async def scenario() -> tuple[Run, int]:
        load = asyncio.create_task(open_loop(taking(1.0), evenly(2, 100), on_done=watched.append))
        await asyncio.sleep(2.7)
        load.cancel()
        return await load, load.cancelling()

    run, cancelling = clock.run(scenario())
    assert run.interrupted and cancelling == 0
    assert [t.status for t in run.traces] == ["ok"] * 4 + ["cancelled"] * 2
    assert run.end == pytest.approx(2.7, abs=1e-3)
    assert all(t.t_end == pytest.approx(2.7, abs=1e-3) for t in run.traces[4:])
    assert len(watched) == 6


def test_ctrl_c_during_the_warm_up(clock: Clock) -> None:
    async def scenario(load: Any) -> Run:
        task = asyncio.create_task(load)
        await asyncio.sleep(0.5)
        task.cancel()
        run: Run = await task
        return run

    for load in (
        open_loop(taking(9), evenly(1, 9), warmup=evenly(1, 9, "w")),
        open_loop(taking(9), evenly(1, 9), warmup=[WorkItem("w", 1)]),
        closed_loop(taking(9), evenly(1, 9), users=1, warmup=[WorkItem("w", 1)]),
    ):
        run = clock.run(scenario(load))
        assert run.interrupted and len(run.traces) == 1 and run.measured() == []
        assert run.end == pytest.approx(run.start)


def test_a_real_interrupt_signal() -> None:
    async def main() -> Run:
        asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGINT)
        return await closed_loop(taking(0.01), repeat(WorkItem("p", 1)), users=2, seconds=600)

    run = asyncio.run(main())
    assert run.interrupted and run.end < 60 and sum(t.status == "ok" for t in run.traces) > 2


def test_a_mistake_of_the_user_ends_the_run_at_once(clock: Clock) -> None:
    async def serve(work: WorkItem) -> None:
        await asyncio.sleep(1)
        raise RequestError("chat takes texts")

    with pytest.raises(RequestError, match="chat takes texts"):
        clock.run(open_loop(Scripted(serve), evenly(1, 1000)))
    assert clock.at < 1010


@pytest.mark.parametrize(
    ("load", "says"),
    [
        (lambda t: open_loop(t, []), "no request to send"),
        (lambda t: open_loop(t, [WorkItem("a", 1, -1)]), "from 0 s on"),
        (lambda t: open_loop(t, [WorkItem("a", 1, float("inf"))]), "from 0 s on"),
        (lambda t: open_loop(t, [WorkItem("a", 1, 5)], seconds=4), "after the window of 4 s"),
        (lambda t: open_loop(t, [WorkItem("a", 1)], timeout_s=0), "timeout_s must be above 0"),
        (lambda t: closed_loop(t, [WorkItem("a", 1)], users=0), "at least 1"),
        (lambda t: closed_loop(t, [WorkItem("a", 1)], users=1, requests=0), "at least 1"),
        (lambda t: closed_loop(t, [WorkItem("a", 1)], users=1, seconds=0), "seconds must be above 0"),
        (lambda t: closed_loop(t, repeat(WorkItem("a", 1)), users=1), "needs a number of requests, or seconds"),
    ],
)
def test_what_makes_no_load(clock: Clock, load: Any, says: str) -> None:
    target = taking(1)
    with pytest.raises(RequestError, match=says):
        clock.run(load(target))
    assert target.sent == []


# --- the client's health, and the record ----------------------------------------------------------


def test_a_stall_of_the_client_is_seen_once(clock: Clock) -> None:
    async def serve(work: WorkItem) -> None:
        await asyncio.sleep(1)
        clock.block(0.3)
        await asyncio.sleep(1)

    run = clock.run(open_loop(Scripted(serve), [WorkItem("a", 1)]))
    late = [stall for stall in run.loop_stalls_s if stall > 0.001]
    assert late == [pytest.approx(0.3, abs=0.011)]
    assert len(run.loop_stalls_s) == pytest.approx(200, abs=3)


def test_all_times_count_from_the_start_of_the_run(clock: Clock) -> None:
    clock.block(5000)
    (trace,) = clock.run(open_loop(taking(1.0), [WorkItem("a", 3)])).traces
    assert (trace.t_scheduled, trace.t_sent, trace.t_end) == (
        0.0,
        pytest.approx(0, abs=NEAR),
        pytest.approx(1, abs=NEAR),
    )
    assert trace.chunks == [(pytest.approx(1, abs=NEAR), 3)]


def test_a_run_is_stored_and_read_again(clock: Clock, tmp_path: Path) -> None:
    run = clock.run(open_loop(taking(1.0), evenly(2, 4), warmup=[WorkItem("w", 1)]))
    run.settings["seed"] = 7
    save_run(run, tmp_path / "new")
    assert load_run(tmp_path / "new") == run
    kept = json.loads((tmp_path / "new" / "run.json").read_text())["client"]
    assert kept == {"send_lag_s": [metrics.client_delay(t) for t in run.traces], "loop_stalls_s": run.loop_stalls_s}
    assert run.settings["target"] == {"name": "script", "url": "nowhere"} and run.settings["seed"] == 7
    assert run.settings["loop"] == "open" and run.provenance == {"machine": "none"}


def test_settings_of_earlier_runs_are_flattened(clock: Clock, tmp_path: Path) -> None:
    run = clock.run(closed_loop(taking(1.0), evenly(2, 4), users=2))
    run.settings |= {"users": 2.0, "seed": 7}
    save_run(run, tmp_path)
    path, load = tmp_path / "run.json", {"users": 2.0, "seed": 7}
    record = json.loads(path.read_text())
    loop = {"kind": record["settings"].pop("loop")}
    loop |= {name: record["settings"].pop(name) for name in ("think_s", "requests", "seconds", "ran_out", "warmup")}
    loop |= {"users": record["settings"].pop("users"), "timeout_s": record["settings"].pop("timeout_s")}
    del record["settings"]["seed"]
    record["settings"] |= {"loop": loop, "load": load}
    path.write_text(json.dumps(record))
    assert load_run(tmp_path) == run


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("run.json", None, "run.json is missing"),
        ("traces.jsonl", None, "traces.jsonl is missing"),
        ("run.json", "{}", "not the record of a run"),
        ("run.json", "{", "not the record of a run"),
        ("traces.jsonl", "{}\n", "line 1: not a trace record"),
    ],
)
def test_what_is_no_run(clock: Clock, tmp_path: Path, name: str, text: str | None, says: str) -> None:
    save_run(clock.run(open_loop(taking(1.0), [WorkItem("a", 1)])), tmp_path)
    if text is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(text)
    with pytest.raises(NanoinferError, match=says):
        load_run(tmp_path)

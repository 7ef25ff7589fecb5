"""The engine in this process as a target: its tokens, its own record, its errors."""

from __future__ import annotations

import asyncio

import pytest

from nanoinfer.bench.loadgen import EngineTarget, closed_loop
from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.measure import metrics
from nanoinfer.measure.clock import now
from nanoinfer.measure.trace import Trace
from nanoinfer.models.registry import load_model
from nanoinfer.workload.items import WorkItem


@pytest.fixture
def target() -> EngineTarget:
    return EngineTarget(ContinuousEngine(load_model("random:tiny-llama"), cache_tokens=512))


async def ask(target: EngineTarget, work: WorkItem) -> Trace:
    trace = Trace(start := now(), start)
    await target.send(work, trace)
    return trace


def test_a_run_on_an_engine(target: EngineTarget) -> None:
    works = [WorkItem([1 + i, 2, 3], 4 + i) for i in range(6)]
    run = asyncio.run(closed_loop(target, works, users=3))
    target.engine.close()
    assert sorted(t.output_tokens for t in run.traces) == [4, 5, 6, 7, 8, 9]
    for trace in run.traces:
        assert (trace.status, trace.prompt_tokens) == ("ok", 3)
        assert [n for _, n in trace.chunks] == [1] * trace.output_tokens
        assert trace.kinds == ["content"] * trace.output_tokens
        assert trace.t_start is not None and 0 <= trace.t_sent <= trace.t_start <= trace.chunks[0][0]
        assert metrics.e2e(trace) is not None
    assert run.settings["target"]["max_running"] == 32 and run.settings["target"]["cache_tokens"] == 512


def test_what_can_never_be_served_is_in_the_trace(target: EngineTarget) -> None:
    trace = asyncio.run(ask(target, WorkItem([10**6], 4)))
    target.engine.close()
    assert (trace.status, trace.error, trace.chunks) == ("error", "refused", [])
    assert "outside the vocabulary" in target.messages["refused"]


def test_cancelling_frees_the_engine(target: EngineTarget) -> None:
    async def scenario() -> Trace:
        trace = Trace(start := now(), start)
        task = asyncio.create_task(target.send(WorkItem([1], 200), trace))
        while not trace.chunks:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while target.engine.busy:
            await asyncio.sleep(0.001)
        return trace

    trace = asyncio.run(scenario())
    target.engine.close()
    assert trace.status == "cancelled" and trace.t_end is not None
    assert 0 < trace.output_tokens < 200

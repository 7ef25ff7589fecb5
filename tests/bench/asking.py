"""Asking the mock, for tests of the HTTP client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from nanoinfer.bench.client import HttpTarget
from nanoinfer.bench.mock import Mock, serving
from nanoinfer.measure.clock import now
from nanoinfer.measure.trace import Trace
from nanoinfer.workload.items import WorkItem

QUICK = {"ttft": 0.0, "gap": 0.0}


async def ask(target: HttpTarget, work: WorkItem, timeout_s: float = 30.0) -> Trace:
    start = now()
    trace = Trace(start, start)
    try:
        async with asyncio.timeout(timeout_s):
            await target.send(work, trace)
    finally:
        times = [trace.t_scheduled, trace.t_sent, *(t for t, _ in trace.chunks), trace.t_end or 0.0]
        assert times == sorted(times)
        assert len(trace.kinds) == len(trace.chunks)
    return trace


@asynccontextmanager
async def mocked(endpoint: Any = "completions", /, **behaviour: Any) -> AsyncIterator[tuple[Mock, HttpTarget]]:
    async with serving() as mock:
        target = HttpTarget(mock.url, model="mock", endpoint=endpoint, extra={"mock": QUICK | behaviour})
        try:
            yield mock, target
        finally:
            await target.close()

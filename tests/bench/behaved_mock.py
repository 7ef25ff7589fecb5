"""Asking a mock that can also misbehave, for tests of the HTTP client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from aiohttp import web

from nanoinfer.bench.client import HttpTarget
from nanoinfer.bench.loadgen import sleep_until
from nanoinfer.bench.mock import LoggedRequest, Mock, MockFrames, MockTiming, refusal, serving, start_stream
from nanoinfer.measure.clock import now
from nanoinfer.measure.trace import Trace
from nanoinfer.workload.items import WorkItem

QUICK = {"ttft": 0.0, "gap": 0.0}


@dataclass(frozen=True)
class Behaviour(MockTiming):
    """How one request is answered. Times are in seconds, and ``after`` counts chunks with tokens."""

    chunk_tokens: int = 1  # in each chunk; the last has what is left
    reasoning: int = 0  # chunks of reasoning, before the content
    usage: Literal["asked", "never"] = "asked"  # what `stream_options` asks for, or nothing
    status: int = 200  # another is answered at once, with an error
    refuses: tuple[str, ...] = ()  # fields that are answered with a 400 where the request has them
    hold_for: int = 0  # no answer begins before as many requests are open at once
    stall_after: int | None = None  # after as many chunks, `stall` seconds go by, and all that follow are later
    stall: float = 0.0
    error_after: int | None = None  # an error frame, and the end
    cut_after: int | None = None  # the stream ends there, in good order but unfinished
    abort_after: int | None = None  # the connection breaks off there

    def due(self, i: int) -> float:
        stalled = self.stall if self.stall_after is not None and i >= self.stall_after else 0.0
        return super().due(i) + stalled


class BehavedMock(Mock):
    timing = Behaviour

    def __init__(self) -> None:
        super().__init__()
        self.came = asyncio.Condition()

    async def answer(
        self, request: web.Request, timing: MockTiming, logged: LoggedRequest, frames: MockFrames
    ) -> web.StreamResponse:
        assert isinstance(timing, Behaviour)
        fields = logged.body.keys() | (logged.body.get("stream_options") or {}).keys()
        if refused := fields & set(timing.refuses):
            return refusal(400, f"unknown field {min(refused)}")
        if timing.status != 200:
            return refusal(timing.status, "as asked")
        if timing.hold_for:
            async with self.came:
                self.came.notify_all()
                await self.came.wait_for(lambda: self.most_at_once >= timing.hold_for)
        if timing.usage == "never":
            frames.usage_at_end = frames.usage_with_each = False
        response = await start_stream(request, frames.opening())
        for i in range(-(-frames.tokens // timing.chunk_tokens)):
            if i == timing.error_after:
                await response.write(b'data: {"error":{"message":"mock: as asked","code":500}}\n\n')
            if i == timing.abort_after and request.transport is not None:
                request.transport.abort()
            if i in (timing.error_after, timing.cut_after, timing.abort_after):
                return response
            delta = "reasoning_content" if i < timing.reasoning else "content"
            chunk = frames.token(min(timing.chunk_tokens, frames.tokens - frames.sent), delta)
            await sleep_until(logged.t + timing.due(i))
            logged.writes.append(now())
            await response.write(chunk)
        await response.write(frames.ending())
        return response


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
    async with serving(mock=BehavedMock()) as mock:
        target = HttpTarget(mock.url, model="mock", endpoint=endpoint, extra={"mock": QUICK | behaviour})
        try:
            yield mock, target
        finally:
            await target.close()

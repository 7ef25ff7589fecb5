"""Requests under way: each sent as a task of its own, timed, and kept whatever becomes of it."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from nanoinfer.bench.run import ClientHealth, Run
from nanoinfer.bench.target import Target
from nanoinfer.errors import RequestError
from nanoinfer.measure.clock import now
from nanoinfer.measure.environment import provenance
from nanoinfer.measure.trace import Trace
from nanoinfer.workload.items import WorkItem

#: Seconds between two looks at how late the event loop is.
TICK_S = 0.01
Watch = Callable[[Trace], None]


class Sending:
    """Requests under way and the records of those that were. ``zero`` is the run's start on the clock."""

    def __init__(self, target: Target, timeout_s: float, watch: Watch | None) -> None:
        if not timeout_s > 0:
            raise RequestError(f"timeout_s must be above 0, got {timeout_s:g}")
        self.target, self.timeout_s, self.watch = target, timeout_s, watch
        self.traces: list[Trace] = []
        self.stalls: list[float] = []
        self.is_interrupted = False
        self.provenance = provenance()  # takes a while: not with a server waiting, nor after Ctrl-C
        self.zero = now()
        self.ended_at = 0.0  # seconds after zero

    async def run(self, drive: Callable[[Sending, asyncio.TaskGroup], Awaitable[None]]) -> None:
        """Drive until all has been sent and has ended, or Ctrl-C ends it."""
        gc.freeze()  # what is there by now need not be looked through while requests wait
        self.zero = now()
        ticker = asyncio.create_task(self._tick())
        try:
            async with asyncio.TaskGroup() as group:
                await drive(self, group)
        except asyncio.CancelledError:
            self.is_interrupted = True
            if (task := asyncio.current_task()) is not None:
                task.uncancel()  # it is dealt with
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self.ended_at = now() - self.zero
            ticker.cancel()
            gc.unfreeze()

    async def send(self, work: WorkItem, due: float) -> Trace:
        """Send one request that is due at ``due`` on the clock; its record, in seconds from ``zero``."""
        trace = Trace(due, due)
        self.traces.append(trace)
        try:
            async with asyncio.timeout(self.timeout_s):
                await self.target.send(work, trace)
        except TimeoutError:
            if trace.status == "cancelled":  # and not ended a moment before
                trace.status, trace.error = "timeout", "timeout"
        finally:
            _count_from(self.zero, trace)
            if self.watch is not None:
                self.watch(trace)
        return trace

    async def _tick(self) -> None:
        while True:
            due = now() + TICK_S
            await asyncio.sleep(TICK_S)
            self.stalls.append(max(0.0, now() - due))

    def result(
        self, opened: float | None, length: float, known: dict[str, Any], warmup: int, settings: Mapping[str, Any]
    ) -> Run:
        """The run. Without a length the window closes with the last request, and never later than Ctrl-C."""
        if opened is None:  # it never was
            opened = self.zero + self.ended_at
        start, end = opened - self.zero, opened + length - self.zero
        if not length:
            last = max((t.t_end or 0.0 for t in self.traces if t.t_scheduled >= start), default=self.ended_at)
            end = math.nextafter(last, math.inf)  # a window is open at its end: the last request is inside
        if self.is_interrupted:
            end = max(start, min(end, self.ended_at))
        traces = sorted(self.traces, key=lambda trace: trace.t_scheduled)
        return Run(
            traces=traces,
            start=start,
            end=end,
            settings={
                **known,
                "warmup": warmup,
                "timeout_s": self.timeout_s,
                "target": {"name": self.target.name, **self.target.settings},
                "error_messages": dict(self.target.messages),
                **settings,
            },
            client=ClientHealth([trace.t_sent - trace.t_scheduled for trace in traces], self.stalls),
            interrupted=self.is_interrupted,
            provenance=self.provenance,
        )


async def until(due: float) -> None:
    """Sleep until that time of the clock, and never less."""
    while (wait := due - now()) > 0:
        await asyncio.sleep(wait)


def _count_from(zero: float, trace: Trace) -> None:
    trace.t_scheduled -= zero
    trace.t_sent -= zero
    trace.t_start = None if trace.t_start is None else trace.t_start - zero
    trace.t_end = None if trace.t_end is None else trace.t_end - zero
    trace.chunks = [(t - zero, n) for t, n in trace.chunks]

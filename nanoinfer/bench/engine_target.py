"""The engine in this process as a target: what a server adds is the difference to this."""

from __future__ import annotations

import asyncio
from typing import Any

from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.errors import RequestError
from nanoinfer.measure.clock import now
from nanoinfer.measure.trace import Trace
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.workload.items import WorkItem


class EngineTarget:
    """A continuous engine, called without a network. A chunk is an event, timed when its reader has it.

    Args:
        engine: belongs to the caller, who closes it.
        ignore_eos: generate exactly ``output`` tokens.
    """

    def __init__(self, engine: ContinuousEngine, *, ignore_eos: bool = True) -> None:
        self.engine, self.ignore_eos = engine, ignore_eos
        self.name = f"{engine.loaded.name} in this process"
        self.messages: dict[str, str] = {}

    @property
    def settings(self) -> dict[str, Any]:
        """Which engine, of which sizes."""
        scheduler, pool = self.engine.scheduler, self.engine.pool
        return {
            "engine": self.engine.name,
            "model": self.engine.loaded.name,
            "device": str(self.engine.device),
            "dtype": str(self.engine.dtype).removeprefix("torch."),
            "max_running": scheduler.max_running,
            "token_budget": scheduler.token_budget,
            "cache_tokens": pool.n_blocks * pool.block_size,
            "ignore_eos": self.ignore_eos,
        }

    async def send(self, work: WorkItem, trace: Trace) -> None:
        """Submit one request and read its events; see :class:`nanoinfer.bench.loadgen.Target`."""
        trace.t_sent = now()
        stream = None
        try:
            params = SamplingParams(max_tokens=work.output, ignore_eos=self.ignore_eos)
            stream = await self.engine.submit(work.prompt, params)
            trace.prompt_tokens = len(stream.requests[0].prompt_ids)
            async for event in stream:
                if event.token_id is not None:
                    trace.token(now())
                    trace.kinds.append("content")
            if stream.requests[0].finish_reason is None:  # its engine was closed
                self._fail(trace, "cut off", "the engine was closed before the answer had ended")
        except asyncio.CancelledError:
            trace.status = "cancelled"
            if stream is not None:
                stream.cancel()
            raise
        except RequestError as error:
            self._fail(trace, "refused" if stream is None else "engine", str(error))
        finally:
            trace.t_end = now()
            if stream is not None:
                served = stream.requests[0].trace
                trace.t_start, trace.cached_tokens = served.t_start, served.cached_tokens
                trace.preemptions = served.preemptions

    async def close(self) -> None:
        """Nothing to close: the engine belongs to the caller."""

    def _fail(self, trace: Trace, kind: str, message: str) -> None:
        trace.status, trace.error = "error", kind
        self.messages.setdefault(kind, message)

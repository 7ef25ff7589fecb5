"""The client's own floor: what it adds to every figure, measured against a server of known timing.

The mock runs in a process of its own and logs when it wrote each chunk. Both read the machine's one monotonic clock,
so the time from that moment to the one that the client noted is overhead: of the kernel, of the client's event loop,
of its HTTP parser. Whether this machine can generate a load in time should be known before its results are.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Final

import aiohttp

from nanoinfer.bench.client import HttpTarget
from nanoinfer.bench.loadgen import open_loop
from nanoinfer.errors import NanoinferError, RequestError, check
from nanoinfer.measure.clock import now
from nanoinfer.measure.environment import provenance
from nanoinfer.measure.metrics import client_delay
from nanoinfer.measure.stats import percentile
from nanoinfer.workload.arrivals import poisson
from nanoinfer.workload.items import WorkItem, schedule_at

#: The error budget: mean overhead of a chunk, send lag of the latest 1% of requests (both seconds), and the share
#: of a core that the client may use, since queues grow long before it is full.
OVERHEAD_S: Final = 0.001
LAG_P99_S: Final = 0.010
CPU_SHARE: Final = 0.8
#: Seconds over which the streams are opened.
OPENING_S = 1.0
#: Seconds that the mock may take to start.
START_S: Final = 30.0
#: A longer overhead, in seconds, means that the processes' clocks do not agree.
ONE_CLOCK_S: Final = 60.0


@dataclass(frozen=True)
class Floor:
    """What the client adds at one load, in seconds; None where the load had none of it.

    Args:
        rate: new requests a second that were asked for.
        streams: open streams that were asked for, each of ``chunks_s`` chunks a second.
        at_once: the most requests that the server had at once.
        chunks: how many were measured, while all streams were open.
        overhead_mean_s: from a chunk's writing to the time that the client noted; the percentiles likewise.
        server_lag_p99_s: how late the mock itself wrote; no part of the overhead.
        send_lag_p99_s: how late the requests of ``rate`` were sent.
        stall_p99_s: how late the ticks of the client's event loop were.
        cpu_share: of one core, by the client.
        cpu_chunk_s: processor time of the client for a chunk, its share of the requests included. Where all streams
            tick together, as those of one engine do, the last waits for all others: ``streams`` times this.
    """

    rate: float | None
    streams: int | None
    chunks_s: float
    at_once: int
    chunks: int
    overhead_mean_s: float | None
    overhead_p50_s: float | None
    overhead_p99_s: float | None
    server_lag_p99_s: float | None
    send_lag_p99_s: float | None
    stall_p99_s: float | None
    cpu_share: float
    cpu_chunk_s: float | None

    def problems(self) -> list[str]:
        """Why a run at this load would be beyond its error budget; empty where it is within."""
        mean, lag, share = self.overhead_mean_s or 0.0, self.send_lag_p99_s or 0.0, self.cpu_share
        checks = {
            f"overhead {mean * 1e3:.2f} ms a chunk, budget {OVERHEAD_S * 1e3:g} ms": mean > OVERHEAD_S,
            f"send lag p99 {lag * 1e3:.1f} ms, budget {LAG_P99_S * 1e3:g} ms": lag > LAG_P99_S,
            f"the client used {share:.0%} of a core, budget {CPU_SHARE:.0%}": share > CPU_SHARE,
            f"only {self.at_once} of {self.streams} streams were open at once": self.at_once < (self.streams or 0),
        }
        return [problem for problem, is_beyond in checks.items() if is_beyond]

    def as_json(self) -> dict[str, Any]:
        """For a stored run."""
        return asdict(self) | {"problems": self.problems()}


async def measure_floor(
    *, rate: float | None = None, streams: int | None = None, chunks_s: float = 10.0, seconds: float = 3.0
) -> Floor:
    """Load a mock as a server would be loaded, and measure what the client adds; takes a little over ``seconds``.

    Args:
        rate: new requests a second, each answered with one chunk.
        streams: open throughout, each of ``chunks_s`` chunks a second, not in step.

    Raises:
        RequestError: no load, or a number that is not above 0.
        NanoinferError: a mock that does not start, or a machine whose processes do not share a clock.
    """
    if rate is None and streams is None:
        raise RequestError("floor: give a rate, a number of streams, or both")
    for name, value in {"rate": rate, "streams": streams, "chunks_s": chunks_s, "seconds": seconds}.items():
        if value is not None:
            check(f"floor: {name}", value, above=0)
    opening = OPENING_S if streams is not None else 0.0
    items: list[WorkItem] = []
    if streams is not None:
        chunks = round((opening + seconds) * chunks_s) + 1
        items += schedule_at((WorkItem(f"stream {i}", chunks) for i in range(streams)), poisson(streams / opening))
    if rate is not None:  # once the streams are open
        offsets = (opening + at for at in poisson(rate))
        items += schedule_at((WorkItem(f"request {i}", 1) for i in range(max(1, round(rate * seconds)))), offsets)
    provenance()  # looked up once, it is no part of the load
    async with _mock_process() as url:
        target = HttpTarget(url, model="mock", extra={"mock": {"ttft": 1 / chunks_s, "gap": 1 / chunks_s}})
        wall, cpu = now(), time.process_time()
        run = await open_loop(target, items)
        wall, cpu = now() - wall, time.process_time() - cpu
        async with aiohttp.ClientSession() as client, client.get(f"{url}/log") as response:
            log = await response.json()
        await target.close()
    if run.interrupted:
        raise asyncio.CancelledError
    if failed := next((t.error or t.status for t in run.traces if t.status != "ok"), None):
        raise NanoinferError(f"floor: a request to the mock failed ({failed}): that load is too much for this machine")
    prompts = [str(item.prompt) for item in sorted(items, key=lambda item: item.at)]  # as the traces are sorted
    times = [[run.zero + t for t, _ in trace.token_chunks] for trace in run.traces]
    lags = [client_delay(t) for t, prompt in zip(run.traces, prompts, strict=True) if prompt.startswith("request")]
    overheads, server_lags = _overheads(dict(zip(prompts, times, strict=True)), log, chunks_s)
    return Floor(
        rate=rate,
        streams=streams,
        chunks_s=chunks_s,
        at_once=log["most_at_once"],
        chunks=len(overheads),
        overhead_mean_s=fmean(overheads) if overheads else None,
        overhead_p50_s=percentile(overheads, 50),
        overhead_p99_s=percentile(overheads, 99),
        server_lag_p99_s=percentile(server_lags, 99),
        send_lag_p99_s=percentile(lags, 99),
        stall_p99_s=percentile(run.loop_stalls_s, 99),
        cpu_share=cpu / wall,
        cpu_chunk_s=cpu / sum(map(len, times)),
    )


def _overheads(read: dict[str, list[float]], log: dict[str, Any], chunks_s: float) -> tuple[list[float], list[float]]:
    """Of each chunk while all streams were open: from writing to reading; from when it was due to its writing."""
    written = {request["prompt"]: (request["t"], request["writes"]) for request in log["requests"]}
    streams = [times for prompt, times in read.items() if prompt.startswith("stream")]
    first = max((times[0] for times in streams), default=-math.inf)
    last = min((times[-1] for times in streams), default=math.inf)
    overheads, lags = [], []
    for prompt, times in read.items():
        came, writes = written[prompt]
        for i, (at, wrote) in enumerate(zip(times, writes, strict=True), start=1):
            if first <= wrote <= last:
                overheads.append(at - wrote)
                lags.append(wrote - came - i / chunks_s)
    if overheads and not 0 <= min(overheads) <= max(overheads) < ONE_CLOCK_S:
        raise NanoinferError("floor: the processes of this machine do not share a clock, so there is no telling")
    return overheads, lags


@asynccontextmanager
async def _mock_process() -> AsyncIterator[str]:
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "nanoinfer.bench.mock", "--port", "0", "--with-parent")
    mock = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        assert mock.stdout is not None
        try:
            line = await asyncio.wait_for(mock.stdout.readline(), START_S)
            port = int(line)
        except (TimeoutError, ValueError):
            raise NanoinferError("floor: the mock server did not start") from None
        yield f"http://127.0.0.1:{port}"
    finally:
        if mock.returncode is None:
            mock.terminate()
        await mock.wait()

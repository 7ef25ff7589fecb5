"""The client's own floor: what it adds to every figure, measured against a server whose timing is known exactly.

``python -m nanoinfer.bench.mock --port 0`` prints its port and serves an OpenAI-compatible API on loopback. Nothing
is computed: chunk ``i`` of an answer is due ``ttft + i * gap`` seconds after the request came, whatever became of
those before. Both stand in the request's field ``mock``. ``/log`` lists what came and when each chunk was really
written.

Both processes read the machine's one monotonic clock, so the time from a chunk's writing to the one that the client
noted is overhead: of the kernel, of the client's event loop, of its HTTP parser. Whether this machine can generate a
load in time should be known before its results are.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Annotated, Any, Final

import aiohttp
import typer
from aiohttp import web

from nanoinfer.bench.client import HttpTarget
from nanoinfer.bench.loadgen import open_loop, sleep_until
from nanoinfer.errors import NanoinferError, RequestError, check
from nanoinfer.measure.clock import now
from nanoinfer.measure.environment import provenance
from nanoinfer.measure.metrics import client_delay
from nanoinfer.measure.stats import percentile
from nanoinfer.workload.arrivals import poisson
from nanoinfer.workload.items import WorkItem, schedule_at

#: Requests whose record is kept, the newest.
LOGGED: Final = 20_000
TOKEN: Final = " tok"
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


# --- the mock ---------------------------------------------------------------------------


@dataclass(frozen=True)
class MockTiming:
    """Seconds from a request to its first token, and between tokens."""

    ttft: float = 0.05
    gap: float = 0.02

    def due(self, i: int) -> float:
        """When chunk ``i`` is due, in seconds from the request."""
        return self.ttft + i * self.gap


@dataclass
class LoggedRequest:
    """One request: its prompt, when it came, the rest of its body, and when its chunks with tokens were written."""

    prompt: str
    t: float
    body: dict[str, Any]
    writes: list[float] = field(default_factory=list)


class MockFrames:
    """The frames of one answer, put together from constant parts and not by :mod:`nanoinfer.serve`: the mock must be
    faster than what is measured with it."""

    def __init__(self, body: dict[str, Any], prompt_tokens: int, is_chat: bool) -> None:
        self.tokens, self.sent, self.prompt_tokens = int(body.get("max_tokens", 16)), 0, prompt_tokens
        self.is_chat = is_chat
        options = body.get("stream_options") or {}
        self.usage_at_end = bool(options.get("include_usage"))
        self.usage_with_each = self.usage_at_end and bool(options.get("continuous_usage_stats"))
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        self.head = f'data: {{"id":"mock-1","object":"{kind}","created":0,"model":"mock","choices":['

    def _frame(self, content: str = "", finish: str = "null") -> bytes:
        """One frame; that of the usage at the end has no content."""
        choice = f'{{"index":0,{content},"finish_reason":{finish}}}' if content else ""
        usage = ',"usage":null' if self.usage_at_end else ""
        if self.usage_with_each or not content:
            p, n = self.prompt_tokens, self.sent
            usage = f',"usage":{{"prompt_tokens":{p},"completion_tokens":{n},"total_tokens":{p + n}}}'
        return f"{self.head}{choice}]{usage}}}\n\n".encode()

    def opening(self) -> bytes:
        """The frame with the role, of a chat."""
        return self._frame('"delta":{"role":"assistant","content":""}') if self.is_chat else b""

    def token(self, n: int = 1, delta: str = "content") -> bytes:
        """The next frame, of ``n`` tokens; ``delta`` is the field of a chat that holds them."""
        self.sent += n
        return self._frame(f'"delta":{{"{delta}":"{TOKEN * n}"}}' if self.is_chat else f'"text":"{TOKEN * n}"')

    def ending(self) -> bytes:
        """The reason to finish, the usage where it is wanted, and the end of the stream."""
        last = self._frame('"delta":{}' if self.is_chat else '"text":""', '"length"')
        return last + (self._frame() if self.usage_at_end else b"") + b"data: [DONE]\n\n"


class Mock:
    """The server and its log. A subclass may read more from a request's field ``mock``, and answer otherwise."""

    timing: type[MockTiming] = MockTiming

    def __init__(self) -> None:
        self.log: deque[LoggedRequest] = deque(maxlen=LOGGED)
        self.open = self.most_at_once = 0
        self.url = ""

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_get("/log", self._log)
        return app

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"id": "mock", "object": "model"}]})

    async def _log(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"requests": list(map(vars, self.log)), "most_at_once": self.most_at_once})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        is_chat = request.path.endswith("chat/completions")
        try:
            body = json.loads(await request.read())
            timing = self.timing(**body.get("mock", {}))
            prompt = body.pop("messages")[-1]["content"] if is_chat else body.pop("prompt")
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            return refusal(400, repr(error))
        logged = LoggedRequest(prompt if isinstance(prompt, str) else " ".join(map(str, prompt)), now(), body)
        self.log.append(logged)
        self.open += 1
        self.most_at_once = max(self.most_at_once, self.open)
        try:
            return await self.answer(request, timing, logged, MockFrames(body, len(logged.prompt.split()), is_chat))
        finally:
            self.open -= 1

    async def answer(
        self, request: web.Request, timing: MockTiming, logged: LoggedRequest, frames: MockFrames
    ) -> web.StreamResponse:
        """Answer one request."""
        response = await start_stream(request, frames.opening())
        for i in range(frames.tokens):
            chunk = frames.token()
            await sleep_until(logged.t + timing.due(i))
            logged.writes.append(now())
            await response.write(chunk)
        await response.write(frames.ending())
        return response


async def start_stream(request: web.Request, opening: bytes) -> web.StreamResponse:
    """Send the headers, and the first frame if there is one."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    if opening:
        await response.write(opening)
    return response


def refusal(status: int, message: str) -> web.Response:
    """An error in OpenAI's form."""
    return web.json_response({"error": {"message": f"mock: {message}", "code": status}}, status=status)


@asynccontextmanager
async def serving(port: int = 0, mock: Mock | None = None) -> AsyncIterator[Mock]:
    """A mock on this event loop, on loopback; port 0 takes a free one."""
    mock = Mock() if mock is None else mock
    runner = web.AppRunner(mock.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
        mock.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield mock
    finally:
        await runner.cleanup()


# --- the floor --------------------------------------------------------------------------


@dataclass(frozen=True)
class Floor:
    """What the client adds at one load, in seconds; None where the load had none of it."""

    rate: float | None  # new requests a second that were asked for
    streams: int | None  # open streams that were asked for, each of ``chunks_s`` chunks a second
    chunks_s: float
    at_once: int  # the most requests that the server had at once
    chunks: int  # that were measured, while all streams were open
    overhead_mean_s: float | None  # from a chunk's writing to the time that the client noted
    overhead_p50_s: float | None
    overhead_p99_s: float | None
    server_lag_p99_s: float | None  # how late the mock itself wrote; no part of the overhead
    send_lag_p99_s: float | None  # how late the requests of ``rate`` were sent
    stall_p99_s: float | None  # how late the ticks of the client's event loop were
    cpu_share: float  # of one core, by the client
    #: Processor time of the client for a chunk, its share of the requests included. Where all streams tick together, as
    #: those of one engine do, the last waits for all others: ``streams`` times this.
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
        port = b""
        with suppress(TimeoutError):
            port = (await asyncio.wait_for(mock.stdout.readline(), START_S)).strip()
        if not port.isdigit():
            raise NanoinferError("floor: the mock server did not start")
        yield f"http://127.0.0.1:{int(port)}"
    finally:
        if mock.returncode is None:
            mock.terminate()
        await mock.wait()


# --- the mock as a program --------------------------------------------------------------


async def _serve(port: int) -> None:
    async with serving(port) as mock:
        print(mock.url.rpartition(":")[2], flush=True)
        gc.freeze()
        await asyncio.Event().wait()


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


def main(
    port: Annotated[int, typer.Option(help="0 takes a free one, and prints it.")] = 0,
    with_parent: Annotated[bool, typer.Option("--with-parent", help="End when standard input does.")] = False,
) -> None:
    """Serve until Ctrl-C, or until standard input ends."""
    if with_parent:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(port))


if __name__ == "__main__":
    typer.run(main)

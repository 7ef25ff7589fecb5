"""A server whose timing is known exactly: what a client measures of it beyond that is the client's own.

``python -m nanoinfer.bench.mock --port 0`` prints its port and serves an OpenAI-compatible API on loopback. Nothing
is computed: chunk ``i`` of an answer is due ``ttft + i * gap`` seconds after the request came, whatever became of
those before. Both stand in the request's field ``mock``. ``/log`` lists what came and when each chunk was really
written, by the clock of this machine that clients read too.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import typer
from aiohttp import web

from nanoinfer.bench.loadgen import sleep_until
from nanoinfer.measure.clock import now

#: Requests whose record is kept, the newest.
LOGGED: Final = 20_000
TOKEN: Final = " tok"


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

    def _usage(self) -> str:
        p, n = self.prompt_tokens, self.sent
        return f'"usage":{{"prompt_tokens":{p},"completion_tokens":{n},"total_tokens":{p + n}}}}}\n\n'

    def _frame(self, content: str, finish: str = "null") -> bytes:
        usage = self._usage() if self.usage_with_each else '"usage":null}\n\n' if self.usage_at_end else ""
        tail = f"],{usage}" if usage else "]}\n\n"
        return f'{self.head}{{"index":0,{content},"finish_reason":{finish}}}{tail}'.encode()

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
        usage = f"{self.head}],{self._usage()}".encode() if self.usage_at_end else b""
        return last + usage + b"data: [DONE]\n\n"


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


async def _serve(port: int, with_parent: bool) -> None:
    async with serving(port) as mock:
        print(mock.url.rpartition(":")[2], flush=True)
        gc.freeze()
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        def wait_for_parent() -> None:
            sys.stdin.read()
            with suppress(RuntimeError):  # the loop has ended by itself
                loop.call_soon_threadsafe(stop.set)

        if with_parent:
            threading.Thread(target=wait_for_parent, daemon=True).start()
        await stop.wait()


def main(
    port: Annotated[int, typer.Option(help="0 takes a free one, and prints it.")] = 0,
    with_parent: Annotated[bool, typer.Option("--with-parent", help="End when standard input does.")] = False,
) -> None:
    """Serve until Ctrl-C, or until standard input ends."""
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(port, with_parent))


if __name__ == "__main__":
    typer.run(main)

"""A server whose timing is known exactly: what a client measures of it beyond that is the client's own.

``python -m nanoinfer.bench.mock --port 0`` prints its port and serves an OpenAI-compatible API on loopback. Nothing
is computed: chunk ``i`` of an answer is due ``ttft + i * gap`` seconds after the request came, whatever became of
those before. How to answer stands in the request's field ``mock``, with the names of :class:`Behaviour`. ``/log``
tells what came and when each chunk was really written, by the clock of this machine that clients read too.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

from nanoinfer.bench.sending import until
from nanoinfer.measure.clock import now

#: Requests whose record is kept, the newest.
LOGGED = 20_000
TOKEN = " tok"


@dataclass(frozen=True)
class Behaviour:
    """How one request is answered. Times are in seconds, and ``after`` counts chunks with tokens.

    Args:
        ttft: from the request to the first token.
        gap: between chunks with tokens.
        chunk_tokens: tokens in each of them; the last has what is left.
        role: chat only: a frame with the role at once, before any token.
        reasoning: so many chunks are reasoning, before the content.
        usage: ``asked`` sends what ``stream_options`` asks for, ``never`` nothing.
        status: another than 200 is answered at once, with an error.
        refuses: fields that are answered with a 400 where the request has them.
        hold_for: no answer begins before so many requests are here at once.
        stall_after: behind so many chunks, ``stall`` seconds go by, and all that follow are as much later.
        stall: see there.
        error_after: an error frame, and the end.
        cut_after: the stream ends there, in good order but unfinished.
        abort_after: the connection breaks off there.
    """

    ttft: float = 0.05
    gap: float = 0.02
    chunk_tokens: int = 1
    role: bool = True
    reasoning: int = 0
    usage: Literal["asked", "never"] = "asked"
    status: int = 200
    refuses: tuple[str, ...] = ()
    hold_for: int = 0
    stall_after: int | None = None
    stall: float = 0.0
    error_after: int | None = None
    cut_after: int | None = None
    abort_after: int | None = None

    def due(self, i: int) -> float:
        """When chunk ``i`` is due, in seconds from the request."""
        stalled = self.stall if self.stall_after is not None and i >= self.stall_after else 0.0
        return self.ttft + i * self.gap + stalled


@dataclass
class Seen:
    """One request: its prompt, when it came, the rest of its body, and when its chunks with tokens were written."""

    prompt: str
    t: float
    body: dict[str, Any]
    writes: list[float] = field(default_factory=list)


class Mock:
    """The server's state."""

    def __init__(self) -> None:
        self.log: deque[Seen] = deque(maxlen=LOGGED)
        self.here = self.most_at_once = 0
        self.port = 0
        self._came = asyncio.Condition()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_get("/log", self._tell)
        return app

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"id": "mock", "object": "model"}]})

    async def _tell(self, request: web.Request) -> web.StreamResponse:
        seen = [{"prompt": s.prompt, "t": s.t, "writes": s.writes} for s in self.log]
        return web.json_response({"requests": seen, "most_at_once": self.most_at_once})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            body = json.loads(await request.read())
            behaviour = Behaviour(**body.get("mock", {}))
            prompt = body["messages"][-1]["content"] if request.path.endswith("chat/completions") else body["prompt"]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            return _refusal(400, repr(error))
        options = {name: value for name, value in body.items() if name not in ("prompt", "messages")}
        seen = Seen(prompt if isinstance(prompt, str) else " ".join(map(str, prompt)), now(), options)
        self.log.append(seen)
        asked = body.keys() | (body.get("stream_options") or {}).keys()
        if refused := asked & set(behaviour.refuses):
            return _refusal(400, f"unknown field {min(refused)}")
        if behaviour.status != 200:
            return _refusal(behaviour.status, "as asked")
        self.here += 1
        self.most_at_once = max(self.most_at_once, self.here)
        try:
            if behaviour.hold_for:
                await self._hold(behaviour.hold_for)
            return await self._stream(request, behaviour, seen)
        finally:
            self.here -= 1

    async def _hold(self, n: int) -> None:
        async with self._came:
            self._came.notify_all()
            await self._came.wait_for(lambda: self.most_at_once >= n)

    async def _stream(self, request: web.Request, behaviour: Behaviour, seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        frames = _Frames(seen.body, len(seen.prompt.split()), request.path.endswith("chat/completions"), behaviour)
        if opening := frames.opening():
            await response.write(opening)
        breaks = (behaviour.error_after, behaviour.cut_after, behaviour.abort_after)
        for i, chunk in enumerate(frames.chunks()):
            if i in breaks:
                return await _break(request, response, behaviour, i)
            await until(seen.t + behaviour.due(i))
            seen.writes.append(now())
            await response.write(chunk)
        await response.write(frames.ending())
        return response


class _Frames:
    """The frames of one answer, put together from parts that do not change: the server must not be the slow one."""

    def __init__(self, body: dict[str, Any], prompt_tokens: int, is_chat: bool, behaviour: Behaviour) -> None:
        self.left, self.sent, self.prompt_tokens = int(body.get("max_tokens", 16)), 0, prompt_tokens
        self.is_chat, self.behaviour = is_chat, behaviour
        options = (body.get("stream_options") or {}) if behaviour.usage == "asked" else {}
        self.at_end = bool(options.get("include_usage"))
        self.each = self.at_end and bool(options.get("continuous_usage_stats"))
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        self.head = f'data: {{"id":"mock-1","object":"{kind}","created":0,"model":"mock","choices":['

    def _usage(self) -> str:
        p, n = self.prompt_tokens, self.sent
        return f'"usage":{{"prompt_tokens":{p},"completion_tokens":{n},"total_tokens":{p + n}}}}}\n\n'

    def _frame(self, says: str, finish: str = "null") -> bytes:
        usage = self._usage() if self.each else '"usage":null}\n\n' if self.at_end else ""
        tail = f"],{usage}" if usage else "]}\n\n"
        return f'{self.head}{{"index":0,{says},"finish_reason":{finish}}}{tail}'.encode()

    def opening(self) -> bytes:
        """The frame with the role, if there is one."""
        says = '"delta":{"role":"assistant","content":""}'
        return self._frame(says) if self.is_chat and self.behaviour.role else b""

    def chunks(self) -> Iterator[bytes]:
        """The frames with tokens."""
        for i in range(-(-self.left // self.behaviour.chunk_tokens)):
            n = min(self.behaviour.chunk_tokens, self.left)
            self.left, self.sent = self.left - n, self.sent + n
            name = "reasoning_content" if i < self.behaviour.reasoning else "content"
            yield self._frame(f'"delta":{{"{name}":"{TOKEN * n}"}}' if self.is_chat else f'"text":"{TOKEN * n}"')

    def ending(self) -> bytes:
        """The reason to finish, the usage where it is wanted, and the end of the stream."""
        last = self._frame('"delta":{}' if self.is_chat else '"text":""', '"length"')
        usage = f"{self.head}],{self._usage()}".encode() if self.at_end else b""
        return last + usage + b"data: [DONE]\n\n"


def _refusal(status: int, message: str) -> web.Response:
    headers = {"Retry-After": "1"} if status == 429 else None
    return web.json_response({"error": {"message": f"mock: {message}", "code": status}}, status=status, headers=headers)


async def _break(request: web.Request, response: web.StreamResponse, how: Behaviour, i: int) -> web.StreamResponse:
    if i == how.error_after:
        await response.write(b'data: {"error":{"message":"mock: as asked","code":500}}\n\n')
    elif i == how.abort_after and request.transport is not None:
        request.transport.abort()
    return response


@asynccontextmanager
async def serving(port: int = 0) -> AsyncIterator[Mock]:
    """A mock on this loop, on loopback; port 0 takes a free one."""
    mock = Mock()
    runner = web.AppRunner(mock.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
        mock.port = runner.addresses[0][1]
        yield mock
    finally:
        await runner.cleanup()


async def _serve(port: int, with_parent: bool) -> None:
    async with serving(port) as mock:
        print(mock.port, flush=True)
        gc.freeze()
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        def wait_for_parent() -> None:
            sys.stdin.read()
            with suppress(RuntimeError):  # the loop has ended by itself
                loop.call_soon_threadsafe(stop.set)

        if with_parent:
            threading.Thread(target=wait_for_parent, daemon=True).start()
        await stop.wait()


def main() -> None:
    """Serve until Ctrl-C, or until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one, and prints it")
    parser.add_argument("--with-parent", action="store_true", help="end when standard input does")
    given = parser.parse_args()
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(given.port, given.with_parent))


if __name__ == "__main__":
    main()

"""The front door: takes HTTP, has a replica answer, and sees to it that nobody is left without an answer or an error.

A replica can die at any moment. What it had not begun to answer is asked of another one: an answer that is whole is
only passed on whole, and a stream is held back until its first token, so up to there nobody has seen anything. A
stream that had begun ends with an error frame: what was said cannot be taken back, and another replica might go on
with other tokens. Of a gateway that dies, clients see that the connection breaks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST

from nanoinfer.cluster.asgi import Asked, Message, is_end
from nanoinfer.cluster.prefix import chunks_of
from nanoinfer.serve import errors as problems
from nanoinfer.serve.app import Left, unless_left
from nanoinfer.serve.errors import Problem
from nanoinfer.serve.middleware import Guard
from nanoinfer.serve.service import Limits

ATTEMPTS = 3
METHODS = ["DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"]  # the replicas' app says which it serves
HEALTH_S = 5.0  # in which some replica must say that it is well
PRIVATE = (b"authorization", b"cookie")  # not for the replicas, whose logs others may read


class Lost(Exception):
    """The replica that was to answer is gone."""


Bunches = AsyncGenerator[list[Message], None]
#: Has some replica answer, given the numbers of the prompt's beginnings: bunches of ASGI messages. Raises Lost.
Ask = Callable[[Asked, list[int]], Bunches]


@dataclass
class Counts:
    """Of one gateway: requests, askings of another replica, and requests that ended with an error for want of one."""

    requests: int = 0
    retried: int = 0
    lost: int = 0


@dataclass
class Gateway:
    """Passes requests on.

    Args:
        ask: a replica.
        limits: of each client.
    """

    ask: Ask
    limits: Limits
    counts: Counts = field(default_factory=Counts)

    async def answer(self, request: Request) -> Response:
        """The answer of some replica."""
        headers = [(name, value) for name, value in request.headers.raw if name not in PRIVATE]
        path = request.url.path
        asked = Asked(request.method, path, request.url.query.encode(), headers, await request.body())
        seconds = HEALTH_S if path == "/health" else self.limits.seconds
        until = asyncio.get_running_loop().time() + seconds
        self.counts.requests += 1
        try:
            return await unless_left(self._begun(asked, chunks_of(asked.body), until), request)
        except Left:
            return Response(status_code=499)  # to nobody; the number is nginx's
        except TimeoutError:
            raise Problem(504, f"no replica answered within {seconds:g} s", code="no_replica") from None

    async def _begun(self, asked: Asked, chunks: list[int], until: float) -> Response:
        """An answer that has begun, or is whole. Raises TimeoutError, and :class:`Problem`."""
        for attempt in range(ATTEMPTS):
            self.counts.retried += attempt > 0
            source = self.ask(asked, chunks)
            try:
                async with asyncio.timeout_at(until):
                    head = await _head(source)
            except Lost:
                continue
            except BaseException:
                await source.aclose()
                raise
            start, bodies = head[0], [message.get("body", b"") for message in head[1:]]
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in start["headers"]}
            if is_end(head[-1]):
                await source.aclose()
                return Response(b"".join(bodies), start["status"], headers)
            return StreamingResponse(self._rest(bodies, source, until), start["status"], headers)
        self.counts.lost += 1
        raise Problem(503, f"{ATTEMPTS} replicas were lost over this request; try again later", code="replica_lost")

    async def _rest(self, bodies: list[bytes], source: Bunches, until: float) -> AsyncGenerator[bytes, None]:
        """What has come of a stream, and what comes; an error frame where it breaks off."""
        problem = Problem(503, "the replica that answered is gone; ask again", code="replica_lost")
        try:
            yield b"".join(bodies)
            while True:
                async with asyncio.timeout_at(until):
                    bunch = await anext(source)
                yield b"".join(message.get("body", b"") for message in bunch)
                if is_end(bunch[-1]):
                    return
        except TimeoutError:
            problem = Problem(504, "the answer took too long")
        except (Lost, StopAsyncIteration):
            pass
        except Exception as error:
            logging.getLogger(__name__).exception("an answer broke off")
            problem = problems.of(error)
        finally:
            await source.aclose()
        self.counts.lost += 1
        yield problem.frame()


async def _head(source: Bunches) -> list[Message]:
    """All of an answer; of a stream its first bunch, which was said without waiting, and the next one.

    Raises :class:`Lost` for one that ends before its end.
    """
    messages: list[Message] = []
    async for bunch in source:
        messages += bunch
        if is_end(messages[-1]) or (len(messages) > len(bunch) and _is_stream(messages[0])):
            return messages
    raise Lost


def _is_stream(start: Message) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in start["headers"])


def make_app(gateway: Gateway, metrics: Callable[[], Awaitable[bytes]], api_key: str | None = None) -> FastAPI:
    """The application: every path is passed on but ``/metrics``.

    Args:
        gateway: passes on.
        metrics: of all replicas together, in Prometheus' format.
        api_key: that clients must give; None for none.
    """
    app = FastAPI(title="nanoinfer", openapi_url=None, docs_url=None, redoc_url=None)
    problems.install(app)
    app.add_middleware(Guard, api_key=api_key, body_bytes=gateway.limits.body_bytes)

    @app.get("/metrics")
    async def _metrics() -> Response:
        return Response(await metrics(), media_type=CONTENT_TYPE_LATEST)

    app.add_route("/{path:path}", gateway.answer, methods=METHODS)
    return app

"""Takes HTTP, has a replica answer, and leaves no request without an answer or an error.

A replica can die at any moment. What it had not begun to answer is sent to another one: a whole answer is passed on
when it is complete, and a stream is held back until its first token, so until then the client has seen nothing. A
stream that had begun ends with an error frame: what was sent cannot be taken back, and another replica might go on
with other tokens. If the gateway dies, clients see that the connection breaks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp

from nanoinfer.cluster.prefix import chunks_of
from nanoinfer.serve.app import ClientDisconnected, unless_disconnected
from nanoinfer.serve.errors import APIError, install_handlers, to_api_error
from nanoinfer.serve.middleware import LimitsMiddleware
from nanoinfer.serve.service import ServerLimits

ATTEMPTS = 3
METHODS = ["DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"]  # the replicas' app says which it serves
HEALTH_S = 5.0  # in which some replica must say that it is healthy
PRIVATE = (b"authorization", b"cookie")  # not for the replicas, whose logs others may read


class ReplicaLost(Exception):
    """The replica that was to answer is gone."""


# --- one request, and an app that answers it in another process -------------------------------

Message = MutableMapping[str, Any]
MessageBatches = AsyncGenerator[list[Message], None]


@dataclass(frozen=True)
class ForwardedRequest:
    """One HTTP request with its whole body."""

    method: str
    path: str
    query: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""

    @property
    def scope(self) -> dict[str, Any]:
        """Of ASGI 3.0."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": self.headers,
            "client": None,
            "server": None,
        }


async def run_app(app: ASGIApp, request: ForwardedRequest) -> MessageBatches:
    """The ASGI messages that the app sends, in batches: each holds all that was there when it was fetched.

    The first batch holds what the app could send without waiting: the status, and the head of a stream. Closed before
    its end, the app is cancelled.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    bodies = [request.body]

    async def receive() -> Message:
        if not bodies:  # a client that disconnects is a cancellation here
            await asyncio.Event().wait()
        return {"type": "http.request", "body": bodies.pop(), "more_body": False}

    async def send(message: Message) -> None:
        sent.put_nowait(message)

    async def run() -> None:
        try:
            await app(request.scope, receive, send)
        finally:
            sent.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        is_over = False
        while not is_over:
            batch = [await sent.get()]
            while not sent.empty():
                batch.append(sent.get_nowait())
            is_over = batch[-1] is None
            if messages := [message for message in batch if message is not None]:
                yield messages
        await task  # raises an error of the app's own
    finally:
        task.cancel()
        await asyncio.wait({task})


def is_end(message: Message) -> bool:
    """Whether it is the last one of an answer."""
    return bool(message["type"] == "http.response.body") and not message.get("more_body", False)


# --- the gateway ------------------------------------------------------------------------------

#: Has some replica answer, given the hashes of the prompt's beginnings. Raises ReplicaLost.
Forward = Callable[[ForwardedRequest, list[int]], MessageBatches]


@dataclass
class Counts:
    """Of one gateway: requests, retries on another replica, and requests that ended with an error for want of one."""

    requests: int = 0
    retried: int = 0
    lost: int = 0


@dataclass
class Gateway:
    """Passes requests on, within the limits of each client."""

    forward: Forward
    limits: ServerLimits
    counts: Counts = field(default_factory=Counts)

    async def answer(self, request: Request) -> Response:
        """The answer of some replica."""
        headers = [(name, value) for name, value in request.headers.raw if name not in PRIVATE]
        path = request.url.path
        forwarded = ForwardedRequest(request.method, path, request.url.query.encode(), headers, await request.body())
        seconds = HEALTH_S if path == "/health" else self.limits.seconds
        deadline = asyncio.get_running_loop().time() + seconds
        self.counts.requests += 1
        try:
            return await unless_disconnected(self._response(forwarded, chunks_of(forwarded.body), deadline), request)
        except ClientDisconnected:
            return Response(status_code=499)  # client closed request (nginx)
        except TimeoutError:
            raise APIError(504, f"no replica answered within {seconds:g} s", code="no_replica") from None

    async def _response(self, request: ForwardedRequest, chunks: list[int], deadline: float) -> Response:
        """An answer that has begun, or is whole. Raises TimeoutError, and :class:`APIError`."""
        for attempt in range(ATTEMPTS):
            self.counts.retried += attempt > 0
            source = self.forward(request, chunks)
            try:
                async with asyncio.timeout_at(deadline):
                    head = await _head(source)
            except ReplicaLost:
                continue
            except BaseException:
                await source.aclose()
                raise
            start, bodies = head[0], [message.get("body", b"") for message in head[1:]]
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in start["headers"]}
            if is_end(head[-1]):
                await source.aclose()
                return Response(b"".join(bodies), start["status"], headers)
            return StreamingResponse(self._rest(bodies, source, deadline), start["status"], headers)
        self.counts.lost += 1
        raise APIError(503, f"{ATTEMPTS} replicas were lost over this request; try again later", code="replica_lost")

    async def _rest(self, bodies: list[bytes], source: MessageBatches, deadline: float) -> AsyncGenerator[bytes, None]:
        """What has come of a stream, and what comes; an error frame where it breaks off."""
        api_error = APIError(503, "the replica that answered is gone; ask again", code="replica_lost")
        try:
            yield b"".join(bodies)
            while True:
                async with asyncio.timeout_at(deadline):
                    batch = await anext(source)
                yield b"".join(message.get("body", b"") for message in batch)
                if is_end(batch[-1]):
                    return
        except TimeoutError:
            api_error = APIError(504, "the answer took too long")
        except (ReplicaLost, StopAsyncIteration):
            pass
        except Exception as error:
            logging.getLogger(__name__).exception("an answer broke off")
            api_error = to_api_error(error)
        finally:
            await source.aclose()
        self.counts.lost += 1
        yield api_error.frame()


async def _head(source: MessageBatches) -> list[Message]:
    """All of an answer; of a stream its first batch, which was sent without waiting, and the next one.

    Raises :class:`ReplicaLost` for one that stops before its end.
    """
    messages: list[Message] = []
    async for batch in source:
        messages += batch
        if is_end(messages[-1]) or (len(messages) > len(batch) and _is_stream(messages[0])):
            return messages
    raise ReplicaLost


def _is_stream(start: Message) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in start["headers"])


def make_app(gateway: Gateway, metrics: Callable[[], Awaitable[bytes]], api_key: str | None = None) -> FastAPI:
    """The application: every path but ``/metrics``, which has ``metrics``, is passed on."""
    app = FastAPI(title="nanoinfer", openapi_url=None, docs_url=None, redoc_url=None)
    install_handlers(app)
    app.add_middleware(LimitsMiddleware, api_key=api_key, body_bytes=gateway.limits.body_bytes)

    @app.get("/metrics")
    async def _metrics() -> Response:
        return Response(await metrics(), media_type=CONTENT_TYPE_LATEST)

    app.add_route("/{path:path}", gateway.answer, methods=METHODS)
    return app


# --- its /metrics -----------------------------------------------------------------------------


class MergedMetrics:
    """A Prometheus collector: the metrics of every replica, labelled with its name, and those of the gateway."""

    def __init__(self, texts: Mapping[str, bytes], counts: Counts) -> None:
        self.texts, self.counts = texts, counts

    def collect(self) -> Iterator[Metric]:
        """One family of each name, and in it a sample for each replica."""
        families: dict[str, Metric] = {}
        for replica, text in self.texts.items():
            for family in text_string_to_metric_families(text.decode()):
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    merged.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
        yield from families.values()
        for name, documentation, value in (
            ("requests", "requests that came", self.counts.requests),
            ("retries", "requests that were asked again, their replica being gone", self.counts.retried),
            ("lost", "requests that ended with an error, their replica being gone", self.counts.lost),
        ):
            yield CounterMetricFamily(f"nanoinfer_gateway_{name}", documentation, value)


def merge_metrics(texts: Mapping[str, bytes], counts: Counts) -> bytes:
    """Of replicas by name, and of the gateway, in Prometheus' format."""
    registry = CollectorRegistry()
    registry.register(MergedMetrics(texts, counts))
    return generate_latest(registry)

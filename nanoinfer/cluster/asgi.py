"""An HTTP request as data, and an ASGI app that answers it somewhere else than where it came in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp

Message = MutableMapping[str, Any]


@dataclass(frozen=True)
class Asked:
    """One HTTP request, whole."""

    method: str
    path: str
    query: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""

    @property
    def scope(self) -> dict[str, Any]:
        """As ASGI has it."""
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


async def answered(app: ASGIApp, asked: Asked) -> AsyncIterator[list[Message]]:
    """What the app sends, in bunches: each holds all that was there when it was fetched.

    The first bunch holds what the app could say without waiting for anything: the status, and the head of a stream.
    Left before its end, the app is cancelled.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    bodies = [asked.body]

    async def receive() -> Message:
        if not bodies:  # that the client has left is told by cancelling
            await asyncio.Event().wait()
        return {"type": "http.request", "body": bodies.pop(), "more_body": False}

    async def send(message: Message) -> None:
        sent.put_nowait(message)

    async def run() -> None:
        try:
            await app(asked.scope, receive, send)
        finally:
            sent.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        is_over = False
        while not is_over:
            bunch = [await sent.get()]
            while not sent.empty():
                bunch.append(sent.get_nowait())
            is_over = bunch[-1] is None
            if messages := [message for message in bunch if message is not None]:
                yield messages
        await task  # an error of the app's own
    finally:
        task.cancel()
        await asyncio.wait({task})


def is_end(message: Message) -> bool:
    """Whether nothing comes behind it."""
    return bool(message["type"] == "http.response.body") and not message.get("more_body", False)

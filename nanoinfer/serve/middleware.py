"""What stands before the app: the key, and how large and how slow a body may be."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import MutableMapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from nanoinfer.serve.errors import Problem, answer

OPEN = ("/health",)  # for whoever watches over the process
BODY_S = 30.0  # in which a body must have come


class Guard:
    """ASGI middleware.

    Args:
        app: behind it.
        api_key: what ``Authorization: Bearer`` must hold; None lets everybody in.
        body_bytes: a body may have.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, body_bytes: int) -> None:
        self.app, self.body_bytes = app, body_bytes
        self.expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, or answer it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if (problem := self._refusal(scope["path"], headers)) is not None:
            await answer(problem)(scope, receive, send)
            return
        await self.app(scope, self._limited(receive), send)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> Problem | None:
        # In constant time: how long a comparison takes must not tell how much of a guess is right.
        given = headers.get(b"authorization", b"")
        if self.expected is not None and path not in OPEN and not hmac.compare_digest(given, self.expected):
            return Problem(401, "give the API key of this server as Authorization: Bearer KEY", code="invalid_api_key")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.body_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> Problem:
        return Problem(413, f"the body is larger than the {self.body_bytes:,} bytes that this server reads")

    def _limited(self, receive: Receive) -> Receive:
        read, whole = 0, False
        until = asyncio.get_running_loop().time() + BODY_S

        async def limited() -> MutableMapping[str, Any]:
            nonlocal read, whole
            if whole:  # what comes now is that the client has left
                return await receive()
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body did not come within {BODY_S:.0f} s") from None
            read += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if read > self.body_bytes:
                raise HTTPException(413, self._too_large().message)
            return message

        return limited

"""API key and body limits, checked before the app."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import MutableMapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from nanoinfer.serve.errors import APIError, to_response

OPEN = ("/health",)  # no key needed: health probes
BODY_S = 30.0  # in which a body must have arrived


class LimitsMiddleware:
    """ASGI middleware. ``api_key`` is what ``Authorization: Bearer`` must hold; None admits all."""

    def __init__(self, app: ASGIApp, *, api_key: str | None, body_bytes: int) -> None:
        self.app, self.body_bytes = app, body_bytes
        self.expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif error := self._refusal(scope["path"], dict(scope["headers"])):
            await to_response(error)(scope, receive, send)
        else:
            await self.app(scope, self._limited(receive), send)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> APIError | None:
        # In constant time: how long a comparison takes must not tell how much of a guess is right.
        authorization = headers.get(b"authorization", b"")
        if self.expected is not None and path not in OPEN and not hmac.compare_digest(authorization, self.expected):
            return APIError(401, "give the API key of this server as Authorization: Bearer KEY", code="invalid_api_key")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.body_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> APIError:
        return APIError(413, f"the body is larger than the {self.body_bytes:,} bytes that this server reads")

    def _limited(self, receive: Receive) -> Receive:
        read, whole = 0, False
        until = asyncio.get_running_loop().time() + BODY_S

        async def limited() -> MutableMapping[str, Any]:
            nonlocal read, whole
            if whole:  # what comes now is that the client has disconnected
                return await receive()
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body did not arrive within {BODY_S:.0f} s") from None
            read += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if read > self.body_bytes:
                raise HTTPException(413, self._too_large().message)
            return message

        return limited

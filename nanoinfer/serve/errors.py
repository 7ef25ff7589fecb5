"""Errors as OpenAI's clients expect them: a status, and ``{"error": {...}}``."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from nanoinfer.engines.async_engine import QueueFull
from nanoinfer.errors import EngineError, NanoinferError, RequestError, TokenizerError

RETRY_S = 1  # slots free up within about a second


class APIError(Exception):
    """An error to answer with: ``message`` for people, ``param`` the field at fault, ``code`` OpenAI's word for it."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def headers(self) -> dict[str, str]:
        return {429: {"Retry-After": str(RETRY_S)}, 401: {"WWW-Authenticate": "Bearer"}}.get(self.status, {})

    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def frame(self) -> bytes:
        """As an event of a stream that has begun with status 200."""
        return f"data: {json.dumps(self.body())}\n\n".encode()


def to_api_error(error: Exception) -> APIError:
    """What a client may know of an error: of an internal one only that there was one."""
    match error:
        case APIError():
            return error
        case QueueFull():
            return APIError(429, str(error), code="rate_limit_exceeded")
        case EngineError():  # the log has it; a client learns nothing of the inside
            pass
        case RequestError() | TokenizerError():
            return APIError(400, str(error))
        case NanoinferError():
            return APIError(500, str(error))
    return APIError(500, "the server failed; its log says why", code="internal_error")


def _validation_error(error: RequestValidationError) -> APIError:
    """The first fault, by the name of its field."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"][1:]]
    if first["type"] == "json_invalid":
        return APIError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', 'it does not parse')}")
    message = first["msg"].removeprefix("Value error, ")
    if not path:
        hint = " Send it with Content-Type: application/json." if "dictionary" in message else ""
        return APIError(400, f"the body: {message}.{hint}")
    return APIError(400, f"{'.'.join(path)}: {message}", param=path[0], code="invalid_value")


def to_response(error: APIError) -> JSONResponse:
    """As a response of its own."""
    return JSONResponse(error.body(), error.status, error.headers)


def install_handlers(app: FastAPI) -> None:
    """Have the app answer every error in this form."""

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return to_response(_validation_error(error))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        response = to_response(APIError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))
        response.headers.update(error.headers or {})
        return response

    async def _any(request: Request, error: Exception) -> JSONResponse:
        return to_response(to_api_error(error))

    for kind in (APIError, NanoinferError, Exception):
        app.add_exception_handler(kind, _any)

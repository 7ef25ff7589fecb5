"""Everything that can go wrong, as OpenAI's clients expect it: a status, and ``{"error": {...}}``."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from nanoinfer.engines.async_engine import QueueFull
from nanoinfer.errors import NanoinferError, RequestError, TokenizerError

RETRY_S = 1  # a place is free again when somebody ends, and somebody ends often


class Problem(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: for people: names the thing and the way out.
        param: the field at fault.
        code: OpenAI's word for it, which programs look at.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def headers(self) -> dict[str, str]:
        """That belong to the status."""
        return {429: {"Retry-After": str(RETRY_S)}, 401: {"WWW-Authenticate": "Bearer"}}.get(self.status, {})

    def body(self) -> dict[str, Any]:
        """OpenAI's envelope."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def frame(self) -> bytes:
        """In a stream that has begun with status 200."""
        return f"data: {json.dumps(self.body())}\n\n".encode()


def of(error: Exception) -> Problem:
    """What a client is told of an error; of one that is ours no more than that it is."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, QueueFull):
        return Problem(429, str(error), code="rate_limit_exceeded")
    if isinstance(error, RequestError | TokenizerError):
        return Problem(400, str(error))
    if isinstance(error, NanoinferError):
        return Problem(500, str(error))
    return Problem(500, "the server failed; its log says why", code="internal_error")


def _of_validation(error: RequestValidationError) -> Problem:
    """The first fault, by the name of its field."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"][1:]]
    if first["type"] == "json_invalid":
        return Problem(400, f"the body is not JSON: {first.get('ctx', {}).get('error', 'it does not parse')}")
    message = first["msg"].removeprefix("Value error, ")
    if not path:
        hint = " Send it with Content-Type: application/json." if "dictionary" in message else ""
        return Problem(400, f"the body: {message}.{hint}")
    return Problem(400, f"{'.'.join(path)}: {message}", param=path[0], code="invalid_value")


def answer(problem: Problem) -> JSONResponse:
    """As a response of its own."""
    return JSONResponse(problem.body(), problem.status, problem.headers)


def install(app: FastAPI) -> None:
    """Have the app answer every error in this form."""

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return answer(_of_validation(error))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        response = answer(Problem(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))
        response.headers.update(error.headers or {})
        return response

    async def _any(request: Request, error: Exception) -> JSONResponse:
        return answer(of(error))

    for kind in (Problem, NanoinferError, Exception):
        app.add_exception_handler(kind, _any)

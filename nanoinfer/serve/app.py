"""The routes of an OpenAI-compatible server over one continuous engine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST

from nanoinfer.errors import RequestError
from nanoinfer.serve.errors import APIError, install_handlers, to_api_error
from nanoinfer.serve.middleware import LimitsMiddleware
from nanoinfer.serve.responses import DONE, ChatFormat, CompletionFormat, ResponseFormat
from nanoinfer.serve.schemas import ChatRequest, CompletionRequest, GenerationRequest
from nanoinfer.serve.service import Answer, Service

T = TypeVar("T")

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request is at fault; the error names the field."},
    401: {"description": "The API key is missing or wrong."},
    404: {"description": "There is no such model."},
    408: {"description": "The body did not arrive in time."},
    413: {"description": "The body is too large."},
    429: {"description": "No slot is free; try again after Retry-After seconds."},
    503: {"description": "The server is closing, or its engine is broken."},
    504: {"description": "The answer took too long."},
}


class ClientDisconnected(Exception):
    """The client has closed the connection."""


def make_app(service: Service, api_key: str | None = None) -> FastAPI:
    """The application, which closes the service when it shuts down. With an ``api_key``, clients must give it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    # The pages of documentation that FastAPI makes would load their scripts from elsewhere.
    app = FastAPI(title="nanoinfer", docs_url=None, redoc_url=None, lifespan=lifespan)
    install_handlers(app)
    app.add_middleware(LimitsMiddleware, api_key=api_key, body_bytes=service.limits.body_bytes)

    @app.get("/health", responses={503: ERRORS[503]})
    async def health() -> dict[str, str]:
        """Health probe: whether the engine makes steps, not only whether the server answers."""
        if problem := service.async_engine.problem(service.limits.step_s):
            raise APIError(503, f"unhealthy: {problem}")
        return {"status": "ok"}

    @app.get("/metrics", response_class=Response, responses={401: ERRORS[401]})
    async def metrics() -> Response:
        """Metrics in Prometheus' format."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models", responses={401: ERRORS[401]})
    async def models() -> dict[str, Any]:
        """The one model that is here."""
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{name:path}", responses={status: ERRORS[status] for status in (401, 404)})
    async def model(name: str) -> dict[str, Any]:
        """A model by name."""
        service.check_model(name)
        return _model(service)

    @app.post("/v1/completions", responses=ERRORS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one or more prompts."""
        service.check_model(body.model)
        service.check_choices(len(body.prompt), body.n)
        prompts = [await service.tokenize(prompt) for prompt in body.prompt]
        params = [body.params(service.remaining_context(ids, body.max_tokens), body.logprobs) for ids in prompts]
        form = CompletionFormat(service.name, int(time.time()), service.engine.tokenizer, body.echo)
        return await _answered(await service.start(prompts, params), form, body, request)

    @app.post("/v1/chat/completions", responses=ERRORS)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """The assistant's next turn."""
        service.check_model(body.model)
        service.check_choices(1, body.n)
        ids = await service.tokenize_chat([message.as_dict() for message in body.messages])
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = body.params(service.remaining_context(ids, body.limit), logprobs)
        form = ChatFormat(service.name, int(time.time()), service.engine.tokenizer)
        return await _answered(await service.start([ids], [params]), form, body, request)

    return app


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "nanoinfer",
        "max_model_len": service.engine.config.context,
    }


async def _answered(answer: Answer, form: ResponseFormat, body: GenerationRequest, request: Request) -> Response:
    if body.stream:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(_frames(answer, form, body), media_type="text/event-stream", headers=headers)
    try:
        await unless_disconnected(answer.finished(), request)
    except ClientDisconnected:
        return Response(status_code=499)  # client closed request: nginx's number
    return JSONResponse(form.whole(answer.choices, answer.usage()))


async def unless_disconnected(work: Awaitable[T], request: Request) -> T:
    """Await the work; drop it and raise :class:`ClientDisconnected` as soon as the client disconnects."""
    doing, gone = asyncio.ensure_future(work), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientDisconnected
        return doing.result()
    finally:
        for task in (doing, gone):
            task.cancel()
        await asyncio.wait({doing, gone})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _frames(answer: Answer, form: ResponseFormat, body: GenerationRequest) -> AsyncIterator[bytes]:
    """A stream: per choice its pieces, then the usage if the client wants it, then the end."""
    options = body.stream_options
    at_end, always = (False, False) if options is None else (options.include_usage, options.continuous_usage_stats)
    sent, logs, lengths = 0, [0] * len(answer.choices), [0] * len(answer.choices)
    usage = ', "usage": null' if at_end else ""
    try:
        for choice, request in enumerate(answer.choices):
            head = form.first(choice)
            if isinstance(form, CompletionFormat) and (prompt := form.prompt(request)):
                head, lengths[choice] = form.frame(choice, prompt, usage=usage), len(prompt)
            if head:
                yield head
        async for choice, event in answer:
            request = answer.choices[choice]
            logprobs, sent = None, sent + (event.token_id is not None)
            if request.params.logprobs is not None:
                logprobs = form.logprobs(request.logprobs[logs[choice] : logs[choice] + 1], lengths[choice])
                logs[choice] += 1
            if always:
                usage = f', "usage": {json.dumps(answer.usage(sent))}'
            if event.text or event.finish_reason or logprobs:
                yield form.frame(choice, event.text, event.finish_reason, logprobs, usage)
            lengths[choice] += len(event.text)
        if at_end:
            yield form.last(answer.usage())
        yield DONE
    except (APIError, RequestError) as error:
        yield to_api_error(error).frame()
    finally:
        answer.cancel()

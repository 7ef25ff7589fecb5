"""Between HTTP and the engine: prompts become requests, their events an answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from nanoinfer.engines.async_engine import AsyncEngine, Stream
from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.engines.request import Event, Request
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.serve.errors import APIError
from nanoinfer.serve.metrics import Metrics

LONG_TEXT = 20_000  # characters: tokenizing more takes longer than other requests should wait


@dataclass(frozen=True)
class ServerLimits:
    """The most that a server takes on."""

    body_bytes: int = 2**20
    choices: int = 16  # of a request: prompts times n
    outstanding: int = 256  # prompts that run or wait at a time; more are answered 429
    seconds: float = 600.0  # that an answer may take
    step_s: float = 120.0  # that a step may take before /health reports the engine as hung


class Service:
    """One engine, shared by all requests; its steps run in a thread. ``name`` is what clients call the model."""

    def __init__(self, engine: ContinuousEngine, name: str, limits: ServerLimits) -> None:
        self.engine, self.name, self.limits = engine, name, limits
        self.created = int(time.time())
        self.metrics = Metrics(engine)
        self.async_engine = AsyncEngine(engine, limits.outstanding)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            message = f"there is no model '{name}' here; this server has '{self.name}'"
            raise APIError(404, message, "model", "model_not_found")

    async def tokenize(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str) and len(prompt) > LONG_TEXT:
            return await asyncio.to_thread(self.engine.encode, prompt)
        return self.engine.encode(prompt)

    async def tokenize_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation. Raises :class:`APIError` for a model that has no chat template."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            raise APIError(400, f"{self.name} has no chat template: use /v1/completions", "messages")
        if sum(len(message["content"]) for message in messages) > LONG_TEXT:
            return await asyncio.to_thread(tokenizer.encode_chat, messages)
        return tokenizer.encode_chat(messages)

    def remaining_context(self, prompt: Sequence[int], max_tokens: int | None) -> int:
        """``max_tokens``, or as many as fit after the prompt. Raises :class:`APIError` where it does not fit."""
        context, n = self.engine.config.context, len(prompt)
        if n >= context or n + (max_tokens or 0) > context:
            wanted = "" if max_tokens is None else f" and max_tokens is {max_tokens}"
            message = f"the prompt has {n} tokens{wanted}; the context is {context} tokens: shorten one of them"
            param = "messages" if max_tokens is None else "max_tokens"
            raise APIError(400, message, param, "context_length_exceeded")
        return context - n if max_tokens is None else max_tokens

    def check_choices(self, prompts: int, n: int) -> None:
        if prompts * n > self.limits.choices:
            raise APIError(400, f"{prompts} prompts times n = {n} is more than {self.limits.choices} choices", "n")

    async def start(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Answer:
        """Queue the prompts of one request. Raises :class:`QueueFull` where no slot is free, else as :meth:`submit`."""
        streams: list[Stream] = []
        try:
            for prompt, setting in zip(prompts, params, strict=True):
                streams.append(await self.async_engine.submit(prompt, setting, wait=False))
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        return Answer(streams, self.metrics, self.limits.seconds)

    def close(self) -> None:
        self.async_engine.close()


class Answer:
    """The answer to one request, under way: iterate over ``(choice, event)`` until all choices have ended.

    Choices are numbered through: those of the first prompt, those of the second, and so on.
    """

    def __init__(self, streams: list[Stream], metrics: Metrics, seconds: float) -> None:
        self._streams, self._metrics = streams, metrics
        self.choices: list[Request] = [request for stream in streams for request in stream.requests]
        self._first = [choice for choice, request in enumerate(self.choices) if request.sample == 0]
        self._is_late = False
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _expire(self) -> None:
        self._is_late = True
        self.cancel()

    def cancel(self) -> None:
        """Drop what has not ended; its blocks are free within a step."""
        for stream in self._streams:
            stream.cancel()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        """Raises :class:`APIError` when the time is up or the server closes, :class:`RequestError` as the engine."""
        seen = [False] * len(self.choices)
        try:
            async for choice, event in self._events():
                if not seen[choice]:
                    seen[choice] = True
                    self._metrics.note_first_token(self.choices[choice])
                yield choice, event
            if any(request.finish_reason is None for request in self.choices):
                late, closing = (504, "the answer took too long"), (503, "the server is closing")
                raise APIError(*(late if self._is_late else closing))
        finally:
            self._timer.cancel()
            self.cancel()
            for request in self.choices:
                self._metrics.note_end(request)

    async def _events(self) -> AsyncIterator[tuple[int, Event]]:
        if len(self._streams) == 1:
            async for event in self._streams[0]:
                yield event.request, event
            return
        arrived: asyncio.Queue[tuple[int, Event] | Exception | None] = asyncio.Queue()
        pumps = [
            asyncio.create_task(_pump(stream, offset, arrived))
            for stream, offset in zip(self._streams, self._first, strict=True)
        ]
        try:
            left = len(pumps)
            while left:
                item = await arrived.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for pump in pumps:
                pump.cancel()

    async def finished(self) -> None:
        async for _ in self:
            pass

    def usage(self, sent: int | None = None) -> dict[str, int | dict[str, int]]:
        """Tokens of the prompts, each once whatever its ``n``, and of all choices; or those ``sent`` to the client."""
        prompt = sum(len(self.choices[choice].prompt_ids) for choice in self._first)
        new = sum(len(request.generated) for request in self.choices) if sent is None else sent
        cached = sum(self.choices[choice].trace.cached_tokens for choice in self._first)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


async def _pump(stream: Stream, offset: int, to: asyncio.Queue[tuple[int, Event] | Exception | None]) -> None:
    try:
        async for event in stream:
            to.put_nowait((offset + event.request, event))
        to.put_nowait(None)
    except Exception as error:
        to.put_nowait(error)

"""Between HTTP and the engine: prompts become requests, requests become answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from nanoinfer.engines.async_engine import AsyncEngine, Stream
from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.engines.request import Event, Request
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.serve.errors import Problem
from nanoinfer.serve.metrics import Figures

LONG_TEXT = 20_000  # characters: to cut such a text into tokens takes longer than others should wait


@dataclass(frozen=True)
class Limits:
    """What one client may ask of a server.

    Args:
        body_bytes: of a request.
        choices: of a request: prompts times ``n``.
        outstanding: prompts that run or wait at a time; more are answered 429.
        seconds: an answer may take.
    """

    body_bytes: int = 2**20
    choices: int = 16
    outstanding: int = 256
    seconds: float = 600.0


class Service:
    """One engine, shared by all requests.

    Args:
        engine: belongs to this service from now on.
        name: of the model, as clients must write it.
        limits: of each client.
    """

    def __init__(self, engine: ContinuousEngine, name: str, limits: Limits) -> None:
        self.engine, self.name, self.limits = engine, name, limits
        self.created = int(time.time())
        self.figures = Figures(engine)
        self.async_engine = AsyncEngine(engine, limits.outstanding)

    def check_model(self, asked: str | None) -> None:
        """Raises :class:`Problem` for a model that is not the one here."""
        if asked is not None and asked != self.name:
            raise Problem(
                404, f"there is no model '{asked}' here; this server has '{self.name}'", "model", "model_not_found"
            )

    async def cut(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a prompt. Raises :class:`nanoinfer.errors.RequestError`."""
        if isinstance(prompt, str) and len(prompt) > LONG_TEXT:
            return await asyncio.to_thread(self.engine.encode, prompt)
        return self.engine.encode(prompt)

    async def cut_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation. Raises :class:`Problem` for a model that has no chat template."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            raise Problem(400, f"{self.name} has no chat template: use /v1/completions", "messages")
        if sum(len(message["content"]) for message in messages) > LONG_TEXT:
            return await asyncio.to_thread(tokenizer.encode_chat, messages)
        return tokenizer.encode_chat(messages)

    def room(self, prompt: Sequence[int], asked: int | None) -> int:
        """How many tokens to generate behind a prompt: what is asked for, or all that fit.

        Raises:
            Problem: it does not fit.
        """
        context, n = self.engine.config.context, len(prompt)
        if n >= context or n + (asked or 0) > context:
            wanted = "" if asked is None else f" and {asked} new ones were asked for"
            raise Problem(
                400,
                f"the prompt has {n} tokens{wanted}; the context is {context} tokens: shorten one of them",
                "messages" if asked is None else "max_tokens",
                "context_length_exceeded",
            )
        return context - n if asked is None else asked

    def check_choices(self, prompts: int, n: int) -> None:
        """Raises :class:`Problem` for more choices than a request may have."""
        if prompts * n > self.limits.choices:
            raise Problem(400, f"{prompts} prompts times n = {n} is more than {self.limits.choices} choices", "n")

    async def start(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Answer:
        """Queue the prompts of one request.

        Raises:
            RequestError: what can never be served.
            QueueFull: no place is free.
        """
        streams: list[Stream] = []
        try:
            for prompt, own in zip(prompts, params, strict=True):
                streams.append(await self.async_engine.submit(prompt, own, wait=False))
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        return Answer(streams, self.figures, self.limits.seconds)

    def close(self) -> None:
        """Stop the engine; what is under way ends as cancelled."""
        self.async_engine.close()


class Answer:
    """What is under way for one request: iterate over ``(choice, event)`` until all choices have ended.

    Choices are numbered through: those of the first prompt, those of the second, and so on.
    """

    def __init__(self, streams: list[Stream], figures: Figures, seconds: float) -> None:
        self._streams, self._figures = streams, figures
        self.choices: list[Request] = [request for stream in streams for request in stream.requests]
        self._first = [choice for choice, request in enumerate(self.choices) if request.sample == 0]
        self._late = False
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _expire(self) -> None:
        self._late = True
        self.cancel()

    def cancel(self) -> None:
        """Drop what has not ended; its blocks are free within a step."""
        for stream in self._streams:
            stream.cancel()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        """Events as they come.

        Raises:
            RequestError: the engine could not go on with a choice.
            Problem: the time is up, or the server is closing.
        """
        seen = [False] * len(self.choices)
        try:
            async for choice, event in self._events():
                if not seen[choice]:
                    seen[choice] = True
                    self._figures.first(self.choices[choice])
                yield choice, event
            if any(request.finish_reason is None for request in self.choices):
                raise Problem(504, "the answer took too long") if self._late else Problem(503, "the server is closing")
        finally:
            self._timer.cancel()
            self.cancel()
            for request in self.choices:
                self._figures.ended(request)

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
        """Read to the end. Errors as in iterating."""
        async for _ in self:
            pass

    def usage(self, told: int | None = None) -> dict[str, int | dict[str, int]]:
        """Tokens: prompts once however many choices go on from them, and every token that was generated.

        ``told``: how many of these the client has been told of, where the engine may be ahead of it.
        """
        prompt = sum(len(self.choices[choice].prompt_ids) for choice in self._first)
        new = sum(len(request.generated) for request in self.choices) if told is None else told
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

"""OpenAI's response objects, whole or as the frames of a stream.

A stream sends a frame a token, so a frame is put together from parts that are made once, and only the text is encoded
each time. JSON is ASCII here, whatever the text: a blank line, ``data:`` or U+2028 in it cannot break a frame.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from nanoinfer.engines.request import Request, TokenLogprob
from nanoinfer.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
LEAST = -9999.0  # for minus infinity, which JSON has not

Usage = Mapping[str, Any]


class ResponseFormat:
    """How one endpoint writes an answer. ``created``: seconds since 1970."""

    kind: str
    kind_of_chunk: str
    prefix: str

    def __init__(self, model: str, created: int, tokenizer: Tokenizer | None) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.model, self.created, self.tokenizer = model, created, tokenizer
        self._head = self._top(self.kind_of_chunk)[:-1]  # less the closing brace

    def _top(self, kind: str) -> str:
        return json.dumps({"id": self.id, "object": kind, "created": self.created, "model": self.model})

    def whole(self, requests: Sequence[Request], usage: Usage) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                **self._message(request),
                "logprobs": None if request.params.logprobs is None else self.logprobs(request.logprobs, 0),
                "finish_reason": request.finish_reason,
            }
            for index, request in enumerate(requests)
        ]
        return {**json.loads(self._top(self.kind)), "choices": choices, "usage": usage}

    def frame(
        self,
        index: int,
        text: str,
        finish: str | None = None,
        logprobs: Mapping[str, Any] | None = None,
        usage: str = "",
    ) -> bytes:
        """The next piece of a choice. ``usage`` is put in as it is."""
        logs = "null" if logprobs is None else json.dumps(logprobs)
        end = "null" if finish is None else f'"{finish}"'
        return (
            f'data: {self._head}, "choices": [{{"index": {index}, {self._delta(text)}, '
            f'"logprobs": {logs}, "finish_reason": {end}}}]{usage}}}\n\n'
        ).encode()

    def last(self, usage: Usage) -> bytes:
        """The frame after the last choice's end, with the usage of all."""
        return f'data: {self._head}, "choices": [], "usage": {json.dumps(usage)}}}\n\n'.encode()

    def first(self, index: int) -> bytes:
        """What comes before a choice's first piece, if anything does."""
        return b""

    def token(self, token_id: int) -> tuple[str, list[int]]:
        """A token's text, ``bytes:`` and their values where it is a part of a character, and its bytes."""
        raw = b"" if self.tokenizer is None else self.tokenizer.token_bytes(token_id)
        try:
            return raw.decode("utf-8"), list(raw)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), list(raw)

    def _message(self, request: Request) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, text: str) -> str:
        raise NotImplementedError

    def logprobs(self, entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        """Log-probabilities of tokens; ``offset`` characters of text lie before them."""
        raise NotImplementedError


class CompletionFormat(ResponseFormat):
    """``/v1/completions``."""

    kind = kind_of_chunk = "text_completion"
    prefix = "cmpl"

    def __init__(self, model: str, created: int, tokenizer: Tokenizer | None, echo: bool = False) -> None:
        super().__init__(model, created, tokenizer)
        self.echo = echo

    def prompt(self, request: Request) -> str:
        """The text that an answer with ``echo`` begins with."""
        return self.tokenizer.decode(request.prompt_ids) if self.echo and self.tokenizer is not None else ""

    def _message(self, request: Request) -> dict[str, Any]:
        return {"text": self.prompt(request) + request.text}

    def _delta(self, text: str) -> str:
        return f'"text": {json.dumps(text)}'

    def logprobs(self, entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        texts = [self.token(entry.token_id)[0] for entry in entries]
        return {
            "tokens": texts,
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [{self.token(i)[0]: _finite(value) for i, value in entry.top} for entry in entries],
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset))[: len(texts)],
        }


class ChatFormat(ResponseFormat):
    """``/v1/chat/completions``."""

    kind, kind_of_chunk = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def first(self, index: int) -> bytes:
        delta = '"delta": {"role": "assistant", "content": ""}'
        choice = f'{{"index": {index}, {delta}, "logprobs": null, "finish_reason": null}}'
        return f'data: {self._head}, "choices": [{choice}]}}\n\n'.encode()

    def _message(self, request: Request) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": request.text, "refusal": None}}

    def _delta(self, text: str) -> str:
        return f'"delta": {{"content": {json.dumps(text)}}}' if text else '"delta": {}'

    def logprobs(self, entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        return {
            "content": [
                self._entry(e.token_id, e.logprob) | {"top_logprobs": [self._entry(i, value) for i, value in e.top]}
                for e in entries
            ],
            "refusal": None,
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = self.token(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": raw}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)

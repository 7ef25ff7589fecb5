"""One request: its prompt and settings, what has been generated so far, and when it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from nanoinfer.errors import RequestError
from nanoinfer.measure.trace import Trace
from nanoinfer.models.registry import LoadedModel
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.sampling.sample import SamplerState
from nanoinfer.text.stopping import StopChecker
from nanoinfer.text.tokenizer import Detokenizer

FinishReason = Literal["stop", "length"]


class RequestCancelled(RequestError):
    """The request was cancelled by its reader, or by the engine's closing."""

    def __init__(self) -> None:
        super().__init__("the request was cancelled, or its engine closed, before it had ended")


@dataclass(frozen=True)
class TokenLogprob:
    """The model's own log-probability of a chosen token, and of the best alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Event:
    """A token came, or a request ended, or both."""

    request: int
    token_id: int | None
    text: str  # to show now: can be empty (half a character, a possible stop string), or hold that of earlier tokens
    finish_reason: FinishReason | None
    time: float  # monotonic, in seconds


#: Receives a request's events, or the error that ended it. Each request has exactly one last item.
Deliver = Callable[[Event | RequestError], None]


def is_last(item: Event | RequestError) -> bool:
    """Whether nothing follows this item of its request."""
    return isinstance(item, RequestError) or item.finish_reason is not None


def unwrap(item: Event | RequestError) -> Event:
    """Return an event, raise an error."""
    if isinstance(item, RequestError):
        raise item
    return item


@dataclass(frozen=True)
class Completion:
    """A finished request. ``token_ids`` holds every generated token, the end-of-sequence id included."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_ids: list[int]
    trace: Trace
    logprobs: list[TokenLogprob] | None = None


@dataclass
class Request:
    """The state of one request while an engine works on it.

    A prompt of which ``n`` samples are wanted is ``n`` requests in a row, numbered by ``sample``.
    """

    index: int
    prompt_ids: list[int]
    params: SamplingParams
    loaded: LoadedModel
    trace: Trace
    sample: int = 0
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    sampler: SamplerState = field(init=False)
    limit: int = field(init=False)  # most tokens it can generate, given its settings and the context

    def __post_init__(self) -> None:
        self.sampler = SamplerState(self.params, self.prompt_ids)
        self._detokenizer = Detokenizer(self.loaded.tokenizer) if self.loaded.tokenizer else None
        self._stopper = StopChecker(self.params.stop)
        room = self.loaded.model.config.context - len(self.prompt_ids)
        self.limit = self.params.max_tokens if self.params.on_full == "crop" else min(self.params.max_tokens, room)
        self._end_ids = {*self.params.stop_ids, *(() if self.params.ignore_eos else self.loaded.eos_ids)}

    @property
    def generated(self) -> list[int]:
        return self.sampler.generated

    @property
    def ids(self) -> list[int]:
        return [*self.prompt_ids, *self.generated]

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.generated)

    @property
    def kv_limit(self) -> int:
        """Most tokens that a cache has to hold for it: the last token is never fed."""
        return len(self.prompt_ids) + max(self.limit, 1) - 1

    def accept(self, token_id: int, now: float) -> Event:
        """Take one sampled token: note its time, make its text, decide whether the request ends."""
        self.generated.append(token_id)
        self.trace.token(now)
        ended = token_id in self._end_ids
        delta = "" if ended or self._detokenizer is None else self._stopper.push(self._detokenizer.push(token_id))
        if ended or self._stopper.hit:
            return self._finish("stop", token_id, delta, now)
        if len(self.generated) >= self.limit:
            return self._finish("length", token_id, delta, now)
        self.text += delta
        return Event(self.index, token_id, delta, None, now)

    def finish_empty(self, now: float) -> Event:
        """End a request whose limit is no token at all."""
        return self._finish("length", None, "", now)

    def abandon(self, status: Literal["cancelled", "error"], now: float) -> None:
        """Note that it ends without a result; one that has ended keeps its status."""
        if self.trace.t_end is None:
            self.trace.t_end, self.trace.status = now, status

    def _finish(self, reason: FinishReason, token_id: int | None, delta: str, now: float) -> Event:
        if self._detokenizer is not None:
            delta += self._stopper.push(self._detokenizer.finish()) + self._stopper.finish()
        self.text += delta
        # What was held back may have turned out to be a stop string after all.
        self.finish_reason = "stop" if self._stopper.hit else reason
        self.trace.t_end = now
        return Event(self.index, token_id, delta, self.finish_reason, now)

    def completion(self) -> Completion:
        """The result, once ``finish_reason`` is set."""
        if self.finish_reason is None:
            went_on = "has not finished: iterate over its stream to the end"
            ended = f"ended before it was finished ({self.trace.status})"
            raise RequestError(f"request {self.index} {went_on if self.trace.t_end is None else ended}")
        logs = None if self.params.logprobs is None else self.logprobs
        return Completion(self.text, list(self.generated), self.finish_reason, list(self.prompt_ids), self.trace, logs)

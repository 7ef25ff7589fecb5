"""What every engine shares: prompts in, a stream of events out, a trace for each request.

An engine is its :meth:`Engine.run`: what it does, step by step, until its requests have ended.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from nanoinfer.engines.request import Completion, Event, Request, check_prompt
from nanoinfer.errors import RequestError
from nanoinfer.measure.clock import now
from nanoinfer.measure.trace import Trace
from nanoinfer.models.registry import LoadedModel
from nanoinfer.sampling.params import SamplingParams

Prompt = str | Sequence[int]


class Engine(ABC):
    """A model with a way to generate from it."""

    name: ClassVar[str]

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.model, self.tokenizer, self.config = loaded.model, loaded.tokenizer, loaded.model.config
        weight = next(loaded.model.parameters())
        self.device, self.dtype = weight.device, weight.dtype

    @abstractmethod
    def run(self, requests: list[Request]) -> Generator[Event, None, None]:
        """Work on the requests, each of which asks for a token at least, and yield events until all have ended."""

    def refuse(self, request: Request) -> None:
        """Raise :class:`RequestError` for what this engine can never serve; called before any work."""
        del request  # most engines serve whatever passed the common checks

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Generation:
        """Generate step by step: iterate over :class:`Event`; ``completions`` when it is exhausted.

        Args:
            prompts: one text, one list of token ids, or a list of those.
            params: one for all, or one each; None is greedy with the defaults. A prompt with ``n`` above 1
                has ``n`` results, one behind the other.

        Raises:
            RequestError: before any work, for a prompt or setting that cannot be served.
        """
        return Generation(self, self.admit(prompts, params))

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Generate to the end. Arguments and errors as in :meth:`stream`; results in the order of the prompts."""
        generation = self.stream(prompts, params)
        for _ in generation:
            pass
        return generation.completions

    def admit(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        scheduled = now()
        many = _as_list(prompts)
        params = SamplingParams() if params is None else params
        settings: list[Any] = list(params) if isinstance(params, Sequence) else [params] * len(many)
        if len(settings) != len(many):
            raise RequestError(f"{len(many)} prompts but {len(settings)} SamplingParams: give one for all, or one each")
        if odd := [setting for setting in settings if not isinstance(setting, SamplingParams)]:
            raise RequestError(f"settings are given as SamplingParams(...), not as {type(odd[0]).__name__}")
        requests: list[Request] = []
        for prompt, setting in zip(many, settings, strict=True):
            ids = self.encode(prompt)
            if setting.stop and self.tokenizer is None:
                raise RequestError(f"stop strings need a tokenizer, and {self.loaded.name} has none; use stop_ids")
            check_prompt(ids, setting, self.config.context, self.config.vocab_size)
            for sample in range(setting.n):
                trace = Trace(t_scheduled=scheduled, t_sent=scheduled, prompt_tokens=len(ids))
                # Samples of one prompt roll dice of their own.
                own = setting if setting.seed is None else replace(setting, seed=_plus(setting.seed, sample))
                requests.append(
                    Request(
                        len(requests), ids, own, self.tokenizer, self.loaded.eos_ids, self.config.context, trace, sample
                    )
                )
                self.refuse(requests[-1])
        return requests

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; a text gets the begin-of-sequence id that its tokenizer adds."""
        if not isinstance(prompt, str):
            given: Any = prompt
            try:
                return [operator.index(i) for i in given]
            except TypeError:
                raise RequestError("a prompt is a text or a list of whole numbers, the token ids") from None
        if self.tokenizer is None:
            raise RequestError(f"{self.loaded.name} has no tokenizer here: give prompts as token ids")
        if not prompt:
            raise RequestError("the prompt is empty; give some text")
        return self.tokenizer.encode(prompt, bos=self.tokenizer.adds_bos)


class Generation(Iterator[Event]):
    """One call of an engine, under way: an iterator of events that owns its requests.

    Left before its end, it is closed as soon as nobody holds it, and the requests end as cancelled.
    """

    def __init__(self, engine: Engine, requests: list[Request]) -> None:
        self.requests = requests
        self._events = _run(engine, requests)  # does not hold this object, or only the collector would close it

    def __next__(self) -> Event:
        return next(self._events)

    def close(self) -> None:
        """Stop now; unfinished requests end as cancelled."""
        self._events.close()
        _abandon(self.requests, "cancelled")

    @property
    def completions(self) -> list[Completion]:
        """Results in the order of the prompts, once the iterator is exhausted."""
        return [request.completion() for request in self.requests]


def _run(engine: Engine, requests: list[Request]) -> Generator[Event, None, None]:
    try:
        for request in requests:
            if request.limit == 0:
                yield request.finish_empty(now())
        if wanted := [r for r in requests if r.finish_reason is None]:
            yield from engine.run(wanted)
    except BaseException as error:
        _abandon(requests, "cancelled" if isinstance(error, GeneratorExit | KeyboardInterrupt) else "error")
        raise


def _abandon(requests: list[Request], status: Literal["cancelled", "error"]) -> None:
    for request in requests:
        if request.trace.t_end is None:
            request.trace.t_end, request.trace.status = now(), status


def _plus(seed: int, sample: int) -> int:
    """The seed of a prompt's n-th sample, within 64 bits."""
    return (seed + sample + 2**63) % 2**64 - 2**63


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list. A list of integers is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    given: Any = prompts
    if isinstance(given, bytes | Mapping) or not isinstance(given, Iterable):
        raise RequestError(f"a prompt is a text or a list of token ids, not {type(given).__name__}")
    # Arrays and tensors, of any number of dimensions and in any mixture, as lists.
    items: list[Any] = [item.tolist() if hasattr(item, "tolist") else item for item in given]
    if any(isinstance(item, bytes) for item in items):
        raise RequestError("a prompt is a text or a list of token ids, not bytes; decode them first")
    if not items:
        raise RequestError("no prompt given; give a text, a list of token ids, or a list of those")
    if all(isinstance(item, int) for item in items):
        return [items]
    if any(isinstance(item, int) for item in items):
        raise RequestError("prompts mix single ids with whole prompts; give a list of one kind")
    return items

"""What every engine shares: prompts in, a stream of events out, a trace for each request.

An engine is its way to get the next logits; the loop around that is the same for all,
and it is :meth:`Generation._run`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from nanoinfer.engines.request import Completion, Event, Request, TokenLogprob, check_prompt
from nanoinfer.errors import RequestError
from nanoinfer.measure.clock import now
from nanoinfer.measure.trace import Trace
from nanoinfer.models.registry import LoadedModel
from nanoinfer.sampling import SamplingParams, sample, top_logprobs

Prompt = str | Sequence[int]
#: Logits ``[R, V]`` for the next token of each of R running requests, in their order.
Forward = Callable[[list[Request]], Tensor]


class Engine(ABC):
    """A model with a way to generate from it."""

    name: ClassVar[str]

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.model, self.tokenizer, self.config = loaded.model, loaded.tokenizer, loaded.model.config
        weight = next(loaded.model.parameters())
        self.device, self.dtype = weight.device, weight.dtype

    @abstractmethod
    def start(self, requests: list[Request]) -> Forward:
        """Prepare for one batch; return the function that each step calls with the running requests."""

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Generation:
        """Generate step by step: iterate over :class:`Event`; ``completions`` when it is exhausted.

        Args:
            prompts: one text, one list of token ids, or a list of those.
            params: one for all, or one each; None is greedy with the defaults.

        Raises:
            RequestError: before any work, for a prompt or setting that cannot be served.
        """
        return Generation(self, self._admit(prompts, params))

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Generate to the end. Arguments and errors as in :meth:`stream`; results in the order of the prompts."""
        generation = self.stream(prompts, params)
        for _ in generation:
            pass
        return generation.completions

    def _admit(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        scheduled = now()
        many = _as_list(prompts)
        settings = [params or SamplingParams()] * len(many) if not isinstance(params, Sequence) else list(params)
        if len(settings) != len(many):
            raise RequestError(f"{len(many)} prompts but {len(settings)} SamplingParams: give one for all, or one each")
        requests = []
        for index, (prompt, setting) in enumerate(zip(many, settings, strict=True)):
            ids = self.encode(prompt)
            if setting.stop and self.tokenizer is None:
                raise RequestError(f"stop strings need a tokenizer, and {self.loaded.name} has none; use stop_ids")
            check_prompt(ids, setting, self.config.context, self.config.vocab_size)
            trace = Trace(t_scheduled=scheduled, t_sent=scheduled, prompt_tokens=len(ids))
            requests.append(
                Request(index, ids, setting, self.tokenizer, self.loaded.eos_ids, self.config.context, trace)
            )
        return requests

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; a text gets the begin-of-sequence id that its tokenizer adds."""
        if not isinstance(prompt, str):
            return [int(i) for i in prompt]
        if self.tokenizer is None:
            raise RequestError(f"{self.loaded.name} has no tokenizer here: give prompts as token ids")
        if not prompt:
            raise RequestError("the prompt is empty; give some text")
        return self.tokenizer.encode(prompt, bos=self.tokenizer.adds_bos)


class Generation(Iterator[Event]):
    """One call of an engine, under way: an iterator of events that owns its requests."""

    def __init__(self, engine: Engine, requests: list[Request]) -> None:
        self.engine, self.requests = engine, requests
        self._events = self._run()

    def __next__(self) -> Event:
        return next(self._events)

    def close(self) -> None:
        """Stop now; unfinished requests end as cancelled."""
        self._events.close()

    @property
    def completions(self) -> list[Completion]:
        """Results in the order of the prompts, once the iterator is exhausted."""
        return [request.completion() for request in self.requests]

    def _run(self) -> Generator[Event, None, None]:
        """The step loop: logits of the running rows, one token each, their events; until all have ended."""
        try:
            for request in self.requests:
                if request.limit == 0:
                    yield request.finish_empty(now())
            forward: Forward | None = None
            while running := [r for r in self.requests if r.finish_reason is None]:
                with torch.inference_mode():
                    forward = forward or self.engine.start(running)
                    logits = forward(running)
                    tokens = sample(logits, [r.sampler for r in running])
                    _note_logprobs(logits, tokens, running)
                    token_ids = tokens.tolist()  # waits for the device: the time below is when the token is there
                t = now()
                for request, token_id in zip(running, token_ids, strict=True):
                    yield request.accept(token_id, t)
        except BaseException as error:
            for request in self.requests:
                if request.finish_reason is None:
                    request.trace.t_end = now()
                    request.trace.status = "cancelled" if isinstance(error, GeneratorExit) else "error"
            raise


def _note_logprobs(logits: Tensor, tokens: Tensor, running: list[Request]) -> None:
    rows = [i for i, r in enumerate(running) if r.params.logprobs is not None]
    if not rows:
        return
    index = torch.tensor(rows, device=logits.device)
    count = max(running[i].params.logprobs or 0 for i in rows)
    chosen, best, ids = (t.tolist() for t in top_logprobs(logits[index], tokens[index], count))
    for n, i in enumerate(rows):
        top = list(zip(ids[n], best[n], strict=True))[: running[i].params.logprobs]
        running[i].logprobs.append(TokenLogprob(int(tokens[i]), chosen[n], tuple(top)))


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list. A list of integers is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if not items:
        raise RequestError("no prompt given; give a text, a list of token ids, or a list of those")
    if all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]
    if any(isinstance(item, int) for item in items):
        raise RequestError("prompts mix single ids with whole prompts; give a list of one kind")
    return items  # type: ignore[return-value]

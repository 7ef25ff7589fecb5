"""What every engine shares: prompts in, a stream of events out, a trace for each request.

An engine is its :meth:`Engine.run`: what it does, step by step, until its requests have ended.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from nanoinfer.engines.request import Completion, Event, Request, TokenLogprob
from nanoinfer.errors import RequestError
from nanoinfer.measure.clock import now
from nanoinfer.measure.trace import Trace
from nanoinfer.models.registry import LoadedModel
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.sampling.sample import sample, top_logprobs

Prompt = str | Sequence[int]
#: One prompt or several, as a user may give them; and their settings: one for all, one each, or None for the defaults.
Prompts = Prompt | Sequence[Prompt]
Settings = SamplingParams | Sequence[SamplingParams] | None


class NonFiniteLogits(RequestError):
    """Logits from which no token can be chosen; ``rows`` says where."""

    def __init__(self, rows: list[int], dtype: torch.dtype) -> None:
        super().__init__(
            f"the model's logits are not finite (in {str(dtype).removeprefix('torch.')}): "
            "its weights are damaged, or its numbers too large for the dtype; take bfloat16 or float32"
        )
        self.rows = rows


class Engine(ABC):
    """A model with a way to generate from it."""

    name: ClassVar[str]
    crops: ClassVar[bool] = True  # a cache that holds tokens at their own positions cannot

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.model, self.tokenizer, self.config = loaded.model, loaded.tokenizer, loaded.model.config
        weight = next(loaded.model.parameters())
        self.device, self.dtype = weight.device, weight.dtype

    @abstractmethod
    def run(self, requests: list[Request]) -> Generator[Event, None, None]:
        """Work on the requests, each of which is to get a token at least, and yield events until all have ended."""

    def refuse(self, request: Request) -> None:
        """Raise :class:`RequestError` for what this engine can never serve; called before any work."""
        del request  # most engines serve whatever passed the common checks

    def stream(self, prompts: Prompts, params: Settings = None) -> Generation:
        """Generate step by step: iterate over :class:`Event`; ``completions`` when it is exhausted.

        A prompt with ``n`` above 1 has ``n`` results, one after the other. Raises :class:`RequestError`, before any
        work, for a prompt or setting that cannot be served.
        """
        return Generation(self, self.admit(prompts, params))

    def generate(self, prompts: Prompts, params: Settings = None) -> list[Completion]:
        """Generate to the end. Arguments and errors as in :meth:`stream`; results in the order of the prompts."""
        generation = self.stream(prompts, params)
        for _ in generation:
            pass
        return generation.completions

    def admit(self, prompts: Prompts, params: Settings) -> list[Request]:
        """The requests of some prompts, checked. Arguments and errors as in :meth:`stream`."""
        scheduled = now()
        prompt_list = _as_list(prompts)
        params = SamplingParams() if params is None else params
        settings: list[Any] = list(params) if isinstance(params, Sequence) else [params] * len(prompt_list)
        if (n := len(settings)) != len(prompt_list):
            raise RequestError(f"{len(prompt_list)} prompts but {n} SamplingParams: give one for all, or one each")
        if odd := [setting for setting in settings if not isinstance(setting, SamplingParams)]:
            raise RequestError(f"settings are given as SamplingParams(...), not as {type(odd[0]).__name__}")
        requests: list[Request] = []
        for prompt, setting in zip(prompt_list, settings, strict=True):
            ids = self.encode(prompt)
            self._check(ids, setting)
            for number in range(setting.n):
                trace = Trace(t_scheduled=scheduled, t_sent=scheduled, prompt_tokens=len(ids))
                # A seed of its own for each sample, within 64 bits.
                seed = None if setting.seed is None else (setting.seed + number + 2**63) % 2**64 - 2**63
                request = Request(len(requests), ids, replace(setting, seed=seed), self.loaded, trace, number)
                self.refuse(request)
                requests.append(request)
        return requests

    def _check(self, ids: list[int], params: SamplingParams) -> None:
        if params.stop and self.tokenizer is None:
            raise RequestError(f"stop strings need a tokenizer, and {self.loaded.name} has none; use stop_ids")
        if params.on_full == "crop" and not self.crops:
            raise RequestError(f"the {self.name} engine does not crop; use on_full='stop', or the cached engine")
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        if odd := [i for i in (min(ids), max(ids)) if not 0 <= i < self.config.vocab_size]:
            raise RequestError(f"prompt id {odd[0]} is outside the vocabulary (0 to {self.config.vocab_size - 1})")
        room = self.config.context - len(ids)
        if room < 0 or (room == 0 and params.max_tokens and params.on_full == "stop"):
            raise RequestError(
                f"the prompt has {len(ids)} tokens and the model's context is {self.config.context}: "
                f"shorten it to {self.config.context - 1} tokens or fewer"
            )

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; a text gets the begin-of-sequence id that its tokenizer adds."""
        if not isinstance(prompt, str):
            items: Any = prompt
            try:
                return [operator.index(i) for i in items]
            except TypeError:
                raise RequestError("a prompt is a text or a list of whole numbers, the token ids") from None
        if self.tokenizer is None:
            raise RequestError(f"{self.loaded.name} has no tokenizer here: give prompts as token ids")
        if not prompt:
            raise RequestError("the prompt is empty; give some text")
        return self.tokenizer.encode(prompt, bos=self.tokenizer.adds_bos)

    def choose(self, logits: Tensor, requests: list[Request]) -> list[int]:
        """A token for each row of ``[R, V]``, with its log-probability if wanted; draws none from non-finite logits."""
        check_finite(logits)
        tokens = sample(logits, [r.sampler for r in requests])
        note_logprobs(logits, tokens, requests)
        return tokens.tolist()  # waits for the device


class Generation(Iterator[Event]):
    """One call of an engine, under way: an iterator of events that owns its requests.

    Once nothing refers to it, it is closed at once, and requests that have not ended are cancelled.
    """

    def __init__(self, engine: Engine, requests: list[Request]) -> None:
        self.requests = requests
        # Does not refer to this object: a circle would wait for the garbage collector.
        self._events = _run(engine, requests)

    def __next__(self) -> Event:
        return next(self._events)

    def close(self) -> None:
        self._events.close()
        for request in self.requests:
            request.abandon("cancelled", now())

    @property
    def completions(self) -> list[Completion]:
        """Results in the order of the prompts, once the iterator is exhausted."""
        return [request.completion() for request in self.requests]


def _run(engine: Engine, requests: list[Request]) -> Generator[Event, None, None]:
    try:
        for request in requests:
            if request.limit == 0:
                yield request.finish_empty(now())
        if unfinished := [r for r in requests if r.finish_reason is None]:
            yield from engine.run(unfinished)
    except BaseException as error:
        for request in requests:
            request.abandon("cancelled" if isinstance(error, GeneratorExit | KeyboardInterrupt) else "error", now())
        raise


# --- tokens from logits ---------------------------------------------------------------


def check_finite(logits: Tensor) -> None:
    """Raise :class:`NonFiniteLogits` where the largest of a row of ``[R, V]`` is no finite number."""
    on_cpu = logits.device.type == "cpu"  # there NumPy does it, without waking a thread team
    largest = (logits.float().numpy().max(axis=-1) if on_cpu else logits.amax(dim=-1)).tolist()
    if rows := [row for row, value in enumerate(largest) if not math.isfinite(value)]:
        raise NonFiniteLogits(rows, logits.dtype)


def note_logprobs(logits: Tensor, tokens: Tensor, requests: Sequence[Request]) -> None:
    """Keep the log-probabilities for those requests whose settings ask for them."""
    rows = [row for row, r in enumerate(requests) if r.params.logprobs is not None]
    if not rows:
        return
    index = torch.tensor(rows, device=logits.device)
    count = max(requests[row].params.logprobs or 0 for row in rows)
    chosen, best, ids = (t.tolist() for t in top_logprobs(logits[index], tokens[index], count))
    for n, row in enumerate(rows):
        top = list(zip(ids[n], best[n], strict=True))[: requests[row].params.logprobs]
        requests[row].logprobs.append(TokenLogprob(int(tokens[row]), chosen[n], tuple(top)))


# --- prompts --------------------------------------------------------------------------


def _as_list(prompts: Prompts) -> list[Prompt]:
    """One prompt or many, as a list. A list of integers is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    anything: Any = prompts
    if isinstance(anything, bytes | Mapping) or not isinstance(anything, Iterable):
        raise RequestError(f"a prompt is a text or a list of token ids, not {type(anything).__name__}")
    # Arrays and tensors, of any number of dimensions and in any mixture, as lists.
    items: list[Any] = [item.tolist() if hasattr(item, "tolist") else item for item in anything]
    if any(isinstance(item, bytes) for item in items):
        raise RequestError("a prompt is a text or a list of token ids, not bytes; decode them first")
    if not items:
        raise RequestError("no prompt given; give a text, a list of token ids, or a list of those")
    is_id = [isinstance(item, int) for item in items]
    if any(is_id) and not all(is_id):
        raise RequestError("prompts mix single ids with whole prompts; give a list of one kind")
    return [items] if all(is_id) else items

"""Speculative decoding: guess a few tokens cheaply, then let the model check all of them in one pass.

A decode step of one row reads every weight to make one token. A pass over a few tokens reads them once as well, and
takes hardly longer. So a pass gets the newest token and a draft of what may follow it. Its logits say what should have
come at each place: the draft is kept as far as it agrees, and the first token that does not is put right.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from nanoinfer.cache.blocks import BlockTable
from nanoinfer.cache.paged import NewTokens, PagedCache
from nanoinfer.engines.acceptance import judge
from nanoinfer.engines.choose import not_finite, note_logprobs
from nanoinfer.engines.drafts import Draft, Drafter, ModelDraft, PromptLookup, ahead
from nanoinfer.engines.engine import Engine
from nanoinfer.engines.request import Event, Request
from nanoinfer.errors import DeviceError, RequestError
from nanoinfer.measure.clock import now
from nanoinfer.models.registry import LoadedModel, load_model
from nanoinfer.optimize.apply import apply_optimizations
from nanoinfer.optimize.cpu_kernel import DecodeKernel
from nanoinfer.optimize.options import Optimizations
from nanoinfer.sampling.sample import SamplerState, distribution, penalise, sample

LOOKUP = "prompt-lookup"
BLOCK_SIZE = 8
PLAIN = Optimizations()


@dataclass
class Speculation:
    """What drafts were good for.

    Args:
        passes: of the model, the one over the prompt among them.
        drafted: tokens that were guessed and went through a pass.
        accepted: those of them that saved a pass: tokens delivered beyond the one that a pass brings in any case.
    """

    passes: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance(self) -> float:
        """``accepted / drafted``, 0 to 1."""
        return self.accepted / max(1, self.drafted)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens delivered for each pass, from 1 to ``n_draft + 1``; 0 where there was none."""
        return (self.passes + self.accepted) / max(1, self.passes)


class Text:
    """One request under way: its keys and values in a cache of its own, and whoever drafts for it."""

    def __init__(self, engine: SpeculativeEngine, request: Request) -> None:
        self.request = request
        most = len(request.prompt_ids) + request.limit - 1  # the last token is never fed
        n_blocks = -(-most // BLOCK_SIZE)
        self.cache = PagedCache(engine.config, n_blocks, BLOCK_SIZE, engine.device, engine.dtype)
        self.table = BlockTable(list(range(n_blocks)))
        self.drafter: Drafter = PromptLookup() if engine.draft is None else ModelDraft(engine.draft.model, most)


class SpeculativeEngine(Engine):
    """Drafts, checked a pass at a time. The output is that of the model alone, whatever the draft is worth.

    Greedy requests get the tokens that any engine gives them, and so do seeded ones while drafts are looked up. Where
    a draft model rolls dice of its own, tokens follow the same distribution (:mod:`nanoinfer.engines.acceptance`).

    Requests are served one after another. It pays where a pass's time is the reading of weights: with many rows the
    products are busy without drafts, and what is not kept is work lost. The tokens of a pass come at one moment,
    and traces say so: inter-token latency is zeros and whole passes. ``speculation`` counts the last run, so far.

    Args:
        loaded: the model.
        draft: ``prompt-lookup``, or a model of the same vocabulary: by name, or loaded already.
        n_draft: tokens drafted for a pass at most.
        speed: what passes may use beside the plain model.

    Raises:
        RequestError: another vocabulary, an ``n_draft`` below 1, or a speed that passes cannot use.
        DeviceError: a draft model on another device, or a speed that this machine or dtype does not have.
    """

    name = "speculative"

    def __init__(
        self, loaded: LoadedModel, *, draft: str | LoadedModel = LOOKUP, n_draft: int = 4, speed: Optimizations = PLAIN
    ) -> None:
        given: Any = n_draft
        if isinstance(given, bool) or not isinstance(given, Integral) or given < 1:
            raise RequestError(f"n_draft must be a whole number of at least 1, got {n_draft!r}")
        if speed.graphs:
            raise RequestError("the speculative engine's passes differ in size and are not recorded: leave graphs off")
        super().__init__(loaded)
        self.n_draft = int(n_draft)
        self.draft = None if draft == LOOKUP else self._fitting(draft)
        self.model = apply_optimizations(loaded.model, speed)
        self.kernel = DecodeKernel(loaded.model, "int8" if speed.weights else None) if speed.kernel else None
        self.speculation = Speculation()

    def _fitting(self, draft: str | LoadedModel) -> LoadedModel:
        """The draft model, loaded, if it can draft for this one."""
        if not isinstance(draft, LoadedModel):
            draft = load_model(draft, device=self.device, dtype=self.dtype)
        size, wanted = draft.model.config.vocab_size, self.config.vocab_size
        if size != wanted:
            raise RequestError(
                f"a draft model needs the vocabulary of its target: '{draft.name}' has {size} tokens and "
                f"'{self.loaded.name}' {wanted}; take another, or draft='{LOOKUP}'"
            )
        if (device := next(draft.model.parameters()).device) != self.device:
            raise DeviceError(f"draft '{draft.name}' is on {device} and not on {self.device}: give it by name")
        return draft

    def refuse(self, request: Request) -> None:
        """Refuse cropping: the cache holds tokens at their own positions."""
        if request.params.on_full == "crop":
            raise RequestError("the speculative engine does not crop; use on_full='stop', or the cached engine")

    def run(self, requests: list[Request]) -> Generator[Event, None, None]:
        """One request after another, each to its end."""
        self.speculation = Speculation()
        for request in requests:
            yield from self._serve(request)

    def _serve(self, request: Request) -> Generator[Event, None, None]:
        request.trace.t_start = now()
        text = Text(self, request)
        while request.finish_reason is None:
            yield from self._pass(text)

    @torch.inference_mode()
    def _pass(self, text: Text) -> list[Event]:
        """Draft, check, deliver: one token or more."""
        request = text.request
        room = request.limit - len(request.generated) - 1  # beside the token that comes in any case
        draft = text.drafter.propose(request.sampler, min(self.n_draft, room))
        logits = self._verify(text, [*request.ids[text.table.length :], *draft.tokens], len(draft.tokens) + 1)
        tokens = follow(logits, draft, request.sampler)
        t, events = now(), list[Event]()
        while request.finish_reason is None and len(events) < len(tokens):
            events.append(request.accept(tokens[len(events)], t))
        n = len(events)
        note_logprobs(logits[:n], torch.tensor(tokens[:n], device=logits.device), [request] * n)
        # In the cache is now all but the newest token. What was not kept lies behind that, and is written over.
        text.table.length = request.length - 1
        self.speculation.passes += 1
        self.speculation.drafted += len(draft.tokens)
        self.speculation.accepted += n - 1
        return events

    def _verify(self, text: Text, ids: Sequence[int], n: int) -> Tensor:
        """Feed ``ids`` behind what is in the cache: ``[n, V]`` logits of what follows each of the last ``n``."""
        rows = [NewTokens(text.table, len(ids))]
        if self.kernel is not None and len(ids) == n:  # a prompt is left to the model, as everywhere
            text.cache.prepare(rows)
            return self.kernel(text.cache, rows, ids)
        step = text.cache.step(rows)
        packed = self.model.hidden(torch.tensor([ids], device=self.device), step.positions, step)[0]  # [N, d]
        return self.model.head(packed[-n:])


def follow(logits: Tensor, draft: Draft, state: SamplerState) -> list[int]:
    """The draft as far as it is kept, and the token behind that: 1 to n + 1 of them.

    Args:
        logits: of the model, ``[n + 1, V]``: before each token of the draft, and behind the last one.
        draft: ``n`` tokens.
        state: of the request; its dice are rolled, its history is left alone.

    Raises:
        RequestError: logits that are not finite.
    """
    for error in not_finite(logits).values():
        raise error
    said, tokens = ahead(state), list[int]()
    for row in range(len(logits)):
        if draft.probs is None or row == len(draft.tokens):
            token = int(sample(logits[row : row + 1], [said]))
        else:
            p = distribution(penalise(logits[row : row + 1].float(), [said]), [state.params])[0]
            token = judge(p, draft.probs[row], draft.tokens[row], state.draw(), state.draw())
        tokens.append(token)
        said.generated.append(token)
        if draft.tokens[row : row + 1] != [token]:
            break
    return tokens

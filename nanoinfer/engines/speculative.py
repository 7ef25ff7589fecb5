"""Speculative decoding: guess a few tokens cheaply, then let the model check all of them in one pass.

What comes out is distributed as if nothing had been drafted. A token x drawn from q, to be drawn from p, is accepted
with probability min(1, p(x) / q(x)); else another is drawn from max(p - q, 0). A draft without randomness needs no q:
draw from p, and accept x where it is what was drawn. Sources: Leviathan et al., "Fast Inference from Transformers via
Speculative Decoding"; Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling" (both 2023).
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.cache.blocks import BlockTable
from nanoinfer.cache.contiguous import ContiguousCache
from nanoinfer.cache.paged import NewTokens, PagedCache
from nanoinfer.engines.engine import Engine, check_finite, note_logprobs
from nanoinfer.engines.request import Event, Request
from nanoinfer.errors import DeviceError, RequestError, check
from nanoinfer.measure.clock import now
from nanoinfer.models.gpt2 import GPT2
from nanoinfer.models.llama import Llama
from nanoinfer.models.registry import LoadedModel, load_model
from nanoinfer.optimize.cpu_kernel import DecodeKernel
from nanoinfer.optimize.options import Optimizations, apply_optimizations
from nanoinfer.sampling.sample import SamplerState, distribution, penalise, sample, sample_inverse_cdf, uniform_draws

LOOKUP = "prompt-lookup"
BLOCK_SIZE = 8
MAX_NGRAM = 3  # tokens at the end of the text that are looked up


# --- drafts: guesses at the next tokens that cost less than the tokens themselves -------
#
# Whatever drafts does so for one text, from its first token to its last: ``propose(state, n)`` returns at most ``n``
# tokens to follow it. What is drawn at random comes from the state's own generator. From one call to the next the text
# grows by the accepted tokens of the draft, and one token more.


class Draft(NamedTuple):
    """Tokens that may come next, and what each was drawn from, ``[V]``; None where nothing was drawn at random."""

    tokens: list[int]
    probs: list[Tensor] | None = None


def fork_state(state: SamplerState) -> SamplerState:
    """The same settings and the same random generator, with a history that can run ahead of the text's."""
    fork = copy.copy(state)
    fork.generated = list(state.generated)
    return fork


def next_distribution(logits: Tensor, state: SamplerState) -> Tensor:
    """What a token that follows the state's text is drawn from, ``[1, V]`` of logits ``[1, V]``."""
    return distribution(penalise(logits.float(), [state]), [state.params])


class PromptLookup:
    """What followed the last time the text was where it is now: nothing to compute, nothing to load.

    The longest end of the text, up to three tokens, that occurs elsewhere in it decides; of several occurrences, the
    latest. A copy that reaches the end of the text goes on in what it has copied, as in LZ77: so a loop is drafted
    at full length. Source: Saxena, "Prompt Lookup Decoding" (2023).
    """

    def __init__(self) -> None:
        self.next_index: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after its latest occurrence
        self.indexed_to = 1  # n-grams that end before this index are in it

    def propose(self, state: SamplerState, n: int) -> Draft:
        """Nothing where not even the last token occurred before."""
        text = [*state.prompt_ids, *state.generated]
        length = len(text)
        for end in range(self.indexed_to, length):  # not those that end the text: what follows them is not known
            for size in range(1, min(MAX_NGRAM, end) + 1):
                self.next_index[tuple(text[end - size : end])] = end
        self.indexed_to = length
        for size in range(MAX_NGRAM, 0, -1):
            if (start := self.next_index.get(tuple(text[-size:]))) is not None:
                for at in range(start, start + n):
                    text.append(text[at])
                break
        return Draft(text[length:])


class ModelDraft:
    """A smaller model's own continuation: its best tokens where the request is greedy, else tokens that it draws.

    The text can grow to ``capacity`` tokens; where the model's own context ends, so do its drafts.
    """

    def __init__(self, model: GPT2 | Llama, capacity: int) -> None:
        weight = next(model.parameters())
        self.model, self.device = model, weight.device
        longest = min(capacity, model.config.context)
        self.cache = ContiguousCache(model.config, 1, longest, weight.device, weight.dtype)

    @torch.inference_mode()
    def propose(self, state: SamplerState, n: int) -> Draft:
        """Raises :class:`RequestError` where the model's logits are not finite."""
        text, fork = [*state.prompt_ids, *state.generated], fork_state(state)
        # All tokens before the newest one were accepted. What was fed after them is overwritten.
        self.cache.length = min(self.cache.length, len(text) - 1)
        is_greedy, tokens, probs = state.params.temperature == 0, list[int](), list[Tensor]()
        for _ in range(min(n, self.cache.capacity + 1 - len(text))):  # the last token drafted is never fed
            logits = self._next_logits([*text, *tokens])
            if is_greedy:
                token = int(sample(logits, [fork]))
            else:
                q = next_distribution(logits, fork)
                token = int(sample_inverse_cdf(q, uniform_draws([fork], q.device)))
                probs.append(q[0])
            tokens.append(token)
            fork.generated.append(token)
        return Draft(tokens, None if is_greedy else probs)

    def _next_logits(self, text: list[int]) -> Tensor:
        """Feed what is not in the cache yet; ``[1, V]`` logits of what follows."""
        start = self.cache.length
        positions = torch.arange(start, len(text), device=self.device)[None]
        logits = self.model(torch.tensor([text[start:]], device=self.device), positions, self.cache, last_only=True)[0]
        if not torch.isfinite(logits.amax()):
            raise RequestError("the draft model's logits are not finite; take another draft, or dtype float32")
        return logits  # type: ignore[no-any-return]


# --- which tokens of a draft are accepted -----------------------------------------------


def verify_draft(logits: Tensor, draft: Draft, state: SamplerState) -> list[int]:
    """The draft as far as it is accepted, and the token after that: 1 to n + 1 of them.

    The ``logits`` ``[n + 1, V]`` stand before each of the draft's tokens and after the last one. Random numbers of
    ``state`` are drawn (none from non-finite logits); its history is left alone.
    """
    check_finite(logits)
    fork, tokens = fork_state(state), list[int]()
    for row in range(len(logits)):
        if draft.probs is None or row == len(draft.tokens):
            token = int(sample(logits[row : row + 1], [fork]))
        else:
            p = next_distribution(logits[row : row + 1], fork)[0]
            token = accept_or_resample(p, draft.probs[row], draft.tokens[row], state.draw(), state.draw())
        tokens.append(token)
        fork.generated.append(token)
        if draft.tokens[row : row + 1] != [token]:
            break
    return tokens


def accept_or_resample(p: Tensor, q: Tensor, token: int, u: float, v: float) -> int:
    """The drafted ``token``, drawn from ``q`` ``[V]``, if accepted; else another, so that all follow ``p`` ``[V]``.

    ``u`` and ``v`` are independent uniform numbers in [0, 1): to accept it or not, and to draw another.
    """
    if u * float(q[token]) < float(p[token]):
        return token
    draw = torch.tensor([[v]], dtype=torch.float64, device=p.device)
    return int(sample_inverse_cdf(residual_distribution(p, q)[None], draw))


def residual_distribution(p: Tensor, q: Tensor) -> Tensor:
    """What is drawn from where a token was not accepted: ``max(p - q, 0)``, its sum brought to 1; all are ``[V]``."""
    residual = (p - q).clamp_(min=0)
    total = residual.sum()
    # p and q can be equal but for their rounding, and q nowhere the smaller: then either will do.
    return residual / total if total > 0 else p


# --- the engine ---------------------------------------------------------------------------


@dataclass
class Speculation:
    """What drafts were good for."""

    passes: int = 0  # of the model, the one over the prompt among them
    drafted: int = 0  # tokens that were guessed and went through a pass
    accepted: int = 0  # those that saved a pass: tokens beyond the one that a pass brings in any case

    @property
    def acceptance(self) -> float:
        return self.accepted / max(1, self.drafted)


class SpeculativeRequest:
    """One request under way: its keys and values in a cache of its own, and what drafts for it."""

    def __init__(self, engine: SpeculativeEngine, request: Request) -> None:
        self.request = request
        n_blocks = -(-request.kv_limit // BLOCK_SIZE)
        self.cache = PagedCache(engine.config, n_blocks, BLOCK_SIZE, engine.device, engine.dtype)
        self.table = BlockTable(list(range(n_blocks)))
        draft = engine.draft
        self.drafter = PromptLookup() if draft is None else ModelDraft(draft.model, request.kv_limit)


class SpeculativeEngine(Engine):
    """Drafts, checked a pass at a time, of one request after another.

    Greedy requests get the tokens that any engine gives them, and so do seeded ones while drafts are looked up. Where
    a draft model draws tokens itself, they follow the same distribution. It pays where a pass's time is the reading of
    weights: with many rows the products are busy without drafts, and what is not accepted is work lost. The tokens of a
    pass come at one moment: inter-token latency is zeros and whole passes. ``speculation`` counts the last run, so far.
    """

    name = "speculative"
    crops = False

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        draft: str | LoadedModel = LOOKUP,  # or a model of the same vocabulary and device: by name, or loaded already
        n_draft: int = 4,
        speed: Optimizations | None = None,
    ) -> None:
        speed = speed or Optimizations()
        check("n_draft", n_draft, at_least=1, whole=True)
        if speed.graphs:
            raise RequestError("the speculative engine's passes differ in size and are not recorded: leave graphs off")
        super().__init__(loaded)
        self.n_draft = int(n_draft)
        self.draft = None if draft == LOOKUP else self._load_draft(draft)
        self.model = apply_optimizations(loaded.model, speed)
        self.kernel = DecodeKernel(loaded.model, "int8" if speed.weights else None) if speed.kernel else None
        self.speculation = Speculation()

    def _load_draft(self, draft: str | LoadedModel) -> LoadedModel:
        if not isinstance(draft, LoadedModel):
            draft = load_model(draft, device=self.device, dtype=self.dtype)
        if (size := draft.model.config.vocab_size) != (wanted := self.config.vocab_size):
            raise RequestError(
                f"a draft model needs the vocabulary of its target: '{draft.name}' has {size} tokens and "
                f"'{self.loaded.name}' {wanted}; take another, or draft='{LOOKUP}'"
            )
        if (device := next(draft.model.parameters()).device) != self.device:
            raise DeviceError(f"draft '{draft.name}' is on {device} and not on {self.device}: give it by name")
        return draft

    def run(self, requests: list[Request]) -> Generator[Event, None, None]:
        self.speculation = Speculation()
        for request in requests:
            request.trace.t_start = now()
            active = SpeculativeRequest(self, request)
            while request.finish_reason is None:
                yield from self._pass(active)

    @torch.inference_mode()
    def _pass(self, active: SpeculativeRequest) -> list[Event]:
        request = active.request
        room = request.limit - len(request.generated) - 1  # besides the token that comes in any case
        draft = active.drafter.propose(request.sampler, min(self.n_draft, room))
        logits = self.score(active, [*request.ids[active.table.length :], *draft.tokens], len(draft.tokens) + 1)
        tokens = verify_draft(logits, draft, request.sampler)
        t, events = now(), list[Event]()
        while request.finish_reason is None and len(events) < len(tokens):
            events.append(request.accept(tokens[len(events)], t))
        n = len(events)
        note_logprobs(logits[:n], torch.tensor(tokens[:n], device=logits.device), [request] * n)
        # All but the newest token are in the cache. What was not accepted lies after them, and is overwritten.
        active.table.length = request.length - 1
        self.speculation.passes += 1
        self.speculation.drafted += len(draft.tokens)
        self.speculation.accepted += n - 1
        return events

    def score(self, active: SpeculativeRequest, ids: Sequence[int], n: int) -> Tensor:
        """Feed ``ids`` after what is in the cache: ``[n, V]`` logits of what follows each of the last ``n``."""
        rows = [NewTokens(active.table, len(ids))]
        if self.kernel is not None and len(ids) == n:  # a prompt is left to the model, as everywhere
            active.cache.prepare(rows)
            return self.kernel(active.cache, rows, ids)
        step = active.cache.step(rows)
        packed = self.model.hidden(torch.tensor([ids], device=self.device), step.positions, step)[0]  # [N, d]
        return self.model.head(packed[-n:])

"""Where drafts come from: guesses at the next tokens that cost less than the tokens themselves.

One of two: the text itself, which often repeats what it said before, or a smaller model of the same vocabulary.
"""

from __future__ import annotations

import copy
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nanoinfer.cache.contiguous import ContiguousCache
from nanoinfer.errors import RequestError
from nanoinfer.models.gpt2 import GPT2
from nanoinfer.models.llama import Llama
from nanoinfer.sampling.sample import SamplerState, distribution, penalise, sample, sample_inverse_cdf, uniform_draws

LONGEST = 3  # tokens of the text's end that are looked up


class Draft(NamedTuple):
    """Tokens that may come next, and what each was drawn from, ``[V]``; None where no dice were rolled."""

    tokens: list[int]
    probs: list[Tensor] | None = None


class Drafter(Protocol):
    """Guesses for one text, from its first token to its last."""

    def propose(self, state: SamplerState, n: int) -> Draft:
        """At most ``n`` tokens to follow the text; dice that are rolled are the text's own.

        From one call to the next the text grows by those of the draft that were kept, and one token more.
        """


def ahead(state: SamplerState) -> SamplerState:
    """The same settings and the same dice, with a history that can run ahead of the text's."""
    other = copy.copy(state)
    other.generated = list(state.generated)
    return other


class PromptLookup:
    """What followed the last time the text was where it is now: nothing to compute, nothing to load.

    The longest end of the text, up to three tokens, that stands elsewhere in it decides; of several places, the
    latest. A copy that reaches the end of the text goes on in what it has copied, as in LZ77: so a loop is drafted
    at full length. Source: Saxena, "Prompt Lookup Decoding" (2023).
    """

    def __init__(self) -> None:
        self.goes_on: dict[tuple[int, ...], int] = {}  # where the text goes on behind the latest place of an n-gram
        self.next_end = 1  # n-grams that end before this one are filed

    def propose(self, state: SamplerState, n: int) -> Draft:
        """See :class:`Drafter`; nothing where not even the last token was there before."""
        text = [*state.prompt_ids, *state.generated]
        length = len(text)
        for end in range(self.next_end, length):  # of those that end the text nobody knows what follows
            for size in range(1, min(LONGEST, end) + 1):
                self.goes_on[tuple(text[end - size : end])] = end
        self.next_end = length
        for size in range(LONGEST, 0, -1):
            if (at := self.goes_on.get(tuple(text[-size:]))) is not None:
                for i in range(n):
                    text.append(text[at + i])
                break
        return Draft(text[length:])


class ModelDraft:
    """A smaller model says what it would say: its best tokens where the request is greedy, else draws of its own.

    Args:
        model: of the same vocabulary, on the same device.
        capacity: tokens that the text can grow to. Where the model's own context ends, so do its drafts.
    """

    def __init__(self, model: GPT2 | Llama, capacity: int) -> None:
        weight = next(model.parameters())
        self.model, self.device = model, weight.device
        longest = min(capacity, model.config.context)
        self.cache = ContiguousCache(model.config, 1, longest, weight.device, weight.dtype)

    @torch.inference_mode()
    def propose(self, state: SamplerState, n: int) -> Draft:
        """See :class:`Drafter`. Raises :class:`RequestError` where the model's logits are not finite."""
        text, guess = [*state.prompt_ids, *state.generated], ahead(state)
        # Before the newest token there is only what was kept. What was fed behind that is forgotten.
        self.cache.length = min(self.cache.length, len(text) - 1)
        is_greedy, tokens, probs = state.params.temperature == 0, list[int](), list[Tensor]()
        for _ in range(min(n, self.cache.capacity + 1 - len(text))):  # the last token drafted is never fed
            logits = self._next([*text, *tokens])
            if is_greedy:
                token = int(sample(logits, [guess]))
            else:
                q = distribution(penalise(logits.float(), [guess]), [state.params])
                token = int(sample_inverse_cdf(q, uniform_draws([guess], q.device)))
                probs.append(q[0])
            tokens.append(token)
            guess.generated.append(token)
        return Draft(tokens, None if is_greedy else probs)

    def _next(self, text: list[int]) -> Tensor:
        """Feed what is not in the cache yet; ``[1, V]`` logits of what follows."""
        start = self.cache.length
        positions = torch.arange(start, len(text), device=self.device)[None]
        logits = self.model(torch.tensor([text[start:]], device=self.device), positions, self.cache, last_only=True)[0]
        if not torch.isfinite(logits.amax()):
            raise RequestError("the draft model's logits are not finite; take another draft, or dtype float32")
        return logits  # type: ignore[no-any-return]

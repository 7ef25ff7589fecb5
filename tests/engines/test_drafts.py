"""Drafts: looked up in the text as by hand, or said by a model as it would say them alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoinfer.engines.speculative import MAX_NGRAM, Draft, ModelDraft, PromptLookup
from nanoinfer.engines.static import CachedEngine
from nanoinfer.errors import RequestError
from nanoinfer.models.registry import LoadedModel
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.sampling.sample import SamplerState, distribution, penalise, sample_inverse_cdf
from tests.engines.helpers import GPT2, LLAMA, nan_after, tiny

GREEDY = SamplingParams(max_tokens=10)
PENALISED = SamplingParams(max_tokens=10, repetition_penalty=1.5, frequency_penalty=0.3)
SAMPLED = SamplingParams(temperature=0.8, top_k=20, repetition_penalty=1.3, frequency_penalty=0.5, seed=3)
TINY: dict[str, LoadedModel] = {config.family: tiny(config) for config in (GPT2, LLAMA)}


class TestPromptLookup:
    """Of the longest end that was there before, the latest place."""

    @pytest.mark.parametrize(
        ("text", "n", "expected"),
        [
            ([1, 2, 3, 4, 9, 1, 2, 3], 2, [4, 9]),
            ([1, 2, 3, 4, 8, 2, 3, 5, 1, 2, 3], 1, [4]),  # three tokens back, though two would be nearer
            ([1, 2, 4, 1, 2, 5, 1, 2], 2, [5, 1]),  # the latest
            ([7, 5, 6, 7], 3, [5, 6, 7]),  # one token decides, where more do not
            ([7, 5, 6, 7], 5, [5, 6, 7, 5, 6]),  # on into the copy
            ([3, 3], 4, [3, 3, 3, 3]),
            ([1, 2, 3], 4, []),
            ([1], 4, []),
            ([3, 3], 0, []),
        ],
    )
    def test_by_hand(self, text: list[int], n: int, expected: list[int]) -> None:
        for cut in range(1, len(text) + 1):  # wherever the prompt ends
            assert PromptLookup().propose(SamplerState(GREEDY, text[:cut], text[cut:]), n) == Draft(expected)

    @given(
        text=st.lists(st.integers(0, 3), min_size=1, max_size=40),
        steps=st.lists(st.integers(1, 5), max_size=12),
        n=st.integers(0, 6),
    )
    def test_a_growing_text_equals_a_search_of_the_whole(self, text: list[int], steps: list[int], n: int) -> None:
        lookup, at = PromptLookup(), 1
        for step in [0, *steps]:
            at = min(at + step, len(text))
            assert lookup.propose(SamplerState(GREEDY, text[:1], text[1:at]), n) == Draft(searched(text[:at], n))


def searched(text: list[int], n: int) -> list[int]:
    for size in range(MAX_NGRAM, 0, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[-size:]:
                period = len(text) - size - start
                return [text[start + size + i % period] for i in range(n)]
    return []


@pytest.mark.parametrize("family", TINY)
class TestModelDraft:
    """Over a text that grows by what was kept and one token more."""

    @pytest.mark.parametrize("params", [GREEDY, PENALISED], ids=["plain", "penalised"])
    def test_greedy_drafts_are_what_the_model_says(self, family: str, params: SamplingParams) -> None:
        said = CachedEngine(TINY[family]).generate([[5, 6]], params)[0].token_ids
        drafter = ModelDraft(TINY[family].model, 12)
        for length in (0, 2, 3, 8):
            state = SamplerState(params, [5, 6], said[:length])
            assert drafter.propose(state, 2) == Draft(said[length : length + 2])
            assert state.generated == said[:length]

    @pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
    def test_what_was_not_kept_is_forgotten(self, family: str, params: SamplingParams) -> None:
        used, generated = ModelDraft(TINY[family].model, 12), list[int]()
        for kept in (0, 1, 3, 0, 0):
            draft, new = (
                drafter.propose(SamplerState(params, [1, 2, 3], list(generated)), 3)
                for drafter in (used, ModelDraft(TINY[family].model, 12))
            )
            assert draft.tokens == new.tokens
            for one, other in zip(draft.probs or (), new.probs or (), strict=True):
                assert torch.allclose(one, other, atol=1e-5)
            generated += [*draft.tokens[:kept], 100 + kept]  # instead of the next one came another

    def test_probs_are_what_the_tokens_were_drawn_from(self, family: str) -> None:
        state, same, loaded = SamplerState(SAMPLED, [1, 2], [9]), SamplerState(SAMPLED, []), TINY[family]
        draws = [same.draw() for _ in range(5)]
        tokens, probs = ModelDraft(loaded.model, 12).propose(state, 4)
        assert probs is not None
        for i, (token, q) in enumerate(zip(tokens, probs, strict=True)):
            then = SamplerState(SAMPLED, [1, 2], [9, *tokens[:i]])
            logits = loaded.model(torch.tensor([[1, 2, *then.generated]]), torch.arange(3 + i)[None])[:, -1]
            p = distribution(penalise(logits, [then]), [SAMPLED])
            assert torch.allclose(q, p[0], atol=1e-5)
            assert token == int(sample_inverse_cdf(p, torch.tensor([[draws[i]]], dtype=torch.float64)))
        assert state.draw() == draws[4]  # the request's own generator, of which four numbers were used

    def test_drafts_end_where_the_text_or_the_context_does(self, family: str) -> None:
        model, context = TINY[family].model, TINY[family].model.config.context
        for room in (0, 1, 3):
            prompt = [1] * (context - room)
            assert len(ModelDraft(model, 99).propose(SamplerState(GREEDY, prompt), 9).tokens) == room + 1
            assert len(ModelDraft(model, len(prompt)).propose(SamplerState(GREEDY, prompt), 9).tokens) == 1
        assert ModelDraft(model, 99).propose(SamplerState(GREEDY, [1] * (context + 2)), 9).tokens == []


def test_a_draft_model_that_fails_says_so() -> None:
    for params in (GREEDY, SAMPLED):
        drafter = ModelDraft(nan_after(5).model, 24)
        assert drafter.propose(SamplerState(params, [1]), 2).tokens
        with pytest.raises(RequestError, match="the draft model's logits are not finite"):
            drafter.propose(SamplerState(params, [1], [5]), 2)

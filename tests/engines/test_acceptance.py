"""The rule of acceptance: what comes out is distributed as p, whatever the draft was drawn from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from nanoinfer.cache.contiguous import ContiguousCache
from nanoinfer.cache.paged import PagedStep
from nanoinfer.configs.config import ModelConfig
from nanoinfer.engines import speculative
from nanoinfer.engines.request import Completion
from nanoinfer.engines.speculative import SpeculativeEngine, accept_or_resample, residual_distribution
from nanoinfer.models.registry import LoadedModel
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.sampling.sample import SamplerState, distribution, penalise, sample_inverse_cdf
from tests.examples import examples

Rule = Callable[[Tensor, Tensor, int, float, float], int]
P = [1, 6, 2, 4, 3]  # sixteenths
GENERAL, CERTAIN, SAME = [4, 2, 2, 0, 8], [0, 0, 16, 0, 0], P


def share(weights: list[int]) -> Tensor:
    return torch.tensor(weights) / sum(weights)


def grid(n: int) -> list[float]:
    """The middles of n equal parts of [0, 1): as many fall below k / n as should."""
    return [(i + 0.5) / n for i in range(n)]


@pytest.mark.parametrize("q", [GENERAL, CERTAIN, SAME, [1, 1, 1, 1, 12], [8, 8, 0, 0, 0]])
def test_every_token_comes_out_as_often_as_p_says_exactly(q: list[int]) -> None:
    # All that can happen, each with its weight: drafts by q, u in parts that hold every p / q, v every share left over.
    fine = math.lcm(*[n for n in q if n])
    rest = sum(max(a - b, 0) for a, b in zip(P, q, strict=True)) or 1
    found = dict.fromkeys(range(5), Fraction())
    for token, weight in enumerate(q):
        for u in grid(fine) if weight else ():
            for v in grid(rest):
                found[accept_or_resample(share(P), share(q), token, u, v)] += Fraction(weight, 16 * fine * rest)
    assert list(found.values()) == [Fraction(n, 16) for n in P]


@pytest.mark.parametrize(("token", "ratio"), [(0, 1 / 4), (1, 1.0), (2, 1.0), (4, 3 / 8)])
def test_a_token_is_accepted_with_probability_p_over_q(token: int, ratio: float) -> None:
    for u in (0.0, ratio - 1e-6, ratio + 1e-6):
        if u < 1.0:
            assert (accept_or_resample(share(P), share(GENERAL), token, u, 0.5) == token) == (u < ratio)


def test_the_residual_is_what_p_has_more_than_q() -> None:
    assert residual_distribution(share(P), share(GENERAL)).tolist() == pytest.approx([0, 1 / 2, 0, 1 / 2, 0])
    assert residual_distribution(share(P), share(CERTAIN)).tolist() == pytest.approx(
        [1 / 14, 6 / 14, 0, 4 / 14, 3 / 14]
    )


def test_what_p_has_not_is_never_said() -> None:
    p = torch.tensor([0.0, 0.25, 0.75, 0.0])
    for token in range(4):
        for u in (0.0, 0.5, 1 - 1e-12):
            assert {accept_or_resample(p, torch.full((4,), 0.25), token, u, v) for v in (0.0, 0.5, 1 - 1e-12)} <= {1, 2}


def test_equal_but_for_rounding_leaves_something_to_draw_from() -> None:
    p = share(P)
    q = p * (1 + 1e-6)
    assert torch.equal(residual_distribution(p, q), p)
    assert torch.equal(residual_distribution(p, p), p)
    assert accept_or_resample(p, q, 3, 1 - 1e-12, 0.5) in range(5)


@examples(100)
@given(data=st.data(), size=st.integers(2, 8))
def test_kept_and_left_over_add_up_to_p(data: st.DataObject, size: int) -> None:
    weights = st.lists(st.floats(0, 1, width=32), min_size=size, max_size=size).filter(lambda w: sum(w) > 0.01)
    p, q = (torch.tensor(data.draw(weights), dtype=torch.float64) for _ in range(2))
    p, q = p / p.sum(), q / q.sum()
    kept = torch.minimum(p, q)
    assert (kept + (1 - kept.sum()) * residual_distribution(p, q)).tolist() == pytest.approx(p.tolist(), abs=1e-9)


# --- by drawing -----------------------------------------------------------------------


def always_keep(p: Tensor, q: Tensor, token: int, u: float, v: float) -> int:
    return token


def redraw_from_p(p: Tensor, q: Tensor, token: int, u: float, v: float) -> int:
    """The classic mistake: what was not kept is drawn again from p, and not from what is lacking."""
    return (
        token if u * q[token] < p[token] else int(sample_inverse_cdf(p[None], torch.tensor([[v]], dtype=torch.float64)))
    )


def turned_round(p: Tensor, q: Tensor, token: int, u: float, v: float) -> int:
    kept = u * p[token] < q[token]
    return (
        token
        if kept
        else int(sample_inverse_cdf(residual_distribution(p, q)[None], torch.tensor([[v]], dtype=torch.float64)))
    )


def with_one_number(p: Tensor, q: Tensor, token: int, u: float, v: float) -> int:
    """What is drawn instead has to be independent of why it is drawn."""
    return accept_or_resample(p, q, token, u, u)


def chi_square(rule: Rule, q: list[int], draws: int = 4000) -> float:
    """Of the tokens that the rule lets out against p; 4 degrees of freedom."""
    generator = torch.Generator().manual_seed(7)
    numbers = torch.rand(draws, 3, 1, 1, generator=generator, dtype=torch.float64)
    p, drafted = share(P), share(q)
    tokens = [rule(p, drafted, int(sample_inverse_cdf(drafted[None], d)), float(u), float(v)) for d, u, v in numbers]
    wanted = p * draws
    return float(((torch.bincount(torch.tensor(tokens), minlength=5) - wanted) ** 2 / wanted).sum())


ONE_IN_A_THOUSAND = 18.47  # chi-square of 4 degrees of freedom exceeds it so rarely


@pytest.mark.parametrize("q", [GENERAL, CERTAIN, SAME], ids=["general", "certain", "same"])
def test_draws_follow_p(q: list[int]) -> None:
    assert chi_square(accept_or_resample, q) < ONE_IN_A_THOUSAND


@pytest.mark.parametrize("q", [GENERAL, CERTAIN], ids=["general", "certain"])
@pytest.mark.parametrize("rule", [always_keep, redraw_from_p, turned_round])
def test_a_wrong_rule_does_not(rule: Rule, q: list[int]) -> None:
    assert chi_square(rule, q) > 10 * ONE_IN_A_THOUSAND


# --- by the engine, penalties and filters among it -------------------------------------

SAMPLED = SamplingParams(
    max_tokens=3, temperature=1.3, min_p=0.05, repetition_penalty=1.5, frequency_penalty=0.4, seed=0, n=600
)


class Markov(nn.Module):
    """A model of four tokens that only looks at the last one: quick enough to be asked a thousand times."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.config = ModelConfig("llama", 1, 2, 1, 1, 2, 2, 4, 16)
        logits = 1.5 * torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        self.after = nn.Parameter(logits, requires_grad=False)

    def forward(self, ids: Tensor, positions: Tensor, cache: ContiguousCache, last_only: bool) -> Tensor:
        cache.advance(ids.shape[1])
        return self.after[ids[:, -1:]]

    def hidden(self, ids: Tensor, positions: Tensor, cache: PagedStep) -> Tensor:
        return self.after[ids]

    def head(self, x: Tensor) -> Tensor:
        return x


TARGET, DRAFT = (LoadedModel(f"markov {seed}", Markov(seed), None, frozenset(), "for tests") for seed in (4, 5))  # type: ignore[arg-type]


def pairs_against_chance(done: list[Completion], pair: slice) -> float:
    """Of two neighbours among the three tokens against the chain rule: 15 degrees of freedom at most."""
    wanted = Counter[tuple[int, ...]]()
    for tokens in product(range(4), repeat=3):
        chance = 1.0
        for i, token in enumerate(tokens):
            state = SamplerState(SAMPLED, [1, 2], list(tokens[:i]))
            logits = TARGET.model.after[[2, *tokens][i]][None]  # type: ignore[index]
            chance *= float(distribution(penalise(logits, [state]), [SAMPLED])[0, token])
        wanted[tokens[pair]] += chance * len(done)  # type: ignore[assignment]
    seen = Counter(tuple(c.token_ids[pair]) for c in done)
    if any(wanted[tokens] == 0 for tokens in seen):  # the filters drop it
        return math.inf
    return sum((seen[tokens] - n) ** 2 / n for tokens, n in wanted.items() if n > 0)


ONE_IN_A_THOUSAND_PAIRS = 37.7  # chi-square of 15 degrees of freedom exceeds it so rarely


def test_what_the_engine_samples_follows_its_model() -> None:
    engine = SpeculativeEngine(TARGET, draft=DRAFT, n_draft=2)
    done = engine.generate([[1, 2]], SAMPLED)
    assert 0.2 < engine.speculation.acceptance < 0.8  # both ways are taken often
    for pair in (slice(0, 2), slice(1, 3)):
        assert pairs_against_chance(done, pair) < ONE_IN_A_THOUSAND_PAIRS


@pytest.mark.parametrize("rule", [always_keep, redraw_from_p, with_one_number])
def test_a_wrong_rule_in_the_engine_does_not(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, "accept_or_resample", rule)
    done = SpeculativeEngine(TARGET, draft=DRAFT, n_draft=2).generate([[1, 2]], SAMPLED)
    assert pairs_against_chance(done, slice(0, 2)) > ONE_IN_A_THOUSAND_PAIRS


def test_nor_does_a_draft_judged_without_its_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, "penalise", lambda logits, states: logits)
    done = SpeculativeEngine(TARGET, draft=DRAFT, n_draft=2).generate([[1, 2]], SAMPLED)
    assert pairs_against_chance(done, slice(0, 2)) > ONE_IN_A_THOUSAND_PAIRS

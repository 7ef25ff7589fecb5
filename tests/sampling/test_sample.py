"""The order of the filters, their exact values, and independence of the rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoinfer.errors import RequestError
from nanoinfer.sampling.sample import (
    SamplerState,
    SamplingParams,
    distribution,
    penalise,
    sample,
    top_logprobs,
)
from tests.examples import examples

PROBS = [0.1875, 0.5, 0.0625, 0.25]  # unsorted on purpose


def kept(params: SamplingParams, probs: list[float] = PROBS) -> dict[int, float]:
    p = distribution(torch.tensor([probs]).log(), [params])[0]
    return {i: float(x) for i, x in enumerate(p) if x > 0}


def draws(params: SamplingParams, count: int, probs: list[float] = PROBS) -> torch.Tensor:
    """``count`` draws of one request: the same state in every row, whose generator is asked once a row."""
    return sample(torch.tensor([probs] * count).log(), [SamplerState(params, [0])] * count)


@pytest.mark.parametrize(
    ("top_p", "ids"),
    [
        (1e-9, {1}),
        (0.0, {1}),
        (0.4999, {1}),
        (0.5001, {1, 3}),
        (0.6, {1, 3}),
        (0.80, {0, 1, 3}),
        (0.93, {0, 1, 3}),
        (0.95, {0, 1, 2, 3}),
        (1.0, {0, 1, 2, 3}),
    ],
)
def test_top_p_keeps_the_token_that_crosses(top_p: float, ids: set[int]) -> None:
    assert set(kept(SamplingParams(temperature=1.0, top_p=top_p))) == ids


def test_top_p_renormalises() -> None:
    left = kept(SamplingParams(temperature=1.0, top_p=0.6))
    assert left[1] == pytest.approx(2 / 3, abs=1e-6)
    assert left[3] == pytest.approx(1 / 3, abs=1e-6)


def test_top_p_draws_follow_the_renormalised_distribution() -> None:
    ids = draws(SamplingParams(temperature=1.0, top_p=0.6, seed=1), 6000)
    counts = torch.bincount(ids, minlength=4).tolist()
    assert counts[0] == counts[2] == 0
    assert abs(counts[1] - 4000) <= 110  # three sigma


def test_order_top_k_before_top_p_before_min_p() -> None:
    # top_k=2 leaves {1: 2/3, 3: 1/3}; p=.6 is then reached by id 1 alone. In the other order both would stay.
    assert set(kept(SamplingParams(temperature=1.0, top_k=2, top_p=0.6))) == {1}
    # min_p is relative to the largest that is left: .25/.5 = .5
    assert set(kept(SamplingParams(temperature=1.0, min_p=0.5))) == {1, 3}
    assert set(kept(SamplingParams(temperature=1.0, min_p=0.51))) == {1}
    # temperature comes first: at 0.5 probabilities are squared, and .25/.5 becomes .25
    assert set(kept(SamplingParams(temperature=0.5, min_p=0.5))) == {1}


@pytest.mark.parametrize("top_k", [4, 5, 1000])
def test_top_k_of_the_vocabulary_or_more_is_off(top_k: int) -> None:
    assert kept(SamplingParams(temperature=1.0, top_k=top_k)) == pytest.approx(kept(SamplingParams(temperature=1.0)))


def test_top_k_ties_keep_k_and_the_lowest_ids() -> None:
    assert set(kept(SamplingParams(temperature=1.0, top_k=2), [0.25] * 4)) == {0, 1}


def test_tiny_temperature_is_greedy_and_finite() -> None:
    assert kept(SamplingParams(temperature=1e-30)) == {1: 1.0}


def test_a_temperature_that_fp32_cannot_hold_is_greedy() -> None:
    for temperature in (1e-40, 1e-50, 5e-324):
        assert draws(SamplingParams(temperature=temperature, seed=1), 5).tolist() == [1] * 5


def test_settings_are_plain_numbers_and_tuples_whatever_came() -> None:
    params = SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5), stop=None, stop_ids=7)  # type: ignore[arg-type]
    assert (type(params.max_tokens), type(params.temperature)) == (int, float)
    assert (params.max_tokens, params.temperature, params.stop, params.stop_ids) == (3, 0.5, (), (7,))


def test_greedy_takes_the_lowest_id_on_a_tie() -> None:
    assert sample(torch.tensor([[1.0, 3.0, 3.0]]), [SamplerState(SamplingParams(), [0])]).tolist() == [1]


def test_repetition_penalty_once_for_each_id() -> None:
    state = SamplerState(SamplingParams(repetition_penalty=1.25), [0, 1, 1, 4])
    assert penalise(torch.tensor([[2.0, -1.0, 0.5, -3.0, 0.0]]), [state]).tolist() == [
        pytest.approx([1.6, -1.25, 0.5, -3.0, 0.0])
    ]


@pytest.mark.parametrize(("logits", "choice"), [([2.0, 1.9, -5.0], 1), ([-1.0, -1.1], 1)])
def test_repetition_penalty_flips_greedy(logits: list[float], choice: int) -> None:
    state = SamplerState(SamplingParams(repetition_penalty=1.25), [0])
    assert sample(torch.tensor([logits]), [state]).tolist() == [choice]


def test_repetition_penalty_of_a_row_is_its_own() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, -3.0, 0.0]] * 2)
    params = SamplingParams(repetition_penalty=1.25)
    both = penalise(logits, [SamplerState(params, [0, 1, 1, 4]), SamplerState(params, [2])])
    assert both[1].tolist() == pytest.approx([2.0, -1.0, 0.4, -3.0, 0.0])
    assert torch.equal(both[0], penalise(logits[:1], [SamplerState(params, [0, 1, 1, 4])])[0])


def test_penalties_off_change_no_bit() -> None:
    logits = torch.randn(2, 50)
    states = [SamplerState(SamplingParams(), [1, 2], [3]) for _ in range(2)]
    assert torch.equal(penalise(logits, states), logits)


def test_frequency_and_presence_count_generated_tokens_only() -> None:
    params = SamplingParams(frequency_penalty=0.25, presence_penalty=0.1)
    state = SamplerState(params, prompt_ids=[1, 1, 1], generated=[0, 0, 0])
    assert penalise(torch.tensor([[2.0, 2.0]]), [state]).tolist() == [pytest.approx([1.15, 2.0])]


def test_repetition_comes_before_presence() -> None:
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5)
    state = SamplerState(params, [0], generated=[1])
    assert penalise(torch.tensor([[2.0, 2.0]]), [state]).tolist() == [[1.0, 0.5]]


def test_penalties_of_a_mixed_batch_are_those_of_each_row_alone() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2))
    states = [
        SamplerState(SamplingParams(repetition_penalty=1.3, presence_penalty=0.5), [1, 1, 2], [7, 7, 3]),
        SamplerState(SamplingParams(), [1, 2], [7]),
        SamplerState(SamplingParams(frequency_penalty=0.2), [4], [9, 9, 9, 8]),
        SamplerState(SamplingParams(frequency_penalty=0.2, repetition_penalty=0.8), [49], []),
    ]
    before = logits.clone()
    together = penalise(logits, states)
    assert torch.equal(together, torch.cat([penalise(logits[i : i + 1], [s]) for i, s in enumerate(states)]))
    assert torch.equal(together[1], before[1])
    assert together[2, 9].item() == pytest.approx(before[2, 9].item() - 3 * 0.2)
    assert (together[0] != before[0]).nonzero()[:, 0].tolist() == [1, 2, 3, 7]
    assert torch.equal(logits, before)  # the raw logits are still wanted, for log-probabilities


def test_seeded_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    rows = [
        SamplingParams(temperature=0.9, top_p=0.8, seed=5),
        SamplingParams(),
        SamplingParams(temperature=1.3, top_k=7, repetition_penalty=1.3, seed=5),
    ]
    together = [SamplerState(p, [0, 3]) for p in rows]
    alone = [SamplerState(p, [0, 3]) for p in rows]
    for _ in range(20):
        solo = [int(sample(logits[i : i + 1], [s])) for i, s in enumerate(alone)]
        assert sample(logits, together).tolist() == solo
    assert solo[1] == int(logits[1].argmax())


def test_unseeded_requests_differ() -> None:
    states = [SamplerState(SamplingParams(temperature=1.0), [0]) for _ in range(40)]
    assert len(set(sample(torch.zeros(40, 1000), states).tolist())) > 20


@examples(60)
@given(
    seed=st.integers(0, 2**31),
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 40),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
)
def test_distribution_sums_to_one_and_keeps_the_best(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(1, 32, generator=torch.Generator().manual_seed(seed))
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probs = distribution(logits, [params])
    assert float(probs.sum()) == pytest.approx(1.0, abs=1e-5)
    assert float(probs[0, logits.argmax()]) > 0
    if top_k:
        assert int((probs > 0).sum()) <= top_k


def test_draws_match_the_distribution() -> None:
    # Without filters, three sigma about each expected count.
    counts = torch.bincount(draws(SamplingParams(temperature=1.0, seed=3), 6000), minlength=4).tolist()
    for count, p in zip(counts, PROBS, strict=True):
        assert abs(count - 6000 * p) <= 3 * math.sqrt(6000 * p * (1 - p))


def test_logprobs_are_the_models_own() -> None:
    chosen, best, ids = top_logprobs(torch.tensor([PROBS]).log() + 5.0, torch.tensor([0]), 2)
    assert chosen.tolist() == pytest.approx([math.log(0.1875)])
    assert ids.tolist() == [[1, 3]]
    assert best[0].tolist() == pytest.approx([math.log(0.5), math.log(0.25)])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", math.inf),
        ("logprobs", -1),
        ("stop", ("",)),
        ("stop", 5),
        ("stop_ids", ("a",)),
        ("temperature", "hot"),
        ("temperature", None),
        ("top_p", True),
        ("max_tokens", None),
        ("repetition_penalty", 1e-300),
        ("frequency_penalty", 1e300),
        ("on_full", "wrap"),
    ],
)
def test_bad_settings_are_named(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]

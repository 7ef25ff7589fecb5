"""Three ways to keep the same ids: sorting, the few best, counting; and draws that follow them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from nanoinfer.sampling import filters
from nanoinfer.sampling.filters import (
    FEW,
    Limits,
    best_few,
    keep_by_counting,
    keep_by_sorting,
    keep_ids,
    keep_ordered,
    mass,
)
from nanoinfer.sampling.sample import (
    SamplerState,
    SamplingParams,
    distribution,
    sample,
    sample_by_sorting,
    sample_inverse_cdf,
    softmax_with_temperature,
)
from tests.examples import examples


def limits(vocab: int, *params: SamplingParams) -> Limits:
    return Limits.of(params, vocab, torch.device("cpu"))


def by_hand(probs: Sequence[float], params: SamplingParams) -> set[int]:
    """The definition, in plain Python: the most likely first, the lowest id first among equals."""
    order = sorted((i for i, p in enumerate(probs) if p > 0), key=lambda i: (-probs[i], i))
    whole = {i: round(p * 2**48) for i, p in enumerate(probs)}
    total = 2**48
    if 0 < params.top_k < len(probs):
        order = order[: params.top_k]
        total = sum(whole[i] for i in order)
    if params.top_p < 1.0:
        before = 0
        kept: list[int] = []
        for i in order:
            if before >= params.top_p * total and kept:
                break
            kept.append(i)
            before += whole[i]
        order = kept
    return {i for i in order if probs[i] >= params.min_p * probs[order[0]]}


VALUES = st.one_of(
    st.floats(-30, 10),
    st.sampled_from([0.0, 1.0, 1.0, 2.0, -math.inf]),  # ties, and ids that a mask forbids
    st.floats(-1e-3, 1e-3),  # flat
)
SETTINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1.0, 0.7, 1e-3, 1e-40, 5.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 3, 7, 20, 1000]),
    top_p=st.one_of(st.sampled_from([0.0, 1e-9, 0.25, 0.5, 0.75, 0.9, 1 - 1e-12, 1.0]), st.floats(0, 1)),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
)


@examples(300)
@given(st.data())
def test_all_ways_keep_the_same_ids(data: st.DataObject) -> None:
    vocab = data.draw(st.integers(1, 40))
    few = data.draw(st.integers(1, 45))
    rows = data.draw(st.lists(st.tuples(st.lists(VALUES, min_size=vocab, max_size=vocab), SETTINGS), max_size=5))
    rows.append(([3.0] * vocab, SamplingParams(temperature=1.0, top_p=0.5)))
    logits = torch.tensor([[0.0, *values[1:]] for values, _ in rows])  # id 0 is finite: no row is empty
    params = [p for _, p in rows]
    probs = softmax_with_temperature(logits, params)
    at = limits(vocab, *params)
    reference = keep_by_sorting(probs, at)
    for row, p, mask in zip(probs.tolist(), params, reference, strict=True):
        assert set(mask.nonzero()[:, 0].tolist()) == by_hand(row, p)
    assert torch.equal(keep_by_counting(probs, at), reference)
    assert torch.equal(keep_ids(probs, at, few), reference)
    ids, kept, enough = best_few(probs, at, few)
    found = torch.zeros_like(probs).scatter_(-1, ids, kept)
    assert torch.equal(found[enough], (probs * reference)[enough])
    assert (ids.diff(dim=-1) > 0).all()
    shares = probs * reference
    torch.testing.assert_close(distribution(logits, params), shares / shares.sum(dim=-1, keepdim=True))


@examples(15)
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([0.0, 0.01, 1.0, 4.0]), digits=st.sampled_from([0, 1, 6]))
def test_all_ways_agree_beyond_the_few_best(seed: int, spread: float, digits: int) -> None:
    vocab = 3 * FEW
    logits = (spread * torch.randn(6, vocab, generator=torch.Generator().manual_seed(seed))).round(decimals=digits)
    settings_of = [
        (0, 0.9, 0.0),
        (FEW + 1, 1.0, 0.0),
        (FEW, 0.999, 0.0),
        (2 * FEW, 0.7, 0.0),  # p of what these leave, not of the few best alone
        (2 * FEW, 0.99, 0.3),
        (5, 0.5, 0.0),
    ]
    params = [SamplingParams(temperature=1.0, top_k=k, top_p=p, min_p=m) for k, p, m in settings_of]
    probs, at = softmax_with_temperature(logits, params), limits(vocab, *params)
    assert torch.equal(keep_ids(probs, at), keep_by_sorting(probs, at))


@pytest.mark.parametrize(
    ("top_p", "ids"),
    [(0.0, [1]), (0.5, [1]), (0.5 + 1e-9, [1, 3]), (0.75, [1, 3]), (0.9375, [0, 1, 3]), (0.94, [0, 1, 2, 3])],
)
def test_exact_hits_on_probabilities(top_p: float, ids: list[int]) -> None:
    probs, at = torch.tensor([[0.1875, 0.5, 0.0625, 0.25]]), limits(4, SamplingParams(top_p=top_p))
    for mask in (keep_by_sorting(probs, at), keep_by_counting(probs, at), keep_ids(probs, at, few=2)):
        assert mask[0].nonzero()[:, 0].tolist() == ids


def test_ties_at_the_edge_go_to_the_lowest_ids_wherever_the_few_best_come_from() -> None:
    probs = torch.full((1, 4 * FEW), 1 / (4 * FEW))
    for params, count in ((SamplingParams(top_k=FEW - 1), FEW - 1), (SamplingParams(top_p=0.125), FEW // 2)):
        at = limits(4 * FEW, params)
        assert not best_few(probs, at)[2].any()  # the others are as likely as the last of the few
        assert keep_ids(probs, at)[0].nonzero()[:, 0].tolist() == list(range(count))


def test_a_peaked_row_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "keep_by_counting", None)
    probs = torch.linspace(0, -200, 2 * FEW)[None].softmax(dim=-1)
    params = [SamplingParams(top_k=50), SamplingParams(top_p=0.999), SamplingParams(top_k=50, top_p=0.9, min_p=0.1)]
    at = limits(2 * FEW, *params)
    assert torch.equal(keep_ids(probs.repeat(3, 1), at), keep_by_sorting(probs.repeat(3, 1), at))


def test_mass_sums_do_not_depend_on_their_order() -> None:
    own = mass((9 * torch.randn(5000, generator=torch.Generator().manual_seed(0))).softmax(dim=0))
    total = float(own.sum())
    assert total == sum(map(int, own.tolist())) == float(own.flip(0).cumsum(dim=0)[-1])
    assert total == pytest.approx(2**48, rel=1e-5)


def logits_of(vocab: int, spread: float, rows: int = 1) -> Tensor:
    return (spread * torch.randn(vocab, generator=torch.Generator().manual_seed(7))).repeat(rows, 1)


def expected(logits: Tensor, params: SamplingParams) -> NDArray[np.float64]:
    """What each id's share should be, in numpy fp64, by sorting."""
    scaled = logits.numpy().astype(np.float64) / params.temperature
    probs = np.exp(scaled - scaled.max())
    order = np.argsort(-probs, kind="stable")
    left = probs[order]
    if params.top_k:
        left[params.top_k :] = 0.0
    left /= left.sum()
    left[np.cumsum(left) - left >= params.top_p] = 0.0
    left[left < params.min_p * left[0]] = 0.0
    shares: NDArray[np.float64] = np.zeros_like(left)
    shares[order] = left / left.sum()
    return shares


def chi_square_p(counts: NDArray[np.int64], shares: NDArray[np.float64]) -> float:
    """The chance of counts at least so far from the shares; 0 if an id came that has none."""
    if counts[shares == 0].any():
        return 0.0
    want = shares * counts.sum()
    common = want >= 5  # rarer ids share one cell
    got, want = np.append(counts[common], counts[~common].sum()), np.append(want[common], want[~common].sum())
    got, want = got[want > 0], want[want > 0]
    free = len(want) - 1
    statistic = float(((got - want) ** 2 / want).sum())
    # Wilson and Hilferty: the cube root is close to normal.
    z = ((statistic / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))
    return 0.5 * math.erfc(z / math.sqrt(2))


def counted(params: SamplingParams, spread: float, vocab: int = 2 * FEW) -> NDArray[np.int64]:
    """How often each id comes in 20,000 draws: 100 rows with a generator each, 200 times."""
    logits = logits_of(vocab, spread, rows=100)
    states = [SamplerState(SamplingParams(**{**vars(params), "seed": row}), [0]) for row in range(100)]
    tokens = torch.cat([sample(logits, states) for _ in range(200)])
    return np.bincount(tokens.numpy(), minlength=vocab)


DRAWN = {
    "few best": (SamplingParams(temperature=0.8, top_k=50, top_p=0.9), 1.0),
    "few best, min-p": (SamplingParams(temperature=1.3, min_p=0.05), 2.0),
    "counted": (SamplingParams(temperature=1.0, top_k=900, top_p=0.85), 0.5),
}


@pytest.mark.parametrize("case", DRAWN)
def test_draws_follow_the_distribution(case: str) -> None:
    params, spread = DRAWN[case]
    shares = expected(logits_of(2 * FEW, spread)[0], params)
    assert chi_square_p(counted(params, spread), shares) > 0.01


def without_the_crossing_id(ordered: Tensor, at: Limits) -> Tensor:
    """The classic fault: the mass up to and with an id is held against p."""
    within = ordered * (torch.arange(ordered.shape[-1]) < at.top_k)
    return (within > 0) & (within.cumsum(dim=-1) / within.sum(dim=-1, keepdim=True) <= at.top_p)


def top_p_before_top_k(ordered: Tensor, at: Limits) -> Tensor:
    """Another: p of the whole mass, not of what top-k left."""
    return keep_ordered(ordered, at._replace(top_k=torch.full_like(at.top_k, math.inf))) & keep_ordered(
        ordered, at._replace(top_p=torch.ones_like(at.top_p))
    )


@pytest.mark.parametrize("wrong", [without_the_crossing_id, top_p_before_top_k])
def test_draws_of_a_wrong_filter_do_not(wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    params, spread = DRAWN["few best"]
    shares = expected(logits_of(2 * FEW, spread)[0], params)
    monkeypatch.setattr(filters, "keep_ordered", wrong)
    assert chi_square_p(counted(params, spread), shares) < 1e-9


def test_the_same_tokens_as_by_sorting_alone_and_in_company() -> None:
    vocab, every = 2 * FEW, torch.Generator().manual_seed(1)
    logits = torch.randn(8, vocab, generator=every) * torch.tensor(
        [[0.0], [0.1], [1.0], [2.0], [3.0], [4.0], [5.0], [9.0]]
    )
    params = [
        SamplingParams(temperature=0.5 + row / 8, top_k=(0, 40, 600)[row % 3], top_p=(1.0, 0.9)[row % 2], seed=row)
        for row in range(8)
    ]
    together, alone, sorting = ([SamplerState(p, [0]) for p in params] for _ in range(3))
    for _ in range(20):
        tokens = sample_by_sorting(logits, sorting).tolist()
        assert sample(logits, together).tolist() == tokens
        assert [int(sample(logits[i : i + 1], [s])) for i, s in enumerate(alone)] == tokens


def test_a_draw_next_to_one_picks_the_last_kept_column() -> None:
    last = torch.tensor([[1.0 - 2**-53]], dtype=torch.float64)
    assert sample_inverse_cdf(torch.tensor([[0.5, 0.25, 0.25, 0.0]]), last).tolist() == [2]
    assert sample_inverse_cdf(torch.tensor([[1.0, 1e-9, 0.0]]), last).tolist() == [1]
    assert sample_inverse_cdf(torch.tensor([[0.0, 1.0]]), torch.zeros(1, 1, dtype=torch.float64)).tolist() == [1]

"""Perplexity and KL against cases worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from nanoinfer.configs.config import SHAPES, ModelConfig
from nanoinfer.errors import RequestError
from nanoinfer.measure.quality import kl_and_agreement, perplexity, scored_logits
from nanoinfer.models.registry import load_model

V = 256


class Fixed(nn.Module):
    """The same logits ``[V]`` whatever it reads; remembers the windows it was shown."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.row = nn.Parameter(logits, requires_grad=False)
        self.config: ModelConfig = SHAPES["tiny-gpt2"]
        self.windows: list[list[int]] = []

    def forward(self, ids: Tensor, positions: Tensor, *_: object) -> Tensor:
        assert positions.tolist() == [list(range(ids.shape[1]))]
        self.windows.append(ids[0].tolist())
        return self.row.expand(1, ids.shape[1], -1)


def test_a_uniform_model_has_the_vocabulary_as_its_perplexity() -> None:
    score = perplexity(Fixed(torch.zeros(V)), list(range(11)), 4, 2, n_bytes=20)
    assert score.perplexity == pytest.approx(V, rel=1e-12)
    assert score.tokens == 10
    assert score.bits_per_byte == pytest.approx(10 * 8 / 20)  # eight bits a token


def test_the_mean_is_over_tokens() -> None:
    half = torch.full((V,), -math.inf)
    half[1], half[2] = math.log(0.75), math.log(0.25)
    # Scored: 1, 1, 2. The first id is given.
    assert perplexity(Fixed(half), [9, 1, 1, 2], 4, 1).nll == pytest.approx(-math.log(0.75 * 0.75 * 0.25) / 3)


def test_windows_move_by_the_stride_and_score_each_id_once() -> None:
    model = Fixed(torch.zeros(V))
    targets = [part[1].tolist() for part in scored_logits(model, list(range(10)), 4, 3)]
    assert model.windows == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert targets == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    model.windows.clear()
    targets = [part[1].tolist() for part in scored_logits(model, list(range(8)), 5, 2)]
    assert model.windows == [[0, 1, 2, 3, 4], [2, 3, 4, 5, 6], [4, 5, 6, 7]]
    assert targets == [[1, 2, 3, 4], [5, 6], [7]]


def test_a_text_within_one_window_is_the_models_own_likelihood() -> None:
    model = load_model("random:tiny-llama").model
    ids = torch.randint(V, (1, 40), generator=torch.Generator().manual_seed(1))
    logits = model(ids, torch.arange(40)[None])[0]
    by_hand = -logits.double().log_softmax(-1)[torch.arange(39), ids[0, 1:]].mean()
    assert perplexity(model, ids[0].tolist(), 64, 32).nll == pytest.approx(float(by_hand), rel=1e-9)
    # Smaller windows see less: another number, of the same tokens.
    small = perplexity(model, ids[0].tolist(), 8, 4)
    assert small.tokens == 39 and small.nll != pytest.approx(float(by_hand), rel=1e-9)


def test_equal_models_agree() -> None:
    logits = torch.randn(100, V)
    assert kl_and_agreement(logits, logits) == (0.0, 1.0)
    # A constant changes no probability.
    kl, same = kl_and_agreement(logits, logits + 3)
    assert abs(kl) < 1e-6 and same == 1.0


def test_kl_by_hand() -> None:
    p = torch.tensor([[0.5, 0.5], [0.75, 0.25]]).log()
    q = torch.tensor([[0.25, 0.75], [0.75, 0.25]]).log()
    kl, same = kl_and_agreement(p, q)
    assert kl == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2, rel=1e-6)
    assert same == 0.5  # a tie goes to the lowest id
    back, _ = kl_and_agreement(q, p)
    assert back == pytest.approx((0.25 * math.log(0.5) + 0.75 * math.log(1.5)) / 2, rel=1e-6)  # not symmetric


def test_kl_of_ruled_out_tokens() -> None:
    sure = torch.tensor([[0.0, -math.inf]])
    even = torch.tensor([[0.0, 0.0]])
    assert kl_and_agreement(sure, even)[0] == pytest.approx(math.log(2))
    assert kl_and_agreement(even, sure)[0] == math.inf


@pytest.mark.parametrize(
    ("ids", "context", "stride", "n_bytes", "reason"),
    [
        ([1], 4, 2, None, "a text of 1 tokens"),
        ([1, 2], 1, 1, None, "context must be a whole number at least 2 and at most 128"),
        ([1, 2], 129, 1, None, "context must be a whole number at least 2 and at most 128"),
        ([1, 2], 4, 4, None, "stride must be a whole number at least 1 and below 4"),
        ([1, 2], 4, 0, None, "stride must be a whole number at least 1 and below 4"),
        ([1, 2], 4, 2, 0, "n_bytes"),
    ],
)
def test_what_cannot_be_scored(ids: list[int], context: int, stride: int, n_bytes: int | None, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        perplexity(Fixed(torch.zeros(V)), ids, context, stride, n_bytes)


def test_logits_of_unlike_shapes_are_refused() -> None:
    for a, b in (((2, 3), (3, 2)), ((2,), (2,)), ((0, 3), (0, 3))):
        with pytest.raises(RequestError, match="one shape"):
            kl_and_agreement(torch.zeros(a), torch.zeros(b))

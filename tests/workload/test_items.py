"""Lengths and prompts: drawn, and never the warm-up's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice

import pytest

from nanoinfer.errors import RequestError
from nanoinfer.workload.items import (
    WorkItem,
    from_pairs,
    log_normal,
    log_normal_work,
    parse_lengths,
    schedule_at,
    split_warmup,
    synthetic,
    synthetic_prompt,
)


@pytest.mark.parametrize("text", ["128", "uniform:10-200", "lognormal:10-200"])
def test_words_for_lengths_and_back(text: str) -> None:
    assert str(parse_lengths(text)) == text


@pytest.mark.parametrize(
    "text", ["", "-3", "1.5", "uniform", "uniform:10", "normal:1-2", "uniform:1-2-3", "uniform: 1-2"]
)
def test_words_that_are_no_lengths(text: str) -> None:
    with pytest.raises(RequestError, match="write a number of tokens, uniform:10-200 or lognormal:10-200"):
        parse_lengths(text)


@pytest.mark.parametrize("text", ["0", "uniform:0-4", "lognormal:9-3"])
def test_lengths_below_one_or_the_wrong_way_round(text: str) -> None:
    with pytest.raises(RequestError, match="at least 1 upwards"):
        parse_lengths(text)


def test_draws() -> None:
    rng = random.Random(0)
    assert {parse_lengths("7").draw(rng) for _ in range(9)} == {7}
    assert {parse_lengths("uniform:3-6").draw(rng) for _ in range(200)} == {3, 4, 5, 6}
    drawn = sorted(parse_lengths("lognormal:10-1000").draw(rng) for _ in range(4000))
    assert drawn[0] >= 10 and drawn[-1] <= 1000
    assert drawn[2000] == pytest.approx(100, rel=0.1)  # the geometric middle of the bounds


def test_made_up_work_is_seeded_and_of_the_lengths_asked_for() -> None:
    lengths = (parse_lengths("uniform:5-9"), parse_lengths("4"))
    works = list(islice(synthetic(*lengths, seed=1, vocab_size=50), 30))
    assert works == list(islice(synthetic(*lengths, seed=1, vocab_size=50), 30))
    assert {len(w.prompt) for w in works} == {5, 6, 7, 8, 9} and {w.output for w in works} == {4}
    assert all(0 <= i < 50 for w in works for i in w.ids)
    assert len(str(synthetic_prompt(random.Random(0), 12)).split()) == 12


def test_warm_up_has_other_prompts_with_the_same_seed() -> None:
    lengths = (parse_lengths("8"), parse_lengths("4"))
    warm, measured = (
        {w.prompt for w in islice(synthetic(*lengths, seed=1, stream=stream), 50)} for stream in ("warm-up", "measured")
    )
    assert len(warm) == len(measured) == 50 and not warm & measured


def test_pairs_each_come_up_before_any_does_again() -> None:
    pairs = [(n, n + 1) for n in range(1, 9)]
    works = list(islice(from_pairs(pairs, seed=3, vocab_size=9), 16))
    assert [w.output - len(w.prompt) for w in works] == [1] * 16
    assert sorted(w.output for w in works[:8]) == sorted(w.output for w in works[8:]) == list(range(2, 10))
    assert [w.output for w in works[:8]] != [w.output for w in works[8:]]


def test_prompts_set_aside_for_warming_up_are_not_measured() -> None:
    prompts = [(f"p{i % 8}", None) for i in range(12)]  # some twice
    warm, rest = split_warmup(prompts, 3, seed=2)
    assert len(warm) == 3 and not set(warm) & set(rest) and set(warm) | set(rest) == set(prompts)
    with pytest.raises(RequestError, match="8 different prompts are too few for a warm-up of 8"):
        split_warmup(prompts, 8)


def test_works_get_their_times() -> None:
    assert schedule_at([WorkItem("a", 1), WorkItem("b", 2)], [0.5, 0.75, 1.0]) == [
        WorkItem("a", 1, 0.5),
        WorkItem("b", 2, 0.75),
    ]


def test_a_text_has_no_ids() -> None:
    assert WorkItem((1, 2), 1).ids == [1, 2]
    with pytest.raises(RequestError, match="token ids"):
        _ = WorkItem("text", 1).ids


def test_log_normal_lengths_keep_their_bounds_and_their_middle() -> None:
    rng = random.Random(0)
    lengths = sorted(log_normal(rng, 16, 512) for _ in range(4000))
    assert lengths[0] >= 16 and lengths[-1] <= 512
    assert lengths[2000] == pytest.approx((16 * 512) ** 0.5, rel=0.05)
    assert within(lengths, 38, 215) == pytest.approx(0.683 / 0.954, abs=0.03)  # one deviation of the two that are kept
    with pytest.raises(RequestError, match="upwards"):
        log_normal(rng, 0, 4)


def within(values: Sequence[int], low: int, high: int) -> float:
    return sum(low <= v <= high for v in values) / len(values)


def test_work_is_what_its_seed_says() -> None:
    work = log_normal_work(50, 100, (4, 64), (2, 32), seed=7)
    assert work == log_normal_work(50, 100, (4, 64), (2, 32), seed=7) != log_normal_work(50, 100, (4, 64), (2, 32))
    assert all(4 <= len(w.prompt) <= 64 and 2 <= w.output <= 32 and max(w.prompt) < 100 for w in work)

"""Lengths and prompts: drawn, from files, and never the warm-up's."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest

from nanoinfer.errors import RequestError
from nanoinfer.workload.lengths import (
    Lengths,
    from_pairs,
    from_prompts,
    made_up,
    parse_lengths,
    read_pairs,
    read_prompts,
    set_aside,
    synthetic,
)
from nanoinfer.workload.workload import Work, due


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
    assert len(str(made_up(random.Random(0), 12)).split()) == 12


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


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "prompt_tokens,output_tokens\n120,30\n7,1\n"),
        ("a.txt", "120,30\r\n\r\n7, 1\r\n"),
        ("a.csv", "\ufeff120,30\n7,1"),
        (
            "a.jsonl",
            '{"prompt_tokens": 120, "output_tokens": 30, "status": "ok"}\n{"prompt_tokens":7,"output_tokens":1}\n',
        ),
    ],
)
def test_files_of_pairs(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf8", newline="")
    assert read_pairs(tmp_path / name) == [(120, 30), (7, 1)]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "p,o\n1,2\n3\n", "line 3"),
        ("a.csv", "1,2\n3,x\n", "line 2"),
        ("a.csv", "1,0\n", "line 1"),
        ("a.csv", "1,2,3\n", "line 1"),
        ("a.jsonl", '{"prompt_tokens": 1}\n', "line 1"),
        ("a.jsonl", '{"prompt_tokens": 1, "output_tokens": 2.5}\n', "line 1"),
        ("a.jsonl", "[1, 2\n", "line 1"),
        ("a.csv", "p,o\n", "holds nothing"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RequestError, match=says):
        read_pairs(tmp_path / name)


def test_a_file_that_is_not_there_and_one_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="No such file"):
        read_pairs(tmp_path / "none.csv")
    (tmp_path / "a.csv").write_bytes(b"1,2\n\xff\xfe")
    with pytest.raises(RequestError, match="not a UTF-8 text"):
        read_pairs(tmp_path / "a.csv")


def test_real_prompts(tmp_path: Path) -> None:
    plain, records = tmp_path / "a.txt", tmp_path / "a.jsonl"
    plain.write_text("Tell me\u2028a story\n\n  Why?  \n", encoding="utf8")
    assert read_prompts(plain) == [("Tell me\u2028a story", None), ("Why?", None)]
    records.write_text('"Why?"\n{"prompt": "How?", "output_tokens": 9}\n{"prompt": "Who?"}\n')
    prompts = read_prompts(records)
    assert prompts == [("Why?", None), ("How?", 9), ("Who?", None)]
    works = list(islice(from_prompts(prompts, Lengths("fixed", 4, 4), seed=1), 6))
    assert sorted((w.prompt, w.output) for w in works[:3]) == [("How?", 9), ("Who?", 4), ("Why?", 4)]


@pytest.mark.parametrize(
    "line", ["{}", "3", '{"prompt": ""}', '{"prompt": [1]}', '{"prompt": "a", "output_tokens": 0}']
)
def test_a_line_without_a_prompt_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'"fine"\n{line}\n')
    with pytest.raises(RequestError, match="line 2: not a prompt"):
        read_prompts(tmp_path / "a.jsonl")


def test_prompts_set_aside_for_warming_up_are_not_measured() -> None:
    prompts = [(f"p{i % 8}", None) for i in range(12)]  # some twice
    warm, rest = set_aside(prompts, 3, seed=2)
    assert len(warm) == 3 and not set(warm) & set(rest) and set(warm) | set(rest) == set(prompts)
    with pytest.raises(RequestError, match="8 different prompts do not do for a warm-up of 8"):
        set_aside(prompts, 8)


def test_works_get_their_times() -> None:
    assert due([Work("a", 1), Work("b", 2)], [0.5, 0.75, 1.0]) == [Work("a", 1, 0.5), Work("b", 2, 0.75)]


def test_a_text_has_no_ids() -> None:
    assert Work((1, 2), 1).ids == [1, 2]
    with pytest.raises(RequestError, match="token ids"):
        _ = Work("text", 1).ids

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nanoinfer.book.questions import check_exercise, self_check
from nanoinfer.errors import ChapterError


def write(root: Path, text: str) -> Path:
    folder = root / "book" / "questions"
    folder.mkdir(parents=True)
    (folder / "01_a.toml").write_text(text, encoding="utf-8")
    return root


def test_answers_are_folded_under_their_questions(tmp_path: Path) -> None:
    root = write(tmp_path, '[[question]]\nask = "2 < 3?"\nanswer = "Yes."\n[[question]]\nask = "b"\nanswer = "c"\n')
    shown = self_check("01_a", root)
    assert re.findall(r"<li>(.*?)<details><summary>Answer</summary><p>(.*?)</p>", shown.body) == [
        ("2 &lt; 3?", "Yes."),
        ("b", "c"),
    ]
    assert shown.text == "1. 2 < 3?\n   Yes.\n2. b\n   c"


@pytest.mark.parametrize("text", ["", "[[question]]\nask = 'x'\n", "question = 3", "[["])
def test_a_file_without_questions_is_named(tmp_path: Path, text: str) -> None:
    root = write(tmp_path, text)
    with pytest.raises(ChapterError, match=r"01_a\.toml: no questions"):
        self_check("01_a", root)
    with pytest.raises(ChapterError, match=r"02_b\.toml: no questions"):
        self_check("02_b", root)


def test_an_exercise_is_right_wrong_or_not_written() -> None:
    cases = [((1, 2), 3), ((0.1, 0.2), 0.3)]
    assert check_exercise(lambda a, b: a + b, cases).markdown == "`<lambda>` is right in all 2 cases."
    assert check_exercise(lambda a, b: None, cases).markdown == "`<lambda>` is not written yet."

    def product(a: float, b: float) -> float:
        return a * b

    with pytest.raises(AssertionError, match=r"product\(1, 2\) is 3, not 2"):
        check_exercise(product, cases)

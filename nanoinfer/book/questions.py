"""Questions at the end of a chapter: some to answer in one's head, some to code."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from nanoinfer.book.results import book_root
from nanoinfer.errors import ChapterError
from nanoinfer.show.outputs import Html, Prose


def self_check(chapter: str, root: Path | None = None) -> Html:
    """The questions of ``book/questions/<chapter>.toml``, each answer folded under its question.

    The file has one table ``[[question]]`` for each, with ``ask`` and ``answer``.

    Raises:
        ChapterError: no such file, or one that holds something else.
    """
    path = (root or book_root()) / "book" / "questions" / f"{chapter}.toml"
    try:
        questions = [(q["ask"], q["answer"]) for q in tomllib.loads(path.read_text(encoding="utf-8"))["question"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ChapterError(f"{path.name}: no questions with 'ask' and 'answer' in it ({error!r})") from None
    items = "".join(
        f"<li>{escape(ask)}<details><summary>Answer</summary><p>{escape(answer)}</p></details></li>"
        for ask, answer in questions
    )
    text = "\n".join(f"{i}. {ask}\n   {answer}" for i, (ask, answer) in enumerate(questions, 1))
    return Html(f"<ol>{items}</ol>", text)


def check_exercise(answer: Callable[..., Any], cases: Sequence[tuple[tuple[Any, ...], Any]]) -> Prose:
    """Call the reader's function with each case's arguments and compare it with what the case expects.

    A function that still returns ``None`` is not written yet, which is no error.

    Raises:
        AssertionError: a wrong result, with the call and both values.
    """
    for arguments, expected in cases:
        result = answer(*arguments)
        if result is None:
            return Prose(f"`{answer.__name__}` is not written yet.")
        close = isinstance(expected, float) and abs(result - expected) <= 1e-6 * abs(expected)
        call = f"{answer.__name__}({', '.join(map(repr, arguments))})"
        assert close or result == expected, f"{call} is {expected!r}, not {result!r}"
    return Prose(f"`{answer.__name__}` is right in all {len(cases)} cases.")

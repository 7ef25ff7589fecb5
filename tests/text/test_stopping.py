"""Stop strings: same answer however the text is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nanoinfer.text.stopping import StopChecker


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    checker = StopChecker(stops)
    out = [checker.push(piece) for piece in pieces]
    return [*out, checker.finish()], checker.hit


def test_match_across_pieces_is_not_delivered() -> None:
    assert run(["END"], ["a E", "N", "D b"]) == (["a ", "", "", ""], True)


def test_held_text_is_released_once_it_cannot_match() -> None:
    assert run(["END"], ["a E", "x"]) == (["a ", "Ex", ""], False)


def test_held_text_is_released_at_the_end() -> None:
    assert run(["END"], ["a EN"]) == (["a ", "EN"], False)


def test_earliest_start_wins_even_if_it_completes_later() -> None:
    assert run(["abc", "b"], ["ab", "c"]) == (["", "", ""], True)
    assert run(["abc", "b"], ["ab", "d"]) == (["", "a", ""], True)
    assert run(["abc", "b"], ["ab"]) == (["", "a"], True)


def test_restart_inside_a_partial_match() -> None:
    assert "".join(run(["aab"], ["a", "a", "a", "b"])[0]) == "a"


def reference(stops: list[str], text: str) -> tuple[str, bool]:
    starts = [i for stop in stops if (i := text.find(stop)) >= 0]
    return (text[: min(starts)], True) if starts else (text, False)


@given(
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    st.lists(st.text("abc", max_size=3), max_size=12),
)
def test_any_cut_gives_the_answer_of_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    out, hit = run(stops, pieces)
    assert ("".join(out), hit) == reference(stops, "".join(pieces))

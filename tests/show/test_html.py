from __future__ import annotations

import pytest

from nanoinfer.show.html import table
from nanoinfer.show.text import format_number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (134_515_008, "134,515,008"),
        (-1234, "-1,234"),
        (0.0, "0"),
        (14.12345, "14.1"),
        (9.996, "10.0"),
        (12345.6, "12,346"),
        (0.012345, "0.0123"),
        (-2.5, "-2.50"),
        (8.33e-7, "8.33e-07"),
        (1e15, "1.00e+15"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_are_written_to_three_digits_and_whole_digits_kept(value: float, text: str) -> None:
    assert format_number(value) == text


def test_a_table_has_caption_scopes_and_right_aligned_numbers() -> None:
    shown = table(("engine", "tok/s"), [("naive & slow", 12.5), ("cached", None)], "Speed <now>")
    assert "<caption>Speed &lt;now&gt;</caption>" in shown.html
    assert '<th scope="col">engine</th><th scope="col" class="ni-num">tok/s</th>' in shown.html
    assert '<tr><th scope="row">naive &amp; slow</th><td class="ni-num">12.50</td></tr>' in shown.html
    assert '<td class="ni-num">–</td>' in shown.html
    assert '<div class="ni-scroll" role="region" aria-label="Speed &lt;now&gt;" tabindex="0"><table>' in shown.html
    assert shown.bundle() == {
        "text/plain": "Speed <now>\nengine | tok/s\nnaive & slow | 12.50\ncached | –",
        "text/html": shown.html,
    }
    assert shown._repr_mimebundle_() == shown.bundle() and repr(shown) == shown.text


def test_a_table_refuses_ragged_rows_and_no_caption() -> None:
    with pytest.raises(ValueError, match="row 2 has 1 cells under 2 headings"):
        table(("a", "b"), [(1, 2), (3,)], "Ragged")
    with pytest.raises(ValueError, match="caption"):
        table(("a",), [(1,)], " ")

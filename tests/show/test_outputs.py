from __future__ import annotations

import pytest

from nanoinfer.show.outputs import table


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

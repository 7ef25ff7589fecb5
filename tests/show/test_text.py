from __future__ import annotations

import pytest

from nanoinfer.show.text import as_table, format_number, ms, si


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


def test_what_was_not_measured_is_a_dash() -> None:
    assert format_number(None) == ms(None) == "–"
    assert ms("inf") == "inf"
    assert ms(0.0123) == "12.3"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (16_060_522_496, "16.06 GB"),
        (999, "999 B"),
        (0.00448, "4.48 mB"),
        (2.5e-6, "2.5 µB"),
        (3.2e18, "3,200 PB"),
    ],
)
def test_four_digits_and_a_prefix(value: float, text: str) -> None:
    assert si(value, "B") == text


def test_a_table_without_titles_has_no_heading() -> None:
    assert as_table((("", ""), [("a", "1")])).show_header is False
    titled = as_table((("name", "ms"), [("[red]a", "1")]))
    assert titled.show_header and [column.justify for column in titled.columns] == ["left", "right"]

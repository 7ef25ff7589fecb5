from __future__ import annotations

import re
from urllib.parse import unquote

import pytest

from nanoinfer.show import bars, lines
from nanoinfer.show.figures import SHORTEST_ALT

ALT = "Tokens per second rise with the batch size."


def cells(html: str) -> list[str]:
    return re.findall(r"<(?:th|td)\b[^>]*>(.*?)</(?:th|td)>", html)


def test_lines_hold_every_series_in_one_table() -> None:
    chart = lines({"measured": {1: [9, 10, 14], 2: 20}, "predicted": {2: 19, 4: 38}}, x="batch", y="tok/s", alt=ALT)
    assert cells(chart.body) == [
        *("batch", "measured", "predicted"),
        *("1", "10", "–"),
        *("2", "20", "19"),
        *("4", "–", "38"),
    ]
    assert chart.body.count("<img") == 2
    assert "tok/s by batch" in chart.body


def test_predicted_lines_are_dotted_and_samples_get_a_band() -> None:
    drawn = [
        unquote(lines({name: {1: value, 2: 3}}, x="n", y="s", alt=ALT).body)
        for name, value in (("measured", 2), ("predicted", 2), ("measured", [1, 2, 3]))
    ]
    assert ["stroke-dasharray: 2.2" in body for body in drawn] == [False, True, False]
    assert ["PolyCollection" in body or "FillBetween" in body for body in drawn] == [False, False, True]


def test_a_logarithmic_axis_has_base_2_where_its_numbers_are_powers_of_2() -> None:
    doubling = lines({"a": {1: 1, 2: 2, 64: 3}}, x="n", y="s", alt=ALT, log="x", limits={"limit": 2.5})
    assert cells(doubling.body)[:2] == ["n", "a"]
    assert lines({"a": {1: 1, 10: 2}}, x="n", y="s", alt=ALT, log="xy").body.count("<img") == 2


@pytest.mark.parametrize("stacked", [False, True])
def test_bars_take_one_value_or_parts(stacked: bool) -> None:
    one = bars({"static": 1.5, "continuous": [2.0, 2.1, 2.2]}, unit="tok/s", alt=ALT, stacked=stacked)
    assert cells(one.body) == ["", "tok/s", "static", "1.50", "continuous", "2.10"]
    parts = bars(
        {"step 1": {"attention": 1, "products": 4}, "step 2": {"products": 2}}, unit="ms", alt=ALT, stacked=stacked
    )
    assert cells(parts.body) == ["", "attention", "products", "step 1", "1", "4", "step 2", "–", "2"]


def test_a_smoke_run_leaves_the_numbers_out() -> None:
    for chart in (
        bars({"a": 1.0}, unit="ms", alt=ALT, smoke=True),
        lines({"a": {1: 1}}, x="n", y="s", alt=ALT, smoke=True),
    ):
        assert "<table" not in chart.body
        assert "Smoke run" in chart.body
    assert len(ALT) > SHORTEST_ALT

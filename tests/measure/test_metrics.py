"""The definitions, on traces small enough to check by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoinfer.errors import NanoinferError
from nanoinfer.measure import metrics
from nanoinfer.measure.stats import percentile
from nanoinfer.measure.trace import Trace, load_traces, save_traces


def make(chunks: list[tuple[float, int]], sent: float = 0.0, scheduled: float | None = None, **more: object) -> Trace:
    total = sum(n for _, n in chunks)
    due = sent if scheduled is None else scheduled
    return Trace(due, sent, chunks, output_tokens=total, **more)  # type: ignore[arg-type]


#: sent 0; role-only chunk at 30 ms; six chunks of 3 tokens at 100, 160, ... 400; usage at 420; done at 450.
ONE_STREAM = make([(0.03, 0), *[(0.1 + 0.06 * i, 3) for i in range(6)], (0.42, 0)], t_end=0.45)
#: A chunk of one, two of three, one of one; then usage and the end.
BURSTS = make([(0.2, 1), (0.26, 3), (0.32, 3), (0.38, 1), (0.381, 0)], t_end=0.382)
#: An empty role delta, then two tokens, a finish, a usage frame.
ROLE_FIRST = make([(0.01, 0), (0.25, 1), (0.29, 1), (0.33, 0), (0.331, 0)], t_end=0.331)


def test_one_stream_by_our_rules() -> None:
    assert metrics.ttft(ONE_STREAM) == pytest.approx(0.1)  # not 0.03: a role is no token
    assert metrics.tpot(ONE_STREAM) == pytest.approx(0.02)  # divided by N - n_1 = 15, not by 17
    assert metrics.chunk_gaps(ONE_STREAM) == pytest.approx([0.06] * 5)
    assert metrics.itl_samples(ONE_STREAM) == pytest.approx([0.02] * 15)
    perceived = metrics.itl_perceived(ONE_STREAM)
    assert len(perceived) == 17
    assert percentile(perceived, 50) == 0
    assert metrics.e2e(ONE_STREAM) == pytest.approx(0.4)  # not 0.42 or 0.45
    assert metrics.normalized_latency(ONE_STREAM) == pytest.approx(0.4 / 18)


def test_several_tokens_in_a_chunk() -> None:
    assert metrics.ttft(BURSTS) == pytest.approx(0.2)
    assert metrics.e2e(BURSTS) == pytest.approx(0.38)
    assert metrics.tpot(BURSTS) == pytest.approx(0.18 / 7)
    itl = metrics.itl_samples(BURSTS)
    assert sorted(itl) == pytest.approx([0.02] * 6 + [0.06])
    assert sum(itl) / len(itl) == pytest.approx(0.18 / 7)
    assert percentile(itl, 50) == pytest.approx(0.02)
    assert percentile(itl, 99) == pytest.approx(0.06)
    assert metrics.chunk_gaps(BURSTS) == pytest.approx([0.06] * 3)


def test_what_stops_the_first_token_clock() -> None:
    assert metrics.ttft(ROLE_FIRST) == 0.25
    assert metrics.e2e(ROLE_FIRST) == 0.29
    assert metrics.itl_samples(ROLE_FIRST) == pytest.approx([0.04])
    assert metrics.tpot(ROLE_FIRST) == pytest.approx(0.04)


def test_a_reasoning_token_is_a_token() -> None:
    trace = make([(0.01, 0), (0.1, 1), (0.25, 1)])  # reasoning at 0.1, answer at 0.25: both were generated
    assert metrics.ttft(trace) == 0.1


def test_waiting_to_be_sent_counts() -> None:
    late = make([(3.0, 1), (3.1, 1)], sent=2.5, scheduled=0.0)
    assert metrics.client_delay(late) == 2.5
    assert metrics.ttft(late) == 3.0
    assert metrics.ttft_service(late) == 0.5
    assert metrics.e2e(late) == 3.1


def test_coordinated_omission_shows() -> None:
    """One server, 1 s a request, a request due every 0.5 s: the queue grows, and the percentiles must say so."""
    traces = [make([(i + 1.0, 1)], sent=float(i), scheduled=i * 0.5) for i in range(100)]
    felt = metrics.collect(traces, "ttft").values
    service = metrics.collect(traces, "ttft_service").values
    assert percentile(service, 99) == 1.0
    assert percentile(felt, 99) == 98 * 0.5 + 1


@pytest.mark.parametrize(
    "trace",
    [make([(0.5, 1)]), make([(0.5, 4)]), make([(0.1, 0), (0.5, 4), (0.6, 0)])],
    ids=["one token", "one chunk of four", "one chunk between empty ones"],
)
def test_no_tpot_and_no_itl_without_a_second_chunk(trace: Trace) -> None:
    assert metrics.tpot(trace) is None
    assert metrics.itl(trace) == []
    assert metrics.chunk_gaps(trace) == []
    assert metrics.ttft(trace) == 0.5


def test_no_token_no_value() -> None:
    empty = make([(0.1, 0)], t_end=0.2)
    for name in ("ttft", "ttft_service", "tpot", "e2e", "normalized_latency"):
        assert metrics.metric_named(name)(empty) is None, name
    assert metrics.itl_perceived(empty) == []
    collected = metrics.collect([empty, ROLE_FIRST], "tpot")
    assert collected.values == pytest.approx([0.04])  # a missing value is no 0 in the mean
    assert (collected.undefined, collected.failed) == (1, 0)


def test_served_tokens_count_not_chunks() -> None:
    """Usage said 8 where each of 4 chunks was taken for one token: N is what was served."""
    trace = make([(0.2, 1), (0.26, 1), (0.32, 1), (0.38, 1)])
    trace.output_tokens = 8
    assert metrics.tpot(trace) == pytest.approx(0.18 / 7)
    assert metrics.normalized_latency(trace) == pytest.approx(0.38 / 8)


def test_failed_requests_are_counted_apart() -> None:
    traces = [ROLE_FIRST, make([], t_end=0.001, status="error"), make([(9.0, 1)], status="timeout")]
    collected = metrics.collect(traces, "ttft")
    assert collected.values == [0.25]
    assert (collected.failed, collected.undefined) == (2, 0)
    adjusted = metrics.collect(traces, "ttft", failed_as_infinite=True)
    assert percentile(adjusted.values, 99) == math.inf
    assert percentile(adjusted.values, 30) == 0.25


@pytest.mark.parametrize(
    "trace",
    [make([(0.3, 1), (0.2, 1)]), make([(0.5, 1)], sent=1.0), make([(0.5, 1)], t_end=0.4), make([(math.nan, 1)])],
)
def test_a_clock_that_runs_backwards_is_refused(trace: Trace) -> None:
    with pytest.raises(NanoinferError, match="time runs backwards"):
        metrics.ttft(trace)


chunk_lists = st.lists(
    st.tuples(st.floats(min_value=0, max_value=10), st.integers(min_value=0, max_value=5)), min_size=1, max_size=20
)


@given(chunk_lists)
def test_itl_adds_up_and_perceived_has_n_minus_one_gaps(steps: list[tuple[float, int]]) -> None:
    t, chunks = 1.0, []
    for gap, n in steps:
        t += gap
        chunks.append((t, n))
    trace = make(chunks)
    tokens = trace.token_chunks
    decode = tokens[-1][0] - tokens[0][0] if tokens else 0.0
    assert sum(value * n for value, n in metrics.itl(trace)) == pytest.approx(decode)
    assert len(metrics.itl_perceived(trace)) == max(trace.output_tokens - 1, 0)
    assert sum(metrics.itl_perceived(trace)) == pytest.approx(decode)
    per_token = metrics.tpot(trace)
    if per_token is None:
        assert len(tokens) < 2
    else:
        assert per_token * (trace.output_tokens - tokens[0][1]) == pytest.approx(decode)


# --- many requests -----------------------------------------------------------------


def stream_of(start: float, tokens: int, gap: float, prompt: int = 10) -> Trace:
    times = [start + gap * (i + 1) for i in range(tokens)]
    return make([(t, 1) for t in times], sent=start, t_end=times[-1], prompt_tokens=prompt)


def test_throughput_counts_by_event_time() -> None:
    traces = [stream_of(0.0, 10, 0.125), stream_of(1.0, 10, 0.125)]
    rates = metrics.throughput(traces, 0.5, 1.5)
    assert rates.output_tok_s == 7 + 3  # 0.5 ... 1.25 of the first, 1.125 ... 1.375 of the second
    assert rates.requests_s == 1
    assert rates.input_tok_s == 10  # the first prompt was read before the window began
    assert rates.drained_tok_s == pytest.approx(10 / 1.75)
    whole = metrics.throughput(traces, 0.0, 4.0)
    assert (whole.output_tok_s, whole.requests_s, whole.input_tok_s) == (5.0, 0.5, 5.0)
    assert whole.drained_tok_s == pytest.approx(20 / 2.25)
    assert metrics.throughput([], 0.0, 1.0).drained_tok_s is None
    with pytest.raises(NanoinferError, match="window"):
        metrics.throughput(traces, 1.0, 1.0)


@given(
    st.lists(st.tuples(st.floats(min_value=0, max_value=9.9), st.integers(1, 9)), min_size=1, max_size=40),
    st.floats(min_value=0.1, max_value=20),
)
def test_peak_is_never_below_the_mean(events: list[tuple[float, int]], part: float) -> None:
    trace = make(sorted(events))
    mean = metrics.throughput([trace], 0, 10).output_tok_s
    assert metrics.peak_throughput([trace], 0, 10, part) >= mean * (1 - 1e-12)


def test_goodput() -> None:
    good, slow = stream_of(0.0, 5, 0.01), stream_of(0.0, 5, 0.2)
    one_token, slow_one = stream_of(0.0, 1, 0.01), stream_of(0.0, 1, 5.0)
    failed = make([(0.01, 1), (0.02, 1)], status="error", t_end=0.02)
    timed_out = make([], status="timeout", t_end=10.0)
    result = metrics.goodput(
        [good, slow, one_token, slow_one, failed, timed_out], {"ttft": 0.1, "tpot": 0.02}, start=0.0, end=10.0
    )
    assert (result.good, result.attempted, result.excluded) == (1, 6, 1)  # one_token has no TPOT to judge
    assert result.share == 1 / 5
    assert result.requests_s == 0.1
    assert result.tok_s == 0.5
    assert metrics.goodput([one_token], {"tpot": 1.0}).share is None
    assert metrics.goodput([], {"tpot": 1.0}).share is None
    for slo in ({}, {"ttf": 0.1}):
        with pytest.raises(NanoinferError):
            metrics.goodput([good], slo)


def test_littles_law_is_exact_where_all_requests_lie_inside() -> None:
    # Ten a second, each 0.5 s in flight, for ten seconds; the window holds all of it.
    traces = [make([(i * 0.1 + 0.5, 1)], sent=i * 0.1, t_end=i * 0.1 + 0.5) for i in range(100)]
    law = metrics.little(traces, 0.0, 20.0)
    assert law.rate == 5.0
    assert law.time == pytest.approx(0.5)
    assert law.concurrency == pytest.approx(2.5)
    assert law.error < 1e-9
    # In the steady middle the mean in flight is 10/s x 0.5 s.
    assert metrics.mean_concurrency(traces, 2.0, 8.0) == pytest.approx(5.0)


def test_littles_law_catches_a_record_that_is_wrong() -> None:
    traces = [make([(i + 0.5, 1)], sent=float(i), t_end=i + 0.5) for i in range(10)]
    traces.append(make([(9.5, 1)], sent=-50.0, t_end=9.5))  # was in flight all along, arrived before the window
    assert metrics.little(traces, 0.0, 10.0).error == pytest.approx(0.95)


def test_every_metric_has_a_definition() -> None:
    assert set(metrics.PER_REQUEST) <= set(metrics.DEFINITIONS)
    assert all(text and "\n" not in text for text in metrics.DEFINITIONS.values())


def test_a_saved_run_scores_the_same(tmp_path: Path) -> None:
    save_traces(tmp_path / "run.jsonl", [ONE_STREAM, BURSTS])
    again = list(load_traces(tmp_path / "run.jsonl"))
    assert [metrics.tpot(t) for t in again] == [metrics.tpot(t) for t in (ONE_STREAM, BURSTS)]

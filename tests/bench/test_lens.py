"""One stream under every tool's rules, each figure worked out by hand; and many, by each tool's own percentile."""

from __future__ import annotations

import io
import json
import re
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from nanoinfer.bench.lens import FrameStream, LensCell, LensRow, LensTable, inverted, lens, linear, show_lens, truncated
from nanoinfer.errors import NanoinferError
from nanoinfer.measure import metrics
from nanoinfer.measure.stats import percentile
from nanoinfer.measure.trace import ChunkKind, Trace


def made(*frames: tuple[float, int, ChunkKind], **more: object) -> Trace:
    """A trace with kinds, from frames (ms, tokens, kind); sent and due at 0."""
    chunks = [(t / 1e3, n) for t, n, _ in frames]
    kinds = [kind for _, _, kind in frames]
    given: dict[str, object] = {"output_tokens": sum(n for _, n in chunks), "t_end": chunks[-1][0], "kinds": kinds}
    return Trace(0.0, 0.0, chunks, **{**given, **more})  # type: ignore[arg-type]


#: Sent at 0; a role at 30 ms; six chunks of three tokens at 100, 160 ... 400; usage at 420; [DONE] at 450.
EXAMPLE = made((30, 0, "role"), *[(100 + 60 * i, 3, "content") for i in range(6)], (420, 0, "usage"), (450, 0, "done"))
#: The same, of a client that knew no kinds.
UNKNOWN_KINDS = replace(EXAMPLE, chunks=EXAMPLE.chunks[:-1], kinds=[])


def rows(table: LensTable) -> dict[str, LensRow]:
    return {row.title: row for row in table.rows}


def in_ms(cell: LensCell | None, part: str = "mean") -> float | None:
    value = None if cell is None else getattr(cell, part)
    return None if value is None else round(value * 1e3, 1)


#: Title: TTFT, TPOT, ITL by mean and median, end to end, all in ms to one place; output tokens/s.
GOLDEN: dict[str, tuple[float | None, ...]] = {
    "nanoinfer, this version": (100.0, 20.0, 20.0, 20.0, 400.0, 45.0),
    "vLLM bench serve, chat client since #55508 (September 2026)": (30.0, 21.8, 61.7, 60.0, 400.0, 40.0),
    "vLLM bench serve, chat client until #55508 (at e7dffa6)": (30.0, 22.9, 61.7, 60.0, 420.0, 40.0),
    "vLLM benchmark_serving, chat client from #3768 (April 2024; at 0118413)": (100.0, 20.6, 60.0, 60.0, 450.0, 40.0),
    "SGLang bench_serving, sglang-oai-chat": (100.0, 20.6, 60.0, 60.0, 450.0, 40.0),
    "SGLang bench_serving, sglang, its own /generate": (100.0, 20.6, 20.0, 20.0, 450.0, 40.0),
    "GuideLLM, main, at the commits below": (100.0, 22.2, 17.6, 17.6, 450.0, None),
    "AIPerf, main, at the commits below": (100.0, None, 17.6, 17.6, 400.0, 45.0),
    "AIPerf, with --per-chunk-usage (#1279, August 2026)": (100.0, None, 20.0, 20.0, 400.0, 45.0),
    "inference-perf, since #410 (April 2026)": (100.0, 17.6, 17.6, 0.0, 450.0, 40.0),
    "llmperf, main, at the commits below": (100.0, None, 22.2, 22.2, 450.0, 40.0),
    "MLPerf LoadGen, server scenario, token latencies": (100.0, 17.6, None, None, 400.0, 45.0),
    "other common definitions, no tool claimed": (None, 24.7, 50.0, 50.0, None, None),
}


def seen(row: LensRow) -> tuple[float | None, ...]:
    ttft, tpot, itl, e2e = (row.cells.get(name) for name in ("ttft", "tpot", "itl", "e2e"))
    rate = row.cells.get("throughput")
    tokens_s = None if rate is None or rate.mean is None else round(rate.mean, 1)
    return in_ms(ttft), in_ms(tpot), in_ms(itl), in_ms(itl, "median"), in_ms(e2e), tokens_s


@pytest.mark.parametrize("trace", [EXAMPLE, UNKNOWN_KINDS], ids=["kinds known", "kinds guessed"])
def test_the_example(trace: Trace) -> None:
    assert {title: seen(row) for title, row in rows(lens([trace])).items()} == GOLDEN


def test_the_figures_of_the_example_to_the_last_digit() -> None:
    by = rows(lens([EXAMPLE]))
    tpot = {title: row.cells["tpot"].mean for title, row in by.items() if "tpot" in row.cells}
    assert sorted(tpot.values()) == pytest.approx(  # type: ignore[type-var]
        sorted(
            [
                (0.4 - 0.1) / (18 - 3),  # ours
                (0.4 - 0.1) / 17,  # inference-perf
                (0.4 - 0.1) / 17,  # LoadGen
                (0.4 - 0.03) / 17,  # vLLM since September 2026
                (0.42 - 0.03) / 17,  # vLLM before
                (0.45 - 0.03) / 17,  # the other common definition
                *[(0.45 - 0.1) / 17] * 3,  # vLLM from April 2024, SGLang twice
                (0.4 - 0) / 18,  # GuideLLM
            ]
        ),
        rel=1e-12,
    )


def test_what_needs_the_kinds_of_frames_is_marked_where_there_are_none() -> None:
    known, unknown = lens([EXAMPLE]), lens([UNKNOWN_KINDS])
    assert (known.without_kinds, unknown.without_kinds) == (0, 1)
    assert not any(cell.guessed for row in known.rows for cell in row.cells.values())
    guessed = {
        title: {name for name, cell in row.cells.items() if cell.guessed} for title, row in rows(unknown).items()
    }
    assert guessed["nanoinfer, this version"] == set()
    assert guessed["MLPerf LoadGen, server scenario, token latencies"] == set()
    assert guessed["SGLang bench_serving, sglang-oai-chat"] == {"tpot", "e2e", "throughput"}
    assert guessed["vLLM bench serve, chat client until #55508 (at e7dffa6)"] == {
        "ttft",
        "tpot",
        "itl",
        "e2e",
        "throughput",
    }


def test_reasoning_starts_the_clock_of_some() -> None:
    trace = made((10, 0, "role"), (100, 1, "reasoning"), (250, 1, "content"), (290, 1, "content"), (300, 0, "done"))
    ttft = {title: in_ms(row.cells.get("ttft")) for title, row in rows(lens([trace])).items()}
    assert [title.split(",")[0] for title, value in ttft.items() if value == 250] == [
        "vLLM benchmark_serving",
        "GuideLLM",
        "llmperf",
    ]
    assert [title.split(",")[0] for title, value in ttft.items() if value == 10] == ["vLLM bench serve"] * 2
    assert {value for value in ttft.values()} == {10, 100, 250, None}


def test_an_empty_chunk_and_a_finish_frame_are_chunks_to_vllm() -> None:
    trace = made((10, 0, "role"), (100, 1, "content"), (200, 1, "content"), (240, 0, "finish"), (250, 0, "usage"))
    by = rows(lens([trace]))
    vllm = by["vLLM bench serve, chat client since #55508 (September 2026)"].cells
    assert (in_ms(vllm["itl"]), vllm["itl"].n, in_ms(vllm["e2e"])) == (76.7, 3, 240.0)
    assert in_ms(vllm["tpot"]) == 230.0
    sglang = by["SGLang bench_serving, sglang-oai-chat"].cells
    assert (in_ms(sglang["itl"]), sglang["itl"].n, in_ms(sglang["e2e"])) == (100.0, 1, 250.0)


def test_who_takes_nothing_for_zero() -> None:
    """An answer without text: a TTFT of 0 to some, none to the others."""
    empty = made((10, 0, "role"), (20, 0, "done"))
    by = rows(lens([EXAMPLE, empty]))
    ttft = {title: (row.cells["ttft"].n, in_ms(row.cells["ttft"])) for title, row in by.items() if "ttft" in row.cells}
    assert ttft["nanoinfer, this version"] == (1, 100.0)
    assert ttft["SGLang bench_serving, sglang-oai-chat"] == (2, 50.0)
    assert ttft["llmperf, main, at the commits below"] == (2, 50.0)
    assert by["llmperf, main, at the commits below"].cells["itl"].n == 2
    assert by["nanoinfer, this version"].cells["tpot"].n == 1


def test_waiting_to_be_sent_is_latency_to_two_of_them() -> None:
    late = replace(EXAMPLE, t_scheduled=-1.0)
    ttft = {title: in_ms(row.cells["ttft"]) for title, row in rows(lens([late])).items() if "ttft" in row.cells}
    assert [title.split(",")[0] for title, value in ttft.items() if value == 1100] == ["nanoinfer", "MLPerf LoadGen"]


def test_one_token_has_no_time_per_token() -> None:
    one = made((100, 1, "content"), (130, 0, "done"))
    for title, row in rows(lens([one])).items():
        if "tpot" in row.cells and not title.startswith("GuideLLM"):
            assert (row.cells["tpot"].n, row.cells["tpot"].mean) == (0, None), title
    by = rows(lens([one]))
    assert in_ms(by["GuideLLM, main, at the commits below"].cells["tpot"]) == 100.0  # it divides TTFT by 1
    assert by["inference-perf, since #410 (April 2026)"].cells["ttft"].n == 0  # it wants two tokens


def test_failed_requests_are_left_out_and_counted() -> None:
    failed = made((1, 1, "content"), (2, 1, "content"), status="error")
    table = lens([EXAMPLE, failed])
    assert (table.requests, table.failed) == (2, 1)
    assert {title: seen(row)[:5] for title, row in rows(table).items()} == {t: v[:5] for t, v in GOLDEN.items()}


# --- many requests ----------------------------------------------------------------------------


def answer(tokens: int, ttft: float, gap: float) -> Trace:
    times = [ttft + gap * i for i in range(tokens)]
    return Trace(0.0, 0.0, [(t, 1) for t in times], t_end=times[-1], output_tokens=tokens, kinds=["content"] * tokens)


MANY = [answer(2 + i % 5, 0.1 + 0.003 * (i * 7 % 40), 0.01 + 0.0007 * (i * 11 % 40)) for i in range(40)]


def test_each_percentile_is_the_tools_own() -> None:
    by = rows(lens(MANY))
    ttft = [trace.chunks[0][0] for trace in MANY]
    vllm = by["vLLM bench serve, chat client since #55508 (September 2026)"].cells["ttft"]
    assert (vllm.median, vllm.p99) == pytest.approx((float(np.median(ttft)), float(np.percentile(ttft, 99))))
    ours = by["nanoinfer, this version"].cells["ttft"]
    assert (ours.median, ours.p99) == (percentile(ttft, 50), percentile(ttft, 99))
    loadgen = by["MLPerf LoadGen, server scenario, token latencies"].cells["ttft"]
    assert (loadgen.median, loadgen.p99) == (sorted(ttft)[20], sorted(ttft)[39])  # int(40 * 0.5), int(40 * 0.99)
    assert len({vllm.median, ours.median, loadgen.median}) == 3


def test_guidellm_weighs_by_tokens() -> None:
    short, long = answer(2, 0.1, 0.010), answer(101, 0.1, 0.030)
    itl = rows(lens([short, long]))["GuideLLM, main, at the commits below"].cells["itl"]
    assert itl.mean == pytest.approx((0.010 * 1 + 0.030 * 100) / 101)
    assert itl.median == pytest.approx(0.030)
    assert itl.n == 2


@given(st.lists(st.floats(0, 10), min_size=1, max_size=30), st.sampled_from([1, 50, 90, 99]))
def test_percentiles(values: list[float], q: int) -> None:
    samples = [(value, 1.0) for value in sorted(values)]
    assert linear(samples, q) == pytest.approx(float(np.percentile(values, q)), abs=1e-12)
    assert inverted(samples, q) == percentile(values, q)
    assert truncated(samples, q) == sorted(values)[int(len(values) * q / 100 + 1e-9)]
    twice = [(value, 2.0) for value in sorted(values)]
    assert inverted(twice, q) == percentile([v for value in values for v in (value, value)], q)


CHUNKS = st.lists(st.tuples(st.floats(0.001, 10), st.integers(0, 5)), max_size=15)


@given(CHUNKS, st.floats(0, 3))
def test_our_own_row_is_what_the_metrics_say(steps: list[tuple[float, int]], late: float) -> None:
    t, chunks = late, []
    for gap, n in steps:
        t += gap
        chunks.append((t, n))
    trace = Trace(0.0, late, chunks, t_end=t, output_tokens=sum(n for _, n in chunks))
    ours = rows(lens([trace]))["nanoinfer, this version"].cells
    for name in ("ttft", "tpot", "e2e"):
        value = metrics.metric_named(name)(trace)
        assert ours[name].mean == (None if value is None else pytest.approx(value)), name
    samples = metrics.itl_samples(trace)
    assert ours["itl"].n == len(samples)
    assert ours["itl"].p99 == (pytest.approx(percentile(samples, 99)) if samples else None)


def test_throughput_of_a_run() -> None:
    first = replace(EXAMPLE, t_scheduled=0.0)
    chunks = [(t + 1, n) for t, n in EXAMPLE.chunks]
    second = replace(EXAMPLE, t_scheduled=0.8, t_sent=1.0, chunks=chunks, t_end=1.45)
    by = rows(lens([first, second]))
    rate = {title: row.cells["throughput"].mean for title, row in by.items() if "throughput" in row.cells}
    assert rate["vLLM bench serve, chat client since #55508 (September 2026)"] == pytest.approx(36 / 1.45)
    assert rate["AIPerf, main, at the commits below"] == pytest.approx(36 / 1.4)
    assert rate["MLPerf LoadGen, server scenario, token latencies"] == pytest.approx(36 / 1.4)
    assert rate["nanoinfer, this version"] == pytest.approx(36 / 1.4)


# --- what is said ------------------------------------------------------------------------------


def test_every_claimed_rule_names_where_it_was_read() -> None:
    place = re.compile(r"https://github\.com/[\w-]+/[\w.-]+/(blob/[0-9a-f]{40}/[\w./-]+|pull/\d+)")
    table = lens([EXAMPLE])
    for row in table.rows:
        claimed = row.tool not in ("nanoinfer", "other common definitions")
        assert bool(row.sources) == claimed
        assert all(place.fullmatch(source) for source in row.sources), row.sources
        assert all(len(cell.rule) > 10 for cell in row.cells.values())
    assert {row.tool.split()[0] for row in table.rows} >= {
        *("vLLM", "SGLang", "GuideLLM", "AIPerf", "inference-perf", "llmperf", "MLPerf")
    }


def shown(table: LensTable, width: int = 240) -> str:
    console = Console(file=io.StringIO(), width=width)
    show_lens(console, table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_screen_shows_figure_rule_and_source() -> None:
    text = shown(lens([EXAMPLE]))
    for figure in (
        "100.0",
        "30.0",
        "20.0",
        "21.8",
        "22.9",
        "24.7",
        "20.6",
        "17.6",
        "22.2",
        "61.7",
        "60.0",
        "50.0",
        "0.0",
    ):
        assert f" {figure} " in text, figure
    assert "(last frame, usage too - first chunk, a role's too) / (N - 1)" in text
    assert "https://github.com/vllm-project/vllm/pull/55508" in text
    assert "fewer than 459 requests" in text
    assert "~" not in text
    assert "~22.9" in shown(lens([UNKNOWN_KINDS]))
    assert "22.9" in shown(lens([EXAMPLE]), width=60)


def test_json_says_the_same() -> None:
    table = lens([EXAMPLE])
    data = json.loads(json.dumps(asdict(table)))
    assert data["rows"][1]["cells"]["tpot"]["mean"] == table.rows[1].cells["tpot"].mean
    assert data["rows"][1]["sources"][0].startswith("https://github.com/vllm-project/vllm/blob/")
    assert data["requests"] == 1


def test_what_cannot_be_looked_at() -> None:
    with pytest.raises(NanoinferError, match="no traces"):
        lens([])
    with pytest.raises(NanoinferError, match="8 chunks but 9 kinds"):
        lens([replace(EXAMPLE, chunks=EXAMPLE.chunks[:-1])])
    with pytest.raises(NanoinferError, match="runs backwards"):
        lens([replace(EXAMPLE, t_sent=0.05)])


def test_an_in_process_trace_ends_with_its_last_token() -> None:
    stream = FrameStream.of(answer(3, 0.1, 0.1))
    assert [frame.kind for frame in stream.frames] == ["content"] * 3 + ["done"]
    assert stream.sent == 0.0

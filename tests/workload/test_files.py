"""Work from files: exact offsets from seven digits, over midnight, sped up; bad lines are named."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from nanoinfer.errors import RequestError
from nanoinfer.workload.files import TraceEntry, gap_rate, nanoseconds, read_pairs, read_prompts, read_trace, replayed
from nanoinfer.workload.items import Lengths, WorkItem, from_prompts

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.9985000,100,10
2023-11-16 23:59:59.9990005,50,1
2023-11-17 00:00:00.0000000,2000,5
2023-11-17 00:00:00.5000001,1,20
"""


def trace(tmp_path: Path, text: str, name: str = "a.csv") -> list[TraceEntry]:
    (tmp_path / name).write_text(text, encoding="utf8", newline="")
    return read_trace(tmp_path / name)


def test_an_azure_trace_keeps_all_seven_digits(tmp_path: Path) -> None:
    entries = trace(tmp_path, AZURE)
    assert [e.at for e in entries] == [0.0, 0.0005005, 0.0015, 0.5015001]
    assert gap_rate(entries) == pytest.approx(5.98205, abs=1e-5)
    assert [(e.prompt_tokens, e.output) for e in entries] == [(100, 10), (50, 1), (2000, 5), (1, 20)]


def test_twice_as_fast_is_half_the_offsets(tmp_path: Path) -> None:
    works = replayed(trace(tmp_path, AZURE), speed_up=2, vocab_size=10)
    assert [w.at for w in works] == [0.0, 0.00025025, 0.00075, 0.25075005]
    assert [(len(w.prompt), w.output) for w in works] == [(100, 10), (50, 1), (2000, 5), (1, 20)]


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + AZURE.replace("\n", "\r\n"),
        AZURE.replace("TIMESTAMP,ContextTokens,GeneratedTokens", "timestamp, contexttokens ,generatedtokens"),
        AZURE.replace(",100,10", "+00:00,100,10").replace("2023-11-17 00:00:00.0000000", "2023-11-17T00:00:00Z"),
        "\n".join([AZURE.splitlines()[0], *reversed(AZURE.splitlines()[1:])]),  # not in order
    ],
)
def test_the_same_trace_in_other_clothes(tmp_path: Path, text: str) -> None:
    assert trace(tmp_path, text) == trace(tmp_path, AZURE)


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("1970-01-01 00:00:00", 0),
        ("1970-01-01 00:00:01.5", 1_500_000_000),
        ("1970-01-02 00:00:00.123456789", 86_400_123_456_789),
        ("1970-01-01 01:00:00.0000001+01:00", 100),
        ("1969-12-31 23:59:59.9999999", -100),
    ],
)
def test_times_are_whole_nanoseconds(text: str, ns: int) -> None:
    assert nanoseconds(text) == ns


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (AZURE.replace("100,10", "100"), "line 2: not a time and two numbers"),
        (AZURE.replace("2000,5", "2000,five"), "line 4"),
        (AZURE.replace("2000,5", "2000,0"), "line 4"),
        (AZURE.replace("2023-11-17 00:00:00.5000001", "17/11/2023 00:00"), "line 5"),
        (AZURE.replace("2023-11-17 00:00:00.5000001", "2023-02-30 00:00:00"), "line 5"),
        ("a,b\n1,2\n", "line 1: no column timestamp"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds nothing"),
        ("", "holds nothing"),
    ],
)
def test_bad_lines_of_a_csv(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        trace(tmp_path, text)


def test_a_trace_of_our_own(tmp_path: Path) -> None:
    entries = trace(
        tmp_path,
        '{"at": 2.5, "prompt": "Why?", "output": 3}\n\n'
        '{"at": 0.5, "prompt_tokens": 4, "output": 2}\n{"at": 1, "prompt": [5, 6], "output": 1}\n',
        "a.jsonl",
    )
    assert entries == [TraceEntry(0.5, 4, 2), TraceEntry(1.0, 2, 1, (5, 6)), TraceEntry(2.5, None, 3, "Why?")]
    made, ids, text = replayed(entries)
    assert (ids, text) == (WorkItem((5, 6), 1, 1.0), WorkItem("Why?", 3, 2.5))  # times as they are, not from the first
    assert len(str(made.prompt).split()) == 4 and made.at == 0.5


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "[]",
        "nonsense",
        '{"at": -1, "prompt_tokens": 1, "output": 1}',
        '{"at": NaN, "prompt_tokens": 1, "output": 1}',
        '{"at": 0, "output": 1}',
        '{"at": 0, "prompt_tokens": 0, "output": 1}',
        '{"at": 0, "prompt_tokens": 1, "output": 0}',
        '{"at": 0, "prompt": "", "output": 1}',
        '{"at": 0, "prompt": [], "output": 1}',
        '{"at": 0, "prompt": ["a"], "output": 1}',
        '{"at": 0, "prompt": {"a": 1}, "output": 1}',
    ],
)
def test_bad_lines_of_our_own(tmp_path: Path, line: str) -> None:
    with pytest.raises(RequestError, match=r"a\.jsonl, line 2: not a request"):
        trace(tmp_path, f'{{"at": 0, "prompt_tokens": 1, "output": 1}}\n{line}\n', "a.jsonl")


def test_files_and_speeds_that_do_not_do(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="No such file"):
        read_trace(tmp_path / "a.csv")
    with pytest.raises(RequestError, match=r"a \.jsonl of our own or a \.csv"):
        read_trace(tmp_path / "a.parquet")
    for speed_up in (0, -1, float("nan")):
        with pytest.raises(RequestError, match="speed-up"):
            replayed([TraceEntry(0, 1, 1)], speed_up=speed_up)


def test_one_request_has_no_rate() -> None:
    assert gap_rate([TraceEntry(3.0, 5, 2)]) is None


# --- lengths and prompts ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "prompt_tokens,output_tokens\n120,30\n7,1\n"),
        ("a.txt", "120,30\r\n\r\n7, 1\r\n"),
        ("a.csv", "\ufeff120,30\n7,1"),
        (
            "a.jsonl",
            '{"prompt_tokens": 120, "output_tokens": 30, "status": "ok"}\n{"prompt_tokens":7,"output_tokens":1}\n',
        ),
    ],
)
def test_files_of_pairs(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf8", newline="")
    assert read_pairs(tmp_path / name) == [(120, 30), (7, 1)]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "p,o\n1,2\n3\n", "line 3"),
        ("a.csv", "1,2\n3,x\n", "line 2"),
        ("a.csv", "1,0\n", "line 1"),
        ("a.csv", "1,2,3\n", "line 1"),
        ("a.jsonl", '{"prompt_tokens": 1}\n', "line 1"),
        ("a.jsonl", '{"prompt_tokens": 1, "output_tokens": 2.5}\n', "line 1"),
        ("a.jsonl", "[1, 2\n", "line 1"),
        ("a.csv", "p,o\n", "holds nothing"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RequestError, match=says):
        read_pairs(tmp_path / name)


def test_a_file_that_is_not_there_and_one_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="No such file"):
        read_pairs(tmp_path / "none.csv")
    (tmp_path / "a.csv").write_bytes(b"1,2\n\xff\xfe")
    with pytest.raises(RequestError, match="not a UTF-8 text"):
        read_pairs(tmp_path / "a.csv")


def test_real_prompts(tmp_path: Path) -> None:
    plain, records = tmp_path / "a.txt", tmp_path / "a.jsonl"
    plain.write_text("Tell me\u2028a story\n\n  Why?  \n", encoding="utf8")
    assert read_prompts(plain) == [("Tell me\u2028a story", None), ("Why?", None)]
    records.write_text('"Why?"\n{"prompt": "How?", "output_tokens": 9}\n{"prompt": "Who?"}\n')
    prompts = read_prompts(records)
    assert prompts == [("Why?", None), ("How?", 9), ("Who?", None)]
    works = list(islice(from_prompts(prompts, Lengths("fixed", 4, 4), seed=1), 6))
    assert sorted((w.prompt, w.output) for w in works[:3]) == [("How?", 9), ("Who?", 4), ("Why?", 4)]


@pytest.mark.parametrize(
    "line", ["{}", "3", '{"prompt": ""}', '{"prompt": [1]}', '{"prompt": "a", "output_tokens": 0}']
)
def test_a_line_without_a_prompt_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'"fine"\n{line}\n')
    with pytest.raises(RequestError, match="line 2: not a prompt"):
        read_prompts(tmp_path / "a.jsonl")

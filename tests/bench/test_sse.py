"""Server-sent events: any cut gives the same events, each with the read that completed it."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoinfer.bench import sse
from nanoinfer.bench.sse import Events


def whole(stream: bytes) -> list[bytes]:
    return Events().feed(stream)


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    events, found = Events(), []
    edges = [0, *sorted(p % (len(stream) + 1) for p in places), len(stream)]
    for a, b in pairwise(edges):
        found += events.feed(stream[a:b])
    return found


STREAM = (
    b'\xef\xbb\xbf: ping\n\nevent: message\nid: 7\nretry: 10\ndata: {"a":1}\n\n'
    b"data:two\ndata:  lines\ndata\n\n:\n\nfoo: bar\n\n"
    + 'data: "\U0001f999 é\u2028 data: x"\r\n\r\n'.encode()
    + b"data: cr\r\rdata: [DONE]\r\n\r\n"
)
EVENTS = [b'{"a":1}', b"two\n lines\n", '"\U0001f999 é\u2028 data: x"'.encode(), b"cr", b"[DONE]"]


def test_a_stream_in_one_read() -> None:
    assert whole(STREAM) == EVENTS


def test_one_byte_at_a_time() -> None:
    events, found = Events(), []
    for place in range(len(STREAM)):
        found += events.feed(STREAM[place : place + 1])
    assert found == EVENTS


@given(st.lists(st.integers(0, 10_000), max_size=12))
def test_any_cut(places: list[int]) -> None:
    assert cut(STREAM, places) == EVENTS


@given(
    st.lists(st.text(max_size=30), max_size=5),
    st.lists(st.integers(0, 10_000), max_size=8),
    st.sampled_from(["\n", "\r", "\r\n"]),
)
def test_json_of_any_text_stays_one_event(texts: list[str], places: list[int], end: str) -> None:
    stream = "".join(f"data: {json.dumps(text, ensure_ascii=False)}{end}{end}" for text in texts)
    found = cut(stream.encode("utf-8", "surrogatepass"), places)
    assert [json.loads(data.decode("utf-8", "surrogatepass")) for data in found] == texts


def test_an_event_is_there_with_the_read_that_ends_its_empty_line() -> None:
    events = Events()
    reads = [b"data: a\xc3", b"\xa9\n", b"\n", b"data: b\n\ndata: c\n\nda", b"ta: d\r\n\r", b"\n"]
    assert [events.feed(read) for read in reads] == [[], [], ["aé".encode()], [b"b", b"c"], [b"d"], []]


def test_two_line_feeds_behind_a_carriage_return_in_another_read() -> None:
    events = Events()
    assert [events.feed(read) for read in (b"data: a\r", b"", b"\n", b"\n", b"data: b\n\n")] == [
        [],
        [],
        [],
        [b"a"],
        [b"b"],
    ]


def test_what_a_server_said_last_counts_without_its_empty_line() -> None:
    for last in (b"data: [DONE]", b"data: [DONE]\n"):
        events = Events()
        assert events.feed(b"data: a\n\n" + last) == [b"a"]
        assert events.end() == b"[DONE]"
        assert events.end() is None
    assert Events().end() is None


def test_something_that_is_no_stream_of_events_is_not_hoarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MOST", 100)
    for part in (b"x" * 30, b"data: y\n" * 4):
        events = Events()
        with pytest.raises(ValueError, match="more than 100 bytes"):
            for _ in range(30):
                events.feed(part)
    events = Events()
    for _ in range(100):  # long in all, but each event is short
        assert events.feed(b": ping\n\ndata: 0123456789\n\n") == [b"0123456789"]

"""Streams into traces: events out of bytes cut anywhere, what stops the first-token clock, the tokens of each chunk."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoinfer.bench import stream
from nanoinfer.bench.stream import SSEParser, StreamRecorder, apportion, error_text, estimate_tokens
from nanoinfer.measure import metrics
from nanoinfer.measure.stats import percentile
from nanoinfer.measure.trace import Trace

Frame = tuple[float, Any]


def never(text: str) -> int:
    raise AssertionError(f"the server sent its counts, and yet {text!r} was counted again")


def scored(frames: list[Frame], count: Callable[[str], int] = never, *, byte_by_byte: bool = False) -> Trace:
    """A request sent at 0, whose frames come at these times; a text is sent as it stands."""
    trace = Trace(0.0, 0.0)
    answer, events = StreamRecorder(trace, count), SSEParser()
    for t, frame in frames:
        text = frame if isinstance(frame, str) else f"data: {json.dumps(frame)}\n\n"
        data = text.encode()
        if byte_by_byte:  # all but the last byte come long before
            for place in range(len(data)):
                for event in events.feed(data[place : place + 1]):
                    answer.take(event, t if place == len(data) - 1 else t - 0.0005)
        else:
            for event in events.feed(data):
                answer.take(event, t)
    answer.close()
    assert len(trace.kinds) == len(trace.chunks)
    return trace


def chat(delta: Any, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}


def text(said: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "text": said, "finish_reason": finish}], **more}


def usage(completion: int, prompt: int = 5) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def last(completion: int) -> dict[str, Any]:
    return {"id": "c", "choices": [], "usage": usage(completion)}


DONE = "data: [DONE]\n\n"
#: The same four chunks, their counts sent in four forms.
SEVERAL: dict[str, list[Frame]] = {
    "usage with each": [
        (0.2, text("A", usage=usage(1))),
        (0.26, text("bcd", usage=usage(4))),
        (0.32, text("efg", usage=usage(7))),
        (0.38, text("h", "length", usage=usage(8))),
    ],
    "token ids": [
        (0.2, text("A", token_ids=None)),
        (0.26, text("bcd")),
        (0.32, text("efg")),
        (0.38, text("h", "length")),
    ],
    "usage at the end": [(0.2, text("A")), (0.26, text("bcd")), (0.32, text("efg")), (0.38, text("h", "length"))],
    "log-probabilities": [
        (0.2, chat({"content": "A"})),
        (0.26, chat({"content": "bcd"})),
        (0.32, chat({"content": "efg"})),
        (0.38, chat({"content": "h"}, "length")),
    ],
}
for (_, frame), n in zip(SEVERAL["token ids"], (1, 3, 3, 1), strict=True):
    frame["choices"][0]["token_ids"] = list(range(n))
for (_, frame), n in zip(SEVERAL["log-probabilities"], (1, 3, 3, 1), strict=True):
    frame["choices"][0]["logprobs"] = {"content": [{"token": "?"}] * n}


@pytest.mark.parametrize("form", SEVERAL)
@pytest.mark.parametrize("byte_by_byte", [False, True])
def test_several_tokens_in_one_chunk(form: str, byte_by_byte: bool) -> None:
    trace = scored([*SEVERAL[form], (0.381, last(8)), (0.382, DONE)], byte_by_byte=byte_by_byte)
    assert trace.token_chunks == [(0.2, 1), (0.26, 3), (0.32, 3), (0.38, 1)]
    assert (trace.output_tokens, trace.prompt_tokens, trace.estimated) == (8, 5, False)
    assert metrics.ttft(trace) == 0.2
    assert metrics.e2e(trace) == 0.38  # not 0.381 or 0.382
    assert metrics.tpot(trace) == pytest.approx(0.025714, abs=1e-6)  # not 0.06
    itl = metrics.itl_samples(trace)
    assert sorted(itl) == pytest.approx([0.02] * 6 + [0.06])
    assert [percentile(itl, q) for q in (50, 99)] == pytest.approx([0.02, 0.06])
    assert metrics.chunk_gaps(trace) == pytest.approx([0.06] * 3)


OPENINGS = [
    chat({"role": "assistant", "content": ""}),
    chat({"role": "assistant", "content": None}),
    chat({"role": "assistant"}),
    chat({}),
]


@pytest.mark.parametrize("opening", OPENINGS)
@pytest.mark.parametrize("byte_by_byte", [False, True])
def test_what_stops_the_first_token_clock(opening: Any, byte_by_byte: bool) -> None:
    frames: list[Frame] = [
        (0.010, opening),
        (0.012, ": ping\n\n"),
        (0.250, chat({"content": "Hi"})),
        (0.290, chat({"content": " there"})),
        (0.330, chat({}, "stop")),
        (0.331, last(2)),
        (0.332, DONE),
    ]
    trace = scored(frames, byte_by_byte=byte_by_byte)
    assert (metrics.ttft(trace), metrics.e2e(trace)) == (0.25, 0.29)
    assert metrics.itl_samples(trace) == pytest.approx([0.04])
    assert metrics.tpot(trace) == pytest.approx(0.04)
    assert trace.kinds == ["role", "content", "content", "finish", "usage", "done"]
    assert [t for t, _ in trace.chunks] == [0.01, 0.25, 0.29, 0.33, 0.331, 0.332]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_generated_too(name: str) -> None:
    trace = scored([(0.01, OPENINGS[0]), (0.1, chat({name: "Hm"})), (0.25, chat({"content": "Hi"})), (0.3, last(2))])
    assert metrics.ttft(trace) == 0.1
    assert trace.kinds == ["role", "reasoning", "content", "usage"]
    assert trace.token_chunks == [(0.1, 1), (0.25, 1)]


def test_an_empty_first_frame_of_a_completion_is_no_token() -> None:
    trace = scored(
        [(0.01, text("")), (0.25, text("Hi")), (0.29, text(" there")), (0.33, text("", "stop")), (0.331, last(2))]
    )
    assert (metrics.ttft(trace), metrics.e2e(trace), metrics.tpot(trace)) == (0.25, 0.29, pytest.approx(0.04))
    assert trace.kinds == ["role", "content", "content", "finish", "usage"]


def test_a_role_that_carries_usage_is_still_no_token() -> None:
    trace = scored(
        [
            (0.01, chat({"role": "assistant", "content": ""}, usage=usage(1))),
            (0.25, chat({"content": "Hi"}, usage=usage(1))),
        ]
    )
    assert trace.token_chunks == [(0.25, 1)]


def test_a_role_with_its_first_text_is_a_token() -> None:
    trace = scored([(0.1, chat({"role": "assistant", "content": "Hi"})), (0.2, last(1))])
    assert (trace.token_chunks, trace.kinds) == ([(0.1, 1)], ["content", "usage"])


def test_calls_of_tools_are_generated_too() -> None:
    call = {"tool_calls": [{"index": 0, "function": {"name": "look", "arguments": None}}]}
    more = {"tool_calls": [{"index": 0, "function": {"arguments": '{"a'}}]}
    trace = scored([(0.1, chat(call)), (0.2, chat(more)), (0.3, chat({}, "tool_calls")), (0.3, last(2))])
    assert trace.token_chunks == [(0.1, 1), (0.2, 1)]


def test_tokens_without_a_text_count_when_they_came() -> None:
    """Half a character, and the end of sequence: usage tells of both, and no text does."""
    trace = scored(
        [
            (0.1, text("", usage=usage(1))),
            (0.2, text("é", usage=usage(2))),
            (0.3, text("", "stop", usage=usage(3))),
            (0.4, last(3)),
        ]
    )
    assert trace.token_chunks == [(0.1, 1), (0.2, 1), (0.3, 1)]
    assert trace.kinds == ["content", "content", "finish", "usage"]
    assert trace.output_tokens == 3


def test_usage_with_the_reason_to_finish_is_not_all_the_tokens_at_once() -> None:
    trace = scored([(0.1, text("a")), (0.2, text("b")), (0.3, text("", "stop", usage=usage(2))), (0.3, DONE)])
    assert trace.token_chunks == [(0.1, 1), (0.2, 1)]


def test_text_of_an_earlier_token_is_no_token() -> None:
    trace = scored([(0.1, text("a", usage=usage(1))), (0.2, text("b", usage=usage(1))), (0.3, last(1))])
    assert (trace.token_chunks, trace.output_tokens, trace.estimated) == ([(0.1, 1)], 1, False)


def test_the_served_length_counts_and_not_the_sum_of_what_was_seen() -> None:
    trace = scored([(0.1, text("a", usage=usage(1))), (0.2, text("b", "stop", usage=usage(2))), (0.3, last(3))])
    assert (trace.output_tokens, sum(n for _, n in trace.chunks)) == (3, 2)


def test_cached_tokens_are_noted() -> None:
    frame = last(1)
    frame["usage"]["prompt_tokens_details"] = {"cached_tokens": 4}
    assert scored([(0.1, text("a")), (0.2, frame)]).cached_tokens == 4


def test_without_counts_the_whole_text_is_counted_once_and_called_an_estimate() -> None:
    counted: list[str] = []

    def count(said: str) -> int:
        counted.append(said)
        return 7

    # As one text, a hundred spaces are a token or two; cut into chunks and counted one by one they are many.
    trace = scored([(0.1, text("a")), (0.2, text(" " * 5)), (0.3, text("b", "stop")), (0.3, DONE)], count)
    assert counted == ["a     b"]
    assert trace.token_chunks == [(0.1, 1), (0.2, 5), (0.3, 1)]
    assert (trace.output_tokens, trace.estimated) == (7, True)


def test_chunks_are_never_counted() -> None:
    frames: list[Frame] = [(0.1 * i, text("four" * 3)) for i in range(1, 6)]
    trace = scored(frames, estimate_tokens)
    assert trace.output_tokens == 15 and trace.estimated  # sixty characters, and not five chunks


@pytest.mark.parametrize("odd", [{"completion_tokens": 0}, {"completion_tokens": None}, {}, None])
def test_usage_that_tells_nothing(odd: Any) -> None:
    trace = scored([(0.1, text("ab")), (0.2, {"choices": [], "usage": odd})], lambda said: 1)
    assert (trace.token_chunks, trace.output_tokens, trace.estimated) == ([(0.1, 1)], 1, True)


def test_an_answer_cut_off_keeps_the_usage_so_far() -> None:
    trace = scored([(0.1, text("ab", usage=usage(3))), (0.2, text("cd", usage=usage(5)))])
    assert (trace.token_chunks, trace.output_tokens, trace.estimated) == ([(0.1, 3), (0.2, 2)], 5, False)


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        ({"error": {"message": "out of\nmemory", "code": 500}}, "out of memory"),
        ({"error": "no"}, "no"),
        ({"object": "error", "message": "too long", "code": 400}, "too long"),
        ({"detail": [{"msg": "bad"}], "error": True}, "True"),
    ],
)
def test_an_error_frame(frame: Any, says: str) -> None:
    answer = StreamRecorder(Trace(0, 0), never)
    answer.take(json.dumps(frame).encode(), 0.1)
    assert answer.error == says
    assert error_text(frame) == says


def test_an_error_that_is_null_is_none() -> None:
    answer = StreamRecorder(Trace(0, 0), never)
    answer.take(json.dumps(text("a", "stop", error=None, usage=usage(1))).encode(), 0.1)
    assert answer.error is None and answer.is_finished and not answer.is_done


@pytest.mark.parametrize(
    "data", ["{", "[1]", "3", '"a"', '{"choices": 3}', '{"choices": {"a": 1}}', '{"choices": [3]}']
)
def test_what_is_no_frame(data: str) -> None:
    with pytest.raises(ValueError):
        StreamRecorder(Trace(0, 0), never).take(data.encode(), 0.1)


def test_text_that_looks_like_frames_is_text() -> None:
    said = 'a\n\ndata: [DONE]\n\n\u2028"}]}'
    trace = scored([(0.1, text(said)), (0.2, last(4)), (0.3, DONE)], byte_by_byte=True)
    assert (trace.token_chunks, trace.kinds) == ([(0.1, 4)], ["content", "usage", "done"])


@given(st.integers(0, 60), st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_shares_add_up_and_none_is_empty(total: int, sizes: list[int]) -> None:
    shares = apportion(total, sizes)
    assert sum(shares) == total and len(shares) == len(sizes)
    if total >= len(sizes):
        assert min(shares) >= 1
    elif total:
        assert shares[0] == 1 and max(shares) == 1 and (shares[-1] == 1 or total == 1)


def test_shares_are_in_proportion() -> None:
    assert apportion(8, [1, 3, 3, 1]) == [1, 3, 3, 1]
    assert apportion(100, [10, 30, 60]) == [10, 30, 60]
    assert apportion(3, [1, 1, 1, 1, 1]) == [1, 0, 1, 0, 1]


# --- events out of bytes ------------------------------------------------------------------


def whole(body: bytes) -> list[bytes]:
    return SSEParser().feed(body)


def cut(body: bytes, places: list[int]) -> list[bytes]:
    events, found = SSEParser(), []
    edges = [0, *sorted(p % (len(body) + 1) for p in places), len(body)]
    for a, b in pairwise(edges):
        found += events.feed(body[a:b])
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
    events, found = SSEParser(), []
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
    events = SSEParser()
    reads = [b"data: a\xc3", b"\xa9\n", b"\n", b"data: b\n\ndata: c\n\nda", b"ta: d\r\n\r", b"\n"]
    assert [events.feed(read) for read in reads] == [[], [], ["aé".encode()], [b"b", b"c"], [b"d"], []]


def test_two_line_feeds_after_a_carriage_return_in_another_read() -> None:
    events = SSEParser()
    assert [events.feed(read) for read in (b"data: a\r", b"", b"\n", b"\n", b"data: b\n\n")] == [
        [],
        [],
        [],
        [b"a"],
        [b"b"],
    ]


def test_what_a_server_said_last_counts_without_its_empty_line() -> None:
    for last in (b"data: [DONE]", b"data: [DONE]\n"):
        events = SSEParser()
        assert events.feed(b"data: a\n\n" + last) == [b"a"]
        assert events.end() == [b"[DONE]"]
        assert events.end() == []
    assert SSEParser().end() == []


def test_something_that_is_no_stream_of_events_is_not_hoarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_EVENT_BYTES", 100)
    for part in (b"x" * 30, b"data: y\n" * 4):
        events = SSEParser()
        with pytest.raises(ValueError, match="more than 100 bytes"):
            for _ in range(30):
                events.feed(part)
    events = SSEParser()
    for _ in range(100):  # long in all, but each event is short
        assert events.feed(b": ping\n\ndata: 0123456789\n\n") == [b"0123456789"]

"""The HTTP client against the mock and servers that answer canned bytes; its connections, proxies and addresses."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest

from nanoinfer.bench.client import EXTENSIONS, HttpTarget
from nanoinfer.bench.mock import Mock, serving
from nanoinfer.errors import RequestError
from nanoinfer.measure.clock import now
from nanoinfer.measure.trace import Trace
from nanoinfer.workload.items import WorkItem
from tests.bench.behaved_mock import QUICK, BehavedMock, ask, mocked

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def answered(work: WorkItem, endpoint: Any = "completions", /, **behaviour: Any) -> tuple[Trace, HttpTarget, Mock]:
    async def scenario() -> tuple[Trace, HttpTarget, Mock]:
        async with mocked(endpoint, **behaviour) as (mock, target):
            return await ask(target, work), target, mock

    return asyncio.run(scenario())


def canned(pieces: Sequence[bytes], **options: Any) -> tuple[Trace, HttpTarget]:
    """A server that writes these pieces, one after another, and hangs up."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        )
        await reader.readexactly(length)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async def scenario() -> tuple[Trace, HttpTarget]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        target = HttpTarget(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", model="m", **options)
        async with server:
            trace = await ask(target, WorkItem("Hello", 5))
        await target.close()
        return trace, target

    return asyncio.run(scenario())


# --- counts ---------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("refuses", [(), ("continuous_usage_stats",), ("continuous_usage_stats", "ignore_eos")])
def test_tokens_and_not_chunks_are_counted(endpoint: str, refuses: tuple[str, ...]) -> None:
    trace, _, _ = answered(WorkItem("one two three", 10), endpoint, chunk_tokens=4, refuses=refuses)
    assert [n for _, n in trace.token_chunks] == [4, 4, 2]
    assert (trace.output_tokens, trace.prompt_tokens, trace.status, trace.estimated) == (10, 3, "ok", False)
    opening = ["role"] if endpoint == "chat" else []
    assert trace.kinds == [*opening, "content", "content", "content", "finish", "usage", "done"]


def test_what_was_served_counts_and_not_what_was_asked_for() -> None:
    trace, _, _ = answered(WorkItem("Hello", 10), cut_after=3)
    assert (trace.output_tokens, trace.status, trace.error) == (3, "error", "cut off")
    frames = [b'data: {"choices":[{"text":"a"}]}\n\n', b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\n']
    trace, _ = canned([HEAD, *frames, b"data: [DONE]\n\n"])  # three of the five that were asked for
    assert (trace.output_tokens, trace.status) == (3, "ok")


def test_a_server_that_tells_no_usage_is_estimated() -> None:
    trace, _, _ = answered(WorkItem("Hello", 8), chunk_tokens=4, usage="never")
    # Two chunks of 16 characters: by four characters a token.
    assert ([n for _, n in trace.token_chunks], trace.output_tokens, trace.estimated) == ([4, 4], 8, True)


def test_the_role_is_no_token_and_reasoning_is() -> None:
    trace, _, _ = answered(WorkItem("Hello", 3), "chat", reasoning=2, ttft=0.02)
    assert trace.kinds == ["role", "reasoning", "reasoning", "content", "finish", "usage", "done"]
    assert [n for _, n in trace.chunks] == [0, 1, 1, 1, 0, 0, 0]
    assert trace.token_chunks[0][0] - trace.t_sent >= 0.02


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_bytes_cut_anywhere(size: int) -> None:
    frames = [
        {"choices": [{"text": text}], "usage": {"completion_tokens": n}}
        for n, text in enumerate(("é\n\n", "\U0001f999"), 1)
    ]
    body = (
        b"".join(f"data: {json.dumps(frame, ensure_ascii=False)}\r\n\r\n".encode() for frame in frames)
        + b"data: [DONE]"
    )
    trace, _ = canned([HEAD, *(body[i : i + size] for i in range(0, len(body), size))])
    assert ([n for _, n in trace.chunks], trace.kinds) == ([1, 1, 0], ["content", "content", "done"])
    assert (trace.status, trace.output_tokens) == ("ok", 2)


# --- the request ----------------------------------------------------------------------------


def test_the_request() -> None:
    _, _, mock = answered(WorkItem([5, 6, 7], 4))
    (seen,) = mock.log
    assert seen.prompt == "5 6 7"
    wanted = {"include_usage": True, "continuous_usage_stats": True}
    assert seen.body == {
        "model": "mock",
        "stream": True,
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "stream_options": wanted,
        "mock": QUICK,
    }


def test_extra_fields_are_added_and_taken_away() -> None:
    async def scenario() -> dict[str, Any]:
        async with serving() as mock:
            extra = {"mock": QUICK, "temperature": None, "ignore_eos": None, "top_k": 5}
            target = HttpTarget(mock.url, model="mock", extra=extra)
            await ask(target, WorkItem("a", 1))
            await target.close()
            return mock.log[0].body

    body = asyncio.run(scenario())
    assert body["top_k"] == 5 and "temperature" not in body and "ignore_eos" not in body


def test_what_a_server_refuses_is_asked_for_once() -> None:
    async def scenario() -> tuple[list[dict[str, Any]], list[Trace], dict[str, Any]]:
        async with mocked(refuses=("continuous_usage_stats",)) as (mock, target):
            traces = [await ask(target, WorkItem("a", 2)) for _ in range(3)]
            return [seen.body for seen in mock.log], traces, target.settings

    bodies, traces, settings = asyncio.run(scenario())
    assert ["continuous_usage_stats" in body["stream_options"] for body in bodies] == [True, False, False, False]
    assert [trace.output_tokens for trace in traces] == [2, 2, 2]
    assert settings["extensions"] == ["ignore_eos", "stream_options"]


def test_a_request_that_is_refused_whatever_is_left_out_is_an_error_and_teaches_nothing() -> None:
    async def scenario() -> None:
        async with mocked(status=400) as (mock, target):
            trace = await ask(target, WorkItem("a", 2))
            assert (trace.status, trace.error, len(mock.log)) == ("error", "http 400", 4)
            assert target.messages == {"http 400": "mock: as asked"}
            assert target.settings["extensions"] == list(EXTENSIONS)

    asyncio.run(scenario())


def test_the_key_is_sent_and_stored_nowhere() -> None:
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 7\r\n\r\nno, you")
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/api/v1"
            target = HttpTarget(url, model="m", api_key="secret")
            trace = await ask(target, WorkItem("a", 1))
            await target.close()
        assert (trace.status, trace.error, target.messages) == ("error", "http 401", {"http 401": "no, you"})
        assert "secret" not in json.dumps(target.settings) + target.name

    asyncio.run(scenario())
    assert heads[0].startswith(b"POST /api/v1/completions ") and b"Authorization: Bearer secret" in heads[0]
    assert b"Accept-Encoding: identity" in heads[0]  # a compressed stream is a delayed one


# --- what goes wrong ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "status", "error", "tokens"),
    [
        ({"status": 500}, "error", "http 500", 0),
        ({"status": 429}, "rejected", "http 429", 0),
        ({"status": 503}, "rejected", "http 503", 0),
        ({"error_after": 2}, "error", "error frame", 2),
        ({"cut_after": 2}, "error", "cut off", 2),
        ({"abort_after": 2}, "error", "cut off", 2),
        ({"error_after": 0}, "error", "error frame", 0),
    ],
)
def test_what_the_server_does_wrong_is_in_the_trace(behaviour: Any, status: str, error: str, tokens: int) -> None:
    trace, target, _ = answered(WorkItem("Hello", 5), **behaviour)
    assert (trace.status, trace.error, trace.output_tokens) == (status, error, tokens)
    assert trace.t_end is not None and set(target.messages) == {error}


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (HEAD + b"data: {nonsense\n\n", "bad frame"),
        (HEAD + b'data: {"choices":[{"text":"a"}]}\n\n', "cut off"),
        (HEAD, "cut off"),
        (b"", "disconnected"),
        (b"SSH-2.0-OpenSSH\r\n", "disconnected"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}", "no stream"),
        (
            HEAD.replace(b"\r\nConnection", b"\r\nContent-Length: 999\r\nConnection")
            + b'data: {"choices":[{"text":"a"}]}\n\n',
            "cut off",
        ),
    ],
)
def test_servers_that_do_not_speak_the_protocol(reply: bytes, error: str) -> None:
    trace, target = canned([reply])
    assert (trace.status, trace.error) == ("error", error)
    assert target.messages[error]


def test_no_server_there() -> None:
    async def scenario() -> Trace:
        server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        target = HttpTarget(f"http://127.0.0.1:{port}", model="m")
        try:
            with pytest.raises(RequestError, match="nothing answers there; is the server running"):
                await HttpTarget.connect(f"http://127.0.0.1:{port}")
            return await ask(target, WorkItem("a", 1))
        finally:
            await target.close()

    trace = asyncio.run(scenario())
    assert (trace.status, trace.error, trace.chunks) == ("error", "connect", [])


def test_a_finish_without_an_announced_end_is_an_end() -> None:
    trace, _ = canned([HEAD, b'data: {"choices":[{"text":"a","finish_reason":"stop"}]}\n\n'])
    assert trace.status == "ok"


def test_cancelling_keeps_what_had_come() -> None:
    async def scenario() -> Trace:
        async with mocked(stall_after=2, stall=600.0) as (_, target):
            trace = Trace(start := now(), start)
            task = asyncio.create_task(target.send(WorkItem("a", 5), trace))
            while len(trace.chunks) < 2:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return trace

    trace = asyncio.run(scenario())
    assert (trace.status, trace.output_tokens, [n for _, n in trace.chunks]) == ("cancelled", 2, [1, 1])
    assert trace.t_end is not None and trace.t_end >= trace.chunks[-1][0]


# --- connections ----------------------------------------------------------------------------


def test_no_cap_on_connections() -> None:
    """None of 150 is answered before all are there: a pool of 100 would wait for ever."""

    async def scenario() -> int:
        async with mocked(hold_for=150) as (mock, target):
            traces = await asyncio.gather(*(ask(target, WorkItem(f"p{i}", 2)) for i in range(150)))
            assert {trace.status for trace in traces} == {"ok"}
            return mock.most_at_once

    assert asyncio.run(scenario()) == 150


def test_a_connection_is_used_again() -> None:
    """Though the body ends a moment after the answer."""
    connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        with suppress(asyncio.IncompleteReadError):  # the client hangs up
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(int(re.findall(rb"content-length: (\d+)", head.lower())[0]))
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
                )
                writer.write(b"e\r\ndata: [DONE]\n\n\r\n")
                await asyncio.sleep(0.02)
                writer.write(b"0\r\n\r\n")

    async def scenario() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        target = HttpTarget(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", model="m")
        for _ in range(3):
            trace = await ask(target, WorkItem("a", 1))
            assert (trace.status, trace.kinds) == ("ok", ["done"])
            assert trace.t_end is not None and trace.t_end == trace.chunks[-1][0]  # the wait for the rest is not in it
        await target.close()
        server.close()

    asyncio.run(scenario())
    assert connections == 1


def test_proxies_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert HttpTarget("http://example.org/v1", model="m").proxy is None
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "inside.org")
    assert HttpTarget("http://example.org/v1", model="m").proxy == "http://proxy:3128"
    assert HttpTarget("https://example.org/v1", model="m").proxy is None
    assert HttpTarget("http://inside.org/v1", model="m").proxy is None
    for loopback in ("localhost", "127.0.0.1", "[::1]"):
        assert HttpTarget(f"http://{loopback}:8000/v1", model="m").proxy is None
    monkeypatch.setenv("https_proxy", "socks5://proxy:1")
    with pytest.raises(RequestError, match="not an HTTP proxy"):
        HttpTarget("https://example.org/v1", model="m")


# --- mistakes, before any work ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("localhost:8000", "http://localhost:8000/v1"),
        ("http://localhost:8000/", "http://localhost:8000/v1"),
        ("http://localhost:8000/v1/", "http://localhost:8000/v1"),
        ("https://a.example/api/v1/chat/completions", "https://a.example/api/v1"),
        ("https://a.example/v1/completions?x=1", "https://a.example/v1"),
        ("https://a.example/openai/", "https://a.example/openai"),
    ],
)
def test_addresses(url: str, base: str) -> None:
    assert HttpTarget(url, model="m").base == base


def test_the_address_can_say_the_endpoint() -> None:
    assert HttpTarget("http://a/v1/chat/completions", model="m").url == "http://a/v1/chat/completions"
    assert HttpTarget("http://a", model="m").url == "http://a/v1/completions"
    assert HttpTarget("http://a", model="m", endpoint="chat").url == "http://a/v1/chat/completions"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"url": "ftp://a"}, "no address of a server"),
        ({"url": "http://"}, "no address of a server"),
        ({"url": "http://a:port"}, "no address of a server"),
        ({"url": "http://[::1"}, "no address of a server"),
        ({"url": "http://me:secret@a"}, "holds a name or password"),
        ({"api_key": "a\n"}, "line end"),
        ({"endpoint": "responses"}, "known are completions and chat"),
    ],
)
def test_what_makes_no_target(options: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says) as error:
        HttpTarget(**{"url": "http://a", "model": "m", **options})
    assert "secret" not in str(error.value)


def test_connecting_finds_the_model_and_says_what_is_wrong() -> None:
    async def scenario() -> None:
        async with serving(mock=BehavedMock()) as mock:
            target = await HttpTarget.connect(mock.url, extra={"mock": QUICK})
            assert (target.model, target.name) == ("mock", f"mock at {mock.url}/v1")
            await target.close()
            with pytest.raises(RequestError, match="v1/completions: http 404: mock: as asked"):
                await HttpTarget.connect(mock.url, model="other", extra={"mock": {"status": 404}})
            with pytest.raises(RequestError, match="no/models: http 404"):
                await HttpTarget.connect(f"{mock.url}/no")
            with pytest.raises(RequestError, match=r"no answer within 0\.05 s"):
                await HttpTarget.connect(mock.url, timeout_s=0.05, extra={"mock": {"ttft": 600}})

    asyncio.run(scenario())


def test_chat_takes_no_ids() -> None:
    async def scenario() -> None:
        async with mocked("chat") as (_, target):
            with pytest.raises(RequestError, match="chat takes texts"):
                await ask(target, WorkItem([1, 2], 1))

    asyncio.run(scenario())

"""The HTTP client's connections, proxies and addresses, and what it refuses before any work."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from typing import Any

import pytest

from nanoinfer.bench import client as http_target
from nanoinfer.bench.client import HttpTarget
from nanoinfer.bench.mock import serving
from nanoinfer.errors import RequestError
from nanoinfer.workload.items import WorkItem
from tests.bench.asking import QUICK, ask, mocked

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
    """Though the body ends a moment behind the answer."""
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
    assert http_target._proxy("http://example.org/v1") is None
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "inside.org")
    assert http_target._proxy("http://example.org/v1") == "http://proxy:3128"
    assert http_target._proxy("https://example.org/v1") is None
    assert http_target._proxy("http://inside.org/v1") is None
    for loopback in ("localhost", "127.0.0.1", "[::1]"):
        assert http_target._proxy(f"http://{loopback}:8000/v1") is None
    monkeypatch.setenv("https_proxy", "socks5://proxy:1")
    with pytest.raises(RequestError, match="not an HTTP proxy"):
        http_target._proxy("https://example.org/v1")


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
        async with serving() as mock:
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

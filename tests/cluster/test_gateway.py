"""The gateway with replicas that are no processes: what a client sees when one of them is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from nanoinfer.cluster.gateway import (
    ATTEMPTS,
    Counts,
    ForwardedRequest,
    Gateway,
    Message,
    MessageBatches,
    ReplicaLost,
    is_end,
    make_app,
    merge_metrics,
    run_app,
)
from nanoinfer.engines.async_engine import QueueFull
from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.serve.app import make_app as make_replica
from nanoinfer.serve.service import ServerLimits, Service
from tests.serve.helpers import FORTY, saying

Fate = Callable[[int], int | None]  # of the n-th time that a replica is asked: how many batches it lives for


class Replicas:
    """One engine and the app of a replica, which "dies" as the test says: at each request, after ``fate`` batches."""

    def __init__(self, fate: Fate = lambda n: None) -> None:
        self.service = Service(
            ContinuousEngine(saying(), block_size=4, max_running=8, token_budget=32), "m", ServerLimits(seconds=30)
        )
        self.app, self.fate = make_replica(self.service), fate
        self.asked: list[tuple[ForwardedRequest, list[int]]] = []
        self.heads: list[list[Message]] = []

    async def forward(self, asked: ForwardedRequest, chunks: list[int]) -> MessageBatches:
        self.asked.append((asked, chunks))
        left = self.fate(len(self.asked) - 1)
        source = run_app(self.app, asked)
        try:
            async for bunch in source:
                if left == 0:
                    raise ReplicaLost("made to die")
                left = None if left is None else left - 1
                yield bunch
        finally:
            await source.aclose()  # type: ignore[attr-defined]


@contextmanager
def gateway(replicas: Any, limits: ServerLimits | None = None, **options: Any) -> Iterator[tuple[Gateway, Any]]:
    """A gateway, and what gives a client of it within an event loop."""
    made = Gateway(replicas.forward, limits or ServerLimits(seconds=30))

    async def metrics() -> bytes:
        return merge_metrics({}, made.counts)

    app = make_app(made, metrics, **options)
    try:
        yield made, lambda: httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")
    finally:
        replicas.service.close()


def completion(**more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "hi", "max_tokens": 50, "temperature": 0, **more}


def run(client: Any, method: str, path: str, **options: Any) -> httpx.Response:
    async def once() -> httpx.Response:
        async with client() as session:
            return await session.request(method, path, **options)  # type: ignore[no-any-return]

    return asyncio.run(once())


def frames(response: httpx.Response) -> list[Any]:
    data = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def text_of(found: list[Any]) -> str:
    return "".join(frame["choices"][0].get("text", "") for frame in found if frame != "[DONE]" and "choices" in frame)


def test_whole_and_streamed_answers_pass_unchanged() -> None:
    replicas = Replicas()
    with gateway(replicas) as (made, client):
        whole = run(client, "POST", "/v1/completions", json=completion(prompt="ab" * 2))
        assert whole.status_code == 200, whole.text
        assert whole.json()["usage"]["prompt_tokens"] == 4
        streamed = run(client, "POST", "/v1/completions", json=completion(stream=True))
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.headers["cache-control"] == "no-cache"
        found = frames(streamed)
        assert text_of(found) == FORTY
        assert found[-1] == "[DONE]"
        assert [asked.path for asked, _ in replicas.asked] == ["/v1/completions"] * 2
        assert made.counts == Counts(requests=2)


def test_the_replicas_app_says_what_is_wrong_and_the_gateway_what_is_too_large_or_unknown() -> None:
    replicas = Replicas()
    with gateway(replicas, ServerLimits(body_bytes=1000), api_key="k") as (_, client):
        assert run(client, "POST", "/v1/completions", json=completion()).status_code == 401
        assert not replicas.asked
        key = {"Authorization": "Bearer k"}
        assert run(client, "POST", "/v1/completions", content=b"x" * 1001, headers=key).status_code == 413
        assert not replicas.asked
        bad = run(client, "POST", "/v1/completions", json=completion(temperature=3), headers=key)
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "temperature")
        assert run(client, "GET", "/v1/nothing", headers=key).status_code == 404
        assert run(client, "PUT", "/v1/models", headers=key).status_code == 405
        assert run(client, "GET", "/v1/models", headers=key).json()["data"][0]["id"] == "m"
        assert run(client, "GET", "/health").json() == {"status": "ok"}  # no key is asked for
        assert not any(name == b"authorization" for asked, _ in replicas.asked for name, _ in asked.headers)


@pytest.mark.parametrize(("stream", "lives_for"), [(False, 0), (True, 0), (True, 1)])
def test_what_has_not_begun_is_asked_of_another_replica(stream: bool, lives_for: int) -> None:
    # The first two die: at once, or after the head of the stream, before its first token.
    replicas = Replicas(lambda n: lives_for if n < ATTEMPTS - 1 else None)
    with gateway(replicas) as (made, client):
        response = run(client, "POST", "/v1/completions", json=completion(stream=stream))
        assert response.status_code == 200
        text = text_of(frames(response)) if stream else response.json()["choices"][0]["text"]
        assert text == FORTY
        assert made.counts == Counts(requests=1, retried=2)


def test_the_head_of_a_chat_stream_is_no_beginning_either() -> None:
    replicas = Replicas(lambda n: 1 if n == 0 else None)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "temperature": 0}
    with gateway(replicas) as (made, client):
        found = frames(run(client, "POST", "/v1/chat/completions", json=body))
        deltas = [frame["choices"][0]["delta"] for frame in found if frame != "[DONE]"]
        assert [delta.get("role") for delta in deltas].count("assistant") == 1  # not of the one that died as well
        assert "".join(delta.get("content", "") for delta in deltas) == FORTY
        assert made.counts.retried == 1


def test_a_stream_that_breaks_off_ends_with_an_error_and_never_as_if_it_were_whole() -> None:
    replicas = Replicas(lambda n: 4)
    with gateway(replicas) as (made, client):
        found = frames(run(client, "POST", "/v1/completions", json=completion(stream=True)))
        assert found[-1]["error"]["code"] == "replica_lost"
        assert "[DONE]" not in found
        assert all(frame["choices"][0]["finish_reason"] is None for frame in found[:-1])
        assert FORTY.startswith(text_of(found)) and 0 < len(text_of(found)) < len(FORTY)
        assert made.counts == Counts(requests=1, lost=1)


def test_the_official_client_raises_on_it() -> None:
    replicas = Replicas(lambda n: 4)
    with gateway(replicas) as (_, client):

        async def read() -> str:
            async with client() as session:
                official = openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="-", http_client=session)
                stream = await official.completions.create(model="m", prompt="hi", stream=True, max_tokens=50)
                return "".join([chunk.choices[0].text async for chunk in stream])

        with pytest.raises(openai.APIError, match="the replica that answered is gone"):
            asyncio.run(read())


def test_where_every_replica_dies_there_is_an_error_and_an_end() -> None:
    with gateway(Replicas(lambda n: 0)) as (made, client):
        response = run(client, "POST", "/v1/completions", json=completion())
        assert (response.status_code, response.json()["error"]["code"]) == (503, "replica_lost")
        assert made.counts == Counts(requests=1, retried=ATTEMPTS - 1, lost=1)
        text = run(client, "GET", "/metrics").text
        assert "nanoinfer_gateway_retries_total 2.0" in text
        assert "nanoinfer_gateway_lost_total 1.0" in text


class Odd(Replicas):
    """Replicas that do something else than answer."""

    def __init__(self, what: Callable[[], AsyncIterator[list[Message]]]) -> None:
        super().__init__()
        self.what = what

    async def forward(self, asked: ForwardedRequest, chunks: list[int]) -> MessageBatches:
        self.asked.append((asked, chunks))
        async for bunch in self.what():
            yield bunch


def test_full_and_failing_and_silent_replicas_are_errors_of_their_own() -> None:
    async def full() -> AsyncIterator[list[Message]]:
        raise QueueFull("full")
        yield

    async def failing() -> AsyncIterator[list[Message]]:
        raise ZeroDivisionError
        yield

    async def silent() -> AsyncIterator[list[Message]]:
        await asyncio.sleep(60)
        yield []

    start: Message = {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-type", b"text/event-stream")],
    }
    piece: Message = {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}

    async def silent_later() -> AsyncIterator[list[Message]]:
        yield [start]
        yield [piece]
        await asyncio.sleep(60)

    async def failing_later() -> AsyncIterator[list[Message]]:
        yield [start]
        yield [piece]
        raise ZeroDivisionError

    for what, status, said in (
        (full, 429, "full"),
        (silent, 504, "no replica answered within 0.2 s"),
        (silent_later, 200, "the answer took too long"),
        (failing_later, 200, "the server failed"),
    ):
        with gateway(Odd(what), ServerLimits(seconds=0.2)) as (_, client):
            response = run(client, "POST", "/v1/completions", json=completion(stream=True))
            assert (response.status_code, said in response.text) == (status, True), what.__name__
    with gateway(Odd(failing)) as (made, client), pytest.raises(ZeroDivisionError):
        run(client, "POST", "/v1/completions", json=completion())
    assert made.counts.retried == 0  # a mistake of ours is not made three times


def test_a_client_that_leaves_takes_its_request_along() -> None:
    replicas = Replicas()

    async def leave() -> None:
        asked = ForwardedRequest("POST", "/v1/completions", b"", [(b"content-type", b"application/json")], b"")
        body = json.dumps(completion(stream=True)).encode()
        source = run_app(replicas.app, ForwardedRequest(**{**vars(asked), "body": body}))
        heads = [await anext(source), await anext(source)]
        assert [message["type"] for message in heads[0]] == ["http.response.start"]  # nothing that had to be waited for
        assert not is_end(heads[1][-1])
        assert replicas.service.engine.busy
        await source.aclose()  # type: ignore[attr-defined]
        for _ in range(1000):
            if not replicas.service.engine.busy:
                break
            await asyncio.sleep(0.005)
        assert not replicas.service.engine.busy and replicas.service.engine.pool.used == 0
        assert b'nanoinfer_requests_total{reason="cancelled"} 1.0' in replicas.service.metrics.render()

    try:
        asyncio.run(leave())
    finally:
        replicas.service.close()


def test_the_router_is_told_the_beginning_of_the_prompt() -> None:
    replicas = Replicas()
    with gateway(replicas) as (_, client):
        run(client, "POST", "/v1/completions", json=completion(prompt=[1] * 33))
        run(client, "GET", "/v1/models")
        assert [len(chunks) for _, chunks in replicas.asked] == [2, 0]


def test_figures_of_all_replicas_stand_side_by_side() -> None:
    one, other = Replicas(), Replicas()
    try:
        texts = {name: replicas.service.metrics.render() for name, replicas in (("a", one), ("b", other))}
        text = merge_metrics(texts, Counts(3, 2, 1)).decode()
        assert text.count("# TYPE nanoinfer_kv_cache_blocks gauge") == 1
        for name in "ab":
            assert f'nanoinfer_requests_running{{replica="{name}"}} 0.0' in text
            assert f'nanoinfer_time_to_first_token_seconds_bucket{{le="+Inf",replica="{name}"}} 0.0' in text
        assert "nanoinfer_gateway_requests_total 3.0" in text
    finally:
        one.service.close()
        other.service.close()

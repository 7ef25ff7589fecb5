"""The mock does what its request says: when chunks are due, and what is in them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from nanoinfer.bench.mock import LoggedRequest, MockTiming, serving

CHUNK = {"id": "mock-1", "created": 0, "model": "mock"}


def answered(body: Any, path: str = "completions") -> tuple[int, str, list[LoggedRequest]]:
    async def scenario() -> tuple[int, str, list[LoggedRequest]]:
        async with serving() as mock, aiohttp.ClientSession() as client:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            async with client.post(f"{mock.url}/v1/{path}", data=data) as response:
                return response.status, await response.text(), list(mock.log)

    return asyncio.run(scenario())


def frames(text: str) -> list[Any]:
    assert text.endswith("\n\n")
    found = [event.removeprefix("data: ") for event in text.removesuffix("\n\n").split("\n\n")]
    return [event if event == "[DONE]" else json.loads(event) for event in found]


def choice(finish: str | None = None, **says: Any) -> dict[str, Any]:
    return {"index": 0, **says, "finish_reason": finish}


def test_when_chunks_are_due() -> None:
    timing = MockTiming(ttft=0.5, gap=0.25)
    assert [timing.due(i) for i in range(3)] == [0.5, 0.75, 1.0]


def test_no_chunk_is_early_and_all_are_logged() -> None:
    _, _, (logged,) = answered({"prompt": "a b", "max_tokens": 5, "mock": {"ttft": 0.02, "gap": 0.01}})
    assert len(logged.writes) == 5 and logged.prompt == "a b"
    assert all(wrote >= logged.t + 0.02 + 0.01 * i for i, wrote in enumerate(logged.writes))


def test_a_completion() -> None:
    status, text, _ = answered({"prompt": [1, 2, 3], "max_tokens": 2, "mock": {"ttft": 0, "gap": 0}})
    chunk = {**CHUNK, "object": "text_completion"}
    assert status == 200
    assert frames(text) == [
        chunk | {"choices": [choice(text=" tok")]},
        chunk | {"choices": [choice(text=" tok")]},
        chunk | {"choices": [choice("length", text="")]},
        "[DONE]",
    ]


@pytest.mark.parametrize("continuous", [False, True])
def test_a_chat_with_usage(continuous: bool) -> None:
    body = {
        "messages": [{"role": "user", "content": "a b"}],
        "max_tokens": 2,
        "stream_options": {"include_usage": True, "continuous_usage_stats": continuous},
        "mock": {"ttft": 0, "gap": 0},
    }
    _, text, _ = answered(body, "chat/completions")
    chunk = {**CHUNK, "object": "chat.completion.chunk"}

    def usage(n: int, always: bool = False) -> dict[str, Any]:
        counts = {"prompt_tokens": 2, "completion_tokens": n, "total_tokens": 2 + n}
        return {"usage": counts if continuous or always else None}

    assert frames(text) == [
        chunk | {"choices": [choice(delta={"role": "assistant", "content": ""})], **usage(0)},
        chunk | {"choices": [choice(delta={"content": " tok"})], **usage(1)},
        chunk | {"choices": [choice(delta={"content": " tok"})], **usage(2)},
        chunk | {"choices": [choice("length", delta={})], **usage(2)},
        chunk | {"choices": [], **usage(2, always=True)},
        "[DONE]",
    ]


@pytest.mark.parametrize("body", [b"{", b"[]", {}, {"prompt": "a", "mock": {"speed": 1}}, {"prompt": "a", "mock": 3}])
def test_what_it_does_not_understand_is_a_400(body: Any) -> None:
    status, text, _ = answered(body)
    assert status == 400 and json.loads(text)["error"]["code"] == 400


def test_the_log_and_the_models_over_http() -> None:
    async def scenario() -> None:
        async with serving() as mock, aiohttp.ClientSession() as client:
            body = {"prompt": "a", "max_tokens": 2, "mock": {"ttft": 0, "gap": 0}}
            await (await client.post(f"{mock.url}/v1/completions", json=body)).read()
            log = await (await client.get(f"{mock.url}/log")).json()
            assert log["most_at_once"] == 1
            assert [(s["prompt"], len(s["writes"])) for s in log["requests"]] == [("a", 2)]
            models = await (await client.get(f"{mock.url}/v1/models")).json()
            assert models["data"][0]["id"] == "mock"

    asyncio.run(scenario())

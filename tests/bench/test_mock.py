"""The mock does what its request says: when chunks are due, and what is in them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from nanoinfer.bench.mock import Behaviour, Seen, serving

CHUNK = {"id": "mock-1", "created": 0, "model": "mock"}


def answered(body: Any, path: str = "completions") -> tuple[int, str, list[Seen]]:
    async def scenario() -> tuple[int, str, list[Seen]]:
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
    plain = Behaviour(ttft=0.5, gap=0.25)
    assert [plain.due(i) for i in range(3)] == [0.5, 0.75, 1.0]
    stalled = Behaviour(ttft=0.5, gap=0.25, stall_after=1, stall=4.0)
    assert [stalled.due(i) for i in range(3)] == [0.5, 4.75, 5.0]


def test_no_chunk_is_early_and_all_are_logged() -> None:
    _, _, (seen,) = answered({"prompt": "a b", "max_tokens": 5, "mock": {"ttft": 0.02, "gap": 0.01}})
    assert len(seen.writes) == 5 and seen.prompt == "a b"
    assert all(wrote >= seen.t + 0.02 + 0.01 * i for i, wrote in enumerate(seen.writes))


def test_a_completion() -> None:
    status, text, _ = answered({"prompt": [1, 2, 3], "max_tokens": 3, "mock": {"ttft": 0, "gap": 0, "chunk_tokens": 2}})
    chunk = {**CHUNK, "object": "text_completion"}
    assert status == 200
    assert frames(text) == [
        chunk | {"choices": [choice(text=" tok tok")]},
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
        "mock": {"ttft": 0, "gap": 0, "reasoning": 1},
    }
    _, text, _ = answered(body, "chat/completions")
    chunk = {**CHUNK, "object": "chat.completion.chunk"}

    def usage(n: int, always: bool = False) -> dict[str, Any]:
        told = {"prompt_tokens": 2, "completion_tokens": n, "total_tokens": 2 + n}
        return {"usage": told if continuous or always else None}

    assert frames(text) == [
        chunk | {"choices": [choice(delta={"role": "assistant", "content": ""})], **usage(0)},
        chunk | {"choices": [choice(delta={"reasoning_content": " tok"})], **usage(1)},
        chunk | {"choices": [choice(delta={"content": " tok"})], **usage(2)},
        chunk | {"choices": [choice("length", delta={})], **usage(2)},
        chunk | {"choices": [], **usage(2, always=True)},
        "[DONE]",
    ]


def test_no_role_and_no_usage_where_the_request_says_so() -> None:
    body = {"messages": [{"content": "a"}], "max_tokens": 1, "stream_options": {"include_usage": True}}
    _, text, _ = answered(body | {"mock": {"ttft": 0, "role": False, "usage": "never"}}, "chat/completions")
    content, finish, done = frames(text)
    assert content["choices"][0]["delta"] == {"content": " tok"} and "usage" not in content
    assert finish["choices"][0]["finish_reason"] == "length" and done == "[DONE]"


@pytest.mark.parametrize("body", [b"{", b"[]", {}, {"prompt": "a", "mock": {"speed": 1}}, {"prompt": "a", "mock": 3}])
def test_what_it_does_not_understand_is_a_400(body: Any) -> None:
    status, text, _ = answered(body)
    assert status == 400 and json.loads(text)["error"]["code"] == 400


def test_refusals() -> None:
    status, text, _ = answered({"prompt": "a", "top_k": 1, "mock": {"refuses": ["top_k"]}})
    assert status == 400 and "unknown field top_k" in text
    assert answered({"prompt": "a", "mock": {"refuses": ["top_k"], "ttft": 0}, "max_tokens": 1})[0] == 200
    assert answered({"prompt": "a", "mock": {"status": 429}})[0] == 429


@pytest.mark.parametrize(("how", "frames_before"), [("cut_after", 2), ("error_after", 3)])
def test_streams_that_end_early(how: str, frames_before: int) -> None:
    _, text, (seen,) = answered({"prompt": "a", "max_tokens": 9, "mock": {"ttft": 0, "gap": 0, how: 2}})
    found = frames(text)
    assert len(found) == frames_before and len(seen.writes) == 2 and "[DONE]" not in found
    assert ("error" in found[-1]) == (how == "error_after")


def test_a_broken_connection() -> None:
    with pytest.raises(aiohttp.ClientError):
        answered({"prompt": "a", "max_tokens": 9, "mock": {"ttft": 0, "gap": 0, "abort_after": 2}})


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

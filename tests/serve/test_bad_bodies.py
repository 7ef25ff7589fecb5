"""Bad bodies: every one a 400 that names the field, in OpenAI's envelope, and good requests are served afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nanoinfer.serve.service import ServerLimits
from tests.serve.helpers import Server, saying, serving

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(saying()) as server:
        yield server
        assert server.complete(max_tokens=1).status_code == 200  # after all of them
        server.until_empty()


def refused(response: Any, param: str | None = None, status: int = 400) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    if param is not None:
        assert error["param"] == param, error
    return str(error["message"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true, x}',
        b"[]",
        b"null",
        b'"s"',
        b"123",
        b"",
        bytes.fromhex("7b226d ff".replace(" ", "")),
        b"[" * 100_000,
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    ],
)
def test_what_is_no_object(server: Server, path: str, body: bytes) -> None:
    refused(server.client.post(path, content=body, headers={"Content-Type": "application/json"}))


def test_a_forgotten_content_type_is_named(server: Server) -> None:
    response = server.client.post("/v1/completions", content=b'{"prompt": "hi"}')
    if response.status_code != 200:
        assert "application/json" in refused(response)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, None),
    ],
)
def test_chat(server: Server, change: dict[str, Any], param: str | None) -> None:
    body = {"model": "m", "messages": HI} | change
    refused(server.post("/v1/chat/completions", {k: v for k, v in body.items() if v is not None}), param)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, None),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ""}, None),
        ({"prompt": [256]}, None),
        ({"prompt": [-1]}, None),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": 1, "echo": True}, None),
        ({"presence_penalty": 3}, "presence_penalty"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_completions(server: Server, change: dict[str, Any], param: str | None, stream: bool) -> None:
    if "stream_options" in change and stream:
        return
    refused(server.complete(stream=stream, **change), param)


def test_nan_is_no_number(server: Server) -> None:
    for value in (b"NaN", b"Infinity", b"-Infinity", b"1e999"):
        body = b'{"prompt": "hi", "temperature": ' + value + b"}"
        response = server.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        refused(response, "temperature")


def test_a_lone_surrogate(server: Server) -> None:
    for field in (b'"prompt": "\\ud800"', b'"prompt": "hi", "stop": "\\ud800"'):
        body = b"{" + field + b"}"
        response = server.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        refused(response)


def test_the_context_is_a_limit(server: Server) -> None:
    for body in ({"prompt": "x" * 80}, {"prompt": "x" * 60, "max_tokens": 10}, {"prompt": "x" * 64, "max_tokens": 0}):
        response = server.complete(**body)
        refused(response)
        assert response.json()["error"]["code"] == "context_length_exceeded"
    assert server.complete(prompt="x" * 60, max_tokens=4).status_code == 200
    long = server.chat(messages=[{"role": "user", "content": "x" * 64}])
    assert long.status_code == 400 and long.json()["error"]["code"] == "context_length_exceeded"


def test_another_model_is_not_found(server: Server) -> None:
    response = server.complete(model="other")
    refused(response, "model", 404)
    assert response.json()["error"]["code"] == "model_not_found"


def test_unknown_fields_and_null_are_ignored(server: Server) -> None:
    nothing = dict.fromkeys(("temperature", "top_p", "n", "stop", "seed", "logit_bias", "stream", "logprobs"))
    assert server.complete(foo=1, user="me", **nothing).status_code == 200
    assert server.complete(top_p=0, top_k=-1, best_of=1, suffix="", logit_bias={}).status_code == 200
    assert server.chat(tools=[], tool_choice="auto", response_format={"type": "text"}).status_code == 200


def test_a_model_without_a_template_refuses_chat() -> None:
    loaded = saying()
    assert loaded.tokenizer is not None
    loaded.tokenizer.chat_template = None
    with serving(loaded) as server:
        assert "/v1/completions" in refused(server.chat(), "messages")


def test_a_body_that_is_too_large() -> None:
    with serving(saying(), ServerLimits(body_bytes=1000)) as server:
        assert "1,000" in refused(server.complete(prompt="x" * 2000), status=413)

        def pieces() -> Iterator[bytes]:  # without a length in front
            for _ in range(30):
                yield b" " * 100

        headers = {"Content-Type": "application/json"}
        refused(server.client.post("/v1/completions", content=pieces(), headers=headers), status=413)


def test_paths_and_methods_have_the_same_envelope(server: Server) -> None:
    refused(server.client.get("/v1/nothing"), status=404)
    refused(server.client.get("/v1/completions"), status=405)


def test_the_key() -> None:
    with serving(saying(), api_key="secret-é") as server:
        assert server.client.get("/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            for path in ("/v1/models", "/metrics"):
                response = server.client.get(path, headers=headers)
                assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
            assert server.post("/v1/completions", {"prompt": "hi"}, headers=headers).status_code == 401
        right = {"Authorization": "Bearer secret-é".encode()}
        assert server.client.get("/v1/models", headers=right).status_code == 200

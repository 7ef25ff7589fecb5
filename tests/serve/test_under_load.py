"""Many clients, rude clients, and the end of the server."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from nanoinfer.sampling.params import SamplingParams
from nanoinfer.serve.service import ServerLimits
from tests.engines.helpers import LLAMA, present, tiny
from tests.serve.helpers import FORTY, SECONDS, TEMPLATE, Server, saying, serving


@contextmanager
def held(server: Server) -> Iterator[threading.Event]:
    """The engine takes no step until the event is set."""
    engine, go = server.service.engine, threading.Event()
    step = engine.step

    def gated() -> None:
        assert go.wait(SECONDS)
        step()

    engine.step = gated  # type: ignore[method-assign]
    try:
        yield go
    finally:
        go.set()
        engine.step = step  # type: ignore[method-assign]


def test_no_free_slot_says_when_to_come_again() -> None:
    with serving(saying(), ServerLimits(outstanding=2)) as server:
        with held(server) as go:
            threads = [threading.Thread(target=server.complete) for _ in range(2)]
            for thread in threads:
                thread.start()
            while present(server.service.engine) < 2:
                pass
            response = server.complete()
            assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "rate_limit_exceeded"
            go.set()
            for thread in threads:
                thread.join()
        assert server.complete().status_code == 200
        server.until_empty()


def test_several_prompts_are_taken_whole_or_not_at_all() -> None:
    with serving(saying(), ServerLimits(outstanding=2)) as server:
        assert server.complete(prompt=["a", "b", "c"]).status_code == 429
        server.until_empty()
        assert server.complete(prompt=["ab", "cd"]).status_code == 200


def test_a_stream_that_is_left_frees_its_blocks() -> None:
    with serving(saying(eos=False, context=4096), max_running=2) as server:
        body = {"model": "m", "prompt": "hi", "max_tokens": 4000, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_raw())
        server.until_empty()
        assert server.complete(max_tokens=2).status_code == 200


def test_an_answer_whose_client_disconnected_is_dropped() -> None:
    with serving(saying()) as server, held(server) as go:
        client = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=SECONDS)
        client.request("POST", "/v1/completions", '{"prompt": "hi"}', {"Content-Type": "application/json"})
        while not server.service.engine.busy:
            time.sleep(0.005)
        client.close()
        registry, end = server.service.metrics.registry, time.monotonic() + SECONDS
        while registry.get_sample_value("nanoinfer_requests_total", {"reason": "cancelled"}) != 1:
            assert time.monotonic() < end
            time.sleep(0.005)
        go.set()
        server.until_empty()


def test_an_answer_that_takes_too_long() -> None:
    with serving(saying(), ServerLimits(seconds=0.2)) as server, held(server) as go:
        threading.Timer(0.5, go.set).start()
        response = server.complete()
        assert response.status_code == 504 and "too long" in response.json()["error"]["message"]
        server.until_empty()


def test_an_engine_that_fails_says_so_in_the_stream_and_goes_on() -> None:
    with serving(saying()) as server:
        engine = server.service.engine
        forward, left = engine._forward, [3]

        def failing(*args: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise RuntimeError("the model broke")
            return forward(*args)

        engine._forward = failing  # type: ignore[method-assign]
        *chunks, last = server.frames("/v1/completions", {"prompt": "hi", "max_tokens": 9, "stream": True})
        assert [c["choices"][0]["text"] for c in chunks] == list(FORTY[:2])
        assert last["error"]["message"] == "the server failed; its log says why"
        assert server.complete(max_tokens=3).json()["choices"][0]["text"] == FORTY[:3]
        left[0] = 1
        assert server.complete().status_code == 500  # the request is not at fault
        server.until_empty()


def test_the_official_client() -> None:
    with serving(saying()) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        messages: Any = [{"role": "user", "content": "hi"}]
        answer = client.chat.completions.create(model="m", messages=messages, max_tokens=9)
        assert answer.choices[0].message.content == FORTY[:9] and answer.choices[0].finish_reason == "length"
        assert answer.usage is not None and answer.usage.completion_tokens == 9
        stream = client.chat.completions.create(
            model="m", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == FORTY
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 41
        text = client.completions.create(model="m", prompt="hi", max_tokens=4, logprobs=1)
        assert text.choices[0].text == FORTY[:4] and text.choices[0].logprobs is not None
        assert [m.id for m in client.models.list()] == ["m"]
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="hi")
        with pytest.raises(openai.BadRequestError, match="n: "):
            client.completions.create(model="m", prompt="hi", n=0)


def test_200_streams_of_which_many_are_left() -> None:
    """Who stays gets what a lone request gets; who leaves costs nothing that remains."""
    loaded = tiny(LLAMA)
    assert loaded.tokenizer is not None
    loaded.tokenizer.chat_template = TEMPLATE
    rng = random.Random(7)
    plans = [(rng.choice("abcdefgh") * rng.randint(1, 6), rng.choice([None, 0, 1, 5])) for _ in range(200)]

    async def one(client: openai.AsyncOpenAI, prompt: str, leave: int | None) -> str | None:
        stream: Any = await client.completions.create(
            model="m", prompt=prompt, max_tokens=12, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        text, seen = "", 0
        async with stream:
            async for chunk in stream:
                if leave is not None and seen >= leave:
                    return None
                text, seen = text + chunk.choices[0].text, seen + 1
        return text

    async def all_of_them(url: str) -> list[str | None]:
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(limits=limits, timeout=SECONDS, trust_env=False) as http,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http, max_retries=0) as client,
        ):
            return await asyncio.gather(*(one(client, prompt, leave) for prompt, leave in plans))

    with serving(loaded, ServerLimits(outstanding=200), cache_tokens=512) as server:
        texts = asyncio.run(all_of_them(server.url))
        server.until_empty()
        engine = server.service.engine
        for (prompt, leave), text in zip(plans, texts, strict=True):
            if leave is None:
                assert text == engine.generate([prompt], SamplingParams(12, ignore_eos=True))[0].text
            else:
                assert text is None
        server.until_empty()


# --- the command, and its end ---------------------------------------------------------------


@contextmanager
def command(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``nanoinfer serve`` on a free port, and its address."""
    words = [
        sys.executable,
        "-m",
        "nanoinfer",
        "serve",
        "random:tiny-llama",
        "--port",
        "0",
        "--speed",
        "plain",
        *options,
    ]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"http://[\d.:]+", line):
                yield process, found[0]
                break
        else:
            pytest.fail("it never said where it is")
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_what_is_under_way_end(sign: signal.Signals) -> None:
    with command() as (process, url), httpx.Client(base_url=url, timeout=SECONDS, trust_env=False) as client:
        body = {"prompt": "hello", "max_tokens": 100, "stream": True, "ignore_eos": True}
        body |= {"stream_options": {"include_usage": True}}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(sign)
            rest = [line.removeprefix("data: ") for line in lines if line]
        assert rest[-1] == "[DONE]" and json.loads(rest[-2])["usage"]["completion_tokens"] == 100
        assert process.wait(SECONDS) in (0, -sign, 128 + sign)
        with pytest.raises(httpx.ConnectError):
            client.get("/health")


def test_curl() -> None:
    with command("--name", "tiny") as (_, url):
        words = ["curl", "-sS", "-N", "--noproxy", "*", f"{url}/v1/completions", "-H", "Content-Type: application/json"]
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 3, "ignore_eos": True, "stream": True}
        out = subprocess.run(
            [*words, "-d", json.dumps(body)], capture_output=True, text=True, timeout=SECONDS, check=True
        )
        assert out.stdout.count("data: ") >= 2 and out.stdout.endswith("data: [DONE]\n\n")


def test_another_name_for_this_machine_is_refused() -> None:
    with command() as (_, url), httpx.Client(base_url=url, timeout=SECONDS, trust_env=False) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/health", headers={"Host": "evil.example"}).status_code == 400

"""What a client gets: limits and finish reasons, usage, log-probabilities, streams."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.serve.service import ServerLimits
from tests.engines.helpers import LLAMA, tiny
from tests.serve.helpers import FORTY, SECONDS, TEMPLATE, Server, saying, serving


def soon(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(saying()) as server:
        yield server


@pytest.fixture(scope="module")
def random() -> Iterator[Server]:
    loaded = tiny(LLAMA)
    assert loaded.tokenizer is not None
    loaded.tokenizer.chat_template = TEMPLATE
    with serving(loaded) as server:
        yield server


# --- limits and finish reasons -------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "tokens", "finish"),
    [
        ({"max_tokens": 5}, 5, "length"),
        ({"max_completion_tokens": 5}, 5, "length"),
        ({"max_completion_tokens": 3, "max_tokens": 5}, 3, "length"),
        ({"max_completion_tokens": 5, "max_tokens": 3}, 5, "length"),
        ({}, 41, "stop"),  # forty, and the end-of-sequence token
        ({"max_tokens": None}, 41, "stop"),
        ({"max_tokens": 1}, 1, "length"),
        ({"max_tokens": 41}, 41, "stop"),  # the end comes with the limit: it wins
        ({"max_tokens": 40}, 40, "length"),
        ({"stop": "brown"}, len("The quick brown"), "stop"),
        ({"stop": ["fox", "qui"]}, len("The qui"), "stop"),
        ({"stop": None}, 41, "stop"),
        ({"stop": []}, 41, "stop"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_chat_limits(server: Server, body: dict[str, Any], tokens: int, finish: str, stream: bool) -> None:
    text = FORTY[:tokens]
    for stop in [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []:
        text = text.split(stop)[0]
    if stream:
        whole = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True} | body
        *chunks, last, done = server.frames("/v1/chat/completions", whole | {"stream_options": {"include_usage": True}})
        assert done == "[DONE]" and last["choices"] == []
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == text
        reasons = [c["choices"][0]["finish_reason"] for c in chunks]
        assert reasons[:-1] == [None] * (len(reasons) - 1) and reasons[-1] == finish
        assert len({(c["id"], c["created"], c["model"], c["object"]) for c in [*chunks, last]}) == 1
        usage = last["usage"]
    else:
        answer = server.chat(**body).json()
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
        assert answer["choices"][0]["finish_reason"] == finish
        usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, tokens)
    assert usage["total_tokens"] == 2 + tokens


def test_completions_have_the_default_of_old(server: Server) -> None:
    answer = server.complete().json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0] == {"index": 0, "text": FORTY[:16], "logprobs": None, "finish_reason": "length"}
    none = server.complete(max_tokens=0).json()
    assert none["usage"] == {**none["usage"], "prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2}
    assert none["choices"][0]["text"] == "" and none["choices"][0]["finish_reason"] == "length"
    assert server.complete(max_tokens=0, echo=True).json()["choices"][0]["text"] == "hi"
    assert server.complete(max_tokens=3, echo=True).json()["choices"][0]["text"] == "hi" + FORTY[:3]


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {}])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_comes_only_where_it_is_asked_for(server: Server, path: str, options: Any) -> None:
    given = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    body = {"model": "m", "max_tokens": 3, "stream": True, **given}
    chunks = server.frames(path, body if options is None else body | {"stream_options": options})[:-1]
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)
    *chunks, last, _ = server.frames(path, body | {"stream_options": {"include_usage": True}})
    assert last["choices"] == [] and all(chunk["usage"] is None for chunk in chunks if "usage" in chunk)
    assert last["usage"]["completion_tokens"] == 3
    plain = server.post(path, {k: v for k, v in body.items() if k != "stream"}).json()
    assert plain["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"]
    assert plain["usage"]["total_tokens"] == last["usage"]["total_tokens"]


def test_continuous_usage_counts_the_tokens_of_each_chunk(server: Server) -> None:
    body = {"model": "m", "prompt": "hi", "max_tokens": 4, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = server.frames("/v1/completions", body | {"stream_options": options})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4]
    assert last["usage"]["completion_tokens"] == 4


# --- several choices, seeds, log-probabilities ----------------------------------------------


def test_several_prompts_and_samples_come_in_order(random: Server) -> None:
    prompts = ["ab", [100, 101, 102], "xyz"]
    body = {"model": "m", "prompt": prompts[::2], "n": 2, "max_tokens": 4, "seed": 5, "temperature": 1.5}
    answer = random.post("/v1/completions", body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    engine = random.service.engine
    texts = []
    for prompt in prompts[::2]:
        texts += [c.text for c in engine.generate([prompt], SamplingParams(4, 1.5, n=2, seed=5))]
    assert [choice["text"] for choice in answer["choices"]] == texts and len(set(texts)) > 2
    assert answer["usage"]["prompt_tokens"] == 5 and answer["usage"]["completion_tokens"] == 16
    streamed: dict[int, str] = {}
    for chunk in random.frames("/v1/completions", body | {"stream": True})[:-1]:
        for choice in chunk["choices"]:
            streamed[choice["index"]] = streamed.get(choice["index"], "") + choice["text"]
    assert [streamed[i] for i in range(4)] == texts
    ids = random.complete(prompt=[100, 101, 102], max_tokens=2, temperature=0).json()
    assert ids["choices"][0]["text"] == engine.generate([[100, 101, 102]], SamplingParams(2))[0].text


def test_log_probabilities_are_the_models_own(random: Server) -> None:
    (done,) = random.service.engine.generate(["ab"], SamplingParams(3, logprobs=2))
    assert done.logprobs is not None
    answer = random.complete(prompt="ab", max_tokens=3, temperature=0, logprobs=2).json()["choices"][0]
    assert answer["logprobs"]["token_logprobs"] == pytest.approx([entry.logprob for entry in done.logprobs], abs=1e-4)
    assert [len(top) for top in answer["logprobs"]["top_logprobs"]] == [2, 2, 2]
    assert answer["logprobs"]["text_offset"][0] == 0
    body = {"logprobs": True, "top_logprobs": 2, "max_tokens": 3, "temperature": 0}
    messages = [{"role": "user", "content": "ab"}]
    content = random.chat(messages=messages, **body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == pytest.approx(answer["logprobs"]["token_logprobs"])
    assert [bytes(entry["bytes"]) for entry in content] == [
        random.service.engine.tokenizer.token_bytes(i)  # type: ignore[union-attr]
        for i in done.token_ids
    ]
    chunks = random.frames("/v1/chat/completions", {"model": "m", "messages": messages, "stream": True, **body})
    streamed = [e for c in chunks[1:-1] for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content


def test_minus_infinity_is_sent_as_a_number() -> None:
    with serving(saying()) as server:
        answer = server.complete(max_tokens=2, temperature=0, logprobs=5)
        json.loads(answer.text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


# --- streams ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a\n\ndata: b", "x\u2028y", 'say "no"\\', "\U0001f999 é", "data: [DONE]\n\n"])
def test_text_stays_inside_its_frame(text: str) -> None:
    with serving(saying(text)) as server:
        chunks = server.frames(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        )
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == text
        assert all(c["id"] == chunks[0]["id"] != "" for c in chunks[:-1])


def test_chat_parts_are_joined_by_a_newline(server: Server) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    answer = server.chat(messages=[{"role": "user", "content": parts}], max_tokens=1)
    assert answer.json()["usage"]["prompt_tokens"] == len("Hel\nlo")


def test_the_newer_name_of_the_system(server: Server) -> None:
    both = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
    assert server.chat(messages=both, max_tokens=1).status_code == 200


def test_a_prefix_that_was_seen_is_told(random: Server) -> None:
    body = {"prompt": "a long beginning", "max_tokens": 2, "temperature": 0}
    random.complete(**body)
    assert random.complete(**body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_models_and_health(server: Server) -> None:
    (model,) = server.client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("m", "model", 64)
    assert server.client.get("/v1/models/m").json() == model
    assert server.client.get("/v1/models/other").status_code == 404
    assert server.client.get("/health").json() == {"status": "ok"}


def test_health_knows_an_engine_whose_thread_has_ended() -> None:
    with serving(saying()) as server:
        assert server.client.get("/health").status_code == 200
        server.service.async_engine.close()
        answer = server.client.get("/health")
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "unhealthy: the engine's thread has ended"


def test_health_knows_a_step_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    release, step = threading.Event(), ContinuousEngine.step

    def hang(engine: ContinuousEngine) -> None:
        release.wait(SECONDS)
        step(engine)

    monkeypatch.setattr(ContinuousEngine, "step", hang)
    with serving(saying(), ServerLimits(step_s=0.2)) as server, ThreadPoolExecutor() as pool:
        call = pool.submit(server.complete, max_tokens=1)
        problem = server.service.async_engine.problem
        soon(lambda: problem(0.2) is not None)
        answer = server.client.get("/health")
        release.set()
        assert answer.status_code == 503
        assert "a step has been running for" in answer.json()["error"]["message"]
        assert call.result().status_code == 200
        soon(lambda: server.client.get("/health").status_code == 200)


def test_health_knows_an_engine_whose_steps_all_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = saying()
    with serving(loaded) as server:
        with monkeypatch.context() as patch:
            patch.setattr(loaded.model, "head", lambda *_: 1 / 0)
            states = []
            for _ in range(3):
                assert server.complete(max_tokens=2).status_code == 500
                states.append(server.client.get("/health").status_code)
        assert states == [200, 200, 503]
        assert server.complete(max_tokens=2).status_code == 200
        assert server.client.get("/health").status_code == 200


def test_metrics_count_what_was_served() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    with serving(saying()) as server:
        server.complete(max_tokens=5)
        server.chat()
        response = server.client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        samples = {
            (s.name, *s.labels.values()): s.value
            for family in text_string_to_metric_families(response.text)
            for s in family.samples
        }
    assert samples["nanoinfer_requests_total", "length"] == samples["nanoinfer_requests_total", "stop"] == 1
    assert samples[("nanoinfer_generation_tokens_total",)] == 5 + 41
    assert samples[("nanoinfer_prompt_tokens_total",)] == 4
    assert samples[("nanoinfer_time_to_first_token_seconds_count",)] == 2
    assert samples[("nanoinfer_inter_token_latency_seconds_count",)] == 4 + 40
    assert samples[("nanoinfer_requests_running",)] == samples[("nanoinfer_requests_waiting",)] == 0
    assert samples[("nanoinfer_kv_cache_usage_ratio",)] == 0

"""Two Ray nodes on this machine, a replica on each, and blows: the trial of ``benchmarks.cluster``, shortened."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

import httpx
import openai
import pytest

from benchmarks import cluster as trial
from benchmarks.nodes import Nodes, batch, gateway, nodes
from nanoinfer.cluster import ClusterServeOptions, replicas
from nanoinfer.cluster.gateway import ForwardedRequest
from nanoinfer.cluster.ray_runtime import connected
from tests.cluster.killable import KillableReplica

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
MODEL = trial.MODEL


@dataclass
class Place:
    """Where the tests are: they follow each other on one cluster, and each leaves it whole, or is the last."""

    nodes: Nodes
    url: str
    gateway: Popen[bytes]

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="-", max_retries=0)


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with nodes() as two, gateway(two.address, MODEL, *trial.WORDS) as (url, process):
        yield Place(two, url, process)


def ask(place: Place, prompt: Any, **more: Any) -> Any:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0, **more}
    return httpx.post(f"{place.url}/v1/completions", json=body, timeout=60, trust_env=False)


def test_there_is_a_replica_on_each_node_and_all_of_it_is_on_loopback(place: Place) -> None:
    assert [len({worker.ppid() for worker in place.nodes.workers("ServeReplica")})] == [2]
    assert len(trial.replicas(place.url)) == 2
    assert httpx.get(f"{place.url}/health", trust_env=False).json() == {"status": "ok"}
    for raylet in place.nodes.raylets():
        heard = [c.laddr.ip for c in raylet.net_connections() if c.status == "LISTEN"]
        assert heard and all(ip.removeprefix("::ffff:") == "127.0.0.1" for ip in heard), heard


def test_the_official_client_gets_the_same_answer_whole_and_streamed(place: Place) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 24, "temperature": 0}
    whole = place.client.completions.create(**asked)
    assert whole.usage is not None and whole.usage.completion_tokens == 24
    pieces = [chunk.choices[0] for chunk in place.client.completions.create(stream=True, **asked)]
    assert "".join(piece.text for piece in pieces) == whole.choices[0].text
    assert pieces[-1].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="has no chat template"):
        place.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.NotFoundError, match="there is no model 'x' here"):
        place.client.completions.create(model="x", prompt="hello")


def test_what_begins_alike_is_found_in_the_cache_whatever_comes_between(place: Place) -> None:
    beginnings = [[n] * 96 for n in range(1, 9)]
    cached = []
    for turn in range(3):
        for prompt in beginnings:
            usage = ask(place, [*prompt, turn]).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[:8] == [0] * 8
    assert cached[8:] == [96] * 16
    answered = r'nanoinfer_requests_total\{.*reason="length".*\} (\S+)'
    each = [float(n) for n in re.findall(answered, trial.metrics(place.url))]
    assert len(each) == 2 and min(each) >= 8  # nor has one of them got it all


def check(found: dict[str, Any], most_errors: int) -> None:
    assert found["lost_without_an_error"] == 0, found
    assert found["sent"] == found["finished"] + sum(found["errors"].values()), found
    assert set(found["errors"]) <= {"error frame", "http 503"}, found
    assert sum(found["errors"].values()) <= most_errors, found  # those that were being streamed at that moment
    assert found["replicas_are_back_s"] is not None, found


def test_a_killed_node_costs_what_it_was_saying_and_is_made_up_for(place: Place) -> None:
    # The first blow: later on, the replicas need not be on two nodes any more.
    assert place.nodes.workers("ServeReplica")[-1].ppid() == place.nodes.raylets()[-1].pid
    found = asyncio.run(trial.under_load(place.url, 6, 15, 4, place.nodes.kill_last_node))
    check(found, 12)
    place.nodes.add()


def test_a_client_that_leaves_takes_its_request_along(place: Place) -> None:
    def cancelled() -> float:
        pattern = r'nanoinfer_requests_total\{.*reason="cancelled".*\} (\S+)'
        return sum(float(n) for n in re.findall(pattern, trial.metrics(place.url)))

    before = cancelled()
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{place.url}/v1/completions", json=body, timeout=60, trust_env=False) as response:
        next(response.iter_lines())
    until = time.monotonic() + 10
    while cancelled() != before + 1:
        assert time.monotonic() < until
        time.sleep(0.1)


def test_more_than_the_cluster_has_is_refused_at_once(place: Place, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text('{"prompt": "a"}\n')
    process = batch(place.nodes.address, MODEL, tmp_path / "prompts", tmp_path / "out", "--workers", "99")
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 1
    assert "99 x 1 CPUs are wanted and the cluster has 8" in said


def test_a_replica_whose_engine_has_died_is_replaced(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "Replica", KillableReplica)
    monkeypatch.setattr(replicas, "APP", "killable")

    async def said(handle: Any, path: str) -> bytes:
        async for batch_of in replicas.make_forwarder(handle)(ForwardedRequest("GET", path), []):
            return bytes(batch_of[0]["body"])
        raise AssertionError("nothing was said")

    with connected(place.nodes.address, 1) as ray:
        handle = replicas.deploy(ClusterServeOptions(model=MODEL, replicas=1, drain=5, dtype="float32"))
        first = asyncio.run(said(handle, "/pid"))
        assert asyncio.run(said(handle, "/pid")) == first
        asyncio.run(said(handle, "/die"))
        until = time.monotonic() + 60
        while asyncio.run(said(handle, "/pid")) == first:
            assert time.monotonic() < until
            time.sleep(0.5)
        ray.serve.delete("killable")


def test_a_killed_replica_costs_what_it_was_saying_and_comes_back(place: Place) -> None:
    check(asyncio.run(trial.under_load(place.url, 6, 15, 4, lambda: trial.kill_replica(place.nodes))), 12)


def test_requests_that_have_not_begun_move_to_the_other_replica(place: Place) -> None:
    """Whole answers: a killed replica is not even noticed."""
    statuses: list[int] = []

    def user(number: int) -> None:
        for turn in range(6):
            statuses.append(ask(place, [number + 1] * 32, max_tokens=150, seed=turn).status_code)

    users = [threading.Thread(target=user, args=(n,)) for n in range(4)]
    for thread in users:
        thread.start()
    time.sleep(0.5)
    trial.kill_replica(place.nodes)
    for thread in users:
        thread.join()
    assert statuses == [200] * 24
    until = time.monotonic() + 60
    while len(trial.replicas(place.url)) < 2:
        assert time.monotonic() < until
        time.sleep(0.5)


def test_a_batch_loses_nothing_and_does_nothing_twice_whatever_is_killed(place: Place) -> None:
    found = trial.offline(place.nodes, 3000)
    assert {key: found[key] for key in ("rows", "lost", "twice", "misnamed", "in_order", "errors")} == {
        "rows": 3000,
        "lost": 0,
        "twice": 0,
        "misnamed": 0,
        "in_order": True,
        "errors": 0,
    }
    assert found["as_in_peace"] == 3000
    shards = re.search(r"(\d+) shards were done before, (\d+) handed out again", found["said"])
    assert shards is not None
    assert int(shards[1]) == found["shards_at_the_drivers_death"] > 0
    assert int(shards[2]) > 0


def test_a_signal_lets_what_is_being_said_be_said(place: Place) -> None:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{place.url}/v1/completions", json=body, timeout=60, trust_env=False) as response:
        lines = response.iter_lines()
        next(lines)
        place.gateway.send_signal(signal.SIGTERM)
        data = [line.removeprefix("data: ") for line in lines if line]
    assert data[-1] == "[DONE]"
    assert json.loads(data[-2])["choices"][0]["finish_reason"] == "length"
    place.gateway.wait(60)

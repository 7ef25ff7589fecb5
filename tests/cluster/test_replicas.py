"""A replica, and the commands, where there is no Ray."""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from nanoinfer.cluster import BatchOptions, ClusterServeOptions, ray_runtime, replicas
from nanoinfer.cluster.batch import Worker, run_batch
from nanoinfer.cluster.gateway import ForwardedRequest
from nanoinfer.cluster.replicas import ROUTER, Replica, serve_cluster
from nanoinfer.cluster.shards import Item
from nanoinfer.engines.load import load
from nanoinfer.errors import ModelError, NanoinferError, RequestError
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.serve.options import ServeOptions

MODEL = "random:tiny-llama"
OPTIONS = ServeOptions(model=MODEL, dtype="float32", speed="plain", cache_tokens=1024)


def batch(folder: Path, **options: Any) -> BatchOptions:
    return BatchOptions(**{"model": MODEL, "prompts": folder / "prompts", "out": folder / "out", **options})


def test_it_answers_as_the_server_does_and_is_well_as_long_as_its_engine_is() -> None:
    replica = Replica(OPTIONS)

    async def ask() -> bytes:
        body = json.dumps({"prompt": "hello", "max_tokens": 4, "temperature": 0}).encode()
        headers = [(b"content-type", b"application/json")]
        request = ForwardedRequest("POST", "/v1/completions", b"", headers, body)
        messages = [message async for bunch in replica.answer(request, []) for message in bunch]
        assert messages[0]["status"] == 200
        return b"".join(message["body"] for message in messages[1:])

    answer = json.loads(asyncio.run(ask()))
    (expected,) = load(MODEL, dtype="float32").generate("hello", SamplingParams(max_tokens=4))
    assert answer["choices"][0]["text"] == expected.text
    replica.check_health()
    engine = replica.service.async_engine
    engine.close()
    with pytest.raises(RuntimeError, match="engine's thread has ended"):
        replica.check_health()


def test_it_takes_its_engine_along() -> None:
    replica = Replica(OPTIONS)
    engine = replica.service.async_engine
    assert engine.problem(60) is None
    del replica
    gc.collect()
    assert engine.problem(60) is not None


def test_a_worker_gives_a_row_for_each_prompt_whatever_is_wrong_with_it() -> None:
    worker = Worker(MODEL, SamplingParams(max_tokens=3, temperature=1.0, seed=5), {"dtype": "float32"})
    items = [Item(7, "abc", "name"), Item(8, ""), Item(9, [300]), Item(10, [1] * 999), Item(11, [1, 2], None, 2)]
    rows = asyncio.run(worker.run(items))
    assert [row["index"] for row in rows] == [7, 8, 9, 10, 11]
    (expected,) = load(MODEL, dtype="float32").generate("abc", SamplingParams(max_tokens=3, temperature=1.0, seed=12))
    assert rows[0] == {
        "index": 7,
        "id": "name",
        "text": expected.text,
        "finish_reason": "length",
        "prompt_tokens": 3,
        "completion_tokens": 3,
    }
    assert ["error" in row for row in rows] == [False, True, True, True, False]
    assert "the prompt is empty" in rows[1]["error"] and "outside the vocabulary" in rows[2]["error"]
    assert rows[4]["completion_tokens"] == 2
    worker.engine.close()


def test_without_ray_one_line_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "prompts").write_text('{"prompt": "a"}\n')
    with pytest.raises(NanoinferError, match=r"pip install 'nanoinfer\[ray\]'"):
        run_batch(batch(tmp_path, address="auto"))
    with pytest.raises(NanoinferError, match=r"pip install 'nanoinfer\[ray\]'"):
        serve_cluster(ClusterServeOptions(model=MODEL, port=0, address="auto"))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999"])
def test_where_there_is_no_cluster_that_is_said_at_once(address: str) -> None:
    with pytest.raises(NanoinferError, match=f"no Ray cluster at {address} .*give HOST:PORT"):
        serve_cluster(ClusterServeOptions(model=MODEL, port=0, address=address))


def test_ray_gets_its_settings_when_it_is_asked_for_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"RAY_USAGE_STATS_ENABLED": "1"}  # the user's own stays
    monkeypatch.setattr(ray_runtime.os, "environ", environment)
    ray = types.ModuleType("ray")
    for name in ("ray", "ray.serve", "ray.serve.exceptions"):
        monkeypatch.setitem(sys.modules, name, ray)
    assert environment == {"RAY_USAGE_STATS_ENABLED": "1"}
    assert ray_runtime.require() is ray
    assert environment == {**ray_runtime.ENVIRONMENT, "RAY_USAGE_STATS_ENABLED": "1"}


def test_each_replica_gets_the_options_of_the_server_but_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {}

    def deployment(kind: type, **given: Any) -> Any:
        settings.update(given, kind=kind)
        return types.SimpleNamespace(bind=lambda options: options)

    serve = types.SimpleNamespace(deployment=deployment, start=lambda **_: None, run=lambda bound, **_: bound)
    monkeypatch.setattr(replicas, "require", lambda: types.SimpleNamespace(serve=serve))
    monkeypatch.setattr(replicas, "check_room", lambda *needed: settings.update(needed=needed))
    options = ClusterServeOptions(model=MODEL, replicas=3, cpus=2, speed="auto", api_key="k", queue=7, max_running=5)
    bound = replicas.deploy(options)
    assert (settings["kind"], settings["num_replicas"], settings["needed"]) == (Replica, 3, (3, 2, 0))
    assert settings["max_ongoing_requests"] == 7
    assert (bound.model, bound.speed, bound.api_key, bound.max_running) == (MODEL, None, None, 5)
    assert pickle.loads(pickle.dumps(bound)) == bound  # Ray sends it to other machines


def test_the_router_imports_where_there_is_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named by a path that only Ray Serve reads."""
    routing = types.ModuleType("ray.serve.request_router")
    for name in ("PendingRequest", "ReplicaID", "RequestRouter", "RunningReplica"):
        setattr(routing, name, type(name, (), {}))
    for name in ("ray", "ray.serve"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "ray.serve.request_router", routing)
    monkeypatch.delitem(sys.modules, "nanoinfer.cluster.router", raising=False)
    module, _, name = ROUTER.rpartition(".")
    router = getattr(importlib.import_module(module), name)()
    router.initialize_state(slack=0.5)
    sys.modules.pop("nanoinfer.cluster.router")


def test_mistakes_are_told_before_anything_is_started(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text('{"prompt": "a"}\n')
    with pytest.raises(ModelError, match="unknown shape 'tiny-lama'"):
        serve_cluster(ClusterServeOptions(model="random:tiny-lama"))
    with pytest.raises(ModelError, match="unknown shape"):
        run_batch(batch(tmp_path, model="random:tiny-lama"))
    with pytest.raises(RequestError, match="leave n at 1"):
        run_batch(batch(tmp_path), SamplingParams(n=2))
    with pytest.raises(RequestError, match="workers must be at least 1"):
        run_batch(batch(tmp_path, workers=0))
    with pytest.raises(RequestError, match="No such file"):
        run_batch(batch(tmp_path, prompts=tmp_path / "none"))
    assert list(tmp_path.iterdir()) == [tmp_path / "prompts"]

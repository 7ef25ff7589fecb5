"""A replica, and the commands, where there is no Ray."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from pathlib import Path

import pytest

from nanoinfer.cluster.asgi import Asked
from nanoinfer.cluster.batch import Worker, run_batch
from nanoinfer.cluster.replica import Replica
from nanoinfer.cluster.run import serve_cluster
from nanoinfer.cluster.shards import Item
from nanoinfer.engines.load import load
from nanoinfer.errors import ModelError, NanoinferError, RequestError
from nanoinfer.sampling.params import SamplingParams

MODEL = "random:tiny-llama"
OPTIONS = {"dtype": "float32", "speed": "plain", "cache_tokens": 1024}


def test_it_answers_as_the_server_does_and_is_well_as_long_as_its_engine_is() -> None:
    replica = Replica(MODEL, OPTIONS)

    async def ask() -> bytes:
        body = json.dumps({"prompt": "hello", "max_tokens": 4, "temperature": 0}).encode()
        headers = [(b"content-type", b"application/json")]
        asked = Asked("POST", "/v1/completions", b"", headers, body)
        messages = [message async for bunch in replica.answer(asked, []) for message in bunch]
        assert messages[0]["status"] == 200
        return b"".join(message["body"] for message in messages[1:])

    told = json.loads(asyncio.run(ask()))
    (expected,) = load(MODEL, dtype="float32").generate("hello", SamplingParams(max_tokens=4))
    assert told["choices"][0]["text"] == expected.text
    replica.check_health()
    front = replica.service.front
    front.close()
    with pytest.raises(RuntimeError, match="engine's thread has ended"):
        replica.check_health()


def test_it_takes_its_engine_along() -> None:
    replica = Replica(MODEL, OPTIONS)
    front = replica.service.front
    assert front.is_alive
    del replica
    gc.collect()
    assert not front.is_alive


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
        run_batch(MODEL, tmp_path / "prompts", tmp_path / "out", address="auto")
    with pytest.raises(NanoinferError, match=r"pip install 'nanoinfer\[ray\]'"):
        serve_cluster(MODEL, port=0, address="auto")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999"])
def test_where_there_is_no_cluster_that_is_said_at_once(address: str) -> None:
    with pytest.raises(NanoinferError, match=f"no Ray cluster at {address} .*give HOST:PORT"):
        serve_cluster(MODEL, port=0, address=address)


def test_mistakes_are_told_before_anything_is_started(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text('{"prompt": "a"}\n')
    with pytest.raises(ModelError, match="unknown shape 'tiny-lama'"):
        serve_cluster("random:tiny-lama")
    with pytest.raises(ModelError, match="unknown shape"):
        run_batch("random:tiny-lama", tmp_path / "prompts", tmp_path / "out")
    with pytest.raises(RequestError, match="leave n at 1"):
        run_batch(MODEL, tmp_path / "prompts", tmp_path / "out", params=SamplingParams(n=2))
    with pytest.raises(RequestError, match="workers must be at least 1"):
        run_batch(MODEL, tmp_path / "prompts", tmp_path / "out", workers=0)
    with pytest.raises(RequestError, match="No such file"):
        run_batch(MODEL, tmp_path / "none", tmp_path / "out")
    assert list(tmp_path.iterdir()) == [tmp_path / "prompts"]

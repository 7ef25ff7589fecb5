"""A real server on a free port of this machine, for as long as a test needs it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.models.registry import LoadedModel
from nanoinfer.serve.app import make_app
from nanoinfer.serve.service import ServerLimits, Service
from tests.engines.helpers import scripted

EOS = 200
#: Messages become their contents, one behind the other: a prompt is as long as it looks.
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
FORTY = "The quick brown fox jumps over lazy dogs"
SECONDS = 30.0


class Server:
    """What a test sees of a server under way."""

    def __init__(self, service: Service, url: str) -> None:
        self.service, self.url = service, url
        self.client = httpx.Client(base_url=url, timeout=SECONDS, trust_env=False)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return self.client.post(path, json=body, **more)

    def complete(self, **body: Any) -> Any:
        """A completion of the prompt "hi" unless there is another."""
        return self.post("/v1/completions", {"model": "m", "prompt": "hi", **body})

    def chat(self, **body: Any) -> Any:
        """The turn behind "hi"."""
        return self.post(
            "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "hi"}], **body}
        )

    def frames(self, path: str, body: Any) -> list[Any]:
        """The data of each frame, parsed; ``[DONE]`` as that."""
        with self.client.stream("POST", path, json=body) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            text = "".join(response.iter_text())
        assert text.endswith("\n\n")
        frames = text.removesuffix("\n\n").split("\n\n")
        assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
        data = [frame.removeprefix("data: ") for frame in frames]
        return [item if item == "[DONE]" else json.loads(item) for item in data]

    def is_empty(self) -> bool:
        """Whether nobody runs or waits, and every block is free or cached."""
        engine = self.service.engine
        return not engine.busy and engine.pool.used == 0

    def until_empty(self) -> None:
        end = time.monotonic() + SECONDS
        while not self.is_empty():
            assert time.monotonic() < end, "somebody still holds a place or a block"
            time.sleep(0.005)
        self.service.engine.scheduler.check()


def saying(text: str = FORTY, prompt: int = 2, context: int = 64, eos: bool = True) -> LoadedModel:
    """A model that says this text, then ends; behind a prompt of so many tokens."""
    ids = [*scripted(text, 1).tokenizer.encode(text), *([EOS] if eos else [])]  # type: ignore[union-attr]
    loaded = scripted(ids, prompt, eos=[EOS], context=context)
    assert loaded.tokenizer is not None
    loaded.tokenizer.chat_template = TEMPLATE
    return loaded


@contextmanager
def serving(
    loaded: LoadedModel, limits: ServerLimits | None = None, api_key: str | None = None, **options: Any
) -> Iterator[Server]:
    """A server of this model, named m."""
    engine = ContinuousEngine(loaded, **{"block_size": 4, "max_running": 8, "token_budget": 32, **options})
    service = Service(engine, "m", limits or ServerLimits())
    config = uvicorn.Config(make_app(service, api_key), port=0, log_level="warning", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + SECONDS
    while not server.started:
        assert thread.is_alive() and time.monotonic() < end
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Server(service, f"http://127.0.0.1:{port}")
    finally:
        server.should_exit = True
        thread.join(SECONDS)
        assert not thread.is_alive()

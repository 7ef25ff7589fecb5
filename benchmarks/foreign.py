"""The load generator on a server that is not ours: llama-cpp-python's, with the same weights.

Its streams tell no usage, so the client counts tokens with the model's own tokenizer and marks the count as an
estimate. The same requests are asked again without a stream, where that server does tell: both counts must agree.
``python -m benchmarks.foreign`` takes a minute on two cores and stores its result under ``results/``.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp

from benchmarks.peers import environment
from benchmarks.store import options, store
from nanoinfer.bench.client import HttpTarget
from nanoinfer.bench.loadgen import closed_loop
from nanoinfer.bench.summary import summarise
from nanoinfer.errors import ModelError, NanoinferError
from nanoinfer.measure.environment import provenance
from nanoinfer.models import fetch
from nanoinfer.models.registry import load_model
from nanoinfer.workload.items import WorkItem

PROMPTS = (
    "The sea is",
    "A recipe for bread needs",
    "Once upon a time there was",
    "The capital of France is",
    "Water boils when",
    "In the year 1900",
)
START_S = 60.0


@contextmanager
def server() -> Iterator[str]:
    """``python -m llama_cpp.server`` on a free port; its address once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = ["-m", "llama_cpp.server", "--model", str(fetch.SMOLLM2.path), "--host", "127.0.0.1", "--port", port]
    words += ["--n_ctx", "2048", "--interrupt_requests", "False"]  # or a new request ends the stream before it
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([str(environment.python("llamacpp")), *words], **quiet)  # type: ignore[call-overload]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


async def until_ready(address: str) -> None:
    """Raises :class:`ModelError` where it does not answer in time."""
    async with aiohttp.ClientSession(trust_env=False) as client:
        for _ in range(int(START_S * 5)):
            try:
                async with client.get(f"{address}/v1/models") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)
    raise ModelError(f"llama-cpp-python's server did not answer within {START_S:.0f} s")


async def own_count(address: str, model: str, prompt: str, tokens: int) -> int:
    """What the server says that it generated, asked without a stream."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    async with (
        aiohttp.ClientSession(trust_env=False) as client,
        client.post(f"{address}/v1/completions", json=body) as r,
    ):
        return int((await r.json())["usage"]["completion_tokens"])


async def measure(address: str, tokens: int) -> dict[str, Any]:
    """One closed loop of two users, and the counts side by side."""
    await until_ready(address)
    tokenizer = load_model("smollm2-135m", dtype="bfloat16").tokenizer
    assert tokenizer is not None
    target = await HttpTarget.connect(
        address, count=lambda text: len(tokenizer.encode(text)), extra={"temperature": 0, "ignore_eos": None}
    )
    work = [WorkItem(prompt, tokens) for prompt in PROMPTS]
    run = await closed_loop(target, work, users=2, seconds=None, requests=len(work))
    own = [await own_count(address, target.model, prompt, tokens) for prompt in PROMPTS]
    await target.close()
    counted = [trace.output_tokens for trace in run.traces]
    return {
        "counted": counted,
        "told": own,
        "equal": sorted(counted) == sorted(own),
        "estimated": all(trace.estimated for trace in run.traces),
        "summary": summarise(run, None),
    }


def main() -> None:
    """Measure, print and store; 1 where the counts differ."""
    args = options(__doc__, "results/foreign.json", tokens=48)
    try:
        if not environment.installed("llamacpp"):
            raise ModelError("not installed: python -m benchmarks.compare --install llamacpp")
        with server() as address:
            found = asyncio.run(measure(address, args.tokens))
    except NanoinferError as error:
        sys.exit(f"benchmarks.foreign: {error}")
    store(args.out, {"provenance": provenance(), "server": "llama-cpp-python 0.3.36", **found})
    print(f"counted {found['counted']}, told {found['told']}; written to {args.out}")
    if not found["equal"]:
        sys.exit("benchmarks.foreign: the counts differ")


if __name__ == "__main__":
    main()

"""Small loaded models for the engine tests."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from nanoinfer.configs.config import ModelConfig
from nanoinfer.engines.async_engine import AsyncEngine, QueueFull
from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.engines.request import Completion
from nanoinfer.engines.static import NaiveEngine
from nanoinfer.models.registry import LoadedModel
from nanoinfer.models.weights import build
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.text import tokenizer_files
from tests.engines.harness import free_blocks

GPT2 = ModelConfig("gpt2", 2, 16, 2, 2, 8, 64, 256, 12)
LLAMA = ModelConfig("llama", 2, 32, 4, 2, 8, 48, 256, 24, tied=False)
BLOCK = 4
T = TypeVar("T")
SECONDS = 30.0  # nothing here takes so long unless it hangs


def tiny(config: ModelConfig, eos: Sequence[int] = (), seed: int = 0) -> LoadedModel:
    """A random model whose logits are spread widely enough for greedy choices to be clear."""
    model = build(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.copy_(torch.randn(p.shape, generator=generator) * 0.4)
    return LoadedModel("tiny", model, tokenizer_files.byte_level(), frozenset(eos), "random, for tests")


class Scripted(nn.Module):
    """A model that says a fixed sequence: after a prompt of ``start`` tokens, ``script[i]`` follows."""

    def __init__(self, script: Sequence[int], start: int, context: int = 64) -> None:
        super().__init__()
        self.config = ModelConfig("llama", 1, 2, 1, 1, 2, 2, 256, context)
        self.script, self.start_at = list(script), start
        self.weight = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, ids: Tensor, positions: Tensor, cache=None, mask=None, last_only: bool = False) -> Tensor:  # type: ignore[no-untyped-def]
        if cache is not None:
            cache.update(
                0, torch.zeros(ids.shape[0], 1, ids.shape[1], 2), torch.zeros(ids.shape[0], 1, ids.shape[1], 2)
            )
            cache.advance(ids.shape[1])
        step = (positions[:, -1] + 1 - self.start_at).clamp(max=len(self.script) - 1)
        return torch.nn.functional.one_hot(torch.tensor(self.script)[step], 256).float()[:, None] * 40

    def hidden(self, ids: Tensor, positions: Tensor, cache=None, mask=None) -> Tensor:  # type: ignore[no-untyped-def]
        """``[B, T, V]``: what is said after each token, whatever the others are."""
        if cache is not None:
            nothing = torch.zeros(ids.shape[0], 1, ids.shape[1], 2)
            cache.attend(0, nothing, nothing, nothing, mask)
            cache.advance(ids.shape[1])
        step = (positions + 1 - self.start_at).clamp(0, len(self.script) - 1)
        return torch.nn.functional.one_hot(torch.tensor(self.script)[step], 256).float() * 40

    def head(self, x: Tensor) -> Tensor:
        return x


def scripted(text: str | Sequence[int], start: int, eos: Sequence[int] = (), context: int = 64) -> LoadedModel:
    tokenizer = tokenizer_files.byte_level()
    ids = tokenizer.encode(text) if isinstance(text, str) else text
    return LoadedModel("scripted", Scripted(ids, start, context), tokenizer, frozenset(eos), "scripted, for tests")


class Alone:
    """What the naive engine makes of a request that has no neighbours; worked out once for each."""

    tolerance = 1e-4  # of log-probabilities in fp32

    def __init__(self, loaded: LoadedModel) -> None:
        self.engine = NaiveEngine(loaded)
        self.known: dict[tuple[tuple[int, ...], SamplingParams], list[Completion]] = {}

    def __call__(self, prompt: Sequence[int], params: SamplingParams) -> list[Completion]:
        """One completion a sample, with the log-probabilities of two alternatives at least."""
        key = tuple(prompt), params
        if key not in self.known:
            wanted = replace(params, logprobs=max(2, params.logprobs or 0))
            self.known[key] = self.engine.generate([list(prompt)], wanted)
            if params.temperature == 0 and params.repetition_penalty == 1.0:
                for entry in self.known[key][0].logprobs or ():
                    assert entry.top[0][1] - entry.top[1][1] > 2 * self.tolerance, "no clear choice: take another seed"
        return self.known[key]

    def check(self, done: Completion, params: SamplingParams, sample: int = 0) -> None:
        """Assert that a completion is what it would have been alone."""
        solo = self(done.prompt_ids, params)[sample]
        assert (done.token_ids, done.text, done.finish_reason) == (solo.token_ids, solo.text, solo.finish_reason)
        assert done.trace.output_tokens == len(done.token_ids)
        for ours, its in zip(done.logprobs or (), solo.logprobs or (), strict=params.logprobs is not None):
            assert ours.logprob == pytest.approx(its.logprob, abs=self.tolerance)
            assert dict(ours.top) == pytest.approx(dict(its.top[: params.logprobs]), abs=self.tolerance)


# --- the continuous engine ------------------------------------------------------------


def engine_of(loaded: LoadedModel, **options: Any) -> ContinuousEngine:
    return ContinuousEngine(loaded, **{"block_size": BLOCK, "max_running": 6, "token_budget": 9, **options})


def checked_after_each_step(engine: ContinuousEngine, poison: str | None = None) -> ContinuousEngine:
    """Check all accounts after every step, and fill with NaN all blocks that are free."""
    step = engine.step

    def wrapped() -> None:
        step()
        engine.scheduler.check()
        if poison == "all":
            engine.pool.drop_cached()
        if poison:
            unheld = torch.tensor(free_blocks(engine.pool, engine.scheduler.tables), dtype=torch.long)
            engine.cache.k[:, unheld] = engine.cache.v[:, unheld] = math.nan

    engine.step = wrapped  # type: ignore[method-assign]
    return engine


def check_all(
    engine: ContinuousEngine,
    alone: Alone,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
) -> None:
    """Generate, hold every completion to its request alone, and find the pool whole at the end."""
    settings = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    done = engine.generate(list(prompts), list(settings))
    wanted = [(p, sample) for p in settings for sample in range(p.n)]
    assert len(done) == len(wanted)
    for completion, (p, sample) in zip(done, wanted, strict=True):
        alone.check(completion, p, sample)
    engine.pool.check([])
    assert engine.pool.used == 0
    assert not engine.busy


def nan_after(token: int) -> LoadedModel:
    """A model whose logits are NaN once it has read ``token``; such a token is never generated."""
    loaded = tiny(LLAMA)
    loaded.model.embed_tokens.weight[token] = math.nan  # type: ignore[union-attr]
    loaded.model.lm_head.weight[token] = 0  # type: ignore[union-attr]
    return loaded


def in_threads(work: Sequence[Callable[[], None]], seconds: float = SECONDS) -> None:
    """Run these at the same time; raise what one raised, or fail where one hangs."""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


# --- in an event loop ------------------------------------------------------------------


def played(play: Callable[[], Awaitable[None]]) -> None:
    """Run it in an event loop of a thread of its own, and fail where either hangs."""
    in_threads([lambda: asyncio.run(asyncio.wait_for(play(), SECONDS))], SECONDS + 5)  # type: ignore[arg-type]


async def soon(holds: Callable[[], bool]) -> None:
    """Wait until it holds; :func:`played` ends the waiting."""
    while not holds():
        await asyncio.sleep(0.001)


async def in_thread(work: Callable[..., T], *args: Any) -> T:
    """What it returns, from a thread of its own; one that hangs does not keep Python from leaving."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            loop.call_soon_threadsafe(done.set_result, work(*args))
        except BaseException as error:
            loop.call_soon_threadsafe(done.set_exception, error)

    threading.Thread(target=run, daemon=True).start()
    return await done


class Gated(ContinuousEngine):
    """An engine that runs a step only when it is let."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded, block_size=BLOCK, max_running=8, token_budget=16)
        self.permits, self.steps = threading.Semaphore(0), 0

    def step(self) -> None:
        self.permits.acquire()
        try:
            super().step()
        finally:
            self.steps += 1

    def let(self, steps: int = 1) -> None:
        self.permits.release(steps)


@asynccontextmanager
async def serving(engine: ContinuousEngine, max_outstanding: int = 256) -> AsyncIterator[AsyncEngine]:
    """An async engine that is found idle, its pool whole, its slots free and its thread gone at the end."""
    async_engine = AsyncEngine(engine, max_outstanding)
    try:
        yield async_engine
        if isinstance(engine, Gated):
            engine.let(1000)
        await soon(lambda: not engine.busy)
        assert engine.pool.used == 0
        engine.pool.check([])
        await asyncio.sleep(0)
        if async_engine.problem(60) is None:
            await check_slots(async_engine)
    finally:
        if isinstance(engine, Gated):
            engine.let(1000)
        await in_thread(async_engine.close)
        assert async_engine.problem(60) == "the engine's thread has ended"


async def check_slots(async_engine: AsyncEngine) -> None:
    """Assert that all slots are free, and no more: requests for no token hold theirs until the loop's next turn."""
    nothing = SamplingParams(max_tokens=0)
    streams = [await async_engine.submit([1], nothing, wait=False) for _ in range(async_engine.max_outstanding)]
    with pytest.raises(QueueFull):
        await async_engine.submit([1], nothing, wait=False)
    for stream in streams:
        await stream.finished()


def present(engine: ContinuousEngine) -> int:
    """Sequences that run or wait."""
    return len(engine.scheduler.running) + len(engine.scheduler.waiting)

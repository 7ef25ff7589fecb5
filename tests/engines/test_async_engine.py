"""Many callers, one model: every stream is as if alone, no slot and no block is lost, no caller waits for ever."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from nanoinfer.engines.async_engine import AsyncEngine, QueueFull, Stream
from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.engines.request import Deliver, Request
from nanoinfer.errors import RequestError
from nanoinfer.sampling.params import SamplingParams
from tests.engines.helpers import (
    LLAMA,
    SECONDS,
    Alone,
    Gated,
    engine_of,
    in_thread,
    in_threads,
    nan_after,
    played,
    present,
    scripted,
    serving,
    soon,
    tiny,
)

TINY = tiny(LLAMA)
ALONE = Alone(TINY)
GREEDY = SamplingParams(max_tokens=6)
LONG = SamplingParams(max_tokens=23)


def test_fifty_streams_at_once_equal_each_alone() -> None:
    asked = [
        (
            [i % 7, 2, 3, 4, 5][: 1 + i % 5],
            SamplingParams(max_tokens=1 + i % 9, temperature=i % 3 / 2, seed=i, n=1 + i % 2),
        )
        for i in range(50)
    ]

    async def play() -> None:
        async with serving(engine_of(TINY), max_outstanding=20) as async_engine:

            async def read(prompt: list[int], params: SamplingParams) -> None:
                stream = await async_engine.submit(prompt, params)
                tokens: list[list[int | None]] = [[] for _ in range(params.n)]
                async for event in stream:
                    tokens[event.request].append(event.token_id)
                assert tokens == [c.token_ids for c in stream.completions]
                for sample, done in enumerate(stream.completions):
                    ALONE.check(done, params, sample)
                    assert done.trace.t_start is not None
                    assert done.trace.t_scheduled <= done.trace.t_start < done.trace.chunks[0][0]

            await asyncio.gather(*(read(prompt, params) for prompt, params in asked))

    for prompt, params in asked:
        ALONE(prompt, params)
    played(play)


def test_split_characters_of_two_streams() -> None:
    async def play() -> None:
        engine = ContinuousEngine(scripted([172, 253, 99, 247, 127, 102], start=2))
        async with serving(engine) as async_engine:
            one = await async_engine.submit([1, 2], SamplingParams(max_tokens=4))
            two = await async_engine.submit([1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=2))
            assert [event.text async for event in one] == ["", "", "", "\N{LLAMA}"]
            assert [event.text async for event in two] == ["", "é"]

    played(play)


def test_no_token_wanted() -> None:
    async def play() -> None:
        async with serving(engine_of(TINY), max_outstanding=1) as async_engine:
            for _ in range(3):
                done = await (await async_engine.submit([1, 2], SamplingParams(max_tokens=0, n=2))).finished()
                assert [(c.token_ids, c.finish_reason) for c in done] == [([], "length")] * 2

    played(play)


# --- cancelled ------------------------------------------------------------------------


def test_cancel_ends_the_iteration_and_frees_the_blocks_within_a_step() -> None:
    async def play() -> None:
        engine = Gated(TINY)
        async with serving(engine) as async_engine:
            stream = await async_engine.submit([1, 2, 3], LONG)
            other = await async_engine.submit([4] * 9, LONG)
            engine.let(2)
            assert [(await anext(stream)).token_id for _ in range(2)] == ALONE([1, 2, 3], LONG)[0].token_ids[:2]
            await soon(lambda: engine.steps == 2)
            both = engine.pool.used
            stream.cancel()
            stream.cancel()
            engine.let()
            await soon(lambda: engine.pool.used < both)
            assert engine.steps <= 3
            assert [event async for event in stream] == []
            assert stream.requests[0].trace.status == "cancelled"
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            engine.let(100)
            ALONE.check((await other.finished())[0], LONG)
            other.cancel()  # after its end: nothing happens
            assert other.completions[0].trace.status == "ok"

    played(play)


def test_events_that_have_come_are_read_before_a_cancelled_stream_ends() -> None:
    async def play() -> None:
        engine = Gated(TINY)
        async with serving(engine) as async_engine:
            stream = await async_engine.submit([1], LONG)
            engine.let(3)
            await soon(lambda: engine.steps == 3 and len(stream.requests[0].generated) == 3)
            threading.Thread(target=stream.cancel).start()  # any thread may
            assert len([event async for event in stream]) == 3
            with pytest.raises(RequestError, match="cancelled"):
                await stream.finished()

    played(play)


@pytest.mark.parametrize("how", ["task", "break", "finished"])
def test_a_stream_that_nothing_refers_to_is_cancelled(how: str) -> None:
    async def play() -> None:
        engine = Gated(TINY)
        async with serving(engine) as async_engine:

            async def read() -> None:
                stream = await async_engine.submit([1, 2, 3], LONG)
                if how == "finished":
                    await stream.finished()
                async for _ in stream:
                    if how == "break":
                        break

            task = asyncio.create_task(read())
            await soon(lambda: present(engine) == 1)
            other = await async_engine.submit([4] * 9, LONG)
            engine.let()
            await soon(lambda: engine.steps == 1)
            if how in ("task", "finished"):
                task.cancel()
            await asyncio.wait([task])
            del task
            gc.collect()
            engine.let(2)
            await soon(lambda: present(engine) == 1)  # long before its 23 tokens
            assert engine.steps <= 3
            engine.let(100)
            ALONE.check((await other.finished())[0], LONG)

    played(play)


def test_a_generator_that_is_closed_is_cancelled() -> None:
    async def play() -> None:
        engine = Gated(TINY)
        async with serving(engine):
            generation = engine.stream([[1, 2, 3], [4]], LONG)
            engine.let(2)
            await in_thread(next, generation)
            await in_thread(generation.close)
            engine.let()
            await soon(lambda: not engine.busy and engine.pool.used == 0)
            assert engine.steps <= 4
            assert [r.trace.status for r in generation.requests] == ["cancelled"] * 2

    played(play)


def test_a_reader_that_gives_up_waiting_may_come_back() -> None:
    async def play() -> None:
        engine = Gated(TINY)
        async with serving(engine) as async_engine:
            stream = await async_engine.submit([1, 2, 3], GREEDY)
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(stream), 0.01)
            engine.let(100)
            ALONE.check((await stream.finished())[0], GREEDY)

    played(play)


# --- event loops ----------------------------------------------------------------------


def test_a_second_event_loop_is_refused_until_the_first_is_closed() -> None:
    engine = engine_of(TINY)
    kept: list[Stream] = []

    async def leave() -> None:
        kept.append(await engine.submit([5, 6], LONG))
        with pytest.raises(RequestError, match="callers in another event loop: use one loop, or close\\(\\) it first"):
            await in_thread(asyncio.run, engine.submit([1], GREEDY))

    async def play() -> None:
        ALONE.check((await (await engine.submit([1, 2, 3], GREEDY)).finished())[0], GREEDY)
        kept.pop().cancel()  # whose loop is closed
        await soon(lambda: not engine.busy)
        await in_thread(engine.close)

    asyncio.run(leave())
    played(play)
    assert (engine.pool.used, engine.busy) == (0, False)


# --- threads --------------------------------------------------------------------------


def test_threads_generate_while_streams_run() -> None:
    asked = [[n, i, 1] for n in range(4) for i in range(4)]
    params = SamplingParams(max_tokens=6, temperature=0.8, seed=4)
    for prompt in (*asked, *([i] * 4 for i in range(10))):
        ALONE(prompt, params)

    async def play() -> None:
        engine = engine_of(TINY)
        async with serving(engine, max_outstanding=4) as async_engine:

            def work(n: int) -> None:
                mine = asked[4 * n : 4 * n + 4]
                for done in engine.generate(mine, params):
                    ALONE.check(done, params)
                generation = engine.stream(mine, params)
                next(generation)
                generation.close()  # cancelled on the way
                assert all(r.trace.t_end is not None for r in generation.requests)
                for prompt in mine:
                    assert [e.token_id for e in engine.stream([prompt], params)] == ALONE(prompt, params)[0].token_ids

            async def read(i: int) -> None:
                stream = await async_engine.submit([i] * 4, params)
                ALONE.check((await stream.finished())[0], params)

            threads = in_thread(in_threads, [lambda n=n: work(n) for n in range(4)])  # type: ignore[misc]
            await asyncio.gather(threads, *(read(i) for i in range(10)))

    played(play)


def test_a_stream_begun_before_the_first_submit_goes_on() -> None:
    engine = engine_of(TINY)
    before = engine.stream([[7, 8], [9]], LONG)
    events = [next(before)]

    async def play() -> None:
        stream = await engine.submit([1, 2, 3], LONG)
        for _ in range(10):
            events.append(next(before))
        ALONE.check((await stream.finished())[0], LONG)
        events.extend(before)
        await in_thread(engine.close)

    played(play)
    assert len(events) == 22 + 23
    for done in before.completions:
        ALONE.check(done, LONG)
    assert engine.pool.used == 0


def test_a_program_that_ends_while_streams_run_ends_well() -> None:
    program = """
import asyncio
from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.configs.config import ModelConfig
from nanoinfer.sampling.params import SamplingParams
from tests.engines.helpers import tiny

engine = ContinuousEngine(tiny(ModelConfig("llama", 4, 256, 4, 2, 64, 512, 256, 4000, tied=False)))

async def main():
    streams = [await engine.submit([1, 2, 3], SamplingParams(max_tokens=3900)) for _ in range(4)]
    await anext(streams[0])
    return streams

kept = asyncio.run(main())
print(engine.busy)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True\n", "")


# --- slots ----------------------------------------------------------------------------


def test_submit_waits_for_a_slot_or_says_that_there_is_none() -> None:
    async def play() -> None:
        engine = Gated(TINY)
        async with serving(engine, max_outstanding=2) as async_engine:
            first, second = await async_engine.submit([1], GREEDY), await async_engine.submit([2], LONG, wait=False)
            with pytest.raises(QueueFull, match="2 requests are under way, and no more are taken; try again later"):
                await async_engine.submit([3], GREEDY, wait=False)
            third = asyncio.create_task(async_engine.submit([3], GREEDY))
            await asyncio.sleep(0.02)
            assert not third.done()
            engine.let(6)
            await first.finished()
            stream = await third
            engine.let(100)
            ALONE.check((await stream.finished())[0], GREEDY)
            ALONE.check((await second.finished())[0], LONG)

    played(play)


def test_slots_go_in_the_order_of_asking() -> None:
    async def play() -> None:
        engine = Gated(TINY)
        async with serving(engine, max_outstanding=1) as async_engine:
            first = await async_engine.submit([0], LONG)
            got: list[int] = []

            async def ask(number: int) -> None:
                stream = await async_engine.submit([number], GREEDY)
                got.append(number)
                await stream.finished()

            tasks = []
            for number in range(1, 8):
                tasks.append(asyncio.create_task(ask(number)))
                await asyncio.sleep(0)
            for gone in (3, 5):
                tasks[gone - 1].cancel()
            await asyncio.sleep(0.01)
            first.cancel()
            # The slot belongs to the first in the queue from the moment it is free: no later call slips in.
            while not got:
                with pytest.raises(QueueFull):
                    await async_engine.submit([9], GREEDY, wait=False)
                await asyncio.sleep(0)
            with pytest.raises(QueueFull):
                await async_engine.submit([9], GREEDY, wait=False)
            engine.let(1000)
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert got == [1, 2, 4, 6, 7]
            assert [isinstance(d, asyncio.CancelledError) for d in done] == [n in (3, 5) for n in range(1, 8)]

    played(play)


@pytest.mark.parametrize("turns", range(5))
def test_a_slot_that_comes_as_its_taker_is_cancelled_goes_to_the_next(turns: int) -> None:
    async def play() -> None:
        engine = Gated(TINY)
        async with serving(engine, max_outstanding=1) as async_engine:
            first = await async_engine.submit([1], GREEDY)
            waiting = [asyncio.create_task(async_engine.submit([2], GREEDY)) for _ in range(2)]
            await asyncio.sleep(0.01)
            first.cancel()
            await soon(lambda: not engine.busy)
            for _ in range(turns):
                await asyncio.sleep(0)
            waiting[0].cancel()
            engine.let(100)
            stream = await waiting[1]
            ALONE.check((await stream.finished())[0], GREEDY)
            assert waiting[0].cancelled() or turns > 0

    played(play)


def test_what_is_refused_takes_no_slot() -> None:
    async def play() -> None:
        async with serving(engine_of(TINY), max_outstanding=1) as async_engine:
            for prompt, params, says in [
                ([999], GREEDY, "id 999 is outside the vocabulary"),
                ([], GREEDY, "prompt is empty"),
                ([1], SamplingParams(n=9), "n = 9 samples cannot run together"),
                ([1], SamplingParams(on_full="crop"), "does not crop"),
                ([1] * 24, GREEDY, "shorten it to 23 tokens"),
            ]:
                with pytest.raises(RequestError, match=says):
                    await async_engine.submit(prompt, params)
                with pytest.raises(RequestError, match=says):
                    await async_engine.submit(prompt, params, wait=False)
            ALONE.check((await (await async_engine.submit([1], GREEDY)).finished())[0], GREEDY)
        with pytest.raises(RequestError, match="max_outstanding must be a whole number at least 1, got 0"):
            AsyncEngine(engine_of(TINY), 0)

    played(play)


# --- trouble --------------------------------------------------------------------------


def test_a_request_whose_logits_are_not_numbers_ends_alone() -> None:
    loaded = nan_after(200)
    alone = Alone(loaded)

    async def play() -> None:
        engine = engine_of(loaded)
        async with serving(engine) as async_engine:
            bad = await async_engine.submit([1, 200], SamplingParams(max_tokens=4, n=2))
            good = await async_engine.submit([1, 2], GREEDY)
            for _ in range(2):
                with pytest.raises(RequestError, match="logits are not finite"):
                    await anext(bad)
            assert [event async for event in bad] == []
            alone.check((await good.finished())[0], GREEDY)
            with pytest.raises(RequestError, match="logits are not finite"):
                await in_thread(engine.generate, [[3], [200]], GREEDY)

    played(play)


def test_a_step_that_fails_is_told_to_every_reader_and_the_engine_serves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny(LLAMA)

    def broken(*args: object) -> None:
        raise ValueError("out of paper")

    async def play() -> None:
        engine = Gated(loaded)
        async with serving(engine, max_outstanding=3) as async_engine:
            streams = [await async_engine.submit([i], SamplingParams(max_tokens=9, n=1 + i)) for i in range(3)]
            call = asyncio.create_task(in_thread(engine.generate, [[7], [8]], GREEDY))
            await soon(lambda: present(engine) == 5)
            waiting = asyncio.create_task(async_engine.submit([4], GREEDY))
            engine.let(2)
            await soon(lambda: engine.steps == 2)
            with monkeypatch.context() as patch:
                patch.setattr(loaded.model, "head", broken)
                engine.let(1)  # not two: the other thread at the gate would fail the prompt that waits
                for stream in streams:
                    with pytest.raises(RequestError, match="out of paper"):
                        await stream.finished()
                await soon(lambda: {r.trace.status for s in streams for r in s.requests} == {"error"})
            engine.let(100)
            # The caller of generate has the error itself if its own thread ran the step.
            with pytest.raises((RequestError, ValueError), match="out of paper"):
                await call
            ALONE.check((await (await waiting).finished())[0], GREEDY)

    played(play)


def test_close_while_busy_ends_every_reader() -> None:
    async def play() -> None:
        engine = Gated(TINY)
        async with serving(engine, max_outstanding=3) as async_engine:
            streams = [await async_engine.submit([i], LONG) for i in range(3)]
            readers = [asyncio.create_task(s.finished()) for s in streams]
            call = asyncio.create_task(in_thread(engine.generate, [[7], [8]], LONG))
            await soon(lambda: present(engine) == 5)
            waiting = [asyncio.create_task(async_engine.submit([4], LONG)) for _ in range(12)]
            engine.let(2)
            await soon(lambda: engine.steps == 2)
            closing = [asyncio.create_task(in_thread(async_engine.close)) for _ in range(2)]
            while not all(task.done() for task in closing):
                engine.let(1)
                await asyncio.sleep(0.01)
            engine.let(1000)
            for ended in (*readers, call):
                with pytest.raises(RequestError, match="cancelled, or its engine closed"):
                    await ended
            for refused in waiting:
                with pytest.raises(RequestError, match="this engine was closed; make a new one"):
                    await refused
            with pytest.raises(RequestError, match="was closed"):
                await async_engine.submit([1], LONG)
            assert async_engine.problem(60) == "the engine's thread has ended"
            assert (engine.pool.used, engine.busy) == (0, False)
            async_engine.close()  # again
            ALONE.check(engine.generate([[1]], GREEDY)[0], GREEDY)
            ALONE.check((await (await engine.submit([1], GREEDY)).finished())[0], GREEDY)
            await in_thread(engine.close)

    played(play)


def test_what_is_submitted_while_the_engine_closes_is_ended_too() -> None:
    class Slow(ContinuousEngine):
        def add(self, samples: Sequence[Request], deliver: Deliver) -> None:
            time.sleep(0.1)
            super().add(samples, deliver)

    async def play() -> None:
        async_engine = AsyncEngine(Slow(TINY))
        closing = threading.Timer(0.05, async_engine.close)
        closing.start()
        stream = await async_engine.submit([1], LONG)  # it was not closed yet when this began to be added
        await in_thread(closing.join)
        with pytest.raises(RequestError, match="cancelled"):
            await stream.finished()

    played(play)


def test_a_stream_ends_when_it_is_cancelled_and_not_when_a_long_step_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny(LLAMA)
    inside, go = threading.Event(), threading.Event()
    hidden = loaded.model.hidden

    def slow(*args: Any) -> Any:
        inside.set()
        assert go.wait(SECONDS)
        return hidden(*args)

    monkeypatch.setattr(loaded.model, "hidden", slow)

    async def play() -> None:
        engine = engine_of(loaded)
        async with serving(engine) as async_engine:
            stream = await async_engine.submit([1], LONG)
            await in_thread(inside.wait)
            stream.cancel()
            assert [event async for event in stream] == []
            go.set()

    played(play)

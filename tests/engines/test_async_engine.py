"""Many callers, one model: every stream is as if alone, no place and no block is lost, nobody waits for ever."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time

import pytest

from nanoinfer.engines.async_engine import Front, Stream
from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.errors import RequestError
from nanoinfer.sampling.params import SamplingParams
from tests.engines.helpers import (
    LLAMA,
    Alone,
    Gated,
    beside,
    engine_of,
    front_of,
    in_threads,
    played,
    scripted,
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
        async with front_of(engine_of(TINY), max_outstanding=20) as front:

            async def read(prompt: list[int], params: SamplingParams) -> None:
                stream = await front.submit(prompt, params)
                tokens: list[list[int | None]] = [[] for _ in range(params.n)]
                async for event in stream:
                    tokens[event.request].append(event.token_id)
                assert tokens == [c.token_ids for c in stream.completions]
                for sample, done in enumerate(stream.completions):
                    ALONE.check(done, params, sample)
                    assert done.trace.t_start is not None
                    assert done.trace.t_scheduled <= done.trace.t_start < done.trace.chunks[0][0]

            await asyncio.gather(*(read(*one) for one in asked))

    for one in asked:
        ALONE(*one)
    played(play)


def test_split_characters_of_two_streams() -> None:
    async def play() -> None:
        engine = ContinuousEngine(scripted([172, 253, 99, 247, 127, 102], start=2))
        async with front_of(engine) as front:
            one = await front.submit([1, 2], SamplingParams(max_tokens=4))
            two = await front.submit([1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=2))
            assert [event.text async for event in one] == ["", "", "", "\N{LLAMA}"]
            assert [event.text async for event in two] == ["", "é"]

    played(play)


def test_no_token_wanted() -> None:
    async def play() -> None:
        async with front_of(engine_of(TINY), max_outstanding=1) as front:
            for _ in range(3):
                done = await (await front.submit([1, 2], SamplingParams(max_tokens=0, n=2))).finished()
                assert [(c.token_ids, c.finish_reason) for c in done] == [([], "length")] * 2

    played(play)


# --- cancelled ------------------------------------------------------------------------


def test_cancel_ends_the_iteration_and_frees_the_blocks_within_a_step() -> None:
    async def play() -> None:
        engine = Gated(TINY)
        async with front_of(engine) as front:
            stream = await front.submit([1, 2, 3], LONG)
            other = await front.submit([4] * 9, LONG)
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
        async with front_of(engine) as front:
            stream = await front.submit([1], LONG)
            engine.let(3)
            await soon(lambda: engine.steps == 3 and len(stream.requests[0].generated) == 3)
            threading.Thread(target=stream.cancel).start()  # any thread may
            assert len([event async for event in stream]) == 3
            with pytest.raises(RequestError, match="cancelled"):
                await stream.finished()

    played(play)


@pytest.mark.parametrize("how", ["task", "break", "finished"])
def test_a_stream_that_nobody_holds_any_more_is_cancelled(how: str) -> None:
    async def play() -> None:
        engine = Gated(TINY)
        async with front_of(engine) as front:

            async def read() -> None:
                stream = await front.submit([1, 2, 3], LONG)
                if how == "finished":
                    await stream.finished()
                async for _ in stream:
                    if how == "break":
                        break

            task = asyncio.create_task(read())
            await soon(lambda: front._outstanding == 1)
            other = await front.submit([4] * 9, LONG)
            engine.let()
            await soon(lambda: engine.steps == 1)
            if how in ("task", "finished"):
                task.cancel()
            await asyncio.wait([task])
            del task
            gc.collect()
            engine.let(2)
            await soon(lambda: front._outstanding == 1)  # long before its 23 tokens
            assert engine.steps <= 3
            engine.let(100)
            ALONE.check((await other.finished())[0], LONG)

    played(play)


def test_a_generator_that_is_closed_is_cancelled() -> None:
    async def play() -> None:
        engine = Gated(TINY)
        async with front_of(engine) as front:
            generation = engine.stream([[1, 2, 3], [4]], LONG)
            engine.let(2)
            await beside(next, generation)
            await beside(generation.close)
            engine.let()
            await soon(lambda: front._outstanding == 0 and engine.pool.used == 0)
            assert engine.steps <= 4
            assert [r.trace.status for r in generation.requests] == ["cancelled"] * 2

    played(play)


def test_a_reader_that_gives_up_waiting_may_come_back() -> None:
    async def play() -> None:
        engine = Gated(TINY)
        async with front_of(engine) as front:
            stream = await front.submit([1, 2, 3], GREEDY)
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(stream), 0.01)
            engine.let(100)
            ALONE.check((await stream.finished())[0], GREEDY)

    played(play)


def test_a_loop_that_was_closed_harms_nobody_else() -> None:
    left: list[Stream] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def leave(front: Front) -> None:
        left.append(await front.submit([5, 6], LONG))
        loops.append(asyncio.get_running_loop())
        loops[0].is_closed = lambda: False  # type: ignore[method-assign]  # it closes just after it was asked

    async def play() -> None:
        engine = Gated(TINY)
        async with front_of(engine) as front:
            stream = await front.submit([1, 2, 3], LONG)
            await beside(lambda: asyncio.run(leave(front)))
            engine.let(100)
            ALONE.check((await stream.finished())[0], LONG)
            left.pop().cancel()
            del loops[0].is_closed

    played(play)


# --- threads --------------------------------------------------------------------------


def test_threads_generate_while_streams_run() -> None:
    asked = [[n, i, 1] for n in range(4) for i in range(4)]
    params = SamplingParams(max_tokens=6, temperature=0.8, seed=4)
    for prompt in (*asked, *([i] * 4 for i in range(10))):
        ALONE(prompt, params)

    async def play() -> None:
        async with front_of(engine_of(TINY), max_outstanding=4) as front:
            engine = front.engine
            assert isinstance(engine, ContinuousEngine)

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
                stream = await front.submit([i] * 4, params)
                ALONE.check((await stream.finished())[0], params)

            threads = beside(in_threads, [lambda n=n: work(n) for n in range(4)])  # type: ignore[misc]
            await asyncio.gather(threads, *(read(i) for i in range(10)))

    played(play)


def test_sync_callers_take_places_too() -> None:
    async def play() -> None:
        engine = Gated(TINY)
        async with front_of(engine, max_outstanding=2) as front:
            call = asyncio.create_task(beside(engine.generate, [[1], [2], [3]], GREEDY))
            await soon(lambda: front._outstanding == 3)
            waiting = asyncio.create_task(front.submit([4], GREEDY))
            await asyncio.sleep(0.02)
            assert not waiting.done()
            engine.let(100)
            for done in await call:
                ALONE.check(done, GREEDY)
            ALONE.check((await (await waiting).finished())[0], GREEDY)

    played(play)


def test_two_loops_in_two_threads_share_one_front(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(TINY)
    made: list[Front] = []

    class Slow(Front):
        def __init__(self, engine: ContinuousEngine) -> None:
            time.sleep(0.05)  # long enough for the other thread to come by
            super().__init__(engine)
            made.append(self)

    monkeypatch.setattr("nanoinfer.engines.continuous.Front", Slow)
    together = threading.Barrier(2)

    async def play(first: int) -> None:
        together.wait()
        streams = [await engine.submit([first, i], GREEDY) for i in range(5)]
        for stream in streams:
            ALONE.check((await stream.finished())[0], GREEDY)

    for first in (1, 2):
        for i in range(5):
            ALONE([first, i], GREEDY)
    in_threads([lambda f=first: asyncio.run(play(f)) for first in (1, 2)])  # type: ignore[misc]
    engine.close()
    assert len(made) == 1
    assert (engine.pool.used, engine.busy, made[0]._thread.is_alive()) == (0, False, False)


def test_a_stream_begun_without_a_front_goes_on_beside_it() -> None:
    engine = engine_of(TINY)
    before = engine.stream([[7, 8], [9]], LONG)
    events = [next(before)]

    async def play() -> None:
        stream = await engine.submit([1, 2, 3], LONG)
        for _ in range(10):
            events.append(next(before))
        ALONE.check((await stream.finished())[0], LONG)
        events.extend(before)
        await beside(engine.close)

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

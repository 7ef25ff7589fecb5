"""A place for everybody in their turn; and when the engine fails or closes, everybody hears of it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from nanoinfer.engines.async_engine import Busy, Front, Stream
from nanoinfer.errors import RequestError
from nanoinfer.sampling.params import SamplingParams
from tests.engines.helpers import LLAMA, Alone, Gated, beside, engine_of, front_of, nan_behind, played, soon, tiny

TINY = tiny(LLAMA)
ALONE = Alone(TINY)
GREEDY = SamplingParams(max_tokens=6)
LONG = SamplingParams(max_tokens=23)


# --- places ---------------------------------------------------------------------------


def test_submit_waits_for_a_place_and_submit_nowait_says_so() -> None:
    async def play() -> None:
        engine = Gated(TINY)
        async with front_of(engine, max_outstanding=2) as front:
            first, second = await front.submit([1], GREEDY), front.submit_nowait([2], LONG)
            with pytest.raises(Busy, match="2 requests are under way, and no more are taken; try again later"):
                front.submit_nowait([3], GREEDY)
            third = asyncio.create_task(front.submit([3], GREEDY))
            await asyncio.sleep(0.02)
            assert not third.done()
            engine.let(6)
            await first.finished()
            stream = await third
            engine.let(100)
            ALONE.check((await stream.finished())[0], GREEDY)
            ALONE.check((await second.finished())[0], LONG)

    played(play)


def test_places_go_in_the_order_of_asking() -> None:
    async def play() -> None:
        engine = Gated(TINY)
        async with front_of(engine, max_outstanding=1) as front:
            first = await front.submit([0], LONG)
            got: list[int] = []

            async def ask(number: int) -> None:
                stream = await front.submit([number], GREEDY)
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
            engine.let(1)
            await soon(lambda: front._outstanding == 0 or got != [])
            # The place belongs to the first in line from the moment it was free: nobody slips in.
            with pytest.raises(Busy):
                front.submit_nowait([9], GREEDY)
            engine.let(1000)
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert got == [1, 2, 4, 6, 7]
            assert [isinstance(d, asyncio.CancelledError) for d in done] == [n in (3, 5) for n in range(1, 8)]

    played(play)


def test_a_place_that_comes_as_its_taker_is_cancelled_goes_to_the_next() -> None:
    async def play() -> None:
        engine = Gated(TINY)
        async with front_of(engine, max_outstanding=1) as front:
            first = await front.submit([1], GREEDY)
            waiting = [asyncio.create_task(front.submit([2], GREEDY)) for _ in range(2)]
            await asyncio.sleep(0.01)
            first.cancel()
            engine.let(1)
            # In one go, with no turn of the loop between: the place comes, and its taker is cancelled.
            while front._under_way:
                time.sleep(0.001)
            waiting[0].cancel()
            engine.let(100)
            stream = await waiting[1]
            ALONE.check((await stream.finished())[0], GREEDY)
            assert waiting[0].cancelled()

    played(play)


def test_a_place_is_not_given_to_a_loop_that_was_closed() -> None:
    async def play() -> None:
        engine = Gated(TINY)
        async with front_of(engine, max_outstanding=1) as front:
            first = await front.submit([1], GREEDY)
            other = asyncio.new_event_loop()
            task = other.create_task(front.submit([2], GREEDY))

            def brutally() -> None:
                other.call_later(0.02, other.stop)
                other.run_forever()
                other.close()

            await beside(brutally)
            waiting = asyncio.create_task(front.submit([3], GREEDY))
            await asyncio.sleep(0)
            engine.let(100)
            await first.finished()
            ALONE.check((await (await waiting).finished())[0], GREEDY)
            task._log_destroy_pending = False  # type: ignore[attr-defined]

    played(play)


def test_what_is_refused_takes_no_place() -> None:
    async def play() -> None:
        async with front_of(engine_of(TINY), max_outstanding=1) as front:
            for prompt, params, says in [
                ([999], GREEDY, "id 999 is outside the vocabulary"),
                ([], GREEDY, "prompt is empty"),
                ([1], SamplingParams(n=9), "n = 9 samples cannot run together"),
                ([1], SamplingParams(on_full="crop"), "does not crop"),
                ([1] * 24, GREEDY, "shorten it to 23 tokens"),
            ]:
                with pytest.raises(RequestError, match=says):
                    await front.submit(prompt, params)
                with pytest.raises(RequestError, match=says):
                    front.submit_nowait(prompt, params)
            ALONE.check((await (await front.submit([1], GREEDY)).finished())[0], GREEDY)
        with pytest.raises(RequestError, match="max_outstanding must be at least 1, got 0"):
            Front(front.engine, 0)

    played(play)


# --- trouble --------------------------------------------------------------------------


def test_a_request_whose_logits_are_not_numbers_ends_alone() -> None:
    loaded = nan_behind(200)
    alone = Alone(loaded)

    async def play() -> None:
        engine = engine_of(loaded)
        async with front_of(engine) as front:
            bad = await front.submit([1, 200], SamplingParams(max_tokens=4, n=2))
            good = await front.submit([1, 2], GREEDY)
            for _ in range(2):
                with pytest.raises(RequestError, match="logits are not finite"):
                    await anext(bad)
            assert [event async for event in bad] == []
            alone.check((await good.finished())[0], GREEDY)
            with pytest.raises(RequestError, match="logits are not finite"):
                await beside(engine.generate, [[3], [200]], GREEDY)

    played(play)


def test_a_step_that_fails_is_told_to_every_reader_and_the_engine_serves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny(LLAMA)

    def broken(*args: object) -> None:
        raise ValueError("out of paper")

    async def play() -> None:
        engine = Gated(loaded)
        async with front_of(engine, max_outstanding=4) as front:
            streams = [await front.submit([i], SamplingParams(max_tokens=9, n=1 + i)) for i in range(3)]
            call = asyncio.create_task(beside(engine.generate, [[7], [8]], GREEDY))
            await soon(lambda: front._outstanding == 5)
            waiting = asyncio.create_task(front.submit([4], GREEDY))
            engine.let(2)
            await soon(lambda: engine.steps == 2)
            with monkeypatch.context() as patch:
                patch.setattr(loaded.model, "head", broken)
                engine.let(1)
                for stream in (*streams, call):
                    with pytest.raises(RequestError, match="the engine failed: ValueError: out of paper"):
                        await (stream.finished() if isinstance(stream, Stream) else stream)
                await soon(lambda: {r.trace.status for s in streams for r in s.requests} == {"error"})
            engine.let(100)
            ALONE.check((await (await waiting).finished())[0], GREEDY)

    played(play)


def test_close_while_busy_ends_every_reader() -> None:
    async def play() -> None:
        engine = Gated(TINY)
        async with front_of(engine, max_outstanding=3) as front:
            streams = [await front.submit([i], LONG) for i in range(3)]
            readers = [asyncio.create_task(s.finished()) for s in streams]
            call = asyncio.create_task(beside(engine.generate, [[7], [8]], LONG))
            await soon(lambda: front._outstanding == 5)
            waiting = [asyncio.create_task(front.submit([4], LONG)) for _ in range(12)]
            engine.let(2)
            await soon(lambda: engine.steps == 2)
            closing = [asyncio.create_task(beside(engine.close)) for _ in range(2)]
            engine.let(100)
            await asyncio.gather(*closing)
            for ended in (*readers, call):
                with pytest.raises(RequestError, match="cancelled, or its engine closed"):
                    await ended
            for refused in waiting:
                with pytest.raises(RequestError, match="this front was closed; make a new one"):
                    await refused
            with pytest.raises(RequestError, match="was closed"):
                await front.submit([1], LONG)
            assert not front._thread.is_alive()
            assert (engine.pool.used, engine.busy) == (0, False)
            front.close()  # again
            ALONE.check(engine.generate([[1]], GREEDY)[0], GREEDY)
            ALONE.check((await (await engine.submit([1], GREEDY)).finished())[0], GREEDY)

    played(play)


def test_what_is_submitted_while_the_front_closes_is_ended_too() -> None:
    class Slow(Front):
        """Looks whether it is closed, and dwells on the answer."""

        closed = False

        @property
        def _closed(self) -> bool:
            seen = self.closed
            time.sleep(0.1)
            return seen

        @_closed.setter
        def _closed(self, value: bool) -> None:
            self.closed = value

    async def play() -> None:
        front = Slow(engine_of(TINY))
        closing = threading.Timer(0.05, front.close)
        closing.start()
        stream = await front.submit([1], LONG)  # it has come by just before the end
        await beside(closing.join)
        with pytest.raises(RequestError, match="cancelled"):
            await stream.finished()

    played(play)

"""The continuous engine under stress: what fails, leaves or comes from another thread harms no other request."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.engines.engine import NonFiniteLogits, check_finite
from nanoinfer.engines.request import Event, Request, RequestCancelled
from nanoinfer.errors import RequestError
from nanoinfer.sampling.params import SamplingParams
from tests.engines.helpers import (
    LLAMA,
    Alone,
    check_all,
    checked_after_each_step,
    engine_of,
    in_threads,
    nan_after,
    tiny,
)

TINY = tiny(LLAMA)
ALONE = Alone(TINY)


def test_logits_from_which_no_token_can_be_chosen() -> None:
    nan, inf = math.nan, math.inf
    logits = torch.tensor([[0, 1, 2], [0, nan, 1], [0, inf, 1], [-inf, 2, -inf], [-inf, -inf, -inf], [9, 1, 3e38]])
    with pytest.raises(NonFiniteLogits, match=r"logits are not finite \(in float32\)") as refused:
        check_finite(logits)
    assert refused.value.rows == [1, 2, 4]


class Desk:
    """Adds requests to an engine and keeps what is delivered for each."""

    def __init__(self, engine: ContinuousEngine) -> None:
        self.engine = engine
        self.got: dict[int, list[Event | RequestError]] = {}

    def add(self, prompt: Sequence[int], params: SamplingParams) -> list[Request]:
        samples = self.engine.admit([list(prompt)], params)
        mine = self.got[id(samples)] = []
        self.engine.add(samples, mine.append)
        self.got.setdefault(id(samples[0]), mine)
        return samples

    def __call__(self, samples: list[Request]) -> list[Event | RequestError]:
        return self.got[id(samples)]


@pytest.mark.parametrize("n", [1, 2])
def test_a_request_whose_logits_are_not_numbers_ends_alone(n: int) -> None:
    loaded = nan_after(200)
    alone, engine = Alone(loaded), engine_of(loaded, cache_tokens=40)
    desk, params = Desk(engine), SamplingParams(max_tokens=6, temperature=0.8, seed=3, n=n)
    checked_after_each_step(engine)
    for turn in range(2):  # the second time over blocks that hold NaN
        asked = [desk.add(p, params) for p in ([1, 2, 3], [4, 200, 6, 7, 8], [9] * 6, [200], [3, 2, 1])]
        while engine.busy:
            engine.step()
        for samples, is_bad in zip(asked, (False, True, False, True, False), strict=True):
            got = desk(samples)
            if is_bad:
                assert len(got) == n
                assert all(isinstance(item, RequestError) and "logits are not finite" in str(item) for item in got)
                assert [r.trace.status for r in samples] == ["error"] * n
            else:
                for sample, request in enumerate(samples):
                    alone.check(request.completion(), params, sample)
        assert engine.pool.used == 0, turn
        engine.pool.drop_cached()


@pytest.mark.parametrize("where", ["hidden", "head", "sample"])
def test_a_step_that_fails_is_told_to_all_and_the_engine_serves_on(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny(LLAMA)
    engine = engine_of(loaded)
    params = SamplingParams(max_tokens=6, n=2)
    other = engine.stream([[5] * 6, [6]], params)
    next(other)  # under way beside the call that fails

    def broken(*args: object, **kw: object) -> None:
        raise ValueError("out of paper")

    with monkeypatch.context() as patch:
        if where == "sample":
            patch.setattr("nanoinfer.engines.engine.sample", broken)
        else:
            patch.setattr(loaded.model, where, broken)
        failing = engine.stream([[1, 2, 3], [4]], SamplingParams(max_tokens=3))
        with pytest.raises(ValueError, match="out of paper"):
            list(failing)
    assert [r.trace.status for r in (*failing.requests, *other.requests)] == ["error"] * 6
    assert (engine.busy, engine.pool.used) == (False, 0)
    with pytest.raises(RequestError, match="the engine failed: ValueError: out of paper"):
        list(other)
    check_all(engine, Alone(loaded), [[5] * 6, [6], [1, 2, 3]], params)


def test_cancelled_neighbours() -> None:
    rng = random.Random(1)
    engine = checked_after_each_step(engine_of(TINY, cache_tokens=32, token_budget=8), "free")
    params = SamplingParams(max_tokens=7, temperature=0.7, seed=2, n=2)
    for _ in range(15):
        desk = Desk(engine)
        stay = [desk.add([rng.randrange(9)] * rng.randrange(1, 9), params) for _ in range(2)]
        leave = [desk.add([rng.randrange(9)] * rng.randrange(1, 9), params) for _ in range(4)]
        mixed = desk.add([3, 3, 3], params)  # one of its two samples is cancelled
        rng.shuffle(leave)
        while engine.busy:
            if rng.random() < 0.4 and leave:
                for request in leave.pop():
                    engine.cancel(request)
                    engine.cancel(request)  # once more does no harm
            if rng.random() < 0.1:
                engine.cancel(mixed[1])
            engine.step()
        for samples in stay:
            for sample, request in enumerate(samples):
                ALONE.check(request.completion(), params, sample)
        ALONE.check(mixed[0].completion(), params)
        assert engine.pool.used == 0
        engine.pool.check([])


def test_two_streams_taken_in_turn() -> None:
    engine, params = engine_of(TINY), SamplingParams(max_tokens=5)
    one, two = engine.stream([[1, 2], [3]], params), engine.stream([[4]], params)
    next(one)
    for _ in two:
        next(one, None)
    ALONE.check(two.completions[0], params)
    list(one)
    for done in one.completions:
        ALONE.check(done, params)


def test_a_stream_given_up_in_the_middle_of_a_step_leaves_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator that nothing refers to any more is closed by the garbage collector: at any moment."""
    loaded = tiny(LLAMA)
    engine, params = engine_of(loaded), SamplingParams(max_tokens=9, n=2)
    lost: list[object] = [engine.stream([[7], [8]], SamplingParams(max_tokens=23))]
    next(lost[0])  # type: ignore[call-overload]
    hidden = loaded.model.hidden

    def collecting(*args: Any) -> torch.Tensor:
        if lost:
            lost.clear()
            gc.collect()
        return hidden(*args)

    monkeypatch.setattr(loaded.model, "hidden", collecting)
    done = engine.generate([[1, 2], [3, 4]], params)
    monkeypatch.undo()
    for sample, completion in enumerate(done):
        Alone(loaded).check(completion, params, sample % 2)
    assert (engine.busy, engine.pool.used) == (False, 0)


def test_several_threads_generate_at_once() -> None:
    alone, engine = ALONE, engine_of(TINY, cache_tokens=64)
    params = SamplingParams(max_tokens=6, temperature=0.8, seed=4)

    def work(first: int) -> None:
        for i in range(5):
            prompts = [[first, i, 1], [first] * (i + 1)]
            generation = engine.stream(prompts, params)
            events = list(generation)
            assert sorted(e.request for e in events) == [0] * 6 + [1] * 6
            for done in generation.completions:
                alone.check(done, params)

    for first in range(4):  # solo results first: they are not what is tested
        for i in range(5):
            alone([first, i, 1], params), alone([first] * (i + 1), params)
    in_threads([lambda first=first: work(first) for first in range(4)])  # type: ignore[misc]
    assert (engine.busy, engine.pool.used) == (False, 0)


# --- everything at once ---------------------------------------------------------------


def some_request(rng: random.Random) -> tuple[list[int], SamplingParams]:
    prefix = rng.choice([[], [11, 12, 13, 14], [11, 12, 13, 14, 15, 16, 17, 18], [21, 22, 23, 24, 25]])
    prompt = prefix + [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
    kind = rng.randrange(4)
    params = SamplingParams(max_tokens=rng.choice([1, 2, 5, 9, 30]), logprobs=rng.choice([None, 0, 2]))
    if kind == 1:
        params = replace(params, temperature=0.8, seed=rng.randrange(3), top_p=rng.choice([1.0, 0.8]))
    elif kind == 2:
        params = replace(params, temperature=1.0, seed=rng.randrange(3), n=rng.choice([2, 3]))
    elif kind == 3:
        params = replace(params, stop=rng.choice([("a",), ("e", "k"), ("9", "\x01")]), repetition_penalty=1.2)
    return prompt, params


def test_five_hundred_mixed_requests() -> None:
    rng = random.Random(0)
    alone = ALONE
    engine = checked_after_each_step(engine_of(TINY, cache_tokens=64, max_running=6, token_budget=12), "free")
    kinds = [some_request(rng) for _ in range(150)]
    asked = [rng.choice(kinds) for _ in range(500)]
    desk, under_way, cancelled = Desk(engine), [], set()
    to_come = list(enumerate(asked))
    every: list[tuple[int, list[Request]]] = []
    while to_come or engine.busy:
        while to_come and len(engine.scheduler.waiting) < 6 and rng.random() < 0.7:
            number, (prompt, params) = to_come.pop()
            every.append((number, desk.add(prompt, params)))
            under_way.append(every[-1])
        under_way = [(number, samples) for number, samples in under_way if any(r.trace.t_end is None for r in samples)]
        if under_way and rng.random() < 0.05:
            number, samples = rng.choice(under_way)
            cancelled.add(number)
            for request in samples:
                engine.cancel(request)
        if engine.busy:
            engine.step()
    assert len(every) == 500
    assert 10 < len(cancelled) < 100
    assert engine.scheduler.preemptions > 20
    for number, samples in every:
        prompt, params = asked[number]
        solo = alone(prompt, params)
        for sample, request in enumerate(samples):
            if number in cancelled and request.trace.status == "cancelled":
                assert request.generated == solo[sample].token_ids[: len(request.generated)]
                assert request.text == solo[sample].text[: len(request.text)]
            else:
                assert request.trace.status == "ok"
                alone.check(request.completion(), params, sample)
        assert all(isinstance(item, Event | RequestCancelled) for item in desk(samples))
    assert engine.pool.used == 0
    engine.pool.check([])
    assert engine.pool.counts.found_tokens > 500
    assert engine.pool.counts.copied > 20

"""The continuous engine: whatever a request's neighbours are and do, it says what it says alone."""

from __future__ import annotations

from typing import Any

import pytest

from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.engines.load import load
from nanoinfer.errors import RequestError
from nanoinfer.sampling.params import SamplingParams
from tests.engines.helpers import (
    BLOCK,
    GPT2,
    LLAMA,
    Alone,
    check_all,
    checked_after_each_step,
    engine_of,
    scripted,
    tiny,
)

TINY = {config.family: tiny(config) for config in (GPT2, LLAMA)}
ALONE = {family: Alone(loaded) for family, loaded in TINY.items()}
EOS = 7


def greedy_and_seeded(max_tokens: int) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=max_tokens, logprobs=2),
        SamplingParams(max_tokens=max_tokens, temperature=0.9, top_p=0.9, seed=5, logprobs=2),
    ]


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("poison", [None, "free", "all"])
class TestRowsAlone:
    """Lengths about a block, neighbours, chunks, shared prefixes, preemption; freed blocks may hold anything."""

    def test_lengths_about_a_block_and_up_to_the_context(self, family: str, poison: str | None) -> None:
        context = TINY[family].model.config.context
        engine = checked_after_each_step(engine_of(TINY[family]), poison)
        for params in greedy_and_seeded(max_tokens=99):  # to the end of the context
            for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, context - 1):
                check_all(engine, ALONE[family], [[length + i for i in range(length)]], params)

    @pytest.mark.parametrize("budget", [7, 8, 100])
    def test_neighbours_and_chunks(self, family: str, poison: str | None, budget: int) -> None:
        engine = checked_after_each_step(engine_of(TINY[family], token_budget=budget), poison)
        prompts = [[9] * n + [n] for n in (1, 6, 2, 9, 3, 4, 8, 1)]
        for params in greedy_and_seeded(max_tokens=6):
            check_all(engine, ALONE[family], prompts, params)

    def test_a_full_prefix_hit_twice_in_a_row(self, family: str, poison: str | None) -> None:
        engine = checked_after_each_step(engine_of(TINY[family]), poison)
        prompt = [5, 6, 7, 8, 9, 10, 11, 12]  # two whole blocks; the last token is computed in any case
        params = SamplingParams(max_tokens=3, logprobs=1)
        for found in (0, 4, 4):
            check_all(engine, ALONE[family], [prompt], params)
            done = engine.generate([prompt], params)[0]
            expected = 0 if poison == "all" else 4
            assert done.trace.cached_tokens == expected, found
        check_all(engine, ALONE[family], [prompt, [*prompt, 1], prompt[:4], prompt[:5]], params)

    def test_constant_preemption(self, family: str, poison: str | None) -> None:
        # The pool holds one row at its end, and the rows are admitted when they are short.
        engine = checked_after_each_step(engine_of(TINY[family], block_size=2, cache_tokens=12), poison)
        prompts = [[30 + i] * (1 + i % 3) for i in range(8)]
        for params in greedy_and_seeded(max_tokens=9):
            before = engine.scheduler.preemptions
            done = engine.generate(prompts, params)
            assert sum(c.trace.preemptions for c in done) == engine.scheduler.preemptions - before > 5
            check_all(engine, ALONE[family], prompts, params)

    @pytest.mark.parametrize("cache_tokens", [12, 64])
    def test_samples_of_a_prompt(self, family: str, poison: str | None, cache_tokens: int) -> None:
        engine = checked_after_each_step(engine_of(TINY[family], cache_tokens=cache_tokens), poison)
        prompts = [[1, 2], [3, 4, 5, 6], [1, 2, 3, 4, 5], [9]]
        params = [SamplingParams(max_tokens=6, n=n, seed=8, temperature=1.0, logprobs=1) for n in (4, 3, 5, 1)]
        check_all(engine, ALONE[family], prompts, params)
        cached = load(TINY[family], "cached")
        ours, its = ([c.token_ids for c in e.generate(prompts, params)] for e in (engine, cached))
        assert ours == its
        assert len({tuple(t) for t in ours[:4]}) == 4
        check_all(engine, ALONE[family], [[1, 2, 3, 4]], SamplingParams(max_tokens=5, n=3))  # greedy: thrice the same


# --- endings --------------------------------------------------------------------------


def test_rows_end_for_reasons_of_their_own() -> None:
    loaded = scripted("one END two", start=2, eos=[EOS])
    engine = checked_after_each_step(engine_of(loaded), "free")
    params = [
        SamplingParams(max_tokens=30, stop=("END",)),
        SamplingParams(max_tokens=6, stop=("END",)),
        SamplingParams(max_tokens=0),
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=4, stop_ids=(loaded.tokenizer.encode("o")[0],)),  # type: ignore[union-attr]
        SamplingParams(max_tokens=9, stop=("e E", "ne")),
    ]
    done = engine.generate([[1, 2]] * 6, params)
    assert [(c.text, len(c.token_ids), c.finish_reason) for c in done] == [
        ("one ", 7, "stop"),
        ("one EN", 6, "length"),
        ("", 0, "length"),
        ("o", 1, "length"),
        ("", 1, "stop"),
        ("o", 3, "stop"),
    ]
    assert engine.pool.used == 0


def test_eos_first_last_and_beside_others() -> None:
    engine = checked_after_each_step(engine_of(scripted([EOS, 40, 41, EOS, 42], start=2, eos=[EOS])))
    # A prompt that is longer by i stands behind i tokens of the script.
    params = [SamplingParams(max_tokens=n) for n in (5, 3, 2, 1)]
    done = engine.generate([[1, 2], [1, 2, 3], [1, 2, 3], [1, 2, 3, 4, 5]], params)
    assert [(c.text, c.token_ids, c.finish_reason) for c in done] == [
        ("", [EOS], "stop"),
        ("IJ", [40, 41, EOS], "stop"),
        ("IJ", [40, 41], "length"),
        ("", [EOS], "stop"),
    ]


def test_two_streams_of_split_characters_do_not_meet() -> None:
    engine = engine_of(scripted([172, 253, 99, 247, 127, 102], start=2))  # a llama, then an e acute
    params = [SamplingParams(max_tokens=4), SamplingParams(max_tokens=2)]
    generation = engine.stream([[1, 2], [1, 2, 3, 4, 5, 6]], params)
    assert [(e.request, e.text) for e in generation] == [
        (0, ""),
        (1, ""),
        (0, ""),
        (1, "é"),
        (0, ""),
        (0, "\N{LLAMA}"),
    ]
    assert [c.text for c in generation.completions] == ["\N{LLAMA}", "é"]
    cut = engine.stream([[1, 2], [1, 2, 3, 4, 5, 6]], [SamplingParams(max_tokens=3), SamplingParams(max_tokens=1)])
    assert [(e.request, e.text) for e in cut] == [(0, ""), (1, "\ufffd"), (0, ""), (0, "\ufffd")]


def test_a_repetition_penalty_is_its_rows_own() -> None:
    alone, prompts = ALONE["llama"], [[0, 1, 1, 4], [2], [2], [0, 0, 0]]
    params = [SamplingParams(max_tokens=7, repetition_penalty=p, logprobs=1) for p in (1.25, 1.0, 1.7, 1.0)]
    check_all(engine_of(TINY["llama"]), alone, prompts, params)
    assert alone([2], params[1])[0].token_ids != alone([2], params[2])[0].token_ids  # it does something


# --- accounts -------------------------------------------------------------------------


def test_traces() -> None:
    engine = engine_of(TINY["llama"], block_size=2, cache_tokens=24, max_running=4)
    params = SamplingParams(max_tokens=8)
    done = engine.generate([[i, 2] for i in range(8)], params)
    for c in done:
        t = c.trace
        times = [at for at, _ in t.chunks]
        assert t.t_start is not None
        assert t.t_scheduled == t.t_sent <= t.t_start < times[0]
        assert times == sorted(times)
        assert (t.t_end, t.status, t.output_tokens, t.prompt_tokens) == (times[-1], "ok", 8, 2)
    starts = [c.trace.t_start for c in done]
    assert starts == sorted(starts)  # type: ignore[type-var]
    assert starts[4] > done[0].trace.chunks[0][0]  # type: ignore[operator]  # it had to wait for a place
    assert sum(c.trace.preemptions for c in done) == engine.scheduler.preemptions > 0


def test_cached_tokens() -> None:
    engine = engine_of(TINY["llama"])
    prompt = list(range(10, 20))

    def found(ids: list[int], n: int = 1) -> list[int]:
        return [c.trace.cached_tokens for c in engine.generate([ids], SamplingParams(max_tokens=5, n=n))]

    assert found(prompt) == [0]
    assert found(prompt, n=3) == [8, 8, 8]
    assert found(prompt[:8]) == [4]  # of two whole blocks all but the last token could be found, so one block is
    assert found([*prompt[:4], 1, *prompt[5:]]) == [4]
    assert found([1, *prompt[1:]]) == [0]
    answer = engine.generate([prompt], SamplingParams(max_tokens=5))[0].token_ids
    assert found([*prompt, *answer]) == [12]  # what was generated is found as well, but for the token never fed
    assert engine_of(TINY["llama"], share_prefixes=False).generate([prompt] * 2)[1].trace.cached_tokens == 0


# --- refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "prompts", "params", "says"),
    [
        (
            {"cache_tokens": 8},
            [[1], [1, 2, 3, 4, 5]],
            {"max_tokens": 5},
            "may grow to 9 tokens cannot fit.* of 8: shor",
        ),
        ({"cache_tokens": 11}, [[1] * 8], {"max_tokens": 2}, "may grow to 9 tokens cannot fit.* of 8: shorten"),
        ({"max_running": 2}, [[1], [2]], {"n": 3}, "n = 3 samples cannot run together: at most 2 sequences do"),
        ({}, [[1]], {"on_full": "crop"}, "continuous engine does not crop; use on_full='stop', or the cached engine"),
    ],
)
def test_what_can_never_run_is_refused_before_any_work(
    options: dict[str, Any], prompts: list[list[int]], params: dict[str, Any], says: str
) -> None:
    engine = engine_of(TINY["llama"], **options)
    step, steps = engine.step, [0]

    def counted() -> None:
        steps[0] += 1
        step()

    engine.step = counted  # type: ignore[method-assign]
    for call in (engine.stream, engine.generate):
        with pytest.raises(RequestError, match=says) as refused:
            call(prompts, SamplingParams(**params))
        assert "\n" not in str(refused.value)
    assert (steps, engine.busy, engine.pool.used) == ([0], False, 0)
    check_all(engine, ALONE["llama"], [[1, 2, 3]], SamplingParams(max_tokens=6))


def test_what_just_fits_runs() -> None:
    engine = engine_of(TINY["llama"], cache_tokens=8, max_running=2)
    check_all(
        engine, ALONE["llama"], [[1], [1, 2, 3, 4, 5], [1] * 8], [SamplingParams(max_tokens=n) for n in (8, 4, 1)]
    )
    check_all(engine, ALONE["llama"], [[1, 2, 3]], SamplingParams(max_tokens=6, n=2, temperature=1.0, seed=1))


@pytest.mark.parametrize("max_running", [1, 3])
@pytest.mark.parametrize("block_size", [5, 16, 100])
def test_a_cache_left_to_itself_holds_a_full_context(max_running: int, block_size: int) -> None:
    engine = ContinuousEngine(TINY["gpt2"], max_running=max_running, block_size=block_size)
    assert engine.pool.n_blocks == max_running * -(-12 // block_size)
    check_all(engine, ALONE["gpt2"], [[1] * 5] * 2, SamplingParams(max_tokens=7))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_runing": 3}, "'continuous' has no option 'max_runing'; did you mean 'max_running'"),
        ({"loaded": 3}, "has no option 'loaded'"),
        ({"max_running": 0}, "max_running must be a whole number at least 1, got 0"),
        ({"max_running": "8"}, "max_running must be a whole number at least 1, got '8'"),
        ({"token_budget": 32.0}, "token_budget must be a whole number at least 1, got 32.0"),
        ({"block_size": 0}, "block_size must be a whole number at least 1, got 0"),
        ({"block_size": True}, "block_size must be a whole number at least 1, got True"),
        ({"cache_tokens": "1 GiB"}, "cache_tokens must be a whole number at least 1, got '1 GiB'"),
        ({"cache_tokens": 7}, "at least 1 block"),
        ({"token_budget": 32}, "token_budget must be above max_running"),
    ],
)
def test_options_that_make_no_engine(options: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        load(TINY["gpt2"], "continuous", **options)
    with pytest.raises(RequestError, match="'cached' has no option 'max_running'; it has none"):
        load(TINY["gpt2"], "cached", max_running=3)

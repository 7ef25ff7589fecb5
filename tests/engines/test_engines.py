"""Every engine is held to the naive one: same tokens in fp32, alone or with neighbours."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nanoinfer
from nanoinfer.configs.config import ModelConfig
from nanoinfer.engines.engine import Engine
from nanoinfer.engines.load import ENGINES
from nanoinfer.engines.static import recompute
from nanoinfer.errors import RequestError
from nanoinfer.models.registry import LoadedModel
from nanoinfer.sampling.params import SamplingParams
from tests.engines.helpers import GPT2, LLAMA, scripted, tiny
from tests.examples import examples

ALL = sorted(ENGINES)
CROPPING = [name for name in ALL if name not in ("continuous", "speculative")]
TINY = {config.family: tiny(config) for config in (GPT2, LLAMA)}
EOS = 7


def tokens(engine: Engine, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    return [c.token_ids for c in engine.generate(prompts, params)]


def greedy_by_hand(loaded: LoadedModel, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(recompute(loaded.model, [ids], torch.device("cpu")).argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("name", ALL)
def test_tokens_equal_a_loop_written_by_hand(name: str, family: str) -> None:
    loaded = TINY[family]
    assert tokens(nanoinfer.load(loaded, name), [[5, 6, 7]], SamplingParams(max_tokens=8)) == [
        greedy_by_hand(loaded, [5, 6, 7], 8)
    ]


@examples(40)
@given(
    family=st.sampled_from(sorted(TINY)),
    prompts=st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=9), min_size=1, max_size=5),
    data=st.data(),
)
def test_a_batch_equals_its_rows_alone_in_every_engine(
    family: str, prompts: list[list[int]], data: st.DataObject
) -> None:
    loaded = TINY[family]
    params = [
        SamplingParams(
            max_tokens=data.draw(st.integers(0, 20)),
            temperature=data.draw(st.sampled_from([0.0, 0.9])),
            top_p=data.draw(st.sampled_from([1.0, 0.7])),
            repetition_penalty=data.draw(st.sampled_from([1.0, 1.2])),
            stop_ids=tuple(data.draw(st.lists(st.integers(0, 255), max_size=30))),
            seed=11,
            on_full=data.draw(st.sampled_from(["stop", "crop"])),
        )
        for _ in prompts
    ]
    naive = nanoinfer.load(loaded, "naive")
    solo = [tokens(naive, [prompt], p)[0] for prompt, p in zip(prompts, params, strict=True)]
    for name in CROPPING:
        assert tokens(nanoinfer.load(loaded, name), prompts, params) == solo
    if rows := [row for row, p in enumerate(params) if p.on_full == "stop"]:
        continuous = nanoinfer.load(loaded, "continuous", max_running=4, token_budget=7, block_size=4)
        assert tokens(continuous, [prompts[i] for i in rows], [params[i] for i in rows]) == [solo[i] for i in rows]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("prompt", "asked", "expected"), [(5, 7, 7), (5, 8, 7), (11, 5, 1), (11, 1, 1), (1, 11, 11)])
def test_full_context_stops_with_length(name: str, prompt: int, asked: int, expected: int) -> None:
    done = nanoinfer.load(TINY["gpt2"], name).generate([list(range(prompt))], SamplingParams(max_tokens=asked))[0]
    assert (len(done.token_ids), done.finish_reason) == (expected, "length")


def test_crop_goes_on_as_nanogpt_does() -> None:
    prompt = list(range(3, 11))
    for name in CROPPING:
        params = SamplingParams(max_tokens=20, on_full="crop")
        assert tokens(nanoinfer.load(TINY["gpt2"], name), [prompt], params) == [
            greedy_by_hand(TINY["gpt2"], prompt, 20)
        ]


def test_a_row_that_crops_does_not_harm_one_that_outlives_it() -> None:
    prompts = [list(range(1, 12)), [4]]
    params = [SamplingParams(max_tokens=3, on_full="crop"), SamplingParams(max_tokens=9)]
    naive, cached = (nanoinfer.load(TINY["gpt2"], name) for name in ("naive", "cached"))
    assert tokens(cached, prompts, params) == tokens(naive, prompts, params)


@pytest.mark.parametrize("name", ALL)
class TestEnding:
    """EOS, limits and stop strings, where engines usually go wrong."""

    def run(self, name: str, text: str | list[int], **params: object) -> tuple[str, int, str]:
        engine = nanoinfer.load(scripted(text, start=2, eos=[EOS]), name)
        generation = engine.stream([[1, 2]], SamplingParams(**params))  # type: ignore[arg-type]
        deltas = "".join(event.text for event in generation)
        done = generation.completions[0]
        assert deltas == done.text
        assert done.trace.output_tokens == len(done.token_ids)
        return done.text, len(done.token_ids), done.finish_reason

    def test_eos_first(self, name: str) -> None:
        assert self.run(name, [EOS, 40], max_tokens=5) == ("", 1, "stop")

    def test_eos_exactly_at_the_limit_wins(self, name: str) -> None:
        assert self.run(name, [40, 41, EOS], max_tokens=3) == ("IJ", 3, "stop")

    def test_limit_before_eos(self, name: str) -> None:
        assert self.run(name, [40, 41, EOS], max_tokens=2) == ("IJ", 2, "length")

    def test_eos_can_be_ignored(self, name: str) -> None:
        assert self.run(name, [40, EOS, 41], max_tokens=3, ignore_eos=True)[1:] == (3, "length")

    def test_stop_ids(self, name: str) -> None:
        assert self.run(name, [40, 41, 42], max_tokens=9, stop_ids=(41,)) == ("I", 2, "stop")

    @pytest.mark.parametrize("count", [0, 1])
    def test_none_and_one(self, name: str, count: int) -> None:
        assert self.run(name, "hello", max_tokens=count) == ("hello"[:count], count, "length")

    def test_stop_string_across_tokens(self, name: str) -> None:
        assert self.run(name, "one END two", max_tokens=30, stop=("END",)) == ("one ", 7, "stop")

    def test_half_a_stop_string_at_the_limit_is_released(self, name: str) -> None:
        assert self.run(name, "one END", max_tokens=6, stop=("END",)) == ("one EN", 6, "length")

    def test_emoji_cut_by_the_limit(self, name: str) -> None:
        assert self.run(name, [172, 253, 99, 247], max_tokens=3) == ("\ufffd", 3, "length")
        assert self.run(name, [172, 253, 99, 247], max_tokens=4) == ("\N{LLAMA}", 4, "length")


def test_rows_that_end_at_different_steps() -> None:
    loaded = scripted([40, 41, 42, EOS, 43], start=2, eos=[EOS])
    params = [SamplingParams(max_tokens=n) for n in (1, 9, 2, 0)]
    for name in ALL:
        done = nanoinfer.load(loaded, name).generate([[1, 2]] * 4, params)
        assert [(c.text, c.finish_reason) for c in done] == [
            ("I", "length"),
            ("IJK", "stop"),
            ("IJ", "length"),
            ("", "length"),
        ]


@pytest.mark.parametrize("name", ALL)
def test_traces(name: str) -> None:
    done = nanoinfer.load(TINY["llama"], name).generate([[1, 2, 3], [4]], SamplingParams(max_tokens=4))
    for c, prompt in zip(done, (3, 1), strict=True):
        times = [t for t, _ in c.trace.chunks]
        assert [n for _, n in c.trace.chunks] == [1] * 4
        assert times == sorted(times)
        assert c.trace.t_scheduled == c.trace.t_sent < times[0]
        assert c.trace.t_end == times[-1]
        assert (c.trace.prompt_tokens, c.trace.output_tokens, c.trace.status) == (prompt, 4, "ok")


@pytest.mark.parametrize("name", ALL)
def test_logprobs_match_a_forward_pass(name: str) -> None:
    loaded = TINY["llama"]
    done = nanoinfer.load(loaded, name).generate([[1, 2]], SamplingParams(max_tokens=3, logprobs=2))[0]
    ids = torch.tensor([[1, 2, *done.token_ids]])
    expected = loaded.model(ids, torch.arange(5)[None]).log_softmax(-1)[0]
    assert done.logprobs is not None
    for i, entry in enumerate(done.logprobs):
        assert entry.token_id == done.token_ids[i]
        assert entry.logprob == pytest.approx(float(expected[1 + i, entry.token_id]), abs=1e-4)
        assert entry.top[0][0] == entry.token_id  # greedy
        assert len(entry.top) == 2
        assert entry.top[0][1] >= entry.top[1][1] > -math.inf


@pytest.mark.parametrize("name", ALL)
def test_a_closed_stream_is_cancelled(name: str) -> None:
    generation = nanoinfer.load(TINY["llama"], name).stream([[1], [2]], SamplingParams(max_tokens=9))
    next(generation)
    generation.close()
    assert [r.trace.status for r in generation.requests] == ["cancelled"] * 2
    assert all(r.trace.t_end is not None for r in generation.requests)


@pytest.mark.parametrize(
    ("prompts", "params", "says"),
    [
        ("", None, "prompt is empty"),
        ([[]], None, "prompt is empty"),
        ([], None, "no prompt"),
        ([[1, 256]], None, "id 256 is outside the vocabulary"),
        ([[-1]], None, "id -1 is outside"),
        ([list(range(12))], None, "12 tokens and the model's context is 12: shorten it to 11"),
        ([list(range(13))], SamplingParams(on_full="crop"), "13 tokens"),
        ([[1], [2]], [SamplingParams()] * 3, "2 prompts but 3 SamplingParams"),
        ([1, [2]], None, "mix"),
        (None, None, "list of token ids, not NoneType"),
        (5, None, "list of token ids, not int"),
        (b"abc", None, "not bytes"),
        ([b"abc"], None, "not bytes"),
        ([[1.5]], None, "whole numbers"),
        ([None], None, "whole numbers"),
        ([[1, "a"]], None, "whole numbers"),
        ([1], {"max_tokens": 3}, "SamplingParams.*not as dict"),
        ([1], {}, "SamplingParams.*not as dict"),
        ([1], [None], "SamplingParams.*not as NoneType"),
    ],
)
def test_bad_requests(prompts: object, params: object, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        nanoinfer.load(TINY["gpt2"], "naive").stream(prompts, params)  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [torch.tensor([1, 2]), np.array([[1, 2]]), [np.int64(1), np.int64(2)], range(1, 3)])
def test_arrays_and_tensors_are_token_ids(ids: Any) -> None:
    engine = nanoinfer.load(TINY["gpt2"])
    assert [done.prompt_ids for done in engine.generate(ids, SamplingParams(max_tokens=1))] == [[1, 2]]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_said(name: str, temperature: float) -> None:
    loaded = tiny(GPT2)
    loaded.model.wte.weight.fill_(float("nan"))  # type: ignore[union-attr]
    with pytest.raises(RequestError, match="logits are not finite"):
        nanoinfer.load(loaded, name).generate([1, 2], SamplingParams(temperature=temperature))


def test_a_stream_that_is_not_at_its_end_has_no_completions() -> None:
    generation = nanoinfer.load(TINY["gpt2"]).stream([1])
    with pytest.raises(RequestError, match="request 0 has not finished"):
        _ = generation.completions
    generation.close()  # before its first step
    assert generation.requests[0].trace.status == "cancelled"


@pytest.mark.parametrize("name", ALL)
def test_bad_rows_stop_the_call_before_any_work(name: str) -> None:
    with pytest.raises(RequestError):
        nanoinfer.load(TINY["gpt2"], name).stream([[1], [999]])


def test_unknown_engine_offers_the_nearest() -> None:
    with pytest.raises(RequestError, match="unknown engine 'cachd'; did you mean 'cached'"):
        nanoinfer.load(TINY["gpt2"], "cachd")


def test_cache_is_as_small_as_it_can_be() -> None:
    engine = nanoinfer.load(TINY["gpt2"], "cached")
    generation = engine.stream([[1, 2, 3], [1]], SamplingParams(max_tokens=5))
    batch = engine.start(generation.requests)
    config: ModelConfig = engine.config
    assert batch.cache.capacity == 3 + 5 - 1  # type: ignore[attr-defined]
    assert batch.cache.nbytes == 2 * 7 * 2 * config.n_layers * config.d_model * 4  # type: ignore[attr-defined]

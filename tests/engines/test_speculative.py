"""Speculative decoding: whatever the draft is worth, the output is the model's own."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoinfer.cache.paged import PagedCache
from nanoinfer.engines import speculative
from nanoinfer.engines.request import Completion
from nanoinfer.engines.speculative import Speculation, SpeculativeEngine, SpeculativeRequest
from nanoinfer.engines.static import CachedEngine, NaiveEngine
from nanoinfer.errors import DeviceError, ModelError, RequestError
from nanoinfer.models.registry import LoadedModel, load_model
from nanoinfer.optimize.options import Optimizations
from nanoinfer.sampling.params import SamplingParams
from tests.engines.helpers import GPT2, LLAMA, nan_after, scripted, tiny
from tests.examples import examples

TINY: dict[str, LoadedModel] = {config.family: tiny(config) for config in (GPT2, LLAMA)}
OTHER: dict[str, LoadedModel] = {config.family: tiny(config, seed=1) for config in (GPT2, LLAMA)}
EOS = 7


def drafts_for(loaded: LoadedModel, other: LoadedModel) -> dict[str, str | LoadedModel]:
    return {"lookup": "prompt-lookup", "the target": loaded, "another": other}


# --- greedy, and seeded lookups: the same tokens --------------------------------------


@pytest.mark.parametrize("n_draft", [1, 4, 9])
@pytest.mark.parametrize("name", ["random:tiny-llama", "random:tiny-gpt2"])
def test_greedy_tokens_are_those_of_the_cached_engine(name: str, n_draft: int) -> None:
    loaded, prompts = load_model(name), [[1, 2, 3, 1, 2], [9], list(range(40))]
    params = SamplingParams(max_tokens=50, ignore_eos=True, logprobs=1)
    expected = CachedEngine(loaded).generate(prompts, params)
    for what, draft in drafts_for(loaded, load_model(name, seed=1)).items():
        engine = SpeculativeEngine(loaded, draft=draft, n_draft=n_draft)
        done = engine.generate(prompts, params)
        assert [c.token_ids for c in done] == [c.token_ids for c in expected]
        assert [c.text for c in done] == [c.text for c in expected]
        assert engine.speculation.passes + engine.speculation.accepted == 3 * 50
        if what == "the target":
            assert engine.speculation.acceptance == 1
            assert engine.speculation.passes == 3 * math.ceil(50 / (n_draft + 1))


@pytest.mark.slow
def test_a_real_model_that_repeats_itself_takes_fewer_passes() -> None:
    loaded = load_model("smollm2-135m")
    prompt = "The cat sat on the mat. The dog sat on the mat. The cat sat on the mat. The dog"
    params = SamplingParams(max_tokens=16)
    engine = SpeculativeEngine(loaded)
    assert engine.generate(prompt, params)[0].token_ids == CachedEngine(loaded).generate(prompt, params)[0].token_ids
    assert engine.speculation.accepted > engine.speculation.passes  # more than two tokens a pass


@pytest.mark.parametrize("speed", [Optimizations(kernel=True), Optimizations(fuse=True)], ids=["kernel", "fused"])
@pytest.mark.parametrize("family", TINY)
def test_quicker_passes_say_the_same(family: str, speed: Optimizations) -> None:
    prompts, params = [[1, 2, 1, 2], [5], [6, 7, 8, 9]], SamplingParams(max_tokens=8)
    expected = NaiveEngine(TINY[family]).generate(prompts, params)
    for draft in drafts_for(TINY[family], OTHER[family]).values():
        engine = SpeculativeEngine(TINY[family], draft=draft, n_draft=3, speed=speed)
        assert [c.token_ids for c in engine.generate(prompts, params)] == [c.token_ids for c in expected]
        assert (engine.kernel is not None) == speed.kernel
        assert (engine.model is not TINY[family].model) == speed.fuse


@examples(60)
@given(
    family=st.sampled_from(sorted(TINY)),
    prompts=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=9), min_size=1, max_size=3),
    n_draft=st.integers(1, 6),
    draft=st.sampled_from(["lookup", "the target", "another"]),
    data=st.data(),
)
def test_a_text_equals_its_naive_self(
    family: str, prompts: list[list[int]], n_draft: int, draft: str, data: st.DataObject
) -> None:
    params = [
        SamplingParams(
            max_tokens=data.draw(st.integers(0, 30)),
            temperature=data.draw(st.sampled_from([0.0, 0.2, 0.9])) if draft == "lookup" else 0.0,
            top_p=data.draw(st.sampled_from([1.0, 0.7])),
            repetition_penalty=data.draw(st.sampled_from([1.0, 0.7, 1.2])),
            frequency_penalty=data.draw(st.sampled_from([0.0, 0.3, -1.0])),
            stop_ids=tuple(data.draw(st.lists(st.integers(0, 255), max_size=20))),
            seed=11,
            n=data.draw(st.integers(1, 2)),
        )
        for _ in prompts
    ]
    engine = SpeculativeEngine(TINY[family], draft=drafts_for(TINY[family], OTHER[family])[draft], n_draft=n_draft)
    expected = NaiveEngine(TINY[family]).generate(prompts, params)
    done = engine.generate(prompts, params)
    assert [(c.token_ids, c.finish_reason) for c in done] == [(c.token_ids, c.finish_reason) for c in expected]
    total = engine.speculation
    assert total.passes + total.accepted == sum(len(c.token_ids) for c in done)
    assert 0 <= total.accepted <= total.drafted <= n_draft * total.passes


# --- sampled; that the distribution is the model's: tests/engines/test_acceptance.py ----------


@pytest.mark.parametrize("family", TINY)
def test_a_draft_equal_to_its_target_is_kept_whole(family: str) -> None:
    engine = SpeculativeEngine(TINY[family], draft=TINY[family], n_draft=3)
    params = SamplingParams(max_tokens=9, temperature=1.0, top_k=50, frequency_penalty=0.5, seed=5, n=4)
    done = engine.generate([[1, 2, 3]], params)
    assert engine.speculation == Speculation(passes=4 * 3, drafted=4 * 6, accepted=4 * 6)
    assert engine.speculation.acceptance == 1.0
    assert len({tuple(c.token_ids) for c in done}) > 1


def test_seeds_can_be_repeated() -> None:
    engine = SpeculativeEngine(TINY["llama"], draft=OTHER["llama"])
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=3, n=3)
    first, again = (engine.generate([[1, 2], [3]], params) for _ in range(2))
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert len({tuple(c.token_ids) for c in first}) == 6
    # A sample's random generator is its own: it does not matter what was served before.
    second = SamplingParams(max_tokens=12, temperature=0.9, seed=4)
    assert engine.generate([[3]], second)[0].token_ids == first[4].token_ids


# --- ends in the middle of a draft ----------------------------------------------------


def run(says: str | list[int], n_draft: int = 4, context: int = 64, **params: Any) -> tuple[Completion, Speculation]:
    """A model that says this after a prompt of two tokens, and a draft model that knows it."""
    loaded = scripted(says, start=2, eos=[EOS], context=context)
    engine = SpeculativeEngine(loaded, draft=loaded, n_draft=n_draft)
    generation = engine.stream([[1, 2]], SamplingParams(**params))
    events = list(generation)
    done = generation.completions[0]
    assert "".join(event.text for event in events) == done.text
    assert [event.token_id for event in events] == done.token_ids
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + [done.finish_reason]
    assert done.trace.output_tokens == len(done.token_ids)
    assert len(done.logprobs or ()) == (0 if done.logprobs is None else len(done.token_ids))
    assert engine.speculation.passes + engine.speculation.accepted == len(done.token_ids)
    return done, engine.speculation


def test_end_of_sequence_in_an_accepted_draft() -> None:
    done, count = run([40, 41, 42, 43, 44, 45, EOS, 46, 47], max_tokens=30, logprobs=0)
    assert (done.text, done.token_ids[5:], done.finish_reason) == ("IJKLMN", [45, EOS], "stop")
    assert count == Speculation(passes=2, drafted=8, accepted=5)


def test_end_of_sequence_ignored() -> None:
    done, _ = run([40, EOS, 42, 43, EOS], max_tokens=4, ignore_eos=True)
    assert (done.token_ids, done.finish_reason) == ([40, EOS, 42, 43], "length")


def test_stop_string_in_an_accepted_draft() -> None:
    done, count = run("one END two", max_tokens=30, stop=("END",), logprobs=0)
    assert (done.text, len(done.token_ids), done.finish_reason) == ("one ", 7, "stop")
    assert count.passes == 2


def test_half_a_stop_string_at_the_limit_is_released() -> None:
    assert run("one END", max_tokens=6, stop=("END",))[0].text == "one EN"


@pytest.mark.parametrize("limit", range(1, 13))
def test_the_limit_is_kept_and_nothing_drafted_beyond_it(limit: int) -> None:
    done, count = run("a text of some length", max_tokens=limit)
    assert (done.text, done.finish_reason) == ("a text of some length"[:limit], "length")
    assert count.accepted == count.drafted == limit - count.passes
    assert count.passes == math.ceil(limit / 5)


@pytest.mark.parametrize("context", range(3, 14))
def test_the_context_is_filled_and_not_passed(context: int) -> None:
    done, count = run("a text of some length", context=context, max_tokens=30)
    assert (done.text, done.finish_reason) == ("a text of some length"[: context - 2], "length")
    assert count.accepted == count.drafted


@pytest.mark.parametrize("family", TINY)
def test_the_context_of_a_real_cache_is_filled_to_its_last_place(family: str) -> None:
    loaded = TINY[family]
    for length in range(1, loaded.model.config.context):
        prompt, params = [3] * length, SamplingParams(max_tokens=99)
        expected = NaiveEngine(loaded).generate([prompt], params)[0].token_ids
        for draft in drafts_for(loaded, OTHER[family]).values():
            assert SpeculativeEngine(loaded, draft=draft).generate([prompt], params)[0].token_ids == expected


def test_a_draft_model_of_a_shorter_context_stops_drafting() -> None:
    loaded, short = TINY["llama"], TINY["gpt2"]  # 24 and 12 tokens
    engine = SpeculativeEngine(loaded, draft=short)
    params = SamplingParams(max_tokens=20)
    expected = NaiveEngine(loaded).generate([[1, 2, 3]], params)[0]
    assert engine.generate([[1, 2, 3]], params)[0].token_ids == expected.token_ids
    assert 0 < engine.speculation.drafted < engine.speculation.passes * 2


# --- what is noted beside the tokens --------------------------------------------------


@pytest.mark.parametrize("draft", ["lookup", "the target", "another"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logprobs_match_a_forward_pass(temperature: float, draft: str) -> None:
    loaded = TINY["llama"]
    engine = SpeculativeEngine(loaded, draft=drafts_for(loaded, OTHER["llama"])[draft])
    params = SamplingParams(max_tokens=15, temperature=temperature, seed=1, logprobs=2, presence_penalty=0.5)
    done = engine.generate([[1, 2]], params)[0]
    ids = torch.tensor([[1, 2, *done.token_ids]])
    expected = loaded.model(ids, torch.arange(17)[None]).log_softmax(-1)[0, 1:]
    assert done.logprobs is not None
    assert [entry.token_id for entry in done.logprobs] == done.token_ids
    for entry, row in zip(done.logprobs, expected[:-1], strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert dict(entry.top) == pytest.approx(
            dict(zip(row.topk(2).indices.tolist(), row.topk(2).values.tolist(), strict=True)), abs=1e-4
        )


def test_tokens_of_a_pass_come_at_one_moment() -> None:
    done, count = run("a text of some length", max_tokens=12)
    times = [t for t, n in done.trace.chunks for _ in range(n)]
    assert times == sorted(times)
    assert [times.count(t) for t in sorted(set(times))] == [5, 5, 2]
    assert count.passes == 3
    assert done.trace.t_scheduled <= (done.trace.t_start or 0) < times[0]
    assert done.trace.t_end == times[-1]


def test_each_run_counts_anew() -> None:
    engine = SpeculativeEngine(TINY["llama"], draft=TINY["llama"], n_draft=2)
    assert engine.speculation == Speculation()
    assert Speculation().acceptance == 0
    for _ in range(2):
        engine.generate([[1]], SamplingParams(max_tokens=4))
        assert engine.speculation == Speculation(passes=2, drafted=2, accepted=2)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.02)])
@pytest.mark.parametrize("kernel", [False, True], ids=["model", "kernel"])
@pytest.mark.parametrize("name", ["random:tiny-llama", "random:tiny-gpt2"])
def test_a_pass_says_what_the_whole_text_would(name: str, kernel: bool, dtype: str, tolerance: float) -> None:
    engine = SpeculativeEngine(load_model(name, dtype=dtype), speed=Optimizations(kernel=kernel))
    (request,) = engine.stream([list(range(20))], SamplingParams(max_tokens=20)).requests
    active = SpeculativeRequest(engine, request)
    for kept in (0, 2, 4, 1):
        ids = [*request.ids[active.table.length :], 5, 6, 7, 8]
        with torch.inference_mode():
            logits = engine.score(active, ids, 5)
            whole = torch.tensor([[*request.ids, 5, 6, 7, 8]])
            expected = engine.model(whole, torch.arange(whole.shape[1])[None])[0, -5:]
            assert (logits.float() - expected.float()).abs().max() < tolerance * expected.abs().max()
            request.generated.extend([*[5, 6, 7, 8][:kept], 100])
            active.table.length = request.length - 1


# --- trouble --------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["prompt-lookup", "model"])
def test_a_stream_left_early_frees_everything(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[PagedCache]] = []

    def noted(*args: Any) -> PagedCache:
        cache = PagedCache(*args)
        held.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(speculative, "PagedCache", noted)
    engine = SpeculativeEngine(TINY["llama"], draft=OTHER["llama"] if draft == "model" else draft)
    generation = engine.stream([[1], [2]], SamplingParams(max_tokens=20))
    next(generation)
    assert [ref() is not None for ref in held] == [True]
    requests = generation.requests
    generation.close()
    assert [r.trace.status for r in requests] == ["cancelled"] * 2
    assert all(r.trace.t_end is not None for r in requests)
    assert [ref() for ref in held] == [None]
    done = engine.generate([[1], [2]], SamplingParams(max_tokens=20))  # and the engine is as good as new
    assert [c.token_ids for c in done] == [
        c.token_ids for c in NaiveEngine(TINY["llama"]).generate([[1], [2]], SamplingParams(max_tokens=20))
    ]
    assert [ref() for ref in held] == [None] * 3


@pytest.mark.parametrize("prompt", [[1], [5]], ids=["after a draft", "at once"])
def test_logits_that_are_not_numbers_are_said(prompt: list[int]) -> None:
    engine = SpeculativeEngine(nan_after(5), draft=scripted([5] * 40, start=1))
    with pytest.raises(RequestError, match="the model's logits are not finite"):
        engine.generate([prompt], SamplingParams(max_tokens=9))


def test_what_is_refused() -> None:
    loaded = TINY["llama"]
    with pytest.raises(RequestError, match="the speculative engine does not crop"):
        SpeculativeEngine(loaded).stream([1, 2], SamplingParams(on_full="crop"))
    for n_draft in (0, -1, 1.5, "4", None, True):
        with pytest.raises(RequestError, match=f"n_draft must be a whole number at least 1, got {n_draft!r}"):
            SpeculativeEngine(loaded, n_draft=n_draft)  # type: ignore[arg-type]
    few = replace(tiny(replace(LLAMA, vocab_size=99)), name="few")
    with pytest.raises(RequestError, match="'few' has 99 tokens and 'tiny' 256;"):
        SpeculativeEngine(loaded, draft=few)
    with pytest.raises(ModelError, match="unknown shape 'tiny' in 'random:tiny'; did you mean"):
        SpeculativeEngine(loaded, draft="random:tiny")
    with pytest.raises(RequestError, match="leave graphs off"):
        SpeculativeEngine(loaded, speed=Optimizations(graphs=True))
    away = replace(loaded, name="away", model=tiny(LLAMA).model.to("meta"))
    with pytest.raises(DeviceError, match="draft 'away' is on meta and not on cpu"):
        SpeculativeEngine(loaded, draft=away)


def test_a_draft_given_by_name_is_loaded_as_its_target_is() -> None:
    engine = SpeculativeEngine(load_model("random:tiny-llama", dtype="bfloat16"), draft="random:tiny-gpt2")
    assert engine.draft is not None
    assert next(engine.draft.model.parameters()).dtype == torch.bfloat16
    assert len(engine.generate([1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True))[0].token_ids) == 9


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["random:tiny-llama", "random:tiny-gpt2"])
def test_the_same_tokens_on_a_gpu(name: str) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    expected = CachedEngine(load_model(name)).generate([[1, 2, 3]], params)[0].token_ids
    loaded = load_model(name, device="cuda")
    for draft in drafts_for(loaded, load_model(name, device="cuda", seed=1)).values():
        assert SpeculativeEngine(loaded, draft=draft).generate([[1, 2, 3]], params)[0].token_ids == expected

"""The continuous engine with the native step says what the naive engine says."""

from __future__ import annotations

import random

import pytest
import torch
from typer.testing import CliRunner

from nanoinfer.cli.app import app
from nanoinfer.configs.config import ModelConfig
from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.engines.load import load
from nanoinfer.engines.static import NaiveEngine
from nanoinfer.errors import DeviceError, RequestError
from nanoinfer.models.registry import load_model
from nanoinfer.optimize.options import Optimizations
from nanoinfer.sampling.params import SamplingParams
from tests.engines.helpers import tiny

GPT2 = ModelConfig("gpt2", 2, 16, 2, 2, 8, 64, 256, 48)
LLAMA = ModelConfig("llama", 2, 32, 4, 2, 8, 48, 256, 48, tied=False)


EXACT = [
    Optimizations(kernel=True),
    Optimizations(fuse=True),
    Optimizations(pack=True),
    Optimizations(kernel=True, fuse=True, pack=True),
]


@pytest.mark.parametrize("speed", EXACT, ids=str)
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_every_exact_speed_gives_the_naive_engines_tokens_and_leaves_the_model_alone(
    config: ModelConfig, speed: Optimizations
) -> None:
    loaded = tiny(config)
    before = {name: (p, p.clone()) for name, p in loaded.model.named_parameters()}
    prompts = [[i + 1] * i + [7 * i] for i in range(1, 9)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = NaiveEngine(loaded).generate(prompts, params)
    found = ContinuousEngine(loaded, max_running=5, cache_tokens=512, speed=speed).generate(prompts, params)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    for name, p in loaded.model.named_parameters():
        assert p is before[name][0] and torch.equal(p, before[name][1])


@pytest.mark.parametrize("blocks", [5, 40], ids=["constant preemption", "room"])
@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_same_tokens_as_the_naive_engine(config: ModelConfig, budget: int, blocks: int) -> None:
    rng = random.Random(1)
    loaded = tiny(config)
    beginning = [rng.randrange(256) for _ in range(9)]
    prompts = [[rng.randrange(256) for _ in range(n)] for n in (1, 7, 8, 9, 15, 16, 17, 20)]
    prompts += [[*beginning, rng.randrange(256)] for _ in range(3)]
    params = [
        SamplingParams(max_tokens=rng.randrange(1, 16), temperature=temperature, seed=i, n=1 + i % 2)
        for i, temperature in zip(range(len(prompts)), [0.0, 0.9] * len(prompts), strict=False)
    ]
    engine = ContinuousEngine(
        loaded,
        max_running=4,
        token_budget=budget,
        block_size=8,
        cache_tokens=8 * blocks,
        speed=Optimizations(kernel=True),
    )
    expected = NaiveEngine(loaded).generate(prompts, params)
    for _ in range(2):  # the second time prefixes are found
        assert [c.token_ids for c in engine.generate(prompts, params)] == [c.token_ids for c in expected]
    assert (engine.scheduler.preemptions > 0) == (blocks == 5)
    engine.scheduler.check()
    assert engine.pool.used == 0


def test_a_text_does_not_depend_on_its_neighbours_in_int8() -> None:
    loaded = load_model("random:tiny-llama", dtype="bfloat16")
    engine = load(loaded, "continuous", speed=Optimizations(kernel=True, weights="int8"), share_prefixes=False)
    prompts = [[5 + i] for i in range(12)]  # one token each: the whole text is the kernel's
    greedy = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=0)
    together = engine.generate(prompts, greedy)
    for prompt, done in zip(prompts, together, strict=True):
        (alone,) = engine.generate([prompt], greedy)
        assert alone.token_ids == done.token_ids
        assert alone.logprobs == done.logprobs


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(RequestError, match="None, 'int8', 'int4' or 'fp8'"):
        Optimizations(kernel=True, weights="int3")  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="float32 or bfloat16"):
        load(load_model("random:tiny-llama", dtype=torch.float16), "continuous", speed=Optimizations(kernel=True))


def test_speeds_by_name() -> None:
    assert Optimizations.parse("kernel, int8") == Optimizations(kernel=True, weights="int8")
    assert Optimizations.parse("fuse,pack,compiled") == Optimizations(fuse=True, pack=True, compiled=True)
    assert Optimizations.parse("") == Optimizations.parse("plain") == Optimizations()
    with pytest.raises(RequestError, match=r"^plain means no optimization, and plain,fuse has others"):
        Optimizations.parse("plain,fuse")
    with pytest.raises(RequestError, match=r"unknown speed 'kernle'.*kernel"):
        Optimizations.parse("kernle")
    with pytest.raises(RequestError, match="one kind: give int8 or int4"):
        Optimizations.parse("int8,int4")
    with pytest.raises(RequestError, match="not in int4"):
        Optimizations.parse("kernel,int4")
    with pytest.raises(RequestError, match="graphs for GPUs"):
        Optimizations(kernel=True, graphs=True)


def test_the_command_takes_plain_as_the_server_does() -> None:
    words = [
        "generate",
        "random:tiny-llama",
        "-p",
        "hi",
        "--max-tokens",
        "2",
        "--engine",
        "continuous",
        "--speed",
        "plain",
    ]
    outcome = CliRunner().invoke(app, words)
    assert outcome.exit_code == 0, outcome.output

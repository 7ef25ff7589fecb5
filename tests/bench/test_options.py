"""The options of `nanoinfer bench`: what they refuse, and what they plan to send."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoinfer.bench.options import BenchConfig, LoadPlan
from nanoinfer.errors import RequestError

URL = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    "target", ["http://host:8000", "https://host/v1", "localhost:8000", "127.0.0.1:80/v1", "[::1]:8000"]
)
def test_addresses(target: str) -> None:
    assert BenchConfig(target).is_remote


@pytest.mark.parametrize("target", ["random:tiny-gpt2", "smollm2-135m", "models/a.gguf", "org/name", "C:/models"])
def test_names_of_models(target: str) -> None:
    assert not BenchConfig(target).is_remote


def test_levels_have_prompts_of_their_own() -> None:
    plan = LoadPlan(BenchConfig(URL, sweep="users:1,2", requests=5))
    seen: list[str] = []
    for index in range(2):
        warm, works = plan.work(index, None)
        assert len(warm) == plan.levels[index] and not isinstance(works, list)
        seen += [str(work.prompt) for work in [*warm, *(next(works) for _ in range(5))]]
    assert len(set(seen)) == len(seen) == 1 + 2 + 2 * 5


def test_a_model_in_this_process_gets_ids_of_its_vocabulary() -> None:
    _, works = LoadPlan(BenchConfig("random:tiny-gpt2", prompt_tokens="uniform:3-5")).work(0, 50)
    work = next(iter(works))
    assert not isinstance(work.prompt, str) and 3 <= len(work.prompt) <= 5 and max(work.prompt) < 50


def test_the_same_seed_plans_the_same() -> None:
    options = BenchConfig(URL, rate=5.0, arrivals="gamma", burstiness=0.5, seconds=10.0, output_tokens="lognormal:5-50")
    assert LoadPlan(options).work(0, None) == LoadPlan(options).work(0, None)
    assert LoadPlan(options).shape(5.0) == "gamma:0.5"
    warm, works = LoadPlan(options).work(0, None)
    assert isinstance(works, list) and all(0 <= work.at < 10 for work in works)
    assert len(warm) == 4 and warm[0].at > 0


def test_a_ramp_needs_a_client_for_its_end() -> None:
    plan = LoadPlan(BenchConfig(URL, rate=1.0, arrivals="ramp", to=30.0, seconds=5.0))
    assert plan.most_level == 30.0 and plan.shape(1.0) == "ramp:1.0-30.0"
    assert [work.at for work in plan.work(0, None)[0]] == [0.0] * 4


def test_numbers_that_are_none() -> None:
    with pytest.raises(RequestError, match="--speedup must be above 0"):
        BenchConfig(URL, speedup=0.0, replay=Path("x.csv"))
    with pytest.raises(RequestError, match="--think must be at least 0"):
        BenchConfig(URL, think=-1.0, users=1)

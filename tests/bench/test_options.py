"""The options of `nanoinfer bench`: what they refuse, and what they plan to send."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoinfer.bench.options import BenchConfig, LoadPlan, parse_slo
from nanoinfer.bench.tables import slo_text
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


# --- limits -----------------------------------------------------------------------------


def test_limits_are_seconds() -> None:
    assert parse_slo("ttft=200ms,tpot=50ms,e2e=3s") == {"ttft": 0.2, "tpot": 0.05, "e2e": 3.0}
    assert parse_slo(" ttft_service = 1.5 s , normalized_latency=250us") == {
        "ttft_service": 1.5,
        "normalized_latency": 0.00025,
    }
    assert parse_slo("ttft=70ms") == {"ttft": 0.07}  # 70 * 1e-3 would be 0.07 and a bit, and 70 ms would not meet 70 ms
    assert parse_slo("ttft=.5s,tpot=20.ms") == {"ttft": 0.5, "tpot": 0.02}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "write METRIC=TIME"),
        ("ttft", "slo 'ttft': write METRIC=TIME"),
        ("ttft=", "write METRIC=TIME"),
        ("ttft=200ms,", "write METRIC=TIME"),
        ("ttf=200ms", "no metric 'ttf' of a request; did you mean 'ttft'"),
        ("itl=20ms", "no metric 'itl'"),
        ("client_delay=1ms", "no metric 'client_delay'"),
        ("ttft=200", "slo 'ttft=200': 200 of what?; the units are us, ms, s, as in 200ms"),
        ("ttft=200sec", "unknown unit 'sec'; the units are us, ms, s"),
        ("ttft=fast", "'fast' is no time"),
        ("ttft=-1s", "'-1s' is no time"),
        ("ttft=nan", "'nan' is no time"),
        ("ttft=0ms", "must be above 0"),
        ("ttft=1s,ttft=2s", "ttft has a limit already"),
    ],
)
def test_mistakes_name_the_part(text: str, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_slo(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_limits_for_people() -> None:
    assert slo_text({"ttft": 0.2, "e2e": 3.0}) == "ttft at most 200 ms, e2e at most 3000 ms"

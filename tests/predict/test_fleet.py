"""``plan``: replicas for so many users, worked out by hand from what one of them sustains."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from typer.testing import CliRunner

from nanoinfer.cli import app as cli
from nanoinfer.errors import NanoinferError
from nanoinfer.predict import fleet as planning
from nanoinfer.predict.fleet import plan
from nanoinfer.predict.serving import simulate_serving

LOAD: dict[str, Any] = {"prompts": "uniform:10-200", "outputs": "uniform:2-60", "requests": 300, "seed": 1}
SLO = {"ttft": 0.02, "tpot": 0.005}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return plan("smollm2-135m", "L4", users=[10, 1000, 1_000_000], per_user_hour=12, slo=SLO, usd_per_hour=0.8, **LOAD)


def test_a_replica_takes_the_highest_rate_that_keeps_the_limits(found: dict[str, Any]) -> None:
    highest = found["replica_rate_per_s"]
    for times, good in ((1.0, True), (1.05, False)):
        run = simulate_serving("smollm2-135m", "L4", rate=times * highest, slo=SLO, **LOAD)
        assert (run["goodput"]["share"] >= 0.99) == good


def test_so_many_replicas_as_the_load_needs_and_one_more(found: dict[str, Any]) -> None:
    highest = found["replica_rate_per_s"]
    for users, one in zip((10, 1000, 1_000_000), found["plans"], strict=True):
        assert one["load_per_s"] == pytest.approx(users * 12 / 3600)
        assert one["replicas"] == math.ceil(one["load_per_s"] / (0.8 * highest))
        assert one["devices"] == one["replicas"] + 1
        assert one["load_share"] == pytest.approx(one["load_per_s"] / one["replicas"] / highest)
        assert one["load_share"] <= 0.8
    assert found["plans"][0]["replicas"] == 1 < found["plans"][2]["replicas"]


def test_price_and_power_by_hand(found: dict[str, Any]) -> None:
    for one in found["plans"]:
        assert one["usd_per_hour"] == pytest.approx(0.8 * one["devices"])
        assert one["output_usd_per_mtok"] == pytest.approx(
            one["usd_per_hour"] * 1e6 / 3600 / one["output_tokens_per_s"]
        )
        assert one["watts"] == 72 * one["devices"]
        assert one["tokens_per_joule"] == pytest.approx(one["output_tokens_per_s"] / one["watts"])
        # Answers of 2 to 60 tokens, 31 on average.
        assert one["output_tokens_per_s"] == pytest.approx(31 * one["load_per_s"], rel=0.1)
    # A service with few users idles, and its tokens are dear.
    prices = [one["output_usd_per_mtok"] for one in found["plans"]]
    assert prices == sorted(prices, reverse=True)


def test_limits_are_kept(found: dict[str, Any]) -> None:
    for one in found["plans"]:
        assert one["good_share"] >= 0.99
    assert any("cover one failure at a time" in note for note in found["notes"]) == (found["plans"][2]["replicas"] > 20)


def test_the_command(found: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def planned(model: str, gpu: str, **options: Any) -> dict[str, Any]:
        asked.update(options, model=model, gpu=gpu)
        return found

    monkeypatch.setattr(planning, "plan", planned)
    words = (
        "plan smollm2-135m --gpu L4 --users 10 --users 1000 --per-user 12 --tp 3 --slo ttft=20ms,tpot=5ms "
        "--usd-per-hour 0.8 --requests 300 --spares 2 --headroom 0.5 --seed 1 --dtype fp16 --share 0.9 "
        "--prompt-tokens uniform:10-200 --output-tokens uniform:2-60"
    )
    args = words.split()
    result = CliRunner().invoke(cli.app, [*args, "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout) == found
    others = {"model": "smollm2-135m", "gpu": "L4", "dtype": "fp16", "tp": 3}
    others |= {"spares": 2, "needed": 0.9, "headroom": 0.5}
    assert asked == {**LOAD, **others, "users": [10, 1000], "per_user_hour": 12, "slo": SLO, "usd_per_hour": 0.8}
    text, last = CliRunner().invoke(cli.app, args).stdout, found["plans"][2]
    assert f"{last['replicas']:,} + 1" in text and f"{last['devices']:,}" in text
    assert "within ttft 20.0 ms, tpot 5.00 ms" in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"slo": {"ttft": 1e-6}}, "no rate meets these limits on 1 x L4"),
        ({"users": [0]}, "users must be at least 1"),
        ({"per_user_hour": 0}, "--per-user must be a number above 0"),
        ({"spares": -1}, "--spares must not be negative"),
        ({"headroom": 1.0}, "--headroom must be at least 0 and below 1"),
    ],
)
def test_refusals(options: dict[str, Any], says: str) -> None:
    with pytest.raises(NanoinferError, match=says):
        plan("smollm2-135m", "L4", **{"users": [1], "per_user_hour": 1, "slo": SLO, **LOAD, "requests": 20, **options})

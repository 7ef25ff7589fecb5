"""``simulate`` and ``plan``: figures worked out by hand, the same seed the same record, and what is refused."""

from __future__ import annotations

import io
import json
import math
from itertools import islice
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from nanoinfer.cache.blocks import BlockPool
from nanoinfer.cli import app as cli
from nanoinfer.configs.config import SHAPES
from nanoinfer.engines.scheduler import Scheduler
from nanoinfer.errors import NanoinferError, RequestError
from nanoinfer.measure import metrics
from nanoinfer.predict import serving
from nanoinfer.predict.memory import fit
from nanoinfer.predict.options import FitOptions, PlanOptions, SimulateOptions
from nanoinfer.predict.serving import SimulatedLoad, highest_rate, plan, simulate_serving
from nanoinfer.predict.terminal import show_simulate
from nanoinfer.simulate import simulate
from nanoinfer.theory.roofline import Machine, StepTimes, mixed_step
from nanoinfer.workload.arrivals import gamma
from nanoinfer.workload.items import Lengths

MODEL, GPU = "smollm2-135m", "L4"
SLO, SLO_S = "ttft=50ms,tpot=5ms", {"ttft": 0.05, "tpot": 0.005}


def simulated(**options: Any) -> dict[str, Any]:
    load = {
        "rate": 50.0,
        "requests": 400,
        "window": 0.1,
        "prompt_tokens": "uniform:10-200",
        "output_tokens": "uniform:2-60",
    }
    return simulate_serving(SimulateOptions(MODEL, GPU, **{**load, **options}))


def test_a_lone_request_takes_what_the_roofline_says() -> None:
    # One every ten seconds on average, so nearly all are alone; fixed lengths, so they are all alike.
    found = simulated(rate=0.1, requests=300, prompt_tokens="100", output_tokens="3")
    machine = Machine.datasheet(GPU, "bfloat16")
    first, *rest = (
        mixed_step(SHAPES[MODEL], machine, rows, 1).seconds for rows in ([(0, 100)], [(100, 1)], [(101, 1)])
    )
    latency = found["latency"]
    assert latency["ttft"]["median"] == pytest.approx(first)
    assert latency["tpot"]["median"] == pytest.approx(sum(rest) / 2)
    assert latency["e2e"]["median"] == pytest.approx(first + sum(rest))
    assert latency["wait"]["median"] == 0.0
    assert found["engine"]["running"]["mean"] == pytest.approx(1.0, abs=0.02)


def test_the_record_is_the_plain_simulation_scored() -> None:
    """Every figure once more: all traces kept, every step planned, and the metrics of a whole run."""
    found = simulated(slo=SLO)
    blocks = fit(FitOptions(MODEL, GPU, context=1))["kv_blocks"]
    assert found["engine_settings"]["kv_blocks"] == blocks
    load = SimulatedLoad(400, Lengths("uniform", 10, 200), Lengths("uniform", 2, 60), 1.0, 0)
    traces = list(
        simulate(
            load.works(50.0),
            Scheduler(BlockPool(blocks, 16, False), 256, 2048),
            StepTimes(SHAPES[MODEL], Machine.datasheet(GPU, "bfloat16")).seconds,
        )
    )
    start, end = found["window"]["start_s"], found["window"]["end_s"]
    assert (start, end) == (pytest.approx(0.8), 8.0)
    due = [t for t in traces if start <= t.t_scheduled < end]
    assert found["requests"]["measured"] == len(due) > 300
    for name in ("ttft", "tpot", "e2e", "normalized_latency"):
        values = metrics.collect(due, name).values
        assert found["latency"][name]["mean"] == pytest.approx(sum(values) / len(values))
        assert found["latency"][name]["p90"] == pytest.approx(sorted(values)[-(-len(values) * 9 // 10) - 1])
        assert found["latency"][name]["n"] == len(values)
    gaps = sorted(gap for t in due for gap in metrics.itl_samples(t))
    assert found["latency"]["itl"]["n"] == len(gaps)
    assert found["latency"]["itl"]["mean"] == pytest.approx(sum(gaps) / len(gaps))
    assert found["latency"]["itl"]["p99"] == pytest.approx(gaps[-(-len(gaps) * 99 // 100) - 1], rel=0.001)
    rates = metrics.throughput(traces, start, end)
    for name in ("output_tok_s", "requests_s", "input_tok_s"):
        assert found["rates"][name]["value"] == pytest.approx(getattr(rates, name))
    law = metrics.little(traces, start, end)
    assert found["concurrency"]["mean"] == pytest.approx(law.concurrency)
    assert found["concurrency"]["little"]["error"] == pytest.approx(law.error)
    good = metrics.goodput(due, SLO_S, start, end)
    assert found["goodput"]["share"] == pytest.approx(good.share) and 0 < found["goodput"]["good"] == good.good
    assert found["goodput"]["tok_s"] == pytest.approx(good.tok_s)
    assert found["goodput"]["requests_s"] == pytest.approx(good.requests_s)


def test_a_seed_gives_one_record_and_another_seed_another() -> None:
    found = json.dumps(simulated(seed=3), allow_nan=False)
    assert found == json.dumps(simulated(seed=3), allow_nan=False) != json.dumps(simulated(seed=4), allow_nan=False)


def test_the_load_is_lazy_seeded_and_only_compressed_by_its_rate() -> None:
    load = SimulatedLoad(10**12, Lengths("uniform", 1, 9), Lengths("lognormal", 1, 50), 0.5, 7)
    slow, fast = (list(islice(load.works(rate), 50)) for rate in (1.0, 8.0))
    assert [(len(w.prompt), w.output) for w in slow] == [(len(w.prompt), w.output) for w in fast]
    assert [w.at for w in slow] == pytest.approx([8 * w.at for w in fast])
    assert [w.at for w in slow] == list(islice(gamma(1.0, 0.5, 7), 50))


def test_a_burst_waits_longer_than_a_steady_flow() -> None:
    waits = [simulated(rate=300.0, burstiness=b)["latency"]["ttft"]["p99"] for b in (0.1, 1.0, 100.0)]
    assert waits == sorted(waits, reverse=True) and waits[0] > 1.5 * waits[2]


def test_replicas_share_the_arrivals() -> None:
    one, two = simulated(rate=100.0), simulated(rate=200.0, requests=800, replicas=2)
    assert two["machine"]["devices"] == 2
    assert two["rates"]["output_tok_s"]["value"] == pytest.approx(2 * one["rates"]["output_tok_s"]["value"], rel=0.1)
    assert two["engine"]["running"]["mean"] == pytest.approx(one["engine"]["running"]["mean"], rel=0.15)
    assert two["latency"]["tpot"]["mean"] == pytest.approx(one["latency"]["tpot"]["mean"], rel=0.1)
    assert two["requests"]["measured"] == pytest.approx(720, abs=60)


def test_tensor_parallel_shortens_a_step_and_takes_more_blocks() -> None:
    load: dict[str, Any] = {"rate": 2.0, "requests": 100, "prompt_tokens": "uniform:10-200"}
    load["output_tokens"] = "uniform:2-60"
    one, two = (simulate_serving(SimulateOptions("llama-3.1-8b", "H100", tp=tp, **load)) for tp in (1, 2))
    assert 0.5 < two["latency"]["tpot"]["mean"] / one["latency"]["tpot"]["mean"] < 0.7
    assert two["engine_settings"]["kv_blocks"] > 2 * one["engine_settings"]["kv_blocks"]
    assert two["machine"]["devices"] == 2


def test_the_highest_rate_lies_between_good_and_bad() -> None:
    found = simulated(rate=400.0, requests=150, slo="ttft=20ms", find=True, share=0.9)["highest_rate"]
    low, high = found["rate_per_s"], found["fails_at_per_s"]
    assert 0 < low < high <= 1.021 * low
    for tried in found["tried"]:
        assert (tried["share"] >= 0.9) == (tried["rate_per_s"] <= low)


class Verdicts:
    """A service that is good up to a rate."""

    def __init__(self, most: float) -> None:
        self.most, self.asked = most, list[float]()

    def __call__(self, rate: float) -> float:
        self.asked.append(rate)
        return float(rate <= self.most)


@pytest.mark.parametrize("start", [1.0, 37.0, 300.0])
def test_the_search_finds_a_known_answer(start: float) -> None:
    verdicts = Verdicts(37.0)
    found = highest_rate(verdicts, start, 0.99)
    assert 37.0 / 1.02 <= found["rate_per_s"] <= 37.0 < found["fails_at_per_s"] <= 1.02 * found["rate_per_s"]
    assert len(verdicts.asked) == len(set(verdicts.asked)) < 20


def test_a_search_without_an_end_stops() -> None:
    never, always = highest_rate(Verdicts(0.0), 1.0, 0.99), highest_rate(Verdicts(1e9), 1.0, 0.99)
    assert never["rate_per_s"] is None and never["fails_at_per_s"] == 2**-12
    assert always["fails_at_per_s"] is None and always["rate_per_s"] == 2**12


def test_notes_say_what_the_figures_cannot() -> None:
    def notes(**options: Any) -> str:
        return "\n".join(simulated(**options)["notes"])

    calm = notes(rate=20.0, requests=2000)
    assert "fused" in calm and "queue grows" not in calm and "too small" not in calm and "emptier" not in calm
    assert "the queue grows" in notes(rate=20_000.0, requests=1000, max_running=2, token_budget=16)
    assert "n too small for p95, p99" in notes(requests=90)
    assert "begins emptier" in notes(rate=20_000.0, requests=300)
    assert "No request was due" in notes(requests=1, rate=1000.0, seed=1)
    assert "meets the limits" in notes(requests=50, slo="e2e=0.001us", find=True)


def test_preemptions_and_a_full_cache_show() -> None:
    found = simulated(rate=3000.0, utilisation=0.013, prompt_tokens="100", output_tokens="100")
    assert found["engine_settings"]["kv_blocks"] < 300
    assert found["engine"]["preemptions"] > 0 and found["engine"]["kv_used"]["max"] == 1.0
    assert found["concurrency"]["queued"]["mean"] > 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rate": 0.0}, "--rate must be above 0, got 0"),
        ({"rate": float("nan")}, "--rate must be above 0, got nan"),
        ({"burstiness": -1.0}, "--burstiness must be above 0"),
        ({"requests": 0}, "requests must be at least 1"),
        ({"replicas": 0}, "replicas must be at least 1"),
        ({"find": True}, "give one \\(--slo ttft=200ms\\)"),
        ({"find": True, "slo": SLO, "share": 1.5}, "--share must be above 0 and at most 1"),
        ({"prompt_tokens": "uniform:1-8000", "output_tokens": "200"}, "beyond the model's context of 8192"),
        ({"prompt_tokens": "many"}, "lengths 'many'"),
        ({"tp": 2}, "tp 2 does not divide 9 query heads"),
        ({"max_running": 256, "token_budget": 256}, "token_budget must be above max_running"),
        ({"utilisation": 0.0115, "prompt_tokens": "4000"}, "cannot fit in a KV cache"),
        ({"slo": "speed=1s"}, "metric 'speed'"),
    ],
)
def test_what_cannot_be_simulated_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(NanoinferError, match=says):
        simulated(**options)


def test_the_tables_show_every_figure() -> None:
    record = simulated(requests=100, slo=SLO, find=True, share=0.5, replicas=2)
    out = io.StringIO()
    show_simulate(Console(file=out, width=200), record)
    text = out.getvalue()
    for words in ("TTFT", "p99", "highest rate with 50% good", "2 x L4", "KV blocks held, mean", "broke tpot", "Note:"):
        assert words in text, words
    plain = io.StringIO()
    show_simulate(Console(file=plain, width=200), simulated(requests=20))
    assert "goodput" not in plain.getvalue() and "n too small" in plain.getvalue()


# --- plan ---------------------------------------------------------------------------------


PLAN_LOAD: dict[str, Any] = {"prompt_tokens": "uniform:10-200", "output_tokens": "uniform:2-60"}
PLAN_LOAD |= {"requests": 250, "window": 0.1, "seed": 1, "slo": "ttft=20ms,tpot=5ms"}


def test_a_short_search_overstates_what_a_service_can_do() -> None:
    """Just beyond the capacity a queue grows slowly: 50 requests do not show it, half a second of load does."""
    load = {"rate": 400.0, "requests": 50, "slo": "ttft=20ms", "find": True, "share": 0.9}
    short, long = (simulated(**load, window=window)["highest_rate"] for window in (0.01, 0.4))
    assert short["rate_per_s"] > 1.05 * long["rate_per_s"]
    beyond = simulated(**{**load, "find": False, "rate": short["rate_per_s"], "requests": 2 * int(short["rate_per_s"])})
    assert beyond["goodput"]["share"] < 0.9
    assert any("the queue grows" in note for note in beyond["notes"])


def test_kernels_that_reach_less_than_the_datasheet_take_longer() -> None:
    full, half = (simulated(rate=0.1, requests=50, mfu=share, mbu=share) for share in (1.0, 0.5))
    assert half["latency"]["ttft"]["median"] == pytest.approx(2 * full["latency"]["ttft"]["median"], rel=1e-6)
    assert half["machine"]["peak_flops_per_s"] == full["machine"]["peak_flops_per_s"] / 2
    with pytest.raises(RequestError, match="--mfu must be above 0 and at most 1"):
        simulated(mfu=1.5)


@pytest.fixture(scope="module")
def planned() -> dict[str, Any]:
    return plan(PlanOptions(MODEL, GPU, [10, 1000, 1_000_000], 12, usd_per_hour=0.8, **PLAN_LOAD))


def test_a_replica_takes_the_highest_rate_that_keeps_the_limits(planned: dict[str, Any]) -> None:
    highest = planned["replica_rate_per_s"]
    for times, good in ((1.0, True), (1.05, False)):
        run = simulate_serving(SimulateOptions(MODEL, GPU, rate=times * highest, **PLAN_LOAD))
        assert (run["goodput"]["share"] >= 0.99) == good


def test_so_many_replicas_as_the_load_needs_and_one_more(planned: dict[str, Any]) -> None:
    highest = planned["replica_rate_per_s"]
    for users, one in zip((10, 1000, 1_000_000), planned["plans"], strict=True):
        assert one["load_per_s"] == pytest.approx(users * 12 / 3600)
        assert one["replicas"] == math.ceil(one["load_per_s"] / (0.8 * highest))
        assert one["devices"] == one["replicas"] + 1
        assert one["load_share"] == pytest.approx(one["load_per_s"] / one["replicas"] / highest)
        assert one["load_share"] <= 0.8
    assert planned["plans"][0]["replicas"] == 1 < planned["plans"][2]["replicas"]


def test_price_and_power_by_hand(planned: dict[str, Any]) -> None:
    for one in planned["plans"]:
        assert one["usd_per_hour"] == pytest.approx(0.8 * one["devices"])
        assert one["output_usd_per_mtok"] == pytest.approx(
            one["usd_per_hour"] * 1e6 / 3600 / one["output_tokens_per_s"]
        )
        assert one["watts"] == 72 * one["devices"]
        assert one["tokens_per_joule"] == pytest.approx(one["output_tokens_per_s"] / one["watts"])
        # Answers of 2 to 60 tokens, 31 on average.
        assert one["output_tokens_per_s"] == pytest.approx(31 * one["load_per_s"], rel=0.1)
    # A service with few users idles, and its tokens are dear.
    prices = [one["output_usd_per_mtok"] for one in planned["plans"]]
    assert prices == sorted(prices, reverse=True)


def test_limits_are_kept(planned: dict[str, Any]) -> None:
    for one in planned["plans"]:
        assert one["good_share"] >= 0.99
    assert any("cover one failure at a time" in note for note in planned["notes"]) == (
        planned["plans"][2]["replicas"] > 20
    )


def test_the_command(planned: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[PlanOptions] = []

    def plan_once(options: PlanOptions) -> dict[str, Any]:
        given.append(options)
        return planned

    monkeypatch.setattr(serving, "plan", plan_once)
    words = (
        "plan smollm2-135m --gpu L4 --users 10 --users 1000 --per-user 12 --tp 3 --slo ttft=20ms,tpot=5ms "
        "--usd-per-hour 0.8 --requests 250 --spares 2 --headroom 0.5 --seed 1 --dtype fp16 --share 0.9 "
        "--prompt-tokens uniform:10-200 --output-tokens uniform:2-60 --window 0.1"
    )
    args = words.split()
    result = CliRunner().invoke(cli.app, [*args, "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout) == planned
    others: dict[str, Any] = {"dtype": "fp16", "tp": 3, "spares": 2, "share": 0.9, "headroom": 0.5, "usd_per_hour": 0.8}
    assert given == [PlanOptions(MODEL, GPU, [10, 1000], 12, **PLAN_LOAD, **others)]
    text, last = CliRunner().invoke(cli.app, args).stdout, planned["plans"][2]
    assert f"{last['replicas']:,} + 1" in text and f"{last['devices']:,}" in text
    assert "within ttft 20.0 ms, tpot 5.00 ms" in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"slo": "ttft=1us"}, "no rate meets these limits on 1 x L4"),
        ({"users": [0]}, "--users must be at least 1, got 0"),
        ({"per_user": 0}, "--per-user must be above 0, got 0"),
        ({"spares": -1}, "--spares must be at least 0, got -1"),
        ({"headroom": 1.0}, "--headroom must be at least 0 and below 1, got 1.0"),
    ],
)
def test_what_cannot_be_planned_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(NanoinferError, match=says):
        plan(PlanOptions(MODEL, GPU, **{"users": [1], "per_user": 1, **PLAN_LOAD, "requests": 20, **options}))

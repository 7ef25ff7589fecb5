"""``predict`` for several devices: what they say to each other, what is refused, and which question decides."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from typer.testing import CliRunner

from nanoinfer.cli import app as cli
from nanoinfer.configs.config import SHAPES
from nanoinfer.predict import latency
from nanoinfer.predict.advice import Demand, ParallelOption, parallel_options, splits
from nanoinfer.predict.options import PredictOptions
from nanoinfer.predict.target import Links
from nanoinfer.show.text import si
from nanoinfer.theory.parallel import ParallelConfig, decode_step
from nanoinfer.theory.roofline import Machine

LLAMA = SHAPES["llama-3.1-8b"]
MODEL = ("predict", "llama-3.1-8b", "--gpu", "H100")


def predict(model: str, gpu: str, **options: Any) -> Any:
    return latency.predict(PredictOptions(model, gpu, **options))


def run(*args: str) -> Any:
    return CliRunner().invoke(cli.app, list(args))


def record(*args: str) -> Any:
    result = run(*MODEL, *args, "--json")
    assert result.exit_code == 0 and result.stderr == "", result.output
    return json.loads(result.stdout)


# --- what devices say to each other -------------------------------------------------------


def test_eight_devices_by_hand() -> None:
    found = record("--tp", "8", "--usd-per-hour", "3")
    said = found["decode"]["communication"]
    # 65 all-reduces of 8,192 B, of which 2 x 7/8 are sent, and a gather of 128,256 logits: 66 calls of 8 us.
    sent = 65 * 2 * 7 / 8 * 8192 + 7 * 128_256 / 8 * 2
    assert (said["calls"], said["sent_per_device_bytes"]) == (66, sent)
    assert said["seconds"] == pytest.approx(66 * 8e-6 + sent / 450e9)
    assert said["share_of_time"] == pytest.approx(said["seconds"] / found["decode"]["seconds"])
    assert found["links"] == {
        "link_bytes_per_s": 450e9,
        "alpha_s": 8e-6,
        "nodes_link_bytes_per_s": None,
        "nodes_alpha_s": None,
        "devices_per_server": 8,
        "servers_per_replica": 1,
    }
    assert found["machine"]["devices"] == 8 and found["used_per_device_bytes"]["weights"] == 2 * 8_030_261_248 / 8
    rate = 1 / found["decode"]["seconds"]
    assert found["price"]["output_usd_per_mtok"] == pytest.approx(8 * 3e6 / 3600 / rate)
    assert found["energy"]["joules_per_output_token"] == pytest.approx(8 * 700 / rate)


def test_one_device_says_nothing() -> None:
    found = record()
    assert found["links"] is None and found["split"]["micro_batches"] is None
    assert found["decode"]["communication"]["calls"] == 0 == found["decode"]["communication"]["share_of_time"]
    assert not any("alpha" in note for note in found["notes"])


def test_replicas_multiply_rates_and_nothing_else() -> None:
    one, four = record("--batch", "16"), record("--batch", "16", "--replicas", "4", "--usd-per-hour", "2")
    assert four["decode"]["seconds"] == one["decode"]["seconds"]
    assert four["decode"]["tokens_per_s"] == pytest.approx(4 * one["decode"]["tokens_per_s"])
    assert four["used_per_device_bytes"] == one["used_per_device_bytes"] and four["links"] is None
    assert four["machine"]["devices"] == 4 and four["price"]["usd_per_hour"] == 8
    assert four["energy"]["joules_per_output_token"] == pytest.approx(one["energy"]["joules_per_output_token"])


def test_links_by_name() -> None:
    fast, slow = (record("--tp", "2", "--link", name) for name in ("nvlink5", "ib-ndr"))
    assert fast["links"]["link_bytes_per_s"] == 900e9 and fast["links"]["servers_per_replica"] == 1
    # A link between servers: each device sits in one of its own.
    assert slow["links"]["nodes_link_bytes_per_s"] == 50e9 and slow["links"]["servers_per_replica"] == 2
    assert slow["decode"]["communication"]["seconds"] == pytest.approx(
        66 * 10e-6 + slow["decode"]["communication"]["sent_per_device_bytes"] / 50e9
    )
    ethernet = record("--tp", "2", "--link", "ethernet-100g", "--nodes-alpha-us", "20")
    assert ethernet["links"]["nodes_link_bytes_per_s"] == 12.5e9
    assert ethernet["links"]["nodes_alpha_s"] == pytest.approx(20e-6)
    assert record("--tp", "2", "--alpha-us", "3")["links"]["alpha_s"] == pytest.approx(3e-6)


def test_servers_are_joined_by_infiniband_unless_one_says_otherwise() -> None:
    taken = record("--tp", "16")
    assert any("16 devices fill more than one server of 8: InfiniBand NDR-400" in note for note in taken["notes"])
    assert taken["links"]["nodes_link_bytes_per_s"] == 50e9 and taken["links"]["servers_per_replica"] == 2
    slow = record("--tp", "16", "--nodes-link", "ethernet-100g")
    assert slow["decode"]["seconds"] > taken["decode"]["seconds"]
    rack = record("--tp", "16", "--gpus-per-node", "72")
    assert rack["links"]["servers_per_replica"] == 1 and rack["decode"]["seconds"] < taken["decode"]["seconds"]
    assert not any("fill more than one server" in note for note in (*slow["notes"], *rack["notes"]))


def test_a_pipeline_and_its_micro_batches() -> None:
    found = record("--pp", "4", "--batch", "16", "--micro-batches", "8", "--context", "512")
    assert found["split"]["micro_batches"] == 8 and found["prefill"]["bound"] == "compute"
    step = decode_step(
        LLAMA,
        Links().connect(Machine.datasheet("H100"), ParallelConfig(pp=4), []),
        ParallelConfig(pp=4),
        16,
        512,
        micro_batches=8,
    )
    assert found["decode"]["seconds"] == step.seconds
    few = record("--pp", "4", "--batch", "16", "--micro-batches", "2")
    assert any("2 micro-batches cannot keep 4 stages at work" in note for note in few["notes"])
    assert few["decode"]["communication"]["waiting_for_others_s"] > 0
    one = record("--pp", "4")
    assert one["prefill"]["bound"] == "idle" and "stages wait for each other" in one["prefill"]["why"]


def test_a_mixture_of_experts(tmp_path: Any) -> None:
    from nanoinfer.configs.catalog import MODELS

    (tmp_path / "config.json").write_text(json.dumps(MODELS["Mixtral-8x7B"][0]), encoding="utf-8")
    even, uneven = (predict(str(tmp_path), "H100", ep=8, batch=64, context=1024, imbalance=i) for i in (1.0, 2.0))
    assert even["used_per_device_bytes"]["weights"] < 80e9 < even["weights_bytes"]
    assert even["decode"]["communication"]["calls"] == 1 + 3 * 32
    assert uneven["prefill"]["seconds"] > 1.3 * even["prefill"]["seconds"]
    # One device cannot hold it, and of eight the split over experts is among the choices.
    assert even["questions"]["decides"] == 5
    (asked,) = (way for way in even["questions"]["choices"] if way["as_asked"])
    assert asked["name"] == "ep 8" and asked["decode_seconds"] == even["decode"]["seconds"]
    assert len(even["questions"]["choices"]) == 7


def test_twice_the_devices_of_each_way_in_use() -> None:
    changes = {row["change"]: row for row in record("--tp", "2", "--pp", "2", "--batch", "8")["changes"]}
    assert {"twice the devices (--tp 4)", "twice the devices (--pp 4)"} <= set(changes)
    as_asked = record("--tp", "2", "--pp", "2", "--batch", "8")["decode"]["seconds"]
    assert changes["twice the devices (--tp 4)"]["decode_seconds"] < as_asked
    assert "twice the devices (--pp 2)" not in {row["change"] for row in record("--tp", "2")["changes"]}


@pytest.mark.parametrize(
    "args", [("--pp", "2"), ("--tp", "2", "--pp", "2"), ("--cp", "4"), ("--replicas", "2")], ids=" ".join
)
def test_a_generation_adds_up(args: tuple[str, ...]) -> None:
    found = record(*args, "--batch", "4", "--new", "3", "--context", "100")
    split = ParallelConfig(**{args[i].strip("-"): int(args[i + 1]) for i in range(0, len(args), 2)})
    machine = Links().connect(Machine.datasheet("H100"), split, [])
    steps = sum(decode_step(LLAMA, machine, split, 4, tokens).seconds for tokens in (101, 102))
    assert found["generation"]["decode_seconds"] == pytest.approx(steps)
    assert found["generation"]["tokens_per_s"] == pytest.approx(
        split.replicas * 4 * 3 / (steps + found["prefill"]["seconds"])
    )


# --- what decides -------------------------------------------------------------------------


def decided(**options: Any) -> tuple[int, str, str]:
    found = predict("llama-3.1-8b", options.pop("gpu", "H100"), **options)["questions"]
    return found["decides"], found["why"], found["suggestion"]


def test_nothing_is_guessed() -> None:
    answers = record("--tp", "2")["questions"]["answers"]
    assert [a["answer"] is None for a in answers] == [True, False, True, True, False]
    assert [a["give"] for a in answers] == ["--models", None, "--want", "--shared-prefix", None]
    assert [a["from"] for a in answers] == [None, "the numbers", None, None, "the numbers"]


def test_a_model_that_one_device_does_not_hold_must_be_split() -> None:
    number, why, suggestion = decided(gpu="T4", dtype="float16", tp=2, context=512)
    assert number == 5 and "16 GB and the model needs 16.1 GB with a single row: it must be split" in why
    assert suggestion.startswith("Of 2 devices: tp 2, ")
    # Also where it was asked for otherwise: the wish orders the splits that fit, and adds none.
    assert decided(gpu="T4", dtype="float16", tp=4, context=512, want="throughput")[0] == 5


def test_a_cache_that_one_device_does_not_hold_asks_for_more_of_them() -> None:
    number, why, _ = decided(tp=2, batch=64, context=16_384)
    assert number == 2 and "weights (16.1 GB) but not the cache of all rows next to them (137.4 GB)" in why


def test_many_models_are_placed_not_split() -> None:
    number, why, suggestion = decided(models=12)
    assert number == 1 and "Each of 12 models fits one device" in why and "no split" in suggestion


def test_a_long_shared_prefix_saves_more_than_a_split() -> None:
    number, why, suggestion = decided(context=4096, shared_prefix=4000)
    assert number == 4 and "sent to the same replica" in suggestion
    left, whole = map(float, re.findall(r"([\d.]+) of ([\d.]+) ms", why)[0])
    assert left < whole / 5
    assert decided(context=4096, shared_prefix=100)[0] == 5
    assert predict("gpt2", "H100", shared_prefix=0)["questions"]["answers"][3]["answer"] == "independent"


def test_where_all_fits_the_wish_decides() -> None:
    latency, throughput, both = (decided(tp=8, want=want) for want in ("latency", "throughput", "both"))
    assert latency[0] == throughput[0] == both[0] == 3
    assert latency[2].startswith("Of 8 devices: tp 8, ")
    assert throughput[2].startswith("Of 8 devices: replicas 8, ")
    number, why, suggestion = decided(tp=8)
    assert number == 5 and "nothing must be split" in why and suggestion.startswith("Replicas")


def test_the_choices_are_every_split_of_as_many_devices() -> None:
    assert {str(split) for split in splits(4)} == {
        "replicas 4", "tp 2 x replicas 2", "pp 2 x replicas 2", "cp 2 x replicas 2", "ep 2 x replicas 2", "tp 4",
        "pp 4", "cp 4", "tp 2 x pp 2", "tp 2 x cp 2", "ep 4",
    }  # fmt: skip
    assert all(split.devices == 24 for split in splits(24))
    assert len(set(splits(24))) == len(list(splits(24)))


def test_choices_are_ordered_by_what_is_wanted() -> None:
    machine = Links().connect(Machine.datasheet("H100"), ParallelConfig(), [])

    def found(want: str) -> list[ParallelOption]:
        return parallel_options(Demand(LLAMA, machine, 80e9, 32, 2048, 2048), 8, 32, want)

    latency, throughput, smallest = found("latency"), found("throughput"), found("smallest")
    assert [c.decode_s for c in latency] == sorted(c.decode_s for c in latency)
    assert [-c.tokens_per_s for c in throughput] == sorted(-c.tokens_per_s for c in throughput)
    assert smallest[0].split == ParallelConfig(replicas=8)
    (one,) = (c for c in latency if c.split == ParallelConfig(replicas=8))
    assert one.decode_s == decode_step(LLAMA, machine, ParallelConfig(), 4, 2048).seconds  # 32 rows, four on each
    assert one.tokens_per_s == pytest.approx(
        one.most_rows / decode_step(LLAMA, machine, ParallelConfig(), one.most_rows // 8, 2048).seconds
    )
    assert not any(c.split.ep > 1 for c in latency)


def test_a_thousand_devices_are_answered_at_once() -> None:
    start = time.process_time()
    found = predict("llama-3.1-8b", "H100", tp=8, replicas=128, want="both")
    assert found["machine"]["devices"] == 1024 and time.process_time() - start < 30


# --- text and mistakes ----------------------------------------------------------------


def test_the_table_says_what_the_json_says() -> None:
    args = ("--tp", "8", "--pp", "2", "--batch", "32", "--want", "latency")
    found, text = record(*args), run(*MODEL, *args).stdout
    assert "on 16 x H100 SXM" in text and "tp 8, pp 2" in text
    said = found["decode"]["communication"]
    for name, value in (
        ("bytes that it sends", si(said["sent_per_device_bytes"], "B")),
        ("time for that", si(said["seconds"], "s")),
        ("share of the time in both", f"{said['share_of_time']:.1%}"),
        ("link between servers: rate, and time of a call", si(10e-6, "s")),
    ):
        assert re.search(rf"^{re.escape(name)} .*{re.escape(value)}$", text, re.M), name
    flat = " ".join(text.split())
    assert f"What decides: 3. lower latency, higher throughput, or both? {found['questions']['why']}" in flat
    assert f"Suggestion: {found['questions']['suggestion']}" in flat
    for way in found["questions"]["choices"]:
        assert re.search(rf"^{re.escape(way['name'])} .* {way['most_rows']:,} ", text, re.M)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("--pp 33", "pp 33 stages need a layer each and the model has 32"),
        ("--pp 2 --cp 2", "cp and pp together are not modelled"),
        ("--ep 2", "ep 2 spreads experts and this model has none"),
        ("--replicas 0", "replicas must be at least 1, got 0"),
        ("--micro-batches 2", "1 rows do not fill 2 micro-batches"),
        ("--batch 4 --micro-batches 2", "micro-batches are those of a pipeline"),
        ("--pp 2 --batch 4 --micro-batches 0", "micro-batches must be at least 1, got 0"),
        ("--imbalance 2", "imbalance, the largest load over the mean"),
        ("--tp 2 --link nvlink9", "unknown link 'nvlink9'"),
        ("--tp 2 --nodes-link eth", "unknown link 'eth'"),
        ("--tp 2 --alpha-us -1", "--alpha-us must be at least 0, got -1.0"),
        ("--tp 2 --gpus-per-node 0", "gpus-per-node must be at least 1"),
        ("--want speed", "--want speed: "),
        ("--models 0", "models must be at least 1"),
        ("--shared-prefix 1024", "--shared-prefix 1024: a prefix has 0 tokens or more and is shorter"),
        ("--batch 4000 --pp 2", "4000 rows of 1024 tokens do not fit H100 SXM (80 GB a device)"),
    ],
)
def test_mistakes_are_one_line(args: str, says: str) -> None:
    result = run(*MODEL, *args.split())
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and says in result.stderr, result.stderr


def test_a_device_without_a_link_needs_one_by_name() -> None:
    result = run("predict", "smollm2-135m", "--gpu", "M1", "--dtype", "float32", "--pp", "2")
    assert (
        result.exit_code == 1
        and "no link in the table, so no split can be predicted: name one (--link)" in result.stderr
    )
    named = run("predict", "smollm2-135m", "--gpu", "M1", "--dtype", "float32", "--pp", "2", "--link", "ethernet-100g")
    assert named.exit_code == 0, named.output

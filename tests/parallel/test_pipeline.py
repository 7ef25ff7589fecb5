"""Pipeline parallel: stages equal one device, and what they send equals the formula."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from nanoinfer.engines.static import CachedEngine
from nanoinfer.errors import RequestError
from nanoinfer.parallel.experiments import idle_shares, measure_bubble
from nanoinfer.parallel.pipeline import PipelineEngine, cut
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.theory.communication import Traffic, bubble, pipeline_parallel
from nanoinfer.theory.parallel import stage_weight_bytes, stages
from tests.engines.helpers import tiny
from tests.parallel.pipeline_ranks import CONFIGS, ENDLESS, EVEN, MICRO_BATCHES, RAGGED, SETTINGS, STEPS, generated
from tests.parallel.rank_results import answers, pipeline_ends

KEYS = [(family, m) for family in CONFIGS for m in MICRO_BATCHES]


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank found."""
    return answers(request.param, "pipeline")


@pytest.mark.parametrize(("family", "m"), KEYS)
def test_logits_equal_one_device_in_prefill_and_decode(ranks: list[dict[str, Any]], family: str, m: int) -> None:
    *others, last = (rank["differences"][f"{family} {m}"] for rank in ranks)
    assert all(found == [[], []] for found in others), "only the last stage has logits"
    for steps in last:
        assert len(steps) == STEPS
        for difference, spread in steps:
            assert difference < 2e-5 * spread


@pytest.mark.parametrize(("family", "m"), KEYS)
def test_every_rank_has_one_devices_tokens(ranks: list[dict[str, Any]], family: str, m: int) -> None:
    one = CachedEngine(tiny(CONFIGS[family], pipeline_ends()[family]))
    alone, endless = (generated(one, RAGGED, params) for params in (SETTINGS, ENDLESS))
    assert [reason for _, _, reason in alone][::2] == ["stop", "stop"], "rows end before their limits"
    assert len({len(row) for row, _, _ in alone}) > 2, "rows end at different steps"
    assert [len(row) for row, _, _ in endless] == [9, 4, 12, 7]
    for rank in ranks:
        assert rank["tokens"][f"{family} {m}"] == [alone, endless]


def test_without_a_seed_all_ranks_have_the_same_tokens(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["unseeded"] == ranks[0]["unseeded"] for rank in ranks)
    rows = [tuple(row) for row, _, _ in ranks[0]["unseeded"]]
    assert len(set(rows)) == len(rows)


def test_more_micro_batches_than_rows_are_as_many_as_rows(ranks: list[dict[str, Any]]) -> None:
    alone = generated(CachedEngine(tiny(CONFIGS["llama"], pipeline_ends()["llama"])), EVEN[:1], SETTINGS[:1])
    assert all(rank["one row"] == alone for rank in ranks)


@pytest.mark.parametrize(("family", "m"), KEYS)
def test_bytes_equal_the_formula(ranks: list[dict[str, Any]], family: str, m: int) -> None:
    p, rows, prompt = len(ranks), len(EVEN), len(EVEN[0])
    passes = [prompt] + [1] * (STEPS - 1)
    wanted: Counter[tuple[str, float]] = Counter()
    sent = {"send": 0.0, "broadcast": 0.0}
    for tokens in passes:
        part: Traffic
        for part in pipeline_parallel(CONFIGS[family], rows, tokens, p, 4, m):
            wanted[part.kind, part.message] += part.calls
            sent[part.kind] += part.sent
    # By hand: a hop of all rows is rows * tokens * d * b, however it is cut; ids are int64.
    assert sent == {
        "send": rows * (prompt + STEPS - 1) * CONFIGS[family].d_model * 4,
        "broadcast": STEPS * rows * 8,
    }
    hops = Counter({message: n for (kind, message), n in wanted.items() if kind == "send"})
    assert sum(hops.values()) == m * STEPS
    for rank, answer in enumerate(ranks):
        log = answer["log"][f"{family} {m}"]
        said = {kind: Counter(message for k, message, _ in log if k == kind) for kind, _, _ in log}
        assert said.pop("broadcast") == {rows * 8: STEPS}
        assert said == {
            **({"send": hops} if rank < p - 1 else {}),
            **({"receive": hops} if rank > 0 else {}),
        }
        left = sum(bytes_ for _, _, bytes_ in log)
        assert left == (sent["send"] if rank < p - 1 else sent["broadcast"])


@pytest.mark.parametrize("family", CONFIGS)
def test_a_rank_keeps_its_layers_and_their_cache_only(ranks: list[dict[str, Any]], family: str) -> None:
    layers = {2: [3, 2], 4: [2, 1, 1, 1]}[len(ranks)]
    whole = ranks[0]["bytes"][family][1]
    assert [rank["bytes"][family][0] for rank in ranks] == [n * whole // 5 for n in layers]
    config = CONFIGS[family]
    assert [rank["parameters"][family][0] * 4 for rank in ranks] == [
        stage_weight_bytes(config, own, "float32") for own in stages(5, len(ranks))
    ]
    twice = config.vocab_size * config.d_model if config.tied else 0  # embedding at one end, head at the other
    assert sum(rank["parameters"][family][0] for rank in ranks) == ranks[0]["parameters"][family][1] + twice


def test_what_only_one_rank_could_give_is_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        logprobs, crop = rank["refused"]
        assert "keeps no logprobs" in logprobs
        assert "does not crop" in crop


def test_the_bubble_is_measured_on_every_stage(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert [one["micro_batches"] for one in rank["bubble"]] == [1, 4]
        for one in rank["bubble"]:
            assert len(one["busy_s"]) == len(one["wall_s"]) == 2
            assert all(0 < busy < wall for busy, wall in zip(one["busy_s"], one["wall_s"], strict=True))
    assert [one.predicted for one in idle_shares([rank["bubble"] for rank in ranks])] == [
        bubble(len(ranks), 1),
        bubble(len(ranks), 4),
    ]


# --- without ranks --------------------------------------------------------------------


def test_idle_is_the_mean_over_stages_and_the_median_over_passes() -> None:
    first = [{"micro_batches": 2, "busy_s": [1.0, 2.0, 1.0], "wall_s": [4.0, 4.0, 2.0]}]
    second = [{"micro_batches": 2, "busy_s": [3.0, 2.0, 1.0], "wall_s": [4.0, 4.0, 2.0]}]
    (one,) = idle_shares([first, second])
    assert (one.micro_batches, one.measured, one.low, one.high) == (2, 0.5, 0.5, 0.5)
    assert one.predicted == pytest.approx(1 / 3)
    (one,) = idle_shares([[{"micro_batches": 1, "busy_s": [1.0, 2.0, 3.0], "wall_s": [4.0, 4.0, 4.0]}]])
    assert (one.measured, one.low, one.high) == (0.5, 0.25, 0.75)


def test_unequal_micro_batches_are_no_measurement() -> None:
    with pytest.raises(RequestError, match="8 rows cannot be cut into 3 equal micro-batches"):
        measure_bubble(None, micro_batches=(1, 3))  # type: ignore[arg-type]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(RequestError, match="pp 6 stages need a layer each and the model has 5"):
        cut(tiny(CONFIGS["llama"]).model, 0, 6)


def test_no_micro_batch_is_refused() -> None:
    with pytest.raises(RequestError, match="micro_batches must be at least 1, got 0"):
        PipelineEngine(tiny(CONFIGS["llama"]), None, 0)  # type: ignore[arg-type]


def test_cutting_leaves_the_model_as_it_was() -> None:
    loaded = tiny(CONFIGS["gpt2"])
    before = CachedEngine(loaded).generate(EVEN, SamplingParams(max_tokens=3))
    part = cut(loaded.model, 1, 2)
    assert part.config.n_layers == 2
    assert [c.token_ids for c in CachedEngine(loaded).generate(EVEN, SamplingParams(max_tokens=3))] == [
        c.token_ids for c in before
    ]
    assert part.h[0].mlp.c_fc.weight.data_ptr() == loaded.model.h[3].mlp.c_fc.weight.data_ptr()  # type: ignore[union-attr]

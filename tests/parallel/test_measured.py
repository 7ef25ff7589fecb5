"""One model in several ways: the same tokens in all of them, and the bytes of the formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

from nanoinfer.configs.config import SHAPES
from nanoinfer.engines.cached import CachedEngine
from nanoinfer.errors import RequestError
from nanoinfer.models.registry import load_model
from nanoinfer.parallel.collectives import Sent
from nanoinfer.parallel.data_parallel import assign
from nanoinfer.parallel.measured import WAYS, products_s, split, summed
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.theory import communication
from nanoinfer.theory.communication import sent_bytes
from nanoinfer.theory.parameters import layer_matrices, parameters
from tests.parallel import together

MODEL, CONFIG = "random:tiny-llama", SHAPES["tiny-llama"]
RANKS = 2
SPLIT, RINGS, CROWDING = (f"nanoinfer.parallel.measured:{name}" for name in ("split", "rings", "crowding"))
PROMPTS, NEW, ROUNDS = (together.OF_TWO[SPLIT][name] for name in ("prompts", "new", "rounds"))


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    """What each rank found."""
    tasks = (SPLIT, RINGS, CROWDING)
    return [
        dict(zip(tasks, found, strict=True)) for found in zip(*(together.answers(RANKS, t) for t in tasks), strict=True)
    ]


def test_every_way_says_the_same(ranks: list[Any]) -> None:
    engine = CachedEngine(load_model(MODEL, seed=5))
    alone = [c.token_ids for c in engine.generate(PROMPTS, SamplingParams(max_tokens=NEW, ignore_eos=True))]
    assert len({tuple(ids) for ids in alone}) == len(PROMPTS)
    dealt = assign([len(PROMPTS[0]) + NEW] * 3, RANKS)
    for rank, answer in enumerate(ranks):
        found = answer[SPLIT]
        assert set(found) == set(WAYS) - ({"one"} if rank else set())
        for way, one in found.items():
            assert one["token_ids"] == ([alone[i] for i in dealt[rank]] if way == "replicas" else alone)
            assert len(one["prefill_s"]) == ROUNDS
            assert len(one["step_s"]) == ROUNDS * (NEW - 1)
            assert all(seconds > 0 for seconds in [*one["prefill_s"], *one["step_s"]])


def test_all_ranks_together_send_what_the_formulas_say(ranks: list[Any]) -> None:
    def sent(way: str, phase: str) -> float:
        return sum(call["sent"] for answer in ranks for call in answer[SPLIT].get(way, {}).get(phase, ()))

    rows, tokens, steps = len(PROMPTS), len(PROMPTS[0]), NEW - 1
    for phase, new, passes in (("prefill", tokens, 1), ("steps", 1, steps)):
        tp = communication.tensor_parallel(CONFIG, rows * new, RANKS, 4, rows)
        assert sent("tp", phase) == RANKS * passes * sent_bytes(tp)
        for way, m in (("pp", 1), ("pp, filled", RANKS)):
            *hops, ids = communication.pipeline_parallel(CONFIG, rows, new, RANKS, 4, m)
            assert sent(way, phase) == passes * ((RANKS - 1) * sent_bytes(hops) + ids.sent)
        assert sent("one", phase) == sent("replicas", phase) == 0
    ring, *ends = communication.context_parallel(CONFIG, rows, tokens, RANKS, 4)
    assert sent("cp", "prefill") == RANKS * ring.sent + sent_bytes(ends)
    gather, ids = communication.context_parallel_decode(CONFIG, rows, RANKS)
    assert sent("cp", "steps") == steps * (RANKS * gather.sent + ids.sent)


def test_weights_of_a_rank(ranks: list[Any]) -> None:
    whole = 4 * parameters(CONFIG)
    of = [{way: one["weights"] for way, one in answer[SPLIT].items()} for answer in ranks]
    assert of[0]["one"] == of[0]["replicas"] == of[1]["replicas"] == of[0]["cp"] == whole
    norms = 4 * CONFIG.d_model * (2 * CONFIG.n_layers + 1)
    assert [one["tp"] for one in of] == [(whole - norms) // 2 + norms] * 2
    table = 4 * CONFIG.vocab_size * CONFIG.d_model  # tied: embedding at one end, head at the other
    assert sum(one["pp"] for one in of) == whole + table


def test_the_two_sums_agree_and_so_do_their_bytes(ranks: list[Any]) -> None:
    for answer in ranks:
        found = answer[RINGS]
        assert found["differ"] < 1e-6
        assert [(c["kind"], c["calls"], c["sent"]) for c in found["library"]] == [("all-reduce", 1, 48.0)]
        assert [(c["kind"], c["calls"], c["sent"]) for c in found["ring"]] == [("exchange", 2, 48.0)]


def test_rank_0_works_alone_and_all_work_together(ranks: list[Any]) -> None:
    for rank, answer in enumerate(ranks):
        found = answer[CROWDING]
        assert len(found["together"]) == 2
        assert len(found["alone"]) == (0 if rank else 2)
        assert all(seconds > 0 for seconds in [*found["alone"], *found["together"]])


def test_the_products_are_those_of_all_layers() -> None:
    flops = FlopCounterMode(display=False)
    loaded = load_model(MODEL)
    with flops:
        products_s(loaded.model, 3, repeats=1)
    matrices = [matrix for layer in range(CONFIG.n_layers) for matrix in layer_matrices(CONFIG, layer)]
    assert flops.get_total_flops() == 3 * 2 * 3 * sum(matrix.rows * matrix.columns for matrix in matrices)  # 3 calls


def test_calls_of_one_kind_and_size_are_summed_up() -> None:
    log = [
        Sent("send", 8, 8.0, 1.0),
        Sent("receive", 8, 0.0, 2.0),
        Sent("send", 8, 8.0, 0.5),
        Sent("send", 4, 4.0, 0.1),
    ]
    one, two, three = summed(log)
    assert one == {"kind": "send", "message": 8, "calls": 2, "sent": 16.0, "seconds": 1.5}
    assert (two["kind"], two["calls"], three["message"]) == ("receive", 1, 4)
    assert math.isclose(sum(call["seconds"] for call in (one, two, three)), 3.6)


def test_an_unknown_way_is_named_before_anything_loads() -> None:
    with pytest.raises(RequestError, match="no way 'pt' to share a model; did you mean"):
        split(None, model="no such model", prompts=[[1]], new=1, ways=["pt"])  # type: ignore[arg-type]

"""One model in several strategies: the same tokens in all of them, and the bytes of the formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

from nanoinfer.configs.config import SHAPES
from nanoinfer.engines.static import CachedEngine
from nanoinfer.errors import RequestError
from nanoinfer.models.registry import load_model
from nanoinfer.parallel.collectives import CommRecord, total_calls
from nanoinfer.parallel.data_parallel import assign
from nanoinfer.parallel.experiments import STRATEGIES, compare_strategies, time_products
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.theory import communication
from nanoinfer.theory.arithmetic import layer_matrices, parameters
from nanoinfer.theory.communication import sent_bytes
from tests.parallel import rank_results

MODEL, CONFIG = "random:tiny-llama", SHAPES["tiny-llama"]
RANKS = 2
EXPERIMENTS = ("compare_strategies", "compare_all_reduces", "contention")
STRATEGIES_TASK, ALL_REDUCES, CONTENTION = (f"nanoinfer.parallel.experiments:{name}" for name in EXPERIMENTS)
PROMPTS, NEW, ROUNDS = (rank_results.OF_TWO[STRATEGIES_TASK][name] for name in ("prompts", "new", "rounds"))


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    """Results of each rank."""
    tasks = (STRATEGIES_TASK, ALL_REDUCES, CONTENTION)
    by_task = {task: rank_results.answers(RANKS, task) for task in tasks}
    return [{task: results[rank] for task, results in by_task.items()} for rank in range(RANKS)]


def test_every_strategy_gives_the_same_tokens(ranks: list[Any]) -> None:
    engine = CachedEngine(load_model(MODEL, seed=5))
    alone = [c.token_ids for c in engine.generate(PROMPTS, SamplingParams(max_tokens=NEW, ignore_eos=True))]
    assert len({tuple(ids) for ids in alone}) == len(PROMPTS)
    dealt = assign([len(PROMPTS[0]) + NEW] * 3, RANKS)
    for rank, answer in enumerate(ranks):
        found = answer[STRATEGIES_TASK]
        assert set(found) == set(STRATEGIES) - ({"one"} if rank else set())
        for way, one in found.items():
            assert one["token_ids"] == ([alone[i] for i in dealt[rank]] if way == "replicas" else alone)
            assert len(one["prefill_s"]) == ROUNDS
            assert len(one["step_s"]) == ROUNDS * (NEW - 1)
            assert all(seconds > 0 for seconds in [*one["prefill_s"], *one["step_s"]])


def test_all_ranks_together_send_what_the_formulas_say(ranks: list[Any]) -> None:
    def sent(way: str, phase: str) -> float:
        return sum(call["sent"] for answer in ranks for call in answer[STRATEGIES_TASK].get(way, {}).get(phase, ()))

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
    of = [{way: one["weights"] for way, one in answer[STRATEGIES_TASK].items()} for answer in ranks]
    assert of[0]["one"] == of[0]["replicas"] == of[1]["replicas"] == of[0]["cp"] == whole
    norms = 4 * CONFIG.d_model * (2 * CONFIG.n_layers + 1)
    assert [one["tp"] for one in of] == [(whole - norms) // 2 + norms] * 2
    table = 4 * CONFIG.vocab_size * CONFIG.d_model  # tied: embedding at one end, head at the other
    assert sum(one["pp"] for one in of) == whole + table


def test_the_two_sums_agree_and_so_do_their_bytes(ranks: list[Any]) -> None:
    for answer in ranks:
        found = answer[ALL_REDUCES]
        assert found["differ"] < 1e-6
        assert [(c["kind"], c["calls"], c["sent"]) for c in found["library"]] == [("all-reduce", 1, 48.0)]
        assert [(c["kind"], c["calls"], c["sent"]) for c in found["ring"]] == [("exchange", 2, 48.0)]


def test_rank_0_works_alone_and_all_work_together(ranks: list[Any]) -> None:
    for rank, answer in enumerate(ranks):
        found = answer[CONTENTION]
        assert len(found["together"]) == 2
        assert len(found["alone"]) == (0 if rank else 2)
        assert all(seconds > 0 for seconds in [*found["alone"], *found["together"]])


def test_the_products_are_those_of_all_layers() -> None:
    flops = FlopCounterMode(display=False)
    loaded = load_model(MODEL)
    with flops:
        time_products(loaded.model, 3, repeats=1)
    matrices = [matrix for layer in range(CONFIG.n_layers) for matrix in layer_matrices(CONFIG, layer)]
    assert flops.get_total_flops() == 3 * 2 * 3 * sum(matrix.rows * matrix.columns for matrix in matrices)  # 3 calls


def test_calls_of_one_kind_and_size_are_summed_up() -> None:
    log = [
        CommRecord("send", 8, 8.0, 1.0),
        CommRecord("receive", 8, 0.0, 2.0),
        CommRecord("send", 8, 8.0, 0.5),
        CommRecord("send", 4, 4.0, 0.1),
    ]
    one, two, three = total_calls(log)
    assert one == {"kind": "send", "message": 8, "calls": 2, "sent": 16.0, "seconds": 1.5}
    assert (two["kind"], two["calls"], three["message"]) == ("receive", 1, 4)
    assert math.isclose(sum(call["seconds"] for call in (one, two, three)), 3.6)


def test_an_unknown_strategy_is_named_before_anything_loads() -> None:
    with pytest.raises(RequestError, match="unknown strategy 'pt'; did you mean"):
        compare_strategies(None, model="no such model", prompts=[[1]], new=1, strategies=["pt"])  # type: ignore[arg-type]

"""Experts spread over ranks give what one device gives, send just what the router sends away, and wait for no one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanoinfer.engines.load import load
from nanoinfer.errors import RequestError
from nanoinfer.models.llama import Llama
from nanoinfer.models.moe import MixtureOfExperts, route
from nanoinfer.models.registry import load_model
from nanoinfer.parallel import expert
from nanoinfer.parallel.data_parallel import in_order
from nanoinfer.parallel.expert import ExpertLoads
from nanoinfer.theory.communication import expert_parallel
from tests.engines.helpers import LLAMA, tiny
from tests.parallel import expert_ranks as ranks
from tests.parallel import rank_results

D, E, K, L = ranks.CONFIG.d_model, 8, 2, ranks.CONFIG.n_layers


@pytest.fixture(scope="module", params=[2, 4])
def answers(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return rank_results.answers(request.param, "expert")


@pytest.fixture(scope="module")
def whole() -> Llama:
    model = tiny(ranks.CONFIG).model
    assert isinstance(model, Llama)
    return model


def routed(model: Llama, ids: torch.Tensor) -> list[list[list[int]]]:
    """How many tokens each expert is sent ``[passes, L, E]``, by the routers of one device."""
    found: list[list[int]] = []

    def note(gate: torch.nn.Module, _: object, logits: torch.Tensor) -> None:
        del gate
        found.append(route(logits, K)[1].flatten().bincount(minlength=E).tolist())

    hooks = [layer.gate.register_forward_hook(note) for layer in model.modules() if isinstance(layer, MixtureOfExperts)]
    ranks.passes(model, ids)
    for hook in hooks:
        hook.remove()
    return [found[i : i + L] for i in range(0, len(found), L)]


def test_prefill_and_decode_equal_one_device(answers: list[dict[str, Any]], whole: Llama) -> None:
    expected = ranks.passes(whole, ranks.rows())
    for rank, answer in enumerate(answers):
        for ours, one in zip(answer["logits"], expected, strict=True):
            torch.testing.assert_close(torch.tensor(ours), one[rank :: len(answers)], atol=1e-5, rtol=1e-5)


def test_each_rank_holds_its_share_of_the_experts(answers: list[dict[str, Any]], whole: Llama) -> None:
    n = len(answers)
    of_experts = L * E * 3 * D * ranks.CONFIG.d_ff
    everything = sum(p.numel() for p in whole.parameters())
    assert {answer["held"] for answer in answers} == {E // n}
    assert {answer["parameters"] for answer in answers} == {everything - of_experts + of_experts // n}


def test_bytes_are_exactly_what_the_routers_send_away(answers: list[dict[str, Any]], whole: Llama) -> None:
    n, own = len(answers), E // len(answers)
    counts = [routed(whole, ranks.rows()[rank::n]) for rank in range(n)]  # [n, passes, L, E]
    for rank, answer in enumerate(answers):
        expected: list[list[Any]] = []
        for one_pass in range(1 + ranks.STEPS):
            expected.append(["all-reduce", 8, 2 * (n - 1) / n * 8])
            for layer in range(L):
                # rows from each rank to each rank
                rows = [[sum(counts[a][one_pass][layer][b * own : (b + 1) * own]) for b in range(n)] for a in range(n)]
                there = sum(rows[rank]) - rows[rank][rank]
                back = sum(rows[other][rank] for other in range(n) if other != rank)
                computed = back + rows[rank][rank]
                expected.append(["all-to-all", E * 8, (n - 1) * own * 8])
                expected.append(["all-to-all", sum(rows[rank]) * D * 4, there * D * 4])
                expected.append(["all-to-all", computed * D * 4, back * D * 4])
                assert sum(answer["computed"][layer][one_pass]) == computed
        expected.append(["all-reduce", 8, 2 * (n - 1) / n * 8])  # no rank has a pass left
        assert answer["sent"] == expected


def test_random_routing_sends_what_the_formula_says(answers: list[dict[str, Any]]) -> None:
    n = len(answers)
    traffic = expert_parallel(ranks.CONFIG, ranks.UNIFORM, n, 4)
    tokens = [part for part in traffic if part.message == ranks.UNIFORM * K * D * 4]
    assert sum(part.calls for part in tokens) == 2 * L
    each = sum(part.sent for part in tokens) / (2 * L)
    assert each == ranks.UNIFORM * K * D * 4 * (n - 1) / n
    for answer in answers:
        assert answer["uniform"] == [pytest.approx(each, rel=0.01)] * 2
    counts = [part for part in traffic if part.message == E * 8]
    assert [(part.calls, part.sent) for part in counts] == [(L, L * E // n * (n - 1) * 8)]


@pytest.mark.parametrize("engine", ["naive", "cached", "continuous"])
def test_engines_with_fewer_prompts_than_ranks_say_what_they_say_alone(
    answers: list[dict[str, Any]], engine: str
) -> None:
    alone = load(tiny(ranks.CONFIG), "naive")
    found = {int(i): ids for answer in answers for i, ids in answer[engine].items()}
    assert sorted(found) == [0, 1, 2]
    for i, prompt in enumerate(ranks.prompts(3)):
        assert found[i] == alone.generate([prompt], ranks.wanted(i))[0].token_ids


def test_the_task_gives_the_tokens_of_one_device(answers: list[dict[str, Any]]) -> None:
    tasks = [answer["task"] for answer in answers]
    alone = load(load_model("random:tiny-moe", seed=2))
    done = alone.generate(ranks.prompts(3), ranks.SamplingParams(max_tokens=5))
    assert in_order(tasks) == [one.token_ids for one in done]
    loads = ExpertLoads.from_ranks([task["computed"] for task in tasks])
    assert len(loads.imbalance) == L and all(1 <= x <= len(answers) for x in loads.imbalance)
    whole_prompts = sum(len(prompt) for prompt in ranks.prompts(3))
    assert all(sum(map(sum, layer)) >= K * whole_prompts for layer in loads.rows)


def test_imbalance_is_the_busiest_rank_over_the_mean() -> None:
    # One layer, two passes, two ranks of two experts: 6 + 0 rows, then 1 + 3 of which the second rank has 3.
    loads = ExpertLoads.from_ranks([[[[2, 4], [1, 0]]], [[[0, 0], [3, 0]]]])
    assert loads.rows == [[[6, 0], [1, 3]]]
    assert loads.imbalance == [(6 + 3) / (3 + 2)]
    assert ExpertLoads([[[5, 5]]]).imbalance == [1.0]


def test_what_cannot_be_spread_is_refused() -> None:
    def of(size: int) -> Any:
        return SimpleNamespace(size=size, rank=0)

    with pytest.raises(RequestError, match=r"'tiny' has no experts to spread; take a mixture of experts"):
        expert.shard(tiny(LLAMA), of(2))
    with pytest.raises(RequestError, match="ep 3 does not divide 8 experts; take one of 1, 2, 4, 8"):
        expert.shard(tiny(ranks.CONFIG), of(3))

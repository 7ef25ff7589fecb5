"""Context parallel: a prompt in parts equals one device, and what goes round the ring equals the formula."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoinfer.engines.static import CachedEngine
from nanoinfer.models.attention import attend
from nanoinfer.parallel.context import attend_with_lse, merge, rank_positions, zigzag_chunks
from nanoinfer.parallel.experiments import SHAPE
from nanoinfer.theory.communication import context_parallel, context_parallel_decode, partition
from tests.engines.helpers import tiny
from tests.examples import examples
from tests.parallel.context_ranks import CONFIGS, LENGTHS, ROWS, prompts
from tests.parallel.pipeline_ranks import ENDLESS, SETTINGS, STEPS, generated
from tests.parallel.rank_results import answers, context_ends

KEYS = [(family, length) for family in CONFIGS for length in LENGTHS]


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank found."""
    return answers(request.param, "context")


@pytest.mark.parametrize(("family", "length"), KEYS)
def test_logits_equal_one_device_in_prefill_and_decode(ranks: list[dict[str, Any]], family: str, length: int) -> None:
    for rank in ranks:
        for steps in rank["differences"][f"{family} {length}"]:  # with overlap and without
            assert len(steps) == STEPS
            for difference, spread in steps:
                assert difference < 2e-5 * spread


@pytest.mark.parametrize("family", CONFIGS)
def test_every_rank_has_one_devices_tokens(ranks: list[dict[str, Any]], family: str) -> None:
    one = CachedEngine(tiny(CONFIGS[family], context_ends()[family]))
    alone, endless = (generated(one, prompts(13), params) for params in (SETTINGS, ENDLESS))
    assert [reason for _, _, reason in alone][::2] == ["stop", "stop"], "rows end before their limits"
    assert len({len(row) for row, _, _ in alone}) > 2, "rows end at different steps"
    assert [len(row) for row, _, _ in endless] == [9, 4, 12, 7]
    for rank in ranks:
        assert rank["tokens"][family] == [alone, endless]


def test_without_a_seed_all_ranks_have_the_same_tokens(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["unseeded"] == ranks[0]["unseeded"] for rank in ranks)
    rows = [tuple(row) for row, _, _ in ranks[0]["unseeded"]]
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize(("family", "length"), KEYS)
def test_bytes_equal_the_formula(ranks: list[dict[str, Any]], family: str, length: int) -> None:
    n, config = len(ranks), CONFIGS[family]
    ring, last, ids = context_parallel(config, ROWS, length, n, 4)
    gather, ids_too = context_parallel_decode(config, ROWS, n)
    # By hand: keys and values of the longest part; outputs and their log-sum-exps of every query head.
    assert ring.message == 2 * ROWS * math.ceil(length / n) * config.n_kv_heads * config.d_head * 4
    assert gather.message == ROWS * config.n_heads * (config.d_head + 1) * 4
    assert (last.message, ids.message, ids_too) == (ROWS * config.d_model * 4, ROWS * 8, ids)
    owner = next(rank for rank in range(n) if length - 1 in rank_positions(length, rank, n))
    for rank, answer in enumerate(ranks):
        log = answer["log"][f"{family} {length}"]
        assert Counter((kind, message) for kind, message, _ in log) == {
            (ring.kind, ring.message): ring.calls,
            (last.kind, last.message): 1,
            (gather.kind, gather.message): gather.calls * (STEPS - 1),
            (ids.kind, ids.message): STEPS,
        }
        sent = {kind: sum(bytes_ for k, _, bytes_ in log if k == kind) for kind, _, _ in log}
        assert sent == {
            "exchange": ring.sent,
            "all-gather": gather.sent * (STEPS - 1),
            "broadcast": last.sent * (rank == owner) + ids.sent * STEPS * (rank == 0),
        }


@pytest.mark.parametrize(("family", "length"), KEYS)
def test_ranks_share_the_cache_evenly(ranks: list[dict[str, Any]], family: str, length: int) -> None:
    n = len(ranks)
    kept = [rank["kept"][f"{family} {length}"] for rank in ranks]
    assert {whole for _, _, whole in kept} == {length + STEPS - 1}  # the last token chosen is never fed
    assert sum(own for own, _, _ in kept) == length + STEPS - 1
    taken = [own - len(rank_positions(length, rank, n)) for rank, (own, _, _) in enumerate(kept)]
    assert taken == [len(turns) for turns in partition(STEPS - 1, n)]
    assert max(capacity for _, capacity, _ in kept) <= math.ceil(length / n) + math.ceil((STEPS - 1) / n)


def test_what_cannot_be_served_is_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        ragged, short, logprobs, crop = rank["refused"]
        assert "needs prompts of one length, got 4 to 5 tokens" in ragged
        assert f"1 tokens cannot be spread over {len(ranks)} ranks" in short
        assert "keeps no logprobs" in logprobs
        assert "does not crop" in crop


def test_the_overlap_is_measured_at_every_length(ranks: list[dict[str, Any]]) -> None:
    n = len(ranks)
    for rank in ranks:
        assert [one["tokens"] for one in rank["overlap"]] == [12, 16]
        for one in rank["overlap"]:
            for name in ("overlapped_s", "in_turn_s", "exchange_s", "attention_s"):
                assert len(one[name]) == 2
                assert min(one[name]) > 0
            ring, *_ = context_parallel(SHAPE, 1, one["tokens"], n, 4)
            assert one["sent"] == ring.sent / SHAPE.n_layers


# --- without ranks --------------------------------------------------------------------


@examples(100)
@given(
    seed=st.integers(0, 2**32 - 1),
    group=st.integers(1, 3),
    n_new=st.integers(1, 4),
    owners=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    hidden=st.floats(0, 1),
    scale=st.sampled_from([1.0, 30.0]),
)
def test_any_split_of_the_keys_gives_attention_over_all(
    seed: int, group: int, n_new: int, owners: list[int], hidden: float, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    n_keys, n_kv, d_head = len(owners), 2, 4

    def normal(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(2, heads, tokens, d_head, generator=generator)

    q, k, v = normal(n_kv * group, n_new) * scale, normal(n_kv, n_keys), normal(n_kv, n_keys)
    mask = torch.rand(n_new, n_keys, generator=generator) >= hidden  # rows that see nothing, too
    parts = [
        attend_with_lse(q, k[:, :, own], v[:, :, own], mask[:, own])
        for own in ([i for i, owner in enumerate(owners) if owner == rank] for rank in range(4))
    ]
    out, lse = parts[0]
    for part in parts[1:]:
        out, lse = merge((out, lse), part)

    wide_k, wide_v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q.double() @ wide_k.transpose(2, 3) / math.sqrt(d_head)).masked_fill(~mask, -math.inf)
    wanted = (scores.softmax(-1) @ wide_v).nan_to_num(0.0)  # a softmax over nothing
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_attention_with_its_log_sum_exp_is_attention() -> None:
    q, k, v = (torch.randn(2, heads, 5, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    out, _ = attend_with_lse(q, k, v, torch.ones(5, 5, dtype=torch.bool).tril())
    torch.testing.assert_close(out.transpose(1, 2).flatten(2), attend(q, k, v))


@pytest.mark.parametrize("tokens", [4, 5, 13, 16, 23])
def test_every_token_has_one_rank_and_ranks_have_equal_work(tokens: int) -> None:
    held = [rank_positions(tokens, rank, 4) for rank in range(4)]
    assert sorted(place for part in held for place in part) == list(range(tokens))
    assert all(part == sorted(part) for part in held)
    assert max(map(len, held)) == math.ceil(tokens / 4)
    assert max(map(len, held)) - min(map(len, held)) <= 1
    assert [zigzag_chunks(rank, 4) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]


def test_causal_work_is_balanced() -> None:
    work = [sum(place + 1 for place in rank_positions(64, rank, 4)) for rank in range(4)]
    assert len(set(work)) == 1

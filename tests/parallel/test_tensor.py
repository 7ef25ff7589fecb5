"""A sliced model computes what the whole one computes, and its ranks send the bytes of the formula."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from nanoinfer.configs.config import SHAPES as NAMED
from nanoinfer.errors import RequestError
from nanoinfer.parallel.tensor import ShardSpec, is_even, shard_spec
from nanoinfer.theory.communication import Traffic, all_gather, all_reduce, tensor_parallel
from tests.engines.helpers import tiny
from tests.parallel.rank_results import answers
from tests.parallel.slice_ranks import PROMPTS, SHAPES, UNEVEN, drive

CASES = [(2, name) for name in [*SHAPES, "uneven"]] + [(4, name) for name in SHAPES]


def config_of(name: str) -> Any:
    return UNEVEN if name == "uneven" else SHAPES[name]


@pytest.mark.parametrize(("n", "name"), CASES)
def test_logits_equal_one_device(n: int, name: str) -> None:
    whole = drive(tiny(config_of(name)))
    for answer in answers(n, "slice"):
        for ours, theirs in zip(answer[name]["logits"], whole["logits"], strict=True):
            one, all_together = torch.tensor(theirs), torch.tensor(ours)
            assert all_together.shape == (len(PROMPTS), config_of(name).vocab_size)
            assert (one - all_together).abs().max() < 1e-5 * one.abs().max()


@pytest.mark.parametrize(("n", "name"), CASES)
def test_engines_say_the_same_on_every_rank(n: int, name: str) -> None:
    whole = drive(tiny(config_of(name)))["said"]
    assert whole[0] == whole[1]  # cached and continuous
    assert whole[0][0] != whole[0][1]  # greedy and seeded
    for answer in answers(n, "slice"):
        assert answer[name]["said"] == whole


@pytest.mark.parametrize(("n", "name"), CASES)
def test_traffic_is_that_of_the_formula(n: int, name: str) -> None:
    config = config_of(name)
    slots = len(PROMPTS) * max(map(len, PROMPTS))  # padding is computed too
    for answer in answers(n, "slice"):
        prefill, *steps = answer[name]["calls"]
        for calls, tokens in ((prefill, slots), *((step, len(PROMPTS)) for step in steps)):
            if name == "uneven":  # the same calls: what is uneven are the products
                reduces = all_reduce(2 * config.n_layers + 1, tokens * config.d_model * 4, n)
                expected = (reduces, all_gather(1, len(PROMPTS) * 51 * 4, n))
            else:
                expected = tensor_parallel(config, tokens, n, 4, len(PROMPTS))
            assert counted(calls) == set(expected)


def counted(calls: Sequence[Sequence[Any]]) -> set[Traffic]:
    """A log as the formula has it: calls of one kind and size together."""
    alike = Counter((kind, message) for kind, message, _ in calls)
    return {
        Traffic(kind, n, message, sum(c[2] for c in calls if (c[0], c[1]) == (kind, message)))
        for (kind, message), n in alike.items()
    }


@pytest.mark.parametrize(("n", "name"), CASES)
def test_a_slice_is_what_its_rank_needs(n: int, name: str) -> None:
    config = config_of(name)
    model = tiny(config).model
    once = [p for key, p in model.named_parameters() if "norm" in key or "ln_" in key or key == "wpe.weight"]
    once += [p for key, p in model.named_parameters() if key.endswith("c_proj.bias")]  # added to the whole sum
    whole = sum(p.nbytes for p in once)
    for rank, answer in enumerate(answers(n, "slice")):
        found, mine = answer[name], shard_spec(config, n, rank, uneven=name == "uneven")
        assert found["untouched"]
        assert found["shared"] == whole  # and nothing of what was cut
        assert found["config"] == [len(mine.heads), len(mine.kv_heads), len(mine.middle)]
    if name in ("llama", "gpt2") or (n == 2 and name != "uneven"):  # no KV head is copied: the rest is divided by n
        rows = 1 if config.tied else 2
        padding = rows * (n * -(-config.vocab_size // n) - config.vocab_size) * config.d_model * 4
        total = sum(p.nbytes for p in model.parameters())
        assert sum(answer[name]["bytes"] for answer in answers(n, "slice")) == total + (n - 1) * whole + padding


# --- slices ----------------------------------------------------------------------


def test_slices() -> None:
    smol = NAMED["smollm2-135m"]
    assert shard_spec(smol, 3, 1) == ShardSpec(range(3, 6), range(1, 2), range(512, 1024), range(16_384, 32_768))
    assert shard_spec(smol, 2, 0, uneven=True) == ShardSpec(range(6), range(2), range(768), range(24_576))
    assert shard_spec(smol, 2, 1, uneven=True) == ShardSpec(
        range(6, 9), range(2, 3), range(768, 1536), range(24_576, 49_152)
    )
    # two KV heads for four ranks: each is on two of them, with half of the queries that look at it
    grouped = SHAPES["grouped, tied"]
    parts = [shard_spec(grouped, 4, rank) for rank in range(4)]
    assert [part.kv_heads for part in parts] == [range(1), range(1), range(1, 2), range(1, 2)]
    assert [part.heads for part in parts] == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert parts[3].vocabulary == range(78, 104)  # three rows beyond the end


def test_what_cannot_be_divided() -> None:
    smol, xl = NAMED["smollm2-135m"], NAMED["gpt2-xl"]
    assert not is_even(smol, 2) and is_even(smol, 3) and not is_even(UNEVEN, 2)
    with pytest.raises(RequestError, match=r"tp 2 does not divide 9 query heads and 3 KV heads evenly; .* 1, 3, 9"):
        shard_spec(smol, 2, 0)
    with pytest.raises(RequestError, match="tp 6 does not divide 9 query heads"):
        shard_spec(smol, 6, 0, uneven=True)  # there is no half of a KV head
    with pytest.raises(RequestError, match="tp 2 does not divide 25 query heads"):
        shard_spec(xl, 2, 0)
    with pytest.raises(RequestError, match="d_ff of 51 evenly"):
        shard_spec(UNEVEN, 9, 0)
    with pytest.raises(RequestError, match="tp must be at least 1"):
        shard_spec(smol, 0, 0)
    with pytest.raises(RequestError, match="does not cut experts"):
        shard_spec(NAMED["tiny-moe"], 2, 0)

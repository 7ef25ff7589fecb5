"""Replicas: who gets which prompt, and that several engines say what one says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoinfer.engines.load import load
from nanoinfer.errors import RequestError
from nanoinfer.parallel.data_parallel import assign, in_order
from nanoinfer.sampling.params import SamplingParams
from tests.parallel import rank_results


def test_prompts_of_one_length_go_round_robin() -> None:
    assert assign([9] * 7, 3) == [[0, 3, 6], [1, 4], [2, 5]]


def test_a_long_prompt_keeps_its_replica_from_the_next_few() -> None:
    assert assign([30, 10, 10, 10, 10], 2) == [[0, 4], [1, 2, 3]]


def test_replicas_without_prompts_and_without_sense() -> None:
    assert assign([5], 3) == [[0], [], []]
    with pytest.raises(RequestError, match="replicas must be at least 1, got 0"):
        assign([5], 0)


@given(st.lists(st.integers(1, 1000), max_size=50), st.integers(1, 9))
def test_every_prompt_goes_somewhere_and_nobody_waits_long(tokens: list[int], replicas: int) -> None:
    queues = assign(tokens, replicas)
    assert sorted(i for queue in queues for i in queue) == list(range(len(tokens)))
    assert all(queue == sorted(queue) for queue in queues)
    loads = [sum(tokens[i] for i in queue) for queue in queues]
    assert max(loads) - min(loads) <= max(tokens, default=0)


def test_two_replicas_say_what_one_engine_says_in_the_order_of_the_prompts() -> None:
    task = "nanoinfer.parallel.data_parallel:generate"
    answers, prompts = rank_results.answers(2, task), rank_results.OF_TWO[task]["prompts"]
    one = load("random:tiny-llama", "continuous", seed=3)
    done = one.generate(prompts, SamplingParams(max_tokens=6))
    assert in_order(answers) == [completion.token_ids for completion in done]
    assert [answer["prompts"] for answer in answers] == assign([len(one.encode(p)) + 6 for p in prompts], 2)

"""Data parallel: replicas of the whole model, which do not communicate; only the prompts are divided among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nanoinfer.engines.load import load
from nanoinfer.errors import check
from nanoinfer.parallel.collectives import Communicator
from nanoinfer.sampling.params import SamplingParams


def assign(tokens: Sequence[int], replicas: int) -> list[list[int]]:
    """Prompt indices of each replica: in order, each prompt goes to the replica with the fewest tokens so far.

    ``tokens`` are those of each prompt and its answer at most.
    """
    check("replicas", replicas, at_least=1)
    queues: list[list[int]] = [[] for _ in range(replicas)]
    outstanding = [0] * replicas
    for prompt, count in enumerate(tokens):
        least = outstanding.index(min(outstanding))
        queues[least].append(prompt)
        outstanding[least] += count
    return queues


def generate(
    comm: Communicator,
    model: str,
    prompts: Sequence[str | Sequence[int]],
    params: Mapping[str, Any] | None = None,
    engine: str = "continuous",
    **options: Any,
) -> dict[str, Any]:
    """A task for :func:`~nanoinfer.parallel.launch.launch`: this rank's engine serves its share of the prompts.

    ``options`` are those of :func:`nanoinfer.load`. The answer has the indices of ``prompts`` and their ``token_ids``.
    """
    replica, settings = load(model, engine, **options), SamplingParams(**(params or {}))
    lengths = [len(replica.encode(prompt)) + settings.max_tokens for prompt in prompts]
    mine = assign(lengths, comm.size)[comm.rank]
    completions = replica.generate([prompts[i] for i in mine], settings) if mine else []
    return {"prompts": mine, "token_ids": [completion.token_ids for completion in completions]}


def in_order(answers: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Token ids of all replicas' answers, in the order of the prompts."""
    by_prompt = {i: ids for answer in answers for i, ids in zip(answer["prompts"], answer["token_ids"], strict=True)}
    return [by_prompt[i] for i in sorted(by_prompt)]

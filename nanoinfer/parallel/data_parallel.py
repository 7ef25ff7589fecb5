"""Data parallel: replicas of the whole model, which do not communicate; only the prompts are divided among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from nanoinfer.engines.load import load
from nanoinfer.errors import check
from nanoinfer.measure.clock import now
from nanoinfer.parallel.collectives import Communicator
from nanoinfer.sampling.params import SamplingParams


def assign(tokens: Sequence[int], replicas: int) -> list[list[int]]:
    """Prompt indices of each replica: in order, each prompt goes to the replica with the fewest tokens so far.

    ``tokens`` are those of each prompt and its answer at most. Prompts of one length go round robin.
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

    Ranks start together, and nothing else is sent. ``model``, ``engine`` and ``options`` are those of
    :func:`nanoinfer.load`, ``params`` fields of :class:`~nanoinfer.sampling.params.SamplingParams`.

    Returns:
        The indices of this rank's ``prompts``, their ``token_ids``, and when they ``began`` and ``ended``, in seconds
        of the machine's monotonic clock.
    """
    replica, settings = load(model, engine, **options), SamplingParams(**(params or {}))
    lengths = [len(replica.encode(prompt)) + settings.max_tokens for prompt in prompts]
    mine = assign(lengths, comm.size)[comm.rank]
    dist.barrier(comm.group)
    began = now()
    completions = replica.generate([prompts[i] for i in mine], settings) if mine else []
    return {"prompts": mine, "token_ids": [c.token_ids for c in completions], "began": began, "ended": now()}


def in_order(answers: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Token ids of all replicas' answers, in the order of the prompts."""
    by_prompt = {i: ids for answer in answers for i, ids in zip(answer["prompts"], answer["token_ids"], strict=True)}
    return [by_prompt[i] for i in sorted(by_prompt)]


def tokens_per_second(answers: Sequence[Mapping[str, Any]]) -> float:
    """Generated tokens of all replicas, over the time from the first start to the last end."""
    tokens = sum(len(ids) for answer in answers for ids in answer["token_ids"])
    seconds: float = max(answer["ended"] for answer in answers) - min(answer["began"] for answer in answers)
    return tokens / seconds

"""Replicas: the whole model several times, side by side.

They tell each other nothing, so this is the split without communication, and the first to think of where a model fits
one device. What there is to decide is who gets which prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from nanoinfer.engines.load import load
from nanoinfer.errors import RequestError
from nanoinfer.measure.clock import now
from nanoinfer.parallel.collectives import Wire
from nanoinfer.sampling.params import SamplingParams


def assign(tokens: Sequence[int], replicas: int) -> list[list[int]]:
    """Which prompts each replica serves: one after the other, each goes to whom the fewest tokens are assigned so far.

    Prompts of one length go round robin; a long one keeps its replica from the next few.

    Args:
        tokens: of each prompt and its answer at most.
        replicas: at least 1; the first of those with equally few is taken.
    """
    if replicas < 1:
        raise RequestError(f"replicas must be at least 1, got {replicas}")
    queues: list[list[int]] = [[] for _ in range(replicas)]
    outstanding = [0] * replicas
    for prompt, count in enumerate(tokens):
        least = outstanding.index(min(outstanding))
        queues[least].append(prompt)
        outstanding[least] += count
    return queues


def generate(
    wire: Wire,
    model: str,
    prompts: Sequence[str | Sequence[int]],
    params: Mapping[str, Any] | None = None,
    engine: str = "continuous",
    **options: Any,
) -> dict[str, Any]:
    """A task for :func:`~nanoinfer.parallel.launch.launch`: this rank's engine serves its share of the prompts.

    Args:
        wire: to the other ranks, to begin together; then nothing goes over it.
        model: by name.
        prompts: of all replicas.
        params: fields of :class:`~nanoinfer.sampling.params.SamplingParams`.
        engine: by name.
        options: as of :func:`nanoinfer.load`.

    Returns:
        Which ``prompts`` these were, their ``token_ids``, and when they ``began`` and ``ended``, in seconds of the
        machine's one monotonic clock.
    """
    own, setting = load(model, engine, **options), SamplingParams(**(params or {}))
    lengths = [len(own.encode(prompt)) + setting.max_tokens for prompt in prompts]
    mine = assign(lengths, wire.size)[wire.rank]
    dist.barrier(wire.group)
    began = now()
    done = own.generate([prompts[i] for i in mine], setting) if mine else []
    return {"prompts": mine, "token_ids": [one.token_ids for one in done], "began": began, "ended": now()}


def in_order(answers: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Token ids of all replicas' answers, in the order of the prompts."""
    found = {i: ids for answer in answers for i, ids in zip(answer["prompts"], answer["token_ids"], strict=True)}
    return [found[i] for i in sorted(found)]


def tokens_per_second(answers: Sequence[Mapping[str, Any]]) -> float:
    """Generated tokens of all replicas, over the time from the first one's beginning to the last one's end."""
    tokens = sum(len(ids) for answer in answers for ids in answer["token_ids"])
    seconds: float = max(answer["ended"] for answer in answers) - min(answer["began"] for answer in answers)
    return tokens / seconds

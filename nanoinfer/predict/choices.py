"""Every way in which so many devices can serve a model, and what each gives: the splits side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nanoinfer.configs.config import ModelConfig
from nanoinfer.errors import RequestError
from nanoinfer.theory.roofline import Machine
from nanoinfer.theory.split import Split, largest_batch
from nanoinfer.theory.split_steps import decode_step, prefill_step


@dataclass(frozen=True)
class Choice:
    """One way.

    Attributes:
        split: who shares what.
        ttft_s: seconds of the prefill of one prompt.
        decode_s: of a decode step with the rows that were asked for, spread over the replicas.
        most_rows: that fit, all replicas together.
        tokens_per_s: with so many rows.
    """

    split: Split
    ttft_s: float
    decode_s: float
    most_rows: int
    tokens_per_s: float

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "split": vars(self.split),
            "name": str(self.split),
            "ttft_s": self.ttft_s,
            "decode_seconds": self.decode_s,
            "most_rows": self.most_rows,
            "tokens_per_s_with_most_rows": self.tokens_per_s,
        }


def splits(devices: int) -> Iterator[Split]:
    """Every split into so many devices that the theory has: tp with pp or cp, or ep, and replicas of that."""
    for group in _divisors(devices):
        replicas = devices // group
        for tp in _divisors(group):
            yield Split(tp=tp, pp=group // tp, replicas=replicas)
            if group > tp:
                yield Split(tp=tp, cp=group // tp, replicas=replicas)
        if group > 1:
            yield Split(ep=group, replicas=replicas)


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def choices(
    config: ModelConfig,
    machine: Machine,
    memory_bytes: float,
    devices: int,
    rows: int,
    context: int,
    longest: int,
    want: str,
) -> list[Choice]:
    """The splits that fit, best first; with none, an empty list.

    Args:
        config: the model.
        machine: one device, with its links.
        memory_bytes: of one device.
        devices: in all.
        rows: that are to be served in all, spread over replicas.
        context: tokens that each holds.
        longest: tokens that each holds in the end, for which there must be room.
        want: ``latency`` (the shortest decode step for those rows), ``throughput`` (most tokens/s with as many rows
            as fit), ``both`` (the best product of the two), ``smallest`` (fewest devices to a replica, then latency).
    """
    found = []
    for split in splits(devices):
        try:
            most = largest_batch(config, split, longest, memory_bytes, machine.dtype, utilisation=1.0, block=1)
            each = math.ceil(rows / split.replicas)
            if most < each:
                continue
            first = prefill_step(config, machine, split, 1, context)
            step, full = (decode_step(config, machine, split, n, context) for n in (each, most))
        except RequestError:  # the model does not divide so, or there is no link
            continue
        total = split.replicas * most
        found.append(Choice(split, first.seconds, step.seconds, total, total / full.seconds))

    def key(choice: Choice) -> tuple[float, ...]:
        order = {
            "latency": choice.decode_s,
            "throughput": -choice.tokens_per_s,
            "both": choice.decode_s / choice.tokens_per_s,
            "smallest": choice.split.group,
        }
        return order[want], choice.decode_s, choice.split.group

    return sorted(found, key=key)

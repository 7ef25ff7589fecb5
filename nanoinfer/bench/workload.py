"""Seeded work for engines and servers: how long prompts and answers are, and when they come."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from nanoinfer.errors import RequestError


@dataclass(frozen=True)
class Work:
    """One request: its prompt's ids, how many tokens it wants, and when it is due, in seconds."""

    prompt: Sequence[int]
    output: int
    at: float = 0.0


def log_normal(rng: random.Random, low: int, high: int) -> int:
    """A length between ``low`` and ``high``: the logarithm is normal, and the bounds lie two deviations from its mean.

    What falls outside is drawn again.
    """
    if not 1 <= low <= high:
        raise RequestError(f"lengths run from at least 1 upwards, got {low} to {high}")
    mean, deviation = math.log(low * high) / 2, math.log(high / low) / 4
    while True:
        if low <= (length := round(rng.lognormvariate(mean, deviation))) <= high:
            return length


def log_normal_work(
    n: int, vocab_size: int, prompts: tuple[int, int], outputs: tuple[int, int], seed: int = 0
) -> list[Work]:
    """``n`` requests due at once, of random ids, with log-normal lengths between the given bounds."""
    rng = random.Random(seed)
    return [
        Work([rng.randrange(vocab_size) for _ in range(log_normal(rng, *prompts))], log_normal(rng, *outputs))
        for _ in range(n)
    ]

"""Seeded work for engines and servers: how long prompts and answers are, and when they come."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from nanoinfer.errors import RequestError


@dataclass(frozen=True)
class Work:
    """One request: its prompt, a text or token ids, how many tokens it wants, and when it is due.

    ``at`` is in seconds from the start of the schedule that the work belongs to.
    """

    prompt: str | Sequence[int]
    output: int
    at: float = 0.0

    @property
    def ids(self) -> list[int]:
        """The prompt's token ids. Raises :class:`RequestError` for a text, which only a tokenizer can turn into ids."""
        if isinstance(self.prompt, str):
            raise RequestError(f"this needs prompts as token ids, and one is a text: {self.prompt[:40]!r}")
        return list(self.prompt)


def due(works: Iterable[Work], offsets: Iterable[float]) -> list[Work]:
    """The works with these times, in seconds; as many as the shorter of the two has."""
    return [replace(work, at=at) for at, work in zip(offsets, works, strict=False)]


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

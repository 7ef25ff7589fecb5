"""Requests as work to send, made from distributions of lengths or from given prompts.

Warm-up needs other prompts than the measurement: one that was seen before is found in the prefix cache, and its time
to first token is then that of a look-up. Hence the ``stream`` of synthetic work, and :func:`split_warmup`.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from nanoinfer.errors import RequestError

T = TypeVar("T")
#: Words that byte-pair vocabularies of English hold whole: n of them are about n tokens. The server counts them.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house service "
    "friend father power hour game line end member law car city community name president team minute idea body"
)
WORDS = _WORDS.split()


@dataclass(frozen=True)
class WorkItem:
    """One request."""

    prompt: str | Sequence[int]  # a text, or token ids
    output: int  # tokens that it wants
    at: float = 0.0  # when it is due, in seconds from the start of its schedule

    @property
    def ids(self) -> list[int]:
        """The prompt's token ids. Raises :class:`RequestError` for a text, which only a tokenizer can turn into ids."""
        if isinstance(self.prompt, str):
            raise RequestError(f"this needs prompts as token ids, and one is a text: {self.prompt[:40]!r}")
        return list(self.prompt)


def schedule_at(items: Iterable[WorkItem], offsets: Iterable[float]) -> list[WorkItem]:
    """The items with these times, in seconds; as many as the shorter of the two has."""
    return [replace(item, at=at) for at, item in zip(offsets, items, strict=False)]


# --- lengths --------------------------------------------------------------------------


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens, between ``low`` and ``high`` inclusive."""

    kind: Literal["fixed", "uniform", "lognormal"]
    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise RequestError(f"lengths run from at least 1 upwards, got {self.low} to {self.high}")

    def draw(self, rng: random.Random) -> int:
        """One length. The logarithm of a log-normal one has its bounds two standard deviations from its mean.

        What falls outside is drawn again.
        """
        if self.kind != "lognormal":
            return self.low if self.kind == "fixed" else rng.randint(self.low, self.high)
        mean, deviation = math.log(self.low * self.high) / 2, math.log(self.high / self.low) / 4
        while True:
            if self.low <= (length := round(rng.lognormvariate(mean, deviation))) <= self.high:
                return length

    def __str__(self) -> str:
        return str(self.low) if self.kind == "fixed" else f"{self.kind}:{self.low}-{self.high}"


def parse_lengths(text: str) -> Lengths:
    """``128``, ``uniform:10-200`` or ``lognormal:10-200``. Raises :class:`RequestError` for anything else."""
    if re.fullmatch(r"[0-9]+", text):
        return Lengths("fixed", int(text), int(text))
    if match := re.fullmatch(r"(uniform|lognormal):([0-9]+)-([0-9]+)", text):
        kind: Any = match[1]
        return Lengths(kind, int(match[2]), int(match[3]))
    raise RequestError(f"lengths '{text}': write a number of tokens, uniform:10-200 or lognormal:10-200")


def log_normal(rng: random.Random, low: int, high: int) -> int:
    """A length of a log-normal distribution between ``low`` and ``high``; see :meth:`Lengths.draw`."""
    return Lengths("lognormal", low, high).draw(rng)


# --- requests -------------------------------------------------------------------------


def synthetic_prompt(rng: random.Random, tokens: int, vocab_size: int | None = None) -> str | list[int]:
    """``tokens`` random ids below ``vocab_size`` or, without one, as many random words."""
    if vocab_size is None:
        return " ".join(rng.choices(WORDS, k=tokens))
    return [rng.randrange(vocab_size) for _ in range(tokens)]


def log_normal_work(
    n: int, vocab_size: int, prompts: tuple[int, int], outputs: tuple[int, int], seed: int = 0
) -> list[WorkItem]:
    """``n`` requests due at once, of random ids, with log-normal lengths between the given bounds."""
    rng, prompt, output = random.Random(seed), Lengths("lognormal", *prompts), Lengths("lognormal", *outputs)
    return [WorkItem(synthetic_prompt(rng, prompt.draw(rng), vocab_size), output.draw(rng)) for _ in range(n)]


def synthetic(
    prompt: Lengths, output: Lengths, *, seed: int = 0, vocab_size: int | None = None, stream: str = "measured"
) -> Iterator[WorkItem]:
    """Synthetic requests without end. Another ``stream`` of the same seed has other prompts."""
    rng = random.Random(f"{seed}/{stream}")
    while True:
        yield WorkItem(synthetic_prompt(rng, prompt.draw(rng), vocab_size), output.draw(rng))


def from_pairs(
    pairs: Sequence[tuple[int, int]], *, seed: int = 0, vocab_size: int | None = None, stream: str = "measured"
) -> Iterator[WorkItem]:
    """Synthetic requests with these (prompt, output) lengths, without end."""
    rng = random.Random(f"{seed}/{stream}")
    for prompt, output in _shuffled(pairs, rng):
        yield WorkItem(synthetic_prompt(rng, prompt, vocab_size), output)


def from_prompts(prompts: Sequence[tuple[str, int | None]], output: Lengths, *, seed: int = 0) -> Iterator[WorkItem]:
    """Requests with these prompts, without end; ``output`` where one does not say how long its answer is."""
    rng = random.Random(f"{seed}/prompts")
    for text, wanted in _shuffled(prompts, rng):
        yield WorkItem(text, output.draw(rng) if wanted is None else wanted)


def _shuffled(items: Sequence[T], rng: random.Random) -> Iterator[T]:
    """All of them come before any comes again."""
    while True:
        yield from rng.sample(items, len(items))


def split_warmup(prompts: Sequence[T], n: int, seed: int = 0) -> tuple[list[T], list[T]]:
    """``n`` prompts for warming up, and the others. Raises :class:`RequestError` where no others are left."""
    unique = list(dict.fromkeys(prompts))
    if n >= len(unique):
        few = f"{len(unique)} different prompts are too few"
        raise RequestError(f"{few} for a warm-up of {n} and a measurement of others")
    random.Random(f"{seed}/set aside").shuffle(unique)
    warmup = set(unique[:n])
    return unique[:n], [prompt for prompt in prompts if prompt not in warmup]

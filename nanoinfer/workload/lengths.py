"""How long prompts and answers are, and the requests made of that.

A benchmark with one length measures one point of a curve; real lengths spread over two orders of magnitude. They
are fixed, drawn (uniform, log-normal), or taken from a file of pairs or of real prompts.

Warm-up needs prompts of its own: one that was seen before is found in the prefix cache, and its time to first
token is then that of a look-up. Hence the ``stream`` of made-up work and :func:`set_aside` for real prompts.
"""

from __future__ import annotations

import csv
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from nanoinfer.errors import RequestError
from nanoinfer.workload.workload import Work, log_normal

T = TypeVar("T")
Pair = tuple[int, int]

#: Words that byte-pair vocabularies of English hold whole: n of them are about n tokens. The server counts them.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house service "
    "friend father power hour game line end member law car city community name president team minute idea body"
)
WORDS = _WORDS.split()


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
        """One length."""
        if self.kind == "lognormal":
            return log_normal(rng, self.low, self.high)
        return self.low if self.kind == "fixed" else rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.kind == "fixed" else f"{self.kind}:{self.low}-{self.high}"


def parse_lengths(text: str) -> Lengths:
    """``128``, ``uniform:10-200`` or ``lognormal:10-200``. Raises :class:`RequestError` for anything else."""
    if re.fullmatch(r"[0-9]+", text):
        return Lengths("fixed", int(text), int(text))
    if found := re.fullmatch(r"(uniform|lognormal):([0-9]+)-([0-9]+)", text):
        kind: Any = found[1]
        return Lengths(kind, int(found[2]), int(found[3]))
    raise RequestError(f"lengths '{text}': write a number of tokens, uniform:10-200 or lognormal:10-200")


# --- made-up prompts ------------------------------------------------------------------


def made_up(rng: random.Random, tokens: int, vocab_size: int | None = None) -> str | list[int]:
    """A prompt of so many random ids below ``vocab_size``, or, without one, of so many random words."""
    if vocab_size is None:
        return " ".join(rng.choices(WORDS, k=tokens))
    return [rng.randrange(vocab_size) for _ in range(tokens)]


def synthetic(
    prompt: Lengths, output: Lengths, *, seed: int = 0, vocab_size: int | None = None, stream: str = "measured"
) -> Iterator[Work]:
    """Made-up requests without end. Another ``stream`` of the same seed has other prompts."""
    rng = random.Random(f"{seed}/{stream}")
    while True:
        yield Work(made_up(rng, prompt.draw(rng), vocab_size), output.draw(rng))


def from_pairs(
    pairs: Sequence[Pair], *, seed: int = 0, vocab_size: int | None = None, stream: str = "measured"
) -> Iterator[Work]:
    """Made-up requests with these (prompt, output) lengths, without end; each pair comes up before any does again."""
    rng = random.Random(f"{seed}/{stream}")
    for prompt, output in _shuffled(pairs, rng):
        yield Work(made_up(rng, prompt, vocab_size), output)


def _shuffled(items: Sequence[T], rng: random.Random) -> Iterator[T]:
    while True:
        yield from rng.sample(items, len(items))


def read_pairs(path: Path) -> list[Pair]:
    """Lengths from a file: two numbers a line (a first line of names is passed over), or ``.jsonl`` records.

    Records need ``prompt_tokens`` and ``output_tokens``, so the traces of an earlier run serve as well.

    Raises:
        RequestError: naming the line that is not a pair of lengths.
    """
    pairs: list[Pair] = []
    for number, line in _lines(path):
        try:
            if path.suffix == ".jsonl":
                record = json.loads(line)
                pair = (record["prompt_tokens"], record["output_tokens"])
            else:
                first, second = next(csv.reader([line]))
                if number == 1 and any(letter.isalpha() for letter in first):
                    continue
                pair = (int(first), int(second))
            pairs.append((whole(pair[0]), whole(pair[1])))
        except (ValueError, KeyError, TypeError):
            raise RequestError(
                f"{path}, line {number}: not a prompt's and an output's length, each at least 1"
            ) from None
    return _some(path, pairs)


# --- real prompts -----------------------------------------------------------------------


def read_prompts(path: Path) -> list[tuple[str, int | None]]:
    """Prompts from a file, with the length of the answer where it says so.

    One prompt a line; in a ``.jsonl`` file a string, or an object with ``prompt`` and perhaps ``output_tokens``.

    Raises:
        RequestError: naming the line that holds no prompt.
    """
    prompts: list[tuple[str, int | None]] = []
    for number, line in _lines(path):
        if path.suffix != ".jsonl":
            prompts.append((line, None))
            continue
        try:
            record = json.loads(line)
            text, output = (
                (record, None) if isinstance(record, str) else (record["prompt"], record.get("output_tokens"))
            )
            if not isinstance(text, str) or not text:
                raise ValueError
            prompts.append((text, None if output is None else whole(output)))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RequestError(
                f'{path}, line {number}: not a prompt; write "text" or {{"prompt": "text", "output_tokens": 100}}'
            ) from None
    return _some(path, prompts)


def set_aside(prompts: Sequence[T], n: int, seed: int = 0) -> tuple[list[T], list[T]]:
    """``n`` prompts for warming up, and the others. Raises :class:`RequestError` where no others are left."""
    unique = list(dict.fromkeys(prompts))
    if n >= len(unique):
        raise RequestError(
            f"{len(unique)} different prompts do not do for a warm-up of {n} and a measurement of others"
        )
    random.Random(f"{seed}/set aside").shuffle(unique)
    aside = set(unique[:n])
    return unique[:n], [prompt for prompt in prompts if prompt not in aside]


def from_prompts(prompts: Sequence[tuple[str, int | None]], output: Lengths, *, seed: int = 0) -> Iterator[Work]:
    """Requests with these prompts, without end; each comes up before any does again.

    ``output`` is for prompts that do not say how long their answer is.
    """
    rng = random.Random(f"{seed}/prompts")
    for text, wanted in _shuffled(prompts, rng):
        yield Work(text, output.draw(rng) if wanted is None else wanted)


# --- files ------------------------------------------------------------------------------


def whole(value: Any) -> int:
    """A length that came from a file. Raises ValueError for what is no whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError
    return value


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that hold anything, numbered from 1. Only a line feed ends one: U+2028 may be part of a prompt."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise RequestError(f"{path}: not a UTF-8 text") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if line := line.strip():
            yield number, line


def _some(path: Path, found: list[T]) -> list[T]:
    if not found:
        raise RequestError(f"{path}: holds nothing")
    return found

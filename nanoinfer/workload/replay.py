"""Replaying a recorded trace: the arrivals and lengths that a service really saw.

Two formats. Our own is JSON lines: ``{"at": 0.5, "prompt_tokens": 120, "output": 40}``, with ``at`` in seconds from
the start, and ``"prompt"`` (a text or token ids) where it is known. The other is that of Azure's public traces, CSV
with the columns TIMESTAMP, ContextTokens and GeneratedTokens, where time is a date with seven digits of a second.
Python's own parsers refuse or cut these, and reading only two of them makes arrivals collapse into bursts.
"""

from __future__ import annotations

import csv
import datetime
import json
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoinfer.errors import RequestError
from nanoinfer.workload.lengths import made_up, whole
from nanoinfer.workload.workload import Work

_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?")
_COLUMNS = ("timestamp", "contexttokens", "generatedtokens")


@dataclass(frozen=True)
class Entry:
    """One recorded request: seconds from the start, tokens in and out, and the prompt where it was kept."""

    at: float
    prompt_tokens: int | None
    output: int
    prompt: str | tuple[int, ...] | None = None


def read_trace(path: Path) -> list[Entry]:
    """A recorded trace, in order of time: Azure's (``.csv``) or our own (``.jsonl``).

    Times of a ``.csv`` count from its first request; those of a ``.jsonl`` are kept as they are.

    Raises:
        RequestError: a file that cannot be read, naming the line.
    """
    if path.suffix not in (".csv", ".jsonl"):
        raise RequestError(f"{path}: a trace is a .jsonl of our own or a .csv as Azure publishes them")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            entries = list(_azure(path, file) if path.suffix == ".csv" else _ours(path, file))
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise RequestError(f"{path}: not a UTF-8 text") from None
    if not entries:
        raise RequestError(f"{path}: holds no request")
    return sorted(entries, key=lambda entry: entry.at)


def _azure(path: Path, file: Iterator[str]) -> Iterator[Entry]:
    rows = csv.reader(file)
    names = [name.strip().lower() for name in next(rows, [])]
    if missing := [name for name in _COLUMNS if name not in names]:
        raise RequestError(
            f"{path}, line 1: no column {missing[0]}; needed are TIMESTAMP,ContextTokens,GeneratedTokens"
        )
    at, context, generated = (names.index(name) for name in _COLUMNS)
    found: list[tuple[int, int, int]] = []
    for row in rows:
        if not row:
            continue
        try:
            found.append((nanoseconds(row[at]), whole(int(row[context])), whole(int(row[generated]))))
        except (ValueError, IndexError):
            raise RequestError(
                f"{path}, line {rows.line_num}: not a time and two numbers of tokens, each at least 1"
            ) from None
    first = min((t for t, _, _ in found), default=0)
    return (Entry((t - first) / 1e9, tokens, output) for t, tokens, output in found)


def nanoseconds(text: str) -> int:
    """A date and time as whole nanoseconds since 1970, exact to nine digits of a second.

    Without an offset the time is taken as UTC. Raises ValueError for what is no time.
    """
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise ValueError(text)
    date, clock, digits, zone = found.groups()
    moment = datetime.datetime.fromisoformat(f"{date}T{clock}{zone or 'Z'}")
    since = moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    return (since.days * 86_400 + since.seconds) * 10**9 + int((digits or "0").ljust(9, "0"))


def _ours(path: Path, file: Iterator[str]) -> Iterator[Entry]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            record: dict[str, Any] = json.loads(line)
            at = float(record["at"])
            if not (math.isfinite(at) and at >= 0):
                raise ValueError
            prompt, tokens = record.get("prompt"), record.get("prompt_tokens")
            if isinstance(prompt, list):
                if not prompt or any(isinstance(i, bool) or not isinstance(i, int) for i in prompt):
                    raise ValueError
                prompt, tokens = tuple(prompt), len(prompt)
            elif not isinstance(prompt, str | None) or prompt == "":
                raise ValueError
            if prompt is None or tokens is not None:
                tokens = whole(tokens)
            yield Entry(at, tokens, whole(record["output"]), prompt)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RequestError(
                f'{path}, line {number}: not a request; write {{"at": 0.5, "prompt_tokens": 120, "output": 40}},'
                ' with "prompt" beside or in place of prompt_tokens'
            ) from None


def as_works(
    entries: Sequence[Entry], *, speed_up: float = 1.0, seed: int = 0, vocab_size: int | None = None
) -> list[Work]:
    """The trace as work, every offset divided by ``speed_up``. Prompts that were not kept are made up.

    Raises:
        RequestError: a speed-up that is not above 0.
    """
    if not (math.isfinite(speed_up) and speed_up > 0):
        raise RequestError(f"speed-up must be a number above 0, got {speed_up:g}")
    rng = random.Random(f"{seed}/replay")
    works = []
    for entry in entries:
        prompt = made_up(rng, entry.prompt_tokens or 1, vocab_size) if entry.prompt is None else entry.prompt
        works.append(Work(prompt, entry.output, entry.at / speed_up))
    return works


def describe(entries: Sequence[Entry]) -> dict[str, Any]:
    """What a trace holds.

    ``gap_rate`` is the rate of its gaps, ``(n - 1) / span`` (none for one request): the one to compare with an
    arrival process. ``n / span`` counts one request more than there are gaps in the span.
    """
    span = entries[-1].at - entries[0].at
    tokens = [entry.prompt_tokens for entry in entries]
    return {
        "requests": len(entries),
        "span_s": span,
        "gap_rate": (len(entries) - 1) / span if span > 0 else None,
        "prompt_tokens": sum(n or 0 for n in tokens) if None not in tokens else None,
        "output_tokens": sum(entry.output for entry in entries),
    }

"""Work from files: lengths, real prompts, and recorded traces to replay.

A file that cannot be read is a :class:`RequestError`, which names the line that does not fit.
"""

from __future__ import annotations

import csv
import datetime
import json
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nanoinfer.errors import RequestError, check
from nanoinfer.workload.items import WorkItem, synthetic_prompt

T = TypeVar("T")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?")
COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def _parse_lines(path: Path, parse: Callable[[str, int], T | None], wanted: str) -> list[T]:
    """What ``parse`` makes of each line that is not blank and its number; None for a line to pass over.

    Only a line feed ends a line: U+2028 may be part of a prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise RequestError(f"{path}: not a UTF-8 text") from None
    parsed = []
    for number, line in enumerate(map(str.strip, lines), start=1):
        try:
            if line and (item := parse(line, number)) is not None:
                parsed.append(item)
        except (ValueError, LookupError, TypeError, AttributeError):
            raise RequestError(f"{path}, line {number}: {wanted}") from None
    if not parsed:
        raise RequestError(f"{path}: holds nothing")
    return parsed


def _length(value: Any) -> int:
    """A length that came from a file. Raises ValueError for what is no whole number of at least 1."""
    if type(value) is not int or value < 1:
        raise ValueError
    return value


def read_pairs(path: Path) -> list[tuple[int, int]]:
    """Prompt and output lengths: two numbers a line (a first line of names is passed over), or ``.jsonl`` records.

    Records need ``prompt_tokens`` and ``output_tokens``, so the traces of an earlier run serve as well.
    """

    def parse(line: str, number: int) -> tuple[int, int] | None:
        if path.suffix == ".jsonl":
            record = json.loads(line)
            return _length(record["prompt_tokens"]), _length(record["output_tokens"])
        prompt, output = next(csv.reader([line]))
        if number == 1 and any(letter.isalpha() for letter in prompt):
            return None
        return _length(int(prompt)), _length(int(output))

    return _parse_lines(path, parse, "not a prompt's and an output's length, each at least 1")


def read_prompts(path: Path) -> list[tuple[str, int | None]]:
    """Prompts, one a line, with the length of the answer where it is given.

    In a ``.jsonl`` file a prompt is a string, or an object with ``prompt`` and perhaps ``output_tokens``.
    """

    def parse(line: str, _: int) -> tuple[str, int | None]:
        if path.suffix != ".jsonl":
            return line, None
        record = json.loads(line)
        text, output = (record, None) if isinstance(record, str) else (record["prompt"], record.get("output_tokens"))
        if not isinstance(text, str) or not text:
            raise ValueError
        return text, None if output is None else _length(output)

    return _parse_lines(path, parse, 'not a prompt; write "text" or {"prompt": "text", "output_tokens": 100}')


@dataclass(frozen=True)
class TraceEntry:
    """One recorded request: seconds from the start, tokens in and out, and the prompt where it was kept."""

    at: float
    prompt_tokens: int | None
    output: int
    prompt: str | tuple[int, ...] | None = None


def read_trace(path: Path) -> list[TraceEntry]:
    """A recorded trace, in order of time.

    Our own are JSON lines: ``{"at": 0.5, "prompt_tokens": 120, "output": 40}``, with ``at`` in seconds from the start,
    and ``"prompt"`` (a text or token ids) where it is known. Azure's (https://github.com/Azure/AzurePublicDataset) are
    CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens; their times count from the first request.
    """
    if path.suffix not in (".csv", ".jsonl"):
        raise RequestError(f"{path}: a trace is a .jsonl of our own or a .csv as Azure publishes them")
    return sorted(_azure(path) if path.suffix == ".csv" else _ours(path), key=lambda entry: entry.at)


def _azure(path: Path) -> list[TraceEntry]:
    columns: list[int] = []

    def parse(line: str, _: int) -> tuple[int, int, int] | None:
        row = next(csv.reader([line]))
        if columns:
            at, context, generated = (row[column] for column in columns)
            return nanoseconds(at), _length(int(context)), _length(int(generated))
        names = [name.strip().lower() for name in row]
        for name in map(str.lower, COLUMNS):
            if name not in names:
                raise RequestError(f"{path}, line 1: no column {name}; needed are {','.join(COLUMNS)}")
            columns.append(names.index(name))
        return None

    rows = _parse_lines(path, parse, "not a time and two numbers of tokens, each at least 1")
    first = min(at for at, _, _ in rows)
    return [TraceEntry((at - first) / 1e9, tokens, output) for at, tokens, output in rows]


def nanoseconds(text: str) -> int:
    """A date and time as whole nanoseconds since 1970; UTC without an offset. Raises ValueError for what is no time.

    Azure writes seven digits of a second. ``datetime`` cuts them to six and NumPy's ``datetime64`` knows no offset.
    """
    if (match := _TIME.fullmatch(text.strip())) is None:
        raise ValueError(text)
    moment, digits, zone = match.groups()
    seconds = int(datetime.datetime.fromisoformat(moment + (zone or "Z")).timestamp())
    return seconds * 10**9 + int((digits or "0").ljust(9, "0"))


def _ours(path: Path) -> list[TraceEntry]:
    def parse(line: str, _: int) -> TraceEntry:
        record: dict[str, Any] = json.loads(line)
        at, prompt, tokens = float(record["at"]), record.get("prompt"), record.get("prompt_tokens")
        if not 0 <= at < math.inf:
            raise ValueError
        if isinstance(prompt, list):
            if not prompt or any(type(i) is not int for i in prompt):
                raise ValueError
            prompt, tokens = tuple(prompt), len(prompt)
        elif not isinstance(prompt, str | None) or prompt == "":
            raise ValueError
        if prompt is None or tokens is not None:
            tokens = _length(tokens)
        return TraceEntry(at, tokens, _length(record["output"]), prompt)

    return _parse_lines(
        path,
        parse,
        'not a request; write {"at": 0.5, "prompt_tokens": 120, "output": 40}, '
        'with "prompt" next to or in place of prompt_tokens',
    )


def replayed(
    entries: Sequence[TraceEntry], *, speed_up: float = 1.0, seed: int = 0, vocab_size: int | None = None
) -> list[WorkItem]:
    """The trace as work, every offset divided by ``speed_up`` (above 0). Prompts that were not kept are synthetic."""
    check("speed-up", speed_up, above=0)
    rng = random.Random(f"{seed}/replay")
    prompts = (e.prompt or synthetic_prompt(rng, e.prompt_tokens or 1, vocab_size) for e in entries)
    return [WorkItem(prompt, e.output, e.at / speed_up) for prompt, e in zip(prompts, entries, strict=True)]


def gap_rate(entries: Sequence[TraceEntry]) -> float | None:
    """Requests a second of a trace's gaps, ``(n - 1) / span``, the rate to compare with an arrival process.

    ``n / span`` counts one request more than there are gaps in the span. None where all came at once.
    """
    span = entries[-1].at - entries[0].at
    return (len(entries) - 1) / span if span > 0 else None

"""Numbers and tables for a terminal: the one place that decides how a figure is written."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

#: A header and the rows under it.
Rows = tuple[Sequence[str], Iterable[Sequence[str]]]
#: Stands for what does not exist or was not measured.
DASH: Final = "–"
PREFIXES: Final = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"))


def format_number(value: float | None, digits: int = 3) -> str:
    """``digits`` significant digits, whole ones never cut off: ``0.412``, ``20.0``, ``12,346``; a dash for ``None``.

    Whole numbers (``int``) are written in full, and very large or small ones with an exponent.
    """
    if value is None:
        return DASH
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    if not -6 <= exponent < 15:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def ms(seconds: float | str | None) -> str:
    """Seconds in milliseconds; ``"inf"`` stays a word."""
    return seconds if isinstance(seconds, str) else format_number(None if seconds is None else seconds * 1e3)


def si(value: float, unit: str) -> str:
    """Four digits and a prefix: ``16.06 GB``, ``4.48 ms``."""
    if value == 0:
        return f"0 {unit}"
    scale, prefix = next(((s, p) for s, p in PREFIXES if value >= s), PREFIXES[-1])
    shown = value / scale
    return f"{shown:,.0f} {prefix}{unit}" if shown >= 1000 else f"{shown:.4g} {prefix}{unit}"


def as_table(rows: Rows) -> Table:
    """For a terminal: the first column left, figures right; no heading where all titles are empty."""
    header, body = rows
    table = Table(box=None, pad_edge=False, show_header=any(header))
    for i, name in enumerate(header):
        table.add_column(Text(name), justify="right" if i else "left")
    for row in body:
        table.add_row(*(Text(cell) for cell in row))
    return table


class _Terminal(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # for the command line, which ends as programs do whose reader has left


def console() -> Console:
    """Standard output; in a pipe it is as wide as a table needs."""
    return _Terminal(width=None if sys.stdout.isatty() else 200)


def emit(record: object) -> None:
    """One JSON document on standard output."""
    print(json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False))

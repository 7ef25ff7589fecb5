"""Lines for people, on standard error: standard output is for results."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Print one line to standard error at once."""
    print(text, file=sys.stderr, flush=True)

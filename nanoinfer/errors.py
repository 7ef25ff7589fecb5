"""Errors a user can act on, one line each that names the thing and the way out.

The command line prints that line and exits with 1; a traceback is left for our own mistakes.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any


class NanoinferError(Exception):
    """A mistake in what was asked for, or something missing on this machine."""


class ModelError(NanoinferError):
    """A model that is unknown, absent, damaged or of a family we do not read."""


class TokenizerError(NanoinferError):
    """A tokenizer that is missing, or a text it cannot encode."""


class RequestError(NanoinferError):
    """A prompt or a setting that no engine can serve."""


class EngineError(RequestError):
    """The engine failed while it served a request that is not at fault."""


class DeviceError(NanoinferError):
    """A device or dtype that this machine does not have."""


class ChapterError(NanoinferError):
    """A chapter that is unknown, failed, missing or stale."""


def nearest(word: str, known: Iterable[str], count: int = 3) -> str:
    """The known names near a misspelt one, or all where none is near: ``did you mean 'a' or 'b'?``."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=count, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(f"'{name}'" for name in close) + "?"
    return "known: " + ", ".join(names)


def check(
    name: str,
    value: Any,
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    below: float = math.inf,
    at_most: float = math.inf,
    whole: bool = False,
    error: type[NanoinferError] = RequestError,
) -> None:
    """Refuse what is not a finite number within its limits, in one line that names it and them.

    Raises:
        RequestError: (or ``error``) such as ``--share must be above 0 and at most 1, got 2``.
    """
    if not isinstance(value, bool) and isinstance(value, Integral if whole else Real):
        number: Any = value
        if above < number < below and at_least <= number <= at_most:  # never true of NaN, nor of an infinity
            return
    limits = (("above", above), ("at least", at_least), ("below", below), ("at most", at_most))
    wanted = " and ".join(f"{word} {limit:,.12g}" for word, limit in limits if math.isfinite(limit))
    kind = "a whole number" if whole else "" if wanted else "a finite number"
    raise error(f"{name} must be {f'{kind} {wanted}'.strip()}, got {value!r}")

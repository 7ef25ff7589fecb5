"""Limits that a service promises to keep, as people write them: ``ttft=200ms,tpot=50ms``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

from nanoinfer.errors import RequestError, nearest
from nanoinfer.measure.metrics import PER_REQUEST

#: What one request can be held to. How late our own client was is no promise of a server's.
METRICS: Final = tuple(name for name in PER_REQUEST if name != "client_delay")
#: How many of a unit make a second: dividing rounds once, so that 70ms is 0.07 and not 0.07 and a bit.
PER_SECOND: Final = {"us": 1e6, "ms": 1e3, "s": 1.0}


def parse_slo(text: str) -> dict[str, float]:
    """``"ttft=200ms,tpot=50ms,e2e=3s"`` as seconds by metric: ``{"ttft": 0.2, "tpot": 0.05, "e2e": 3.0}``.

    Raises:
        RequestError: naming the metric or the unit that is missing, unknown or given twice.
    """
    slo: dict[str, float] = {}
    for part in text.split(","):
        name, equals, time = (piece.strip() for piece in part.partition("="))
        if not (name and equals and time):
            raise RequestError(f"slo '{part.strip()}': write METRIC=TIME, as in ttft=200ms,tpot=50ms")
        if name not in METRICS:
            raise RequestError(f"slo '{part.strip()}': no metric '{name}' of a request; {nearest(name, METRICS)}")
        if name in slo:
            raise RequestError(f"slo '{part.strip()}': {name} has a limit already; give one for each metric")
        slo[name] = _seconds(part.strip(), time)
    return slo


def _seconds(part: str, time: str) -> float:
    if (found := re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([^\W\d]*)", time)) is None:
        raise RequestError(f"slo '{part}': '{time}' is no time; write a number and a unit, as in 200ms")
    number, unit = found.groups()
    if unit not in PER_SECOND:
        problem = f"unknown unit '{unit}'" if unit else f"{number} of what?"
        raise RequestError(f"slo '{part}': {problem}; the units are {', '.join(PER_SECOND)}, as in {number}ms")
    if not 0 < (seconds := float(number) / PER_SECOND[unit]) < math.inf:
        raise RequestError(f"slo '{part}': a limit must be above 0 and finite")
    return seconds


def slo_text(slo: Mapping[str, float]) -> str:
    """The limits for people: ``ttft at most 200 ms, tpot at most 50 ms``."""
    return ", ".join(f"{name} at most {seconds * 1e3:g} ms" for name, seconds in slo.items())

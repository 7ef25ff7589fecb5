"""Limits that a service promises to keep: ``ttft=200ms,tpot=50ms``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from nanoinfer.errors import RequestError, check, nearest
from nanoinfer.measure.metrics import PER_REQUEST

#: Metrics that a request can be held to; client_delay is not an SLO metric.
METRICS: Final = tuple(name for name in PER_REQUEST if name != "client_delay")
#: How many of a unit make a second: dividing rounds once, so that 70ms is exactly 0.07.
PER_SECOND: Final = {"us": 1e6, "ms": 1e3, "s": 1.0}


def parse_slo(text: str) -> dict[str, float]:
    """``"ttft=200ms,tpot=50ms,e2e=3s"`` as seconds by metric: ``{"ttft": 0.2, "tpot": 0.05, "e2e": 3.0}``.

    Raises:
        RequestError: naming the metric or the unit that is missing, unknown or given twice.
    """
    slo: dict[str, float] = {}
    for part in map(str.strip, text.split(",")):
        name, _, time = map(str.strip, part.partition("="))
        if not (name and time):
            raise RequestError(f"slo '{part}': write METRIC=TIME, as in ttft=200ms,tpot=50ms")
        if name not in METRICS:
            raise RequestError(f"slo '{part}': no metric '{name}' of a request; {nearest(name, METRICS)}")
        if name in slo:
            raise RequestError(f"slo '{part}': {name} has a limit already; give one for each metric")
        if (match := re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([^\W\d]*)", time)) is None:
            raise RequestError(f"slo '{part}': '{time}' is no time; write a number and a unit, as in 200ms")
        number, unit = match.groups()
        if unit not in PER_SECOND:
            problem = f"unknown unit '{unit}'" if unit else f"{number} of what?"
            raise RequestError(f"slo '{part}': {problem}; the units are {', '.join(PER_SECOND)}, as in {number}ms")
        slo[name] = float(number) / PER_SECOND[unit]
        check(f"slo '{part}': a limit", slo[name], above=0)
    return slo


def slo_text(slo: Mapping[str, float]) -> str:
    """The limits in words: ``ttft at most 200 ms, tpot at most 50 ms``."""
    return ", ".join(f"{name} at most {seconds * 1e3:g} ms" for name, seconds in slo.items())

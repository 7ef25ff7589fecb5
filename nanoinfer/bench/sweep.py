"""Runs at rising load, up to the knee: how much work a service does, and how long its users wait for it.

Levels are rates (open loop) or users (closed loop); each is one run. Three results are read off them:

- the knee: the level with the most power, requests per second over mean end-to-end latency (L. Kleinrock,
  "Power and deterministic rules of thumb for probabilistic problems in computer communications", ICC 1979).
  Below it more load brings work for little waiting, above it waiting for little work. For M/M/1 it lies at half
  the capacity, for users in a closed loop where the bottleneck fills. It needs no threshold;
- the highest level that still meets the SLO: every level up to it had the needed share of good requests;
- saturation, where the sweep stops: the level rose by a share g, output tokens per second by less than g / 10
  over the best so far, and mean latency by more than g / 2.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any, Final, Literal

from nanoinfer.bench.loadgen import Run
from nanoinfer.bench.summary import summarise
from nanoinfer.bench.tables import slo_text
from nanoinfer.errors import RequestError, check
from nanoinfer.measure.stats import least_n

Kind = Literal["rate", "users"]
UNIT: Final[Mapping[str, str]] = {"rate": "requests/s", "users": "users"}
MOST_LEVELS: Final = 64  # that ``a..b`` makes


def format_level(kind: Kind, level: float) -> str:
    """A level with its unit: ``1 user``, ``2.5 requests/s``."""
    return f"{level:g} {'user' if kind == 'users' and level == 1 else UNIT[kind]}"


class SweepPoint:
    """One level and the summary of its run (:func:`nanoinfer.bench.summary.summarise`)."""

    def __init__(self, level: float, summary: Mapping[str, Any]) -> None:
        self.level, self.summary = level, summary
        rates, goodput = summary["rates"], summary["goodput"]
        requests_s: float | None = rates["requests_s"]["value"]
        self.tok_s: float | None = rates["output_tok_s"]["value"]
        self.latency_s: float | None = summary["latency"]["e2e"]["mean"]  # of the requests that ended well
        self.power = None if requests_s is None or not self.latency_s else requests_s / self.latency_s
        #: Of good requests; None without an SLO or a request to judge.
        self.share: float | None = None if goodput is None else goodput["share"]


@dataclass
class Sweep:
    """The levels that ran, in rising order. ``stopped`` says why no higher ones did."""

    kind: Kind
    slo: Mapping[str, float] | None
    needed: float
    points: list[SweepPoint] = field(default_factory=list)
    stopped: str | None = None

    @property
    def knee(self) -> SweepPoint | None:
        """The level with the most power."""
        return max((p for p in self.points if p.power is not None), key=lambda p: p.power or 0.0, default=None)

    @property
    def highest(self) -> SweepPoint | None:
        """The highest level up to which every level had the needed share of good requests."""
        good = takewhile(lambda point: point.share is not None and point.share >= self.needed, self.points)
        return max(good, key=lambda point: point.level, default=None)

    def as_dict(self) -> dict[str, Any]:
        """JSON: the points with their summaries, and what was read off them, with its rule."""
        knee, highest = self.knee, self.highest
        beyond = {f"{p.level:g}": p.summary["beyond_budget"] for p in self.points}
        return {
            "kind": self.kind,
            "unit": UNIT[self.kind],
            "slo_s": dict(self.slo) if self.slo else None,
            "needed_share": self.needed,
            "points": [{"level": p.level, "power": p.power, "summary": p.summary} for p in self.points],
            "knee": {
                "definition": "level with the highest requests/s over mean end-to-end latency",
                "level": knee and knee.level,
                "inside": knee is not None and knee.level not in (self.points[0].level, self.points[-1].level),
            },
            "highest_good": {
                "definition": f"highest level up to which every level had {self.needed:.0%} good requests or more",
                "level": highest and highest.level,
            },
            "stopped": self.stopped,
            "beyond_budget": {level: reasons for level, reasons in beyond.items() if reasons},
            "notes": list(self._notes()),
        }

    def _notes(self) -> Iterator[str]:
        if not self.points:
            return
        lowest, last = self.points[0], self.points[-1]
        if (knee := self.knee) is not None and lowest is not last and knee.level in (lowest.level, last.level):
            end, side = ("highest", "above") if knee is last else ("lowest", "below")
            level = format_level(self.kind, knee.level)
            yield f"The knee is the {end} level that ran: it may lie {side} {level}."
        if not self.slo:
            return
        if (highest := self.highest) is None:
            yield f"No level met the SLO ({slo_text(self.slo)}) for {self.needed:.0%} of its requests."
        elif highest is last:
            yield f"Every level met the SLO: the limit lies above {format_level(self.kind, highest.level)}."
        fewest = min(point.summary["requests"]["attempted"] for point in self.points)
        if 0 < self.needed < 1 and fewest < (least := least_n(100 * self.needed)):
            yield (
                f"n too small: a share of {self.needed:.0%} takes {least:,} requests a level to show, "
                f"all of them good; the fewest here are {fewest:,}."
            )


def saturated(before: Sequence[SweepPoint], last: SweepPoint) -> str | None:
    """Why no higher level will do more work than ``last``, or ``None``; the rule stands in the module's text."""
    if not last.summary["requests"]["ok"]:
        return f"no request ended well at {last.level:g}"
    known = [p for p in before if p.tok_s and p.latency_s]
    if not known or last.tok_s is None or last.latency_s is None:
        return None
    step = last.level / known[-1].level - 1
    gain = last.tok_s / max(p.tok_s or 0.0 for p in known) - 1
    slower = last.latency_s / (known[-1].latency_s or 1.0) - 1
    if gain < step / 10 and slower > step / 2:
        return (
            f"saturated at {last.level:g}: {step:.0%} more load brought {gain:+.0%} tokens/s and {slower:+.0%} latency"
        )
    return None


async def sweep(
    make_run: Callable[[float], Awaitable[Run]],
    levels: Sequence[float],
    slo: Mapping[str, float] | None = None,
    *,
    kind: Kind = "rate",
    needed: float = 0.99,
) -> Sweep:
    """Run level after level until they are through, the system is saturated, or a run was interrupted.

    ``make_run`` runs a level, with its own prompts each time, or one warms the prefix cache for the next. A level meets
    the SLO (limits in seconds) with a share ``needed`` of good requests.
    """
    if not levels or levels[0] <= 0 or any(b <= a for a, b in pairwise(levels)):
        raise RequestError(f"a sweep needs positive levels that rise, got {', '.join(f'{x:g}' for x in levels)}")
    check("the needed share of good requests", needed, above=0, at_most=1)
    result = Sweep(kind, slo, needed)
    for level in levels:
        run = await make_run(level)
        result.points.append(point := SweepPoint(level, summarise(run, slo)))
        if run.interrupted:
            result.stopped = f"interrupted at {level:g}"
        elif level != levels[-1]:
            result.stopped = saturated(result.points[:-1], point)
        if result.stopped is not None:
            break
    return result


def parse_levels(text: str) -> list[float]:
    """``"1,2,5"``, or ``"1..16"`` for doublings with the end among them: 1, 2, 4, 8, 16."""
    first, dots, last = text.partition("..")
    try:
        if dots:
            levels, end = [float(first)], float(last)
            while 0 < levels[-1] < end and len(levels) < MOST_LEVELS:
                levels.append(min(2 * levels[-1], end))
        else:
            levels = [float(part) for part in text.split(",")]
            end = levels[-1]
        if levels[-1] != end or not all(0 < level < math.inf for level in levels) or levels != sorted(set(levels)):
            raise ValueError
    except ValueError:
        raise RequestError(f"--sweep '{text}': write positive levels that rise, as 1,2,4 or 1..16") from None
    return levels

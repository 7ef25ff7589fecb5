"""Warm up, repeat, and compare side by side.

The first calls pay for lazy initialisation, cold caches and autotuning; a single
call is an anecdote; and two things timed one after the other differ by whatever
the machine did in between. So: warm-up kept apart, repeats, interleaved pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanoinfer.errors import NanoinferError
from nanoinfer.measure.clock import timed
from nanoinfer.measure.stats import Ratio, Summary, percentile, ratio_of_medians, summarize

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Timing:
    """Seconds per call. ``summary`` is of ``samples`` only; warm-up calls never enter it."""

    samples: tuple[float, ...]
    warmup_samples: tuple[float, ...]
    summary: Summary


def _check(warmup: int, repeats: int) -> None:
    if warmup < 0 or repeats < 1:
        raise NanoinferError(f"repeat: needs warmup >= 0 and repeats >= 1, got {warmup} and {repeats}")


def _once(fn: Callable[[], object], device: str | torch.device, setup: Callable[[], object] | None) -> float:
    if setup is not None:
        setup()
    return timed(fn, device)[1]


def repeat(
    fn: Callable[[], object],
    *,
    device: str | torch.device = "cpu",
    warmup: int = 3,
    repeats: int = 10,
    setup: Callable[[], object] | None = None,
) -> Timing:
    """Time ``fn``: ``warmup`` calls that are kept apart, then ``repeats``, each synchronised.

    ``setup`` runs before every call and is not timed (flush a cache there, not in ``fn``).
    """
    _check(warmup, repeats)
    seconds = tuple(_once(fn, device, setup) for _ in range(warmup + repeats))
    return Timing(seconds[warmup:], seconds[:warmup], summarize(seconds[warmup:]))


@dataclass(frozen=True)
class Paired:
    """Two timings taken turn about. ``ratio`` is median(a) / median(b): how many times as long ``a`` takes."""

    a: Timing
    b: Timing
    ratio: Ratio


def paired(
    a: Callable[[], object],
    b: Callable[[], object],
    *,
    device: str | torch.device = "cpu",
    warmup: int = 3,
    repeats: int = 10,
    setup: Callable[[], object] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> Paired:
    """Time ``a`` and ``b`` in turns (a b, b a, a b, ...), so that drift falls on both alike."""
    _check(warmup, repeats)
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(warmup + repeats):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            seconds[which].append(_once((a, b)[which], device, setup))
    first, second = (Timing(tuple(s[warmup:]), tuple(s[:warmup]), summarize(s[warmup:])) for s in seconds)
    ratio = ratio_of_medians(first.samples, second.samples, confidence=confidence, seed=seed)
    return Paired(first, second, ratio)


def steady_from(samples: Sequence[float], band: float = 0.1) -> int:
    """How many leading samples look like warm-up: the index of the first that is at the steady level.

    The level is the median of the later half, its band the larger of ``band`` (a
    fraction of the level) and three median absolute deviations. A description of
    the data, for a chart: decide the warm-up of a measurement before taking it.
    """
    later = samples[len(samples) // 2 :]
    level = percentile(later, 50)
    if level is None:
        return 0
    spread = percentile([abs(sample - level) for sample in later], 50) or 0.0
    width = max(band * abs(level), 3 * spread)
    return next(i for i, sample in enumerate(samples) if abs(sample - level) <= width)

"""Measured operators: seconds against size, with straight lines in log-log between the points.

A real machine has a rate for every shape, so the best predictions are put together from operators that were timed one
by one. :mod:`nanoinfer.calibrate.operators` takes these timings.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Of each row of a step: tokens in the cache already, and new ones.
Rows = Sequence[tuple[int, int]]


def interpolate(x: float, points: Sequence[tuple[float, float]]) -> float:
    """The value at ``x`` on straight lines in log-log through ``points`` (positive, ``x`` rising); flat beyond them.

    Without numpy, whose import would take longer than a whole prediction.
    """
    at = bisect.bisect_left(points, x, key=lambda point: point[0])
    if at == 0 or at == len(points) or points[at][0] == x:
        return points[min(at, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    share = math.log(x / x0) / math.log(x1 / x0)
    return math.exp((1 - share) * math.log(y0) + share * math.log(y1))


@dataclass(frozen=True)
class Curve:
    """Seconds at measured sizes, which rise. Flat below the first, in proportion to size beyond the last."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds):
            raise ValueError("a curve needs as many sizes as seconds, and at least one")
        if list(self.sizes) != sorted(set(self.sizes)) or min(self.sizes) <= 0 or min(self.seconds) <= 0:
            raise ValueError("a curve's sizes must rise, and sizes and seconds be above 0")

    def at(self, size: float) -> float:
        """Seconds at ``size``."""
        beyond = max(1.0, size / self.sizes[-1])
        return beyond * interpolate(size, tuple(zip(self.sizes, self.seconds, strict=True)))


@dataclass(frozen=True)
class OperatorCurves:
    """One model's operators on one machine, each timed by itself: seconds of one layer, of products of one call.

    ``products`` go by the names of :func:`~nanoinfer.theory.arithmetic.layer_matrices` and ``lm_head``, their weights
    coming from memory as in a step. ``rest`` is all else: norms, rotation, activation, cache, Python; in steps of the
    continuous engine also its share of writes to the paged cache, scheduling, embedding, the choice of tokens.
    """

    products: Mapping[str, Curve]  # against rows
    decode_attention: Mapping[int, Curve]  # by batch, against context, one new token a row
    paged_attention: Mapping[int, Curve]
    prefill_attention: Curve  # against tokens of one row
    rest: Curve  # against rows of one token each
    rest_prefill: Curve  # against tokens of one prompt
    paged_rest: Curve
    paged_rest_prefill: Curve

    def attention(self, batch: int, new: int, context: int) -> float:
        """Seconds of one layer's attention of ``batch`` rows that are all alike."""
        if new > 1:
            return batch * self.prefill_attention.at(context)
        return _between_batches(self.decode_attention, batch, context)

    def paged(self, rows: int, context: float) -> float:
        """Seconds of one layer's attention over a paged cache, one new token a row."""
        return _between_batches(self.paged_attention, rows, context)

    def mixed_attention(self, rows: Rows) -> float:
        """Seconds of one layer's attention over a paged cache, rows with one new token and chunks of prompts."""
        singles = [old + 1 for old, new in rows if new == 1]
        seconds = self.paged(len(singles), sum(singles) / len(singles)) if singles else 0.0
        # A chunk is the lower part of a triangle.
        chunk = self.prefill_attention
        return seconds + sum(chunk.at(old + new) - (chunk.at(old) if old else 0.0) for old, new in rows if new > 1)

    def rest_of(self, phase: str, *, paged: bool) -> Curve:
        """All but products and attention of one layer, in ``prefill`` or ``decode``."""
        if phase == "decode":
            return self.paged_rest if paged else self.rest
        return self.paged_rest_prefill if paged else self.rest_prefill


def _between_batches(curves: Mapping[int, Curve], batch: int, context: float) -> float:
    batches = tuple(sorted(curves))
    return Curve(batches, tuple(curves[b].at(context) for b in batches)).at(batch)

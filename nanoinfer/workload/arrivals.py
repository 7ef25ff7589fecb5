"""When requests come: schedules fixed before the run, so that no server can talk the clients out of coming.

Each schedule is an iterator of offsets in seconds from its start, in order. They are absolute: a generator that
slept from one request to the next would add its own work to every gap (183 requests a second sent where 200 were
asked). Random ones are seeded and never rescaled to hit their rate on the dot: that chance lumps and thins the
arrivals is what makes them random.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import count, islice, takewhile

from nanoinfer.errors import RequestError


def _positive(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise RequestError(f"{name} must be a number above 0, got {value:g}")
    return value


def constant(rate: float) -> Iterator[float]:
    """``rate`` requests a second, evenly spaced, the first at 0.

    Raises :class:`RequestError` for a rate not above 0.
    """
    _positive("rate", rate)
    return (i / rate for i in count())


def poisson(rate: float, seed: int = 0) -> Iterator[float]:
    """A Poisson process: users who know nothing of each other, ``rate`` a second on average.

    Raises :class:`RequestError` for a rate not above 0.
    """
    return gamma(rate, 1.0, seed)


def gamma(rate: float, burstiness: float, seed: int = 0) -> Iterator[float]:
    """Gaps of a gamma distribution with mean ``1 / rate`` seconds and ``burstiness`` as its shape.

    As elsewhere, the name is the wrong way round: 1 is Poisson, below 1 is burstier, above is more even. A gap's
    standard deviation is its mean over the square root of ``burstiness``.

    Raises:
        RequestError: a rate or burstiness not above 0.
    """
    scale = 1 / (_positive("rate", rate) * _positive("burstiness", burstiness))
    return _running(random.Random(f"{seed}/arrivals"), burstiness, scale)


def _running(rng: random.Random, shape: float, scale: float) -> Iterator[float]:
    at = 0.0
    while True:
        at += rng.gammavariate(shape, scale)
        yield at


def ramp(low: float, high: float, seconds: float, seed: int = 0) -> Iterator[float]:
    """Poisson arrivals whose rate goes evenly from ``low`` to ``high`` in ``seconds``, where they end.

    Raises:
        RequestError: a negative rate, both 0, or no time.
    """
    _positive("ramp: seconds", seconds)
    if not (math.isfinite(low) and math.isfinite(high) and min(low, high) >= 0 and max(low, high) > 0):
        raise RequestError(f"ramp: rates must be 0 or more, one of them above 0, got {low:g} to {high:g}")
    return takewhile(lambda at: at < seconds, (when(n, low, high, seconds) for n in poisson(1.0, seed)))


def when(n: float, low: float, high: float, seconds: float) -> float:
    """The time by which a ramp expects ``n`` arrivals, ``inf`` if never: ``low t + (high - low) t² / (2 seconds) = n``.

    A Poisson process of rate 1 read on this clock is one with the ramp's rate.
    """
    under = low * low + 2 * n * (high - low) / seconds
    if under < 0:  # a rate that falls to 0 sends only so many
        return math.inf
    below = low + math.sqrt(under)  # this form of the root loses no digits where low and high are close
    return 2 * n / below if below else 0.0


def schedule(
    shape: str, rate: float, *, n: int | None = None, seconds: float | None = None, seed: int = 0
) -> list[float]:
    """Offsets of one run, from words: ``constant``, ``poisson``, ``gamma:0.5``, ``ramp:2-20``.

    Args:
        shape: how they come. A ramp has rates of its own and needs ``seconds``.
        rate: requests a second.
        n: at most so many.
        seconds: none at or after this time.
        seed: for the random ones.

    Raises:
        RequestError: an unknown shape, or a schedule that would have no end.
    """
    name, _, rest = shape.partition(":")
    try:
        if name == "ramp":
            low, _, high = rest.partition("-")
            if seconds is None:
                raise RequestError("a ramp needs a length in seconds")
            offsets = ramp(float(low), float(high), seconds, seed)
        elif name == "gamma":
            offsets = gamma(rate, float(rest), seed)
        elif rest or name not in ("constant", "poisson"):
            raise ValueError
        else:
            offsets = constant(rate) if name == "constant" else poisson(rate, seed)
    except ValueError:
        raise RequestError(f"arrivals '{shape}': write constant, poisson, gamma:0.5 or ramp:2-20") from None
    if n is None and seconds is None:
        raise RequestError("arrivals: say how many requests, or for how many seconds")
    if seconds is not None:
        end = _positive("seconds", seconds)
        offsets = takewhile(lambda at: at < end, offsets)
    return list(islice(offsets, n))

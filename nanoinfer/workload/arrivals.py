"""When requests come, open loop: arrivals do not depend on the server.

Each schedule is an iterator of absolute offsets in seconds: sleeping from one request to the next would add the
client's work to every gap. Random ones are seeded and never rescaled to hit their rate (requests a second) exactly. A
number out of its range is a :class:`RequestError`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import accumulate, count, islice, repeat, takewhile

from nanoinfer.errors import RequestError, check


def constant(rate: float) -> Iterator[float]:
    """Evenly spaced, the first at 0."""
    check("rate", rate, above=0)
    return (i / rate for i in count())


def poisson(rate: float, seed: int = 0) -> Iterator[float]:
    """A Poisson process: independent users."""
    return gamma(rate, 1.0, seed)


def gamma(rate: float, burstiness: float, seed: int = 0) -> Iterator[float]:
    """Gaps of a gamma distribution with mean ``1 / rate`` seconds and ``burstiness`` as its shape.

    As in other tools the name is inverted: 1 is Poisson, below 1 is burstier, above is more even. A gap's standard
    deviation is its mean over the square root of ``burstiness``.
    """
    check("rate", rate, above=0)
    check("burstiness", burstiness, above=0)
    rng = random.Random(f"{seed}/arrivals")
    scale = 1 / (rate * burstiness)
    return accumulate(rng.gammavariate(burstiness, scale) for _ in repeat(None))


def ramp(low: float, high: float, seconds: float, seed: int = 0) -> Iterator[float]:
    """Poisson arrivals whose rate goes linearly from ``low`` to ``high`` in ``seconds``, where they end."""
    check("ramp: seconds", seconds, above=0)
    for rate in (low, high):
        check("ramp: a rate", rate, at_least=0)
    check("ramp: the higher rate", max(low, high), above=0)
    return takewhile(lambda at: at < seconds, (ramp_time(n, low, high, seconds) for n in poisson(1.0, seed)))


def ramp_time(n: float, low: float, high: float, seconds: float) -> float:
    """The time by which a ramp expects ``n`` arrivals, ``inf`` if never: ``low t + (high - low) t² / (2 seconds) = n``.

    A Poisson process of rate 1 read on this clock is one with the ramp's rate.
    """
    under = low * low + 2 * n * (high - low) / seconds
    if under < 0:  # a rate that falls to 0 sends a finite number
        return math.inf
    below = low + math.sqrt(under)  # this form of the root loses no digits where low and high are close
    return 2 * n / below if below else 0.0


def schedule(
    shape: str, rate: float, *, n: int | None = None, seconds: float | None = None, seed: int = 0
) -> list[float]:
    """Offsets of one run: at most ``n``, and none at or after ``seconds``; a :class:`RequestError` without either.

    ``shape`` is ``constant``, ``poisson``, ``gamma:0.5`` or ``ramp:2-20``, which has its own rates.
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
        else:
            offsets = {"constant": constant(rate), "poisson": poisson(rate, seed)}[shape]
    except (ValueError, KeyError):
        raise RequestError(f"arrivals '{shape}': write constant, poisson, gamma:0.5 or ramp:2-20") from None
    if n is None and seconds is None:
        raise RequestError("arrivals: say how many requests, or for how many seconds")
    if seconds is not None:
        check("seconds", seconds, above=0)
        offsets = takewhile(lambda at: at < seconds, offsets)
    return list(islice(offsets, n))

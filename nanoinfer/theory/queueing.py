"""Waiting in line: what one server's mean wait must be, to hold a simulation or a measurement against.

Requests come at random (Poisson), on average ``rate`` a second, and are served one at a time for ``service_s`` seconds
on average. The load is the share of time that the server is busy. As it nears 1 the wait grows without bound, and half
of it is due to how unlike the services are (Pollaczek and Khinchine):

    wait = load * service_s / (1 - load) * (1 + c2) / 2

with c2 the variance of the service time over its mean squared: 0 where all are alike (M/D/1), 1 where they are
exponential (M/M/1). Sources: Kleinrock, "Queueing Systems" I (1975); Little, "A proof for the queuing formula" (1961).
"""

from __future__ import annotations

import math

from nanoinfer.errors import RequestError


def load_of(rate: float, service_s: float, servers: int = 1) -> float:
    """Share of time that each of so many servers is busy; at 1 and beyond the queue has no end."""
    _not_negative(rate=rate, service_s=service_s)
    if servers < 1:
        raise RequestError(f"servers must be at least 1, got {servers}")
    return rate * service_s / servers


def mg1_wait(load: float, service_s: float, c2: float) -> float:
    """Mean seconds in the queue, service not counted. ``c2``: variance of the service time over its mean squared.

    Raises:
        RequestError: a load below 0, or one of 1 and more, at which no queue settles; negative times.
    """
    _not_negative(load=load, service_s=service_s, c2=c2)
    if load >= 1:
        raise RequestError(f"a queue at load {load:g} never settles: its mean wait exists below load 1 alone")
    return load * service_s / (1 - load) * (1 + c2) / 2


def md1_wait(load: float, service_s: float) -> float:
    """Mean seconds in the queue where every service takes ``service_s``. Raises as :func:`mg1_wait` does."""
    return mg1_wait(load, service_s, 0.0)


def mm1_wait(load: float, service_s: float) -> float:
    """Mean seconds in the queue where services are exponential with mean ``service_s``. Raises as :func:`mg1_wait`."""
    return mg1_wait(load, service_s, 1.0)


def mm1_residence_percentile(load: float, service_s: float, q: float) -> float:
    """The ``q``-th percentile of seconds from arrival to end in M/M/1: an exponential of mean ``wait + service_s``.

    Raises:
        RequestError: as :func:`mg1_wait`, and for ``q`` outside 0 to 100 (100 has no bound).
    """
    if not 0 <= q < 100:
        raise RequestError(f"q is in percent, from 0 to below 100, got {q:g}")
    return -math.log1p(-q / 100) * (mm1_wait(load, service_s) + service_s)


def in_system(rate: float, seconds: float) -> float:
    """Little's law: mean number of requests there, from how many come a second and how long each stays on average."""
    _not_negative(rate=rate, seconds=seconds)
    return rate * seconds


def _not_negative(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise RequestError(f"{name} must be a number and not negative, got {value:g}")

"""Mean waits of a queue with one server, to compare a simulation or a measurement with.

Requests come at random (Poisson), on average ``rate`` a second, and are served one at a time for ``service_s`` seconds
on average. The load is the share of time that the server is busy. As it nears 1 the wait grows without bound, and half
of it is due to how unlike the services are (Pollaczek and Khinchine):

    wait = load * service_s / (1 - load) * (1 + c2) / 2

with c2 the variance of the service time over its mean squared: 0 where all are alike (M/D/1), 1 where they are
exponential (M/M/1). Source: Kleinrock, "Queueing Systems" I (1975).
"""

from __future__ import annotations

from nanoinfer.errors import RequestError, check


def mg1_wait(load: float, service_s: float, c2: float) -> float:
    """Mean seconds in the queue, service not counted. ``c2``: variance of the service time over its mean squared.

    Raises :class:`RequestError` for a load of 1 and more, at which no queue settles.
    """
    for name, value in {"load": load, "service_s": service_s, "c2": c2}.items():
        check(name, value, at_least=0)
    if load >= 1:
        raise RequestError(f"a queue at load {load:g} never settles: its mean wait exists below load 1 alone")
    return load * service_s / (1 - load) * (1 + c2) / 2


def md1_wait(load: float, service_s: float) -> float:
    """Mean seconds in the queue where every service takes ``service_s``. Raises as :func:`mg1_wait` does."""
    return mg1_wait(load, service_s, 0.0)


def mm1_wait(load: float, service_s: float) -> float:
    """Mean seconds in the queue where services are exponential with mean ``service_s``. Raises as :func:`mg1_wait`."""
    return mg1_wait(load, service_s, 1.0)

"""What serving costs: dollars and joules a token, and the seconds that requests wait at a load.

    $/Mtok = $/h * 1e6 / (3600 * tokens/s)        J/token = watts / (tokens/s)

Both divide by a rate, so a machine that idles, or whose requests fail, costs more a token by exactly the share of its
time that produces nothing. Full machines are cheap, but requests that come at random wait for them without bound as
the load nears 1 (:func:`mg1_wait`).
"""

from __future__ import annotations

from dataclasses import dataclass

from nanoinfer.errors import RequestError, check


def usd_per_mtok(usd_per_hour: float, tokens_per_second: float) -> float:
    """Dollars for a million tokens: 3 $/h at 1,000 tok/s are 0.83 $."""
    check("usd_per_hour", usd_per_hour, above=0)
    check("tokens_per_second", tokens_per_second, above=0)
    return 1e6 * usd_per_hour / 3600 / tokens_per_second


def joules_per_token(watts: float, tokens_per_second: float) -> float:
    """Energy of one token. Say where the watts come from: a meter, or a datasheet."""
    check("watts", watts, above=0)
    check("tokens_per_second", tokens_per_second, above=0)
    return watts / tokens_per_second


@dataclass(frozen=True)
class Price:
    """What one million tokens of each kind cost, in dollars."""

    input: float
    cached_input: float
    output: float


@dataclass(frozen=True)
class Workload:
    """What a machine is paid for."""

    usd_per_hour: float  # of the whole machine, storage and network included
    prefill_rate: float  # input tokens/s while it prefills
    decode_rate: float  # output tokens/s while it decodes, all rows together
    idle: float = 0.0  # share of the hours in which nothing runs
    failed: float = 0.0  # share of requests whose work is thrown away
    cached_cost: float = 0.0  # of a token found in the prefix cache, as a share of a computed one

    def __post_init__(self) -> None:
        for name in ("usd_per_hour", "prefill_rate", "decode_rate"):
            check(name, getattr(self, name), above=0)
        for name in ("idle", "failed", "cached_cost"):
            check(name, getattr(self, name), at_least=0, below=1)

    @property
    def price(self) -> Price:
        """Dollars a million tokens: each phase pays for the time it takes, and for the time that is wasted."""
        useful = (1 - self.idle) * (1 - self.failed)
        computed = usd_per_mtok(self.usd_per_hour, self.prefill_rate) / useful
        return Price(computed, computed * self.cached_cost, usd_per_mtok(self.usd_per_hour, self.decode_rate) / useful)

    def request(self, input_tokens: int, output_tokens: int, cached_tokens: int = 0) -> float:
        """Dollars of one request. ``cached_tokens`` are those of the input that a prefix cache holds."""
        if not 0 <= cached_tokens <= input_tokens or output_tokens < 0:
            raise RequestError(
                f"token counts must not be negative, and cached ({cached_tokens}) at most input ({input_tokens})"
            )
        price = self.price
        fresh = input_tokens - cached_tokens
        return (fresh * price.input + cached_tokens * price.cached_input + output_tokens * price.output) / 1e6


def mg1_wait(load: float, service_s: float, c2: float) -> float:
    """Mean seconds in the queue of one server, service not counted: ``load * service_s / (1 - load) * (1 + c2) / 2``.

    Requests come at random (Poisson) and take ``service_s`` on average; ``load`` is the share of time that the server
    is busy, and ``c2`` the variance of the service time over its mean squared: 0 where all are alike (M/D/1), 1 where
    they are exponential (M/M/1). Raises :class:`RequestError` for a load of 1 and more, at which no queue settles.
    Source: Pollaczek and Khinchine, in Kleinrock, "Queueing Systems" I (1975).
    """
    for name, value in {"load": load, "service_s": service_s, "c2": c2}.items():
        check(name, value, at_least=0)
    if load >= 1:
        raise RequestError(f"a queue at load {load:g} never settles: its mean wait exists below load 1 alone")
    return load * service_s / (1 - load) * (1 + c2) / 2

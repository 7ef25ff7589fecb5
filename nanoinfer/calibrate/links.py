"""What a message costs between these ranks: a latency and a bandwidth for each collective, measured.

seconds = alpha + bytes sent / beta
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from nanoinfer import parallel
from nanoinfer.calibrate.machine import KEEP_S, MAX_WAITED
from nanoinfer.errors import RequestError, check, nearest
from nanoinfer.measure.clock import now, timed
from nanoinfer.measure.environment import machine_key
from nanoinfer.measure.stats import sorted_percentile
from nanoinfer.parallel.launch import launch
from nanoinfer.store import cache_file, cached
from nanoinfer.theory.communication import Traffic

if TYPE_CHECKING:
    from torch import Tensor

    from nanoinfer.parallel.collectives import Communicator

#: Bytes of the messages that are timed: from a number to what a prompt of some thousand tokens sends.
SIZES: Final = (64, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576, 4_194_304)
ROUNDS: Final = 20


@dataclass(frozen=True)
class Rate:
    """What one kind of call costs."""

    alpha: float  # seconds of a call, however small
    beta: float  # bytes a second that leave this rank
    points: tuple[tuple[float, float], ...]  # measured: bytes sent, and the median of seconds

    def seconds(self, calls: float, sent: float) -> float:
        """Of ``calls`` that send ``sent`` bytes in all."""
        return calls * self.alpha + sent / self.beta

    @property
    def error(self) -> float:
        """The largest relative error of the line at a measured point."""
        return max(abs(self.seconds(1, sent) / seconds - 1) for sent, seconds in self.points)


@dataclass(frozen=True)
class LinkRates:
    """The rates between ``ranks`` processes on one kind of device, by kind of call."""

    ranks: int
    device: str
    rates: Mapping[str, Rate]
    disturbed: float  # the share of the processors' time that went to other programs meanwhile

    def rate(self, kind: str) -> Rate:
        """The rate of a kind of :class:`Traffic`. Raises :class:`RequestError` for one that was not timed."""
        if kind not in self.rates:
            raise RequestError(f"'{kind}' was not timed between these ranks; {nearest(kind, self.rates)}")
        return self.rates[kind]


def predicted(traffic: Iterable[Traffic], link: LinkRates) -> float:
    """Seconds that this traffic takes, one call after the other. Raises :class:`RequestError` for an unknown kind."""
    return sum(link.rate(part.kind).seconds(part.calls, part.sent) for part in traffic)


def fit_rate(points: Iterable[tuple[float, float]]) -> Rate:
    """The line through ``(bytes, seconds)`` with the least squares of relative errors; no number below 0."""
    points = tuple(points)
    # Each point to its own scale: alpha * (1 / t) + (x / t) / beta = 1.
    rows, ones = np.array([(1 / t, x / t) for x, t in points]), np.ones(len(points))
    alpha, per_byte = (float(number) for number in np.linalg.lstsq(rows, ones)[0])
    if per_byte <= 0:  # so disturbed that no line rises through them: latency alone
        return Rate(float(np.linalg.lstsq(rows[:, :1], ones)[0][0]), math.inf, points)
    if alpha <= 0:
        return Rate(0.0, 1 / float(np.linalg.lstsq(rows[:, 1:], ones)[0][0]), points)
    return Rate(alpha, 1 / per_byte, points)


# --- measuring -------------------------------------------------------------------------


def measure_link(ranks: int, device: str = "cpu", *, rounds: int = ROUNDS, fresh: bool = False) -> LinkRates:
    """Time the collectives between ``ranks`` processes of this machine, some ten seconds.

    Kept in the user's cache for a day, unless other programs slowed it down; ``fresh`` measures again. Each round takes
    one sample of every kind and size, so that a disturbance falls on a few of each. Raises :class:`RequestError` for
    fewer than two ranks, and what :func:`~nanoinfer.parallel.launch.launch` raises.
    """
    check("a link's ranks", ranks, at_least=2, whole=True)

    def measure() -> LinkRates:
        answers = launch(f"{__name__}:time_calls", ranks, {"rounds": rounds}, device=device)
        others = answers[0]["busy"] - sum(answer["own"] for answer in answers)
        return LinkRates(ranks, device, _rates(answers), max(0.0, float(others / answers[0]["wall"])))

    return cached(
        cache_file("link", [ranks, device, *machine_key()], [Path(parallel.__path__[0])]),
        LinkRates,
        measure,
        max_age_s=KEEP_S,
        fresh=fresh,
        keep=lambda link: link.disturbed <= MAX_WAITED,
    )


def _rates(answers: Sequence[Mapping[str, Any]]) -> dict[str, Rate]:
    """The median over a point's samples; a sample is that of the rank that waited least."""
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for ranks in zip(*(answer["calls"] for answer in answers), strict=True):
        kind, sent, _ = ranks[0]
        samples = zip(*(times for _, _, times in ranks), strict=True)
        points[kind].append((sent, sorted_percentile(sorted(map(min, samples)), 50)))
    return {kind: fit_rate(found) for kind, found in points.items()}


def time_calls(comm: Communicator, rounds: int) -> dict[str, Any]:
    """What each rank runs: every kind and size once a round, each after an untimed call."""
    import psutil
    import torch
    import torch.distributed as dist

    device = "cuda" if dist.get_backend(comm.group) == "nccl" else "cpu"
    messages = [torch.zeros(size // 4, device=device) for size in SIZES]
    items = [(kind, *call) for x in messages for kind, call in _calls(comm, x).items()]
    samples: list[list[float]] = [[] for _ in items]
    sent = [0.0] * len(items)
    start, own, busy = now(), time.process_time(), sum(psutil.cpu_times()[:3])
    for _ in range(rounds):
        for i, (_, call, hops) in enumerate(items):
            call()
            logged = len(comm.log)
            samples[i].append(timed(call, device)[1] / hops)
            sent[i] = sum(entry.sent for entry in comm.log[logged:])
    used = sum(psutil.cpu_times()[:3]) - busy  # user, nice and system time of the whole machine
    return {
        "calls": list(zip((kind for kind, _, _ in items), sent, samples, strict=True)),
        "wall": (now() - start) * (psutil.cpu_count() or 1),
        "own": time.process_time() - own,
        "busy": used,
    }


def _calls(comm: Communicator, x: Tensor) -> dict[str, tuple[Callable[[], object], int]]:
    """By kind: a call with the message ``x``, and how many of its hops wait for each other.

    A send returns before its message has arrived, so messages go once round, through every rank.
    """
    n, rank, y = comm.size, comm.rank, x.clone()
    previous, following = (rank - 1) % n, (rank + 1) % n
    parts = list(x.new_zeros(n, -(-x.numel() // n)).unbind())
    received = [part.clone() for part in parts]

    def round_trip() -> None:
        if rank == 0:
            comm.send(x, following)
        comm.receive(y, previous)
        if rank > 0:
            comm.send(y, following)

    def broadcast_from_each() -> None:
        for root in range(n):
            comm.broadcast(x, root)

    return {
        "all-reduce": (lambda: comm.all_reduce(x), 1),
        "all-gather": (lambda: comm.all_gather(x), 1),
        "all-to-all": (lambda: comm.all_to_all(parts, received), 1),
        "exchange": (lambda: comm.exchange(x, following, previous), 1),
        "send": (round_trip, n),
        "broadcast": (broadcast_from_each, n),
    }

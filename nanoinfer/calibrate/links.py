"""What a message costs between these ranks: a latency and a bandwidth for each collective, measured.

    seconds = alpha + bytes sent / beta

with alpha for a call, however small, and beta the bytes a second that leave a rank. From the two of them and the bytes
that a split sends follows how long it will talk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nanoinfer import parallel
from nanoinfer.errors import RequestError, nearest
from nanoinfer.measure.calibration import MOST_WAITED
from nanoinfer.measure.clock import now, timed
from nanoinfer.measure.environment import machine_key
from nanoinfer.measure.stats import percentile
from nanoinfer.parallel.launch import launch
from nanoinfer.store import cache_file, write_whole
from nanoinfer.theory.communication import Traffic

if TYPE_CHECKING:
    from torch import Tensor

    from nanoinfer.parallel.collectives import Wire

#: Bytes of the messages that are timed: from a number to what a prompt of some thousand tokens sends.
SIZES: Final = (64, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576, 4_194_304)
ROUNDS: Final = 20
KEEP_S: Final = 24 * 3600  # machines drift


@dataclass(frozen=True)
class Rate:
    """What one kind of call costs.

    Attributes:
        alpha: seconds for a call, however small.
        beta: bytes a second that leave this rank.
        points: what was measured: bytes sent, and the median of seconds.
    """

    alpha: float
    beta: float
    points: tuple[tuple[float, float], ...]

    def seconds(self, calls: float, sent: float) -> float:
        """Of so many calls that send so many bytes in all."""
        return calls * self.alpha + sent / self.beta

    @property
    def error(self) -> float:
        """By how much the two numbers miss the worst of the points, as a share of it."""
        return max(abs(self.seconds(1, sent) / seconds - 1) for sent, seconds in self.points)


@dataclass(frozen=True)
class LinkRates:
    """The rates between so many ranks on one kind of device, by kind of call.

    ``disturbed`` is the share of the processors' time that went to other programs meanwhile.
    """

    ranks: int
    device: str
    rates: Mapping[str, Rate]
    disturbed: float

    def rate(self, kind: str) -> Rate:
        """That of one kind of call, as :class:`Traffic` names it. Raises :class:`RequestError` for any other."""
        if kind not in self.rates:
            raise RequestError(f"'{kind}' was not timed between these ranks; {nearest(kind, self.rates)}")
        return self.rates[kind]

    def to_json(self) -> str:
        """All of it, as text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LinkRates:
        """What :meth:`to_json` wrote. Raises ValueError for anything else."""
        try:
            data = json.loads(text)
            rates = {
                kind: Rate(rate["alpha"], rate["beta"], tuple((sent, seconds) for sent, seconds in rate["points"]))
                for kind, rate in data["rates"].items()
            }
            return cls(data["ranks"], data["device"], rates, data["disturbed"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a record of a link's rates: {error!r}") from None


def predicted(traffic: Iterable[Traffic], link: LinkRates) -> float:
    """Seconds that this traffic takes, one call after the other. Raises :class:`RequestError` for an unknown kind."""
    return sum(link.rate(part.kind).seconds(part.calls, part.sent) for part in traffic)


def fitted(points: Iterable[tuple[float, float]]) -> Rate:
    """The line through points of bytes and seconds that misses none by much: least squares of relative errors."""
    points = tuple(points)
    # Each point to its own scale, alpha * (1 / t) + (x / t) / beta = 1, and then the least squares of the two.
    rows = [(1 / t, x / t) for x, t in points]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    alpha, per_byte = (a * bb - b * ab) / determinant, (aa * b - ab * a) / determinant
    if per_byte <= 0:  # so disturbed that no line rises through them
        return Rate(a / aa, math.inf, points)
    return Rate(alpha, 1 / per_byte, points) if alpha > 0 else Rate(0.0, bb / b, points)


# --- measuring -------------------------------------------------------------------------


def measure_link(ranks: int, device: str = "cpu", *, rounds: int = ROUNDS, fresh: bool = False) -> LinkRates:
    """Time the collectives between ``ranks`` processes of this machine, some ten seconds.

    Kept in the user's cache for a day, unless other programs held it up; ``fresh`` measures again.

    Args:
        ranks: 2 or more.
        device: ``cpu`` or ``cuda``.
        rounds: samples of every kind and size; in turns, so that what disturbs falls on a few of each.
        fresh: do not look for what was measured before.

    Raises:
        RequestError: fewer than two ranks.
        DeviceError: as :func:`~nanoinfer.parallel.launch.launch`.
    """
    if ranks < 2:
        raise RequestError(f"a link is between ranks: it needs 2 or more, got {ranks}")
    path = cache_file("link", [ranks, device, *machine_key()], [Path(parallel.__path__[0])])
    if not fresh and (found := _load(path)) is not None:
        return found
    answers = launch(f"{__name__}:time_calls", ranks, {"rounds": rounds}, device=device)
    found = LinkRates(ranks, device, _rates(answers), _disturbed(answers))
    if found.disturbed <= MOST_WAITED:
        with contextlib.suppress(OSError):  # a disk that refuses costs the next call some seconds
            write_whole(path, found.to_json())
    return found


def _load(path: Path) -> LinkRates | None:
    try:
        if time.time() - path.stat().st_mtime > KEEP_S:
            return None
        return LinkRates.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _rates(answers: list[dict[str, Any]]) -> dict[str, Rate]:
    """The median over a point's samples, of which each lasted as long as for the rank that waited least."""
    rates = {}
    for kind, points in answers[0]["calls"].items():
        found = []
        for at, (sent, _) in enumerate(points):
            samples = zip(*(answer["calls"][kind][at][1] for answer in answers), strict=True)
            median = percentile(map(min, samples), 50)
            assert median is not None
            found.append((sent, median))
        rates[kind] = fitted(found)
    return rates


def _disturbed(answers: list[dict[str, Any]]) -> float:
    """The share of the processors' time that went to other programs."""
    others = answers[0]["busy"] - sum(answer["own"] for answer in answers)
    return max(0.0, float(others / answers[0]["wall"]))


def time_calls(wire: Wire, rounds: int) -> dict[str, Any]:
    """What each rank does: every kind and size once in every round, after one that is not counted."""
    import psutil
    import torch
    import torch.distributed as dist

    device = "cuda" if dist.get_backend(wire.group) == "nccl" else "cpu"
    messages = [torch.zeros(size // 4, device=device) for size in SIZES]
    items = [(kind, *call) for x in messages for kind, call in _calls(wire, x).items()]
    samples: list[list[float]] = [[] for _ in items]
    sent = [0.0] * len(items)
    start, own, busy = now(), time.process_time(), sum(psutil.cpu_times()[:3])
    for _ in range(rounds):
        for at, (_, call, turns) in enumerate(items):
            call()
            logged = len(wire.log)
            seconds = timed(call, device)[1]
            samples[at].append(seconds / turns)
            sent[at] = sum(entry.sent for entry in wire.log[logged:])
    found: dict[str, list[tuple[float, list[float]]]] = {}
    for at, (kind, _, _) in enumerate(items):
        found.setdefault(kind, []).append((sent[at], samples[at]))
    used = sum(psutil.cpu_times()[:3]) - busy  # user, nice and system time of the whole machine
    wall = (now() - start) * (psutil.cpu_count() or 1)
    return {"calls": found, "wall": wall, "own": time.process_time() - own, "busy": used}


def _calls(wire: Wire, x: Tensor) -> dict[str, tuple[Callable[[], object], int]]:
    """Of each kind a call with the message ``x``, and how many of them it makes that wait for each other.

    A sender is done before its message has come, so messages go once round, through every rank.
    """
    n, rank, y = wire.size, wire.rank, x.clone()
    before, behind = (rank - 1) % n, (rank + 1) % n
    parts = list(x.new_zeros(n, -(-x.numel() // n)).unbind())
    received = [part.clone() for part in parts]

    def round_trip() -> None:
        if rank == 0:
            wire.send(x, behind)
        wire.receive(y, before)
        if rank > 0:
            wire.send(y, behind)

    def each_tells_all() -> None:
        for root in range(n):
            wire.broadcast(x, root)

    return {
        "all-reduce": (lambda: wire.all_reduce(x), 1),
        "all-gather": (lambda: wire.all_gather(x), 1),
        "all-to-all": (lambda: wire.all_to_all(parts, received), 1),
        "exchange": (lambda: wire.exchange(x, behind, before), 1),
        "send": (round_trip, n),
        "broadcast": (each_tells_all, n),
    }

"""From one device to a thousand: what each kind of parallelism gives in latency and in tokens a device, and where it
stops paying.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from nanoinfer.configs.config import ModelConfig
from nanoinfer.errors import RequestError
from nanoinfer.theory.parallel import ParallelConfig, decode_step, memory, prefill_step
from nanoinfer.theory.parameters import check_sizes
from nanoinfer.theory.roofline import Machine, Step

Dimension = Literal["tp", "pp", "cp", "ep", "replicas"]
DIMENSIONS: Final[tuple[Dimension, ...]] = ("tp", "pp", "cp", "ep", "replicas")
#: One device, two, four, ... 1,024.
DOUBLINGS: Final = tuple(2**i for i in range(11))
#: A step is shorter only if it is so by more than this share.
NOTICED: Final = 0.01
#: A device pays while it yields at least this share of the tokens that one yields where there are fewest.
PAYS: Final = 0.5


@dataclass(frozen=True)
class Point:
    """One number of devices.

    ``efficiency`` is tokens/s a device, over those of the fewest devices that the model fits (of the fewest, if none).
    """

    split: ParallelConfig
    fits: bool
    rows: int  # that all replicas decode together
    prefill_s: float  # of one replica
    decode_s: float  # of one step: a user's wait for a token
    tokens_per_s: float  # of all devices, while they decode
    efficiency: float
    link_share: float  # of the decode step's time, what goes to messages and to waiting for other devices
    prefill_link_share: float


@dataclass(frozen=True)
class Scaling:
    """One kind of parallelism, from few devices to many; ``ends`` says why there are no more points."""

    dimension: Dimension
    points: tuple[Point, ...]
    ends: str

    @property
    def possible(self) -> tuple[Point, ...]:
        """The points that fit; all of them where none does."""
        return tuple(point for point in self.points if point.fits) or self.points

    def best_latency(self, phase: Literal["prefill", "decode"] = "decode") -> Point:
        """The possible point after which more devices no longer make the phase shorter."""
        best, *more = self.possible
        for point in more:
            before, now = ((p.decode_s if phase == "decode" else p.prefill_s) for p in (best, point))
            if now > before * (1 - NOTICED):
                break
            best = point
        return best

    @property
    def last_that_pays(self) -> Point:
        """The possible point after which a device yields less than half of what it does where there are fewest."""
        paying, *more = self.possible
        for point in more:
            if point.efficiency < PAYS:
                break
            paying = point
        return paying


def scale(
    config: ModelConfig,
    machine: Machine,
    memory_bytes: float,
    dimension: Dimension,
    *,
    batch: int = 32,
    context: int = 2048,
    prompts: int = 1,
    devices: Sequence[int] = DOUBLINGS,
    rows_per_device: bool = False,
    imbalance: float = 1.0,
    utilisation: float = 0.9,
) -> Scaling:
    """One kind of parallelism over more and more devices of ``memory_bytes`` each.

    A replica prefills ``prompts`` together and decodes ``batch`` rows, ``context`` tokens each: the same work for more
    devices, of which replicas alone get more; with ``rows_per_device``, ``batch`` rows for each device. ``imbalance``,
    the busiest device's experts over the mean, is taken as far as few devices allow. Raises :class:`RequestError` for
    a dimension that model or machine do not have.
    """
    check_sizes(batch=batch, context=context, prompts=prompts)
    points: list[Point] = []
    ends = "no more were asked for"
    for n in devices:
        split = ParallelConfig(**{dimension: n})
        rows = batch * split.group if rows_per_device else batch
        uneven = min(imbalance, float(split.ep))
        try:
            first = prefill_step(config, machine, split, prompts, context, imbalance=uneven)
            step = decode_step(config, machine, split, rows, context, imbalance=uneven)
        except RequestError as error:
            if len(points) < 2:
                raise  # not even two devices can
            ends = str(error)
            break
        fits = memory(config, split, rows, context, machine.dtype).total <= memory_bytes * utilisation
        rate = split.replicas * rows / step.seconds
        each = (first.seconds, step.seconds, rate, 1.0, waiting(step), waiting(first))
        points.append(Point(split, fits, rows * split.replicas, *each))
    least = Scaling(dimension, tuple(points), ends).possible[0]
    base = least.tokens_per_s / least.split.devices
    rated = (replace(p, efficiency=p.tokens_per_s / p.split.devices / base) for p in points)
    return Scaling(dimension, tuple(rated), ends)


def waiting(step: Step) -> float:
    """Share of a step's time that goes to messages and to waiting for other devices."""
    return sum(op.seconds for op in step.operators if op.bound in ("link", "idle")) / step.seconds

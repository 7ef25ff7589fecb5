"""One clock, the waiting that makes it honest, and repeated measurements.

A GPU call returns before its work is done, so a stopwatch around it times the launch: everything here synchronises
the device on both sides. The first calls pay for lazy initialisation, cold caches and autotuning, and two things timed
one after the other differ by what the machine did in between: hence warm-up kept apart, repeats, interleaved pairs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from nanoinfer.errors import DeviceError, NanoinferError, check
from nanoinfer.measure.stats import Ratio, Summary, ratio_of_medians, summarize

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def now() -> float:
    """Seconds of a monotonic high-resolution clock; only differences mean anything."""
    return time.perf_counter()


def require_cuda(thing: str, instead: str = "take 'cpu'") -> None:
    """Raises :class:`DeviceError` where torch has no CUDA GPU."""
    import torch

    if not torch.cuda.is_available():
        raise DeviceError(f"{thing}: this machine has no CUDA GPU that torch can use; {instead}")


def synchronize(device: str | torch.device = "cpu") -> None:
    """Wait until ``device`` has finished its work; the CPU works at once. Raises :class:`DeviceError`."""
    kind, _, _ = str(device).partition(":")
    if kind == "cpu":
        return
    import torch

    if kind == "cuda":
        require_cuda("device 'cuda'")
        torch.cuda.synchronize(device)
    elif kind == "mps":
        torch.mps.synchronize()
    else:
        raise DeviceError(f"device '{device}': cannot be synchronised (known: cpu, cuda, mps)")


def timed(fn: Callable[[], T], device: str | torch.device = "cpu") -> tuple[T, float]:
    """Call ``fn`` once; return its result and the seconds until the device had finished it."""
    synchronize(device)
    start = now()
    result = fn()
    synchronize(device)
    return result, now() - start


class CudaTimer:
    """Time on the GPU's own clock, between two CUDA events: ``with CudaTimer() as timer: ...`` then ``timer.seconds``.

    Leaves out what Python does before the first event and after the last, which :func:`timed` includes; time in which
    the GPU waits between two kernels is inside both. Raises :class:`DeviceError` where there is no CUDA.
    """

    def __init__(self) -> None:
        import torch

        require_cuda("CudaTimer", "time with clock.timed")
        event: type[Any] = torch.cuda.Event  # untyped in torch
        self._start, self._end = event(enable_timing=True), event(enable_timing=True)

    def __enter__(self) -> CudaTimer:
        self._start.record()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.record()

    @property
    def seconds(self) -> float:
        """Seconds between the events; waits for the second one."""
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1000.0


@dataclass(frozen=True)
class Timing:
    """Seconds per call. ``summary`` is of ``samples`` only; warm-up calls never enter it."""

    samples: tuple[float, ...]
    warmup_samples: tuple[float, ...]
    summary: Summary


def _rounds(
    fns: tuple[Callable[[], object], ...],
    device: str | torch.device,
    warmup: int,
    repeats: int,
    setup: Callable[[], object] | None,
) -> tuple[Timing, ...]:
    """Time each function once a round, in an order that turns with every round."""
    check("warmup", warmup, at_least=0, whole=True, error=NanoinferError)
    check("repeats", repeats, at_least=1, whole=True, error=NanoinferError)
    seconds: list[list[float]] = [[] for _ in fns]
    for number in range(warmup + repeats):
        order = range(len(fns))
        for which in order if number % 2 == 0 else reversed(order):
            if setup is not None:
                setup()
            seconds[which].append(timed(fns[which], device)[1])
    return tuple(Timing(tuple(s[warmup:]), tuple(s[:warmup]), summarize(s[warmup:])) for s in seconds)


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
    (timing,) = _rounds((fn,), device, warmup, repeats, setup)
    return timing


@dataclass(frozen=True)
class Paired:
    """Two interleaved timings. ``ratio`` is median(a) / median(b): how many times as long ``a`` takes."""

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
    first, second = _rounds((a, b), device, warmup, repeats, setup)
    return Paired(first, second, ratio_of_medians(first.samples, second.samples, confidence=confidence, seed=seed))

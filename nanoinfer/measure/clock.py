"""One clock, and the waiting that makes it honest.

A GPU call returns before its work is done, so a stopwatch around it times the
launch. Everything here synchronises the device on both sides of the region.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from nanoinfer.errors import DeviceError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def now() -> float:
    """Seconds of a monotonic high-resolution clock; only differences mean anything."""
    return time.perf_counter()


def synchronize(device: str | torch.device = "cpu") -> None:
    """Wait until ``device`` has finished all work given to it; on the CPU there is none to wait for."""
    kind, _, _ = str(device).partition(":")
    if kind == "cpu":
        return
    import torch

    if kind == "cuda":
        if not torch.cuda.is_available():
            raise DeviceError("device 'cuda': this machine has no CUDA GPU that torch can use; take 'cpu'")
        torch.cuda.synchronize(device)
    elif kind == "mps":
        torch.mps.synchronize()
    else:
        raise DeviceError(f"device '{device}': no way known to wait for it (known: cpu, cuda, mps)")


def timed(fn: Callable[[], T], device: str | torch.device = "cpu") -> tuple[T, float]:
    """Call ``fn`` once; return its result and the seconds until the device had finished it."""
    synchronize(device)
    start = now()
    result = fn()
    synchronize(device)
    return result, now() - start


class CudaTimer:
    """Time on the GPU's own clock, between two CUDA events in the current stream.

    Leaves out what Python does before the first event and after the last, which :func:`timed`
    includes; time in which the GPU waits between two kernels is inside both.
    ``with CudaTimer() as timer: ...`` then ``timer.seconds``.
    Raises :class:`DeviceError` where there is no CUDA.
    """

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise DeviceError("CudaTimer: this machine has no CUDA GPU that torch can use; time with clock.timed")
        event: type[Any] = torch.cuda.Event  # untyped in torch
        self._start, self._end = event(enable_timing=True), event(enable_timing=True)

    def __enter__(self) -> CudaTimer:
        self._start.record()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end.record()

    @property
    def seconds(self) -> float:
        """Seconds between the events; waits for the second one."""
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1000.0

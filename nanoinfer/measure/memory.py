"""How many bytes: counted exactly for tensors, measured for what a process or a GPU really took.

A measurement holds activations, fragmentation and the runtime too.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nanoinfer.errors import NanoinferError
from nanoinfer.measure.clock import require_cuda

if TYPE_CHECKING:
    import torch

Method = Literal["VmHWM, reset through clear_refs", "RSS sampled every 2 ms", "torch.cuda peak statistics"]


def tensors_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes that these tensors occupy, each byte once: ties and overlapping views are not counted twice.

    A strided view counts from its first to its last element; on ``meta`` each object counts by shape and dtype.
    """
    spans: dict[str, list[tuple[int, int]]] = {}
    shapes: dict[int, int] = {}
    for tensor in tensors:
        if tensor.device.type == "meta":
            shapes[id(tensor)] = tensor.nbytes
        if tensor.device.type == "meta" or not tensor.numel():
            continue
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        extent = (sum((size - 1) * stride for size, stride in pairs) + 1) * tensor.element_size()
        spans.setdefault(str(tensor.device), []).append((tensor.data_ptr(), tensor.data_ptr() + extent))
    total = sum(shapes.values())
    for intervals in spans.values():
        reached = 0
        for start, end in sorted(intervals):
            total += max(0, end - max(start, reached))
            reached = max(reached, end)
    return total


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of a region: the process's resident memory on the CPU, what live tensors hold (allocated) on CUDA."""

    device: str
    method: Method  # sampling can miss a peak shorter than 2 ms
    start: int
    peak: int
    end: int
    reserved_peak: int | None = None  # what torch's CUDA allocator took from the driver; None on the CPU

    @property
    def above_start(self) -> int:
        """The most the region added to what was there before it."""
        return max(0, self.peak - self.start)


# A gauge watches a peak from its creation on; ``finish`` returns (peak, end, reserved peak), all in bytes.


class _CudaGauge:
    method: Method = "torch.cuda peak statistics"

    def __init__(self, device: str) -> None:
        import torch

        self._device, self._cuda = device, torch.cuda
        self._cuda.synchronize(device)
        self._cuda.reset_peak_memory_stats(device)
        self.start = self._cuda.memory_allocated(device)

    def finish(self) -> tuple[int, int, int | None]:
        self._cuda.synchronize(self._device)
        peaks = self._cuda.max_memory_allocated(self._device), self._cuda.max_memory_reserved(self._device)
        return peaks[0], self._cuda.memory_allocated(self._device), peaks[1]


class _HighWaterGauge:
    """Linux's peak of the resident memory. Raises ``OSError`` or ``ValueError`` where it cannot be set back."""

    method: Method = "VmHWM, reset through clear_refs"

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self.start = self._status("VmRSS")
        # Some sandboxes accept the write and do nothing: believe only a mark that came down.
        if self._status("VmHWM") > self.start + (1 << 20):
            raise OSError("the peak was not reset")

    @staticmethod
    def _status(field: str) -> int:
        """A field of /proc/self/status (the kernel writes kB for KiB)."""
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
        raise OSError(f"no {field} in /proc/self/status")

    def finish(self) -> tuple[int, int, int | None]:
        return self._status("VmHWM"), self._status("VmRSS"), None


class _SampledGauge:
    """Resident memory by polling, for systems that cannot reset their peak."""

    method: Method = "RSS sampled every 2 ms"

    def __init__(self) -> None:
        import psutil

        self._process = psutil.Process()
        self._finished = threading.Event()
        self.start = self._peak = self._rss()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _rss(self) -> int:
        return int(self._process.memory_info().rss)

    def _sample(self) -> None:
        while not self._finished.wait(0.002):
            self._peak = max(self._peak, self._rss())

    def finish(self) -> tuple[int, int, int | None]:
        self._finished.set()
        self._thread.join()
        end = self._rss()
        return max(self._peak, end), end, None


class MemoryMeter:
    """``with MemoryMeter(device) as meter: ...`` then ``meter.use``.

    The peak of the process (or GPU) is reset on entry, so meters do not nest: :class:`NanoinferError` where one is
    open, and on ``use`` before the region was left. Raises :class:`DeviceError` for a CUDA device that is not there.
    """

    _open = False

    def __init__(self, device: str | torch.device = "cpu", *, method: Literal["auto", "sample"] = "auto") -> None:
        self._device, self._sampled = str(device), method == "sample"
        self._cuda = self._device.partition(":")[0] == "cuda"
        self._use: MemoryUse | None = None
        if self._cuda:
            require_cuda(f"device '{device}'")

    def __enter__(self) -> MemoryMeter:
        if MemoryMeter._open:
            raise NanoinferError("memory: a meter is already open; meters share one peak and do not nest")
        self._gauge = self._begin()
        MemoryMeter._open = True
        return self

    def _begin(self) -> _CudaGauge | _HighWaterGauge | _SampledGauge:
        gc.collect()
        # Hand freed heap pages back, or the region would reuse them and seem to need nothing.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        if self._cuda:
            return _CudaGauge(self._device)
        if not self._sampled:
            with contextlib.suppress(OSError, ValueError):
                return _HighWaterGauge()
        return _SampledGauge()

    def __exit__(self, *error: object) -> None:
        MemoryMeter._open = False
        peak, end, reserved = self._gauge.finish()
        self._use = MemoryUse(self._device, self._gauge.method, self._gauge.start, peak, end, reserved)

    @property
    def use(self) -> MemoryUse:
        """The measurement."""
        if self._use is None:
            raise NanoinferError("memory: nothing measured yet; read .use after the 'with' block")
        return self._use

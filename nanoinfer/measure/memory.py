"""How many bytes: counted exactly where they can be, measured where they cannot.

Tensors are counted (:func:`tensors_bytes`, :func:`module_bytes`): exact, the same
on every machine. What a process or a GPU really took is measured
(:class:`MemoryMeter`), and holds activations, fragmentation and the runtime too.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from nanoinfer.errors import DeviceError, NanoinferError

if TYPE_CHECKING:
    import torch

Method = Literal["VmHWM, reset through clear_refs", "RSS sampled every 2 ms", "torch.cuda peak statistics"]


# --- counted ---------------------------------------------------------------------


def tensors_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes that these tensors occupy, each byte once: ties and overlapping views are not counted twice.

    A strided view counts from its first to its last element. Tensors without storage
    (``meta``) count by shape and dtype, each object once.
    """
    spans: dict[str, list[tuple[int, int]]] = {}
    shapes: dict[int, int] = {}
    for tensor in tensors:
        if not tensor.numel():
            continue
        if tensor.device.type == "meta":
            shapes[id(tensor)] = tensor.numel() * tensor.element_size()
            continue
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        extent = (sum((size - 1) * stride for size, stride in pairs) + 1) * tensor.element_size()
        start = tensor.data_ptr()
        spans.setdefault(str(tensor.device), []).append((start, start + extent))
    total = sum(shapes.values())
    for intervals in spans.values():
        reached = 0
        for start, end in sorted(intervals):
            total += max(0, end - max(start, reached))
            reached = max(reached, end)
    return total


def module_bytes(module: torch.nn.Module) -> int:
    """Exact bytes of a module's parameters and buffers; a tied matrix counts once."""
    return tensors_bytes([*module.parameters(), *module.buffers()])


# --- measured --------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryUse:
    """What a region took, in bytes.

    ``start`` and ``peak`` are the process's resident memory on the CPU, the bytes that
    live tensors hold (allocated) on CUDA. ``end`` is the same when the region was left.
    ``reserved_peak`` is what torch's CUDA allocator took from the driver (``None`` on the
    CPU). ``method`` says how it was got: sampling can miss a peak shorter than 2 ms.
    """

    device: str
    method: Method
    start: int
    peak: int
    end: int
    reserved_peak: int | None = None

    @property
    def above_start(self) -> int:
        """The most the region added to what was there before it."""
        return max(0, self.peak - self.start)


def _status_bytes(field: str) -> int:
    """A field of /proc/self/status, in bytes (the kernel writes kB for KiB)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")


def _reset_high_water() -> bool:
    """Set the kernel's peak-RSS mark back to the present RSS. False where this system will not."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        # Some sandboxes accept the write and do nothing: believe only a mark that came down.
        return _status_bytes("VmHWM") <= _status_bytes("VmRSS") + (1 << 20)
    except (OSError, ValueError):
        return False


def _give_back_free_memory() -> None:
    """Hand freed heap pages back, or the region would reuse them and seem to need nothing."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class _Sampler(threading.Thread):
    """Peak RSS by polling, for systems that cannot reset their high-water mark."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        import psutil

        self._process = psutil.Process()
        self._stop_asked = threading.Event()
        self.peak = self.rss()

    def rss(self) -> int:
        return int(self._process.memory_info().rss)

    def run(self) -> None:
        while not self._stop_asked.wait(0.002):
            self.peak = max(self.peak, self.rss())

    def finish(self) -> tuple[int, int]:
        """Stop; return ``(peak, present)``."""
        self._stop_asked.set()
        self.join()
        end = self.rss()
        return max(self.peak, end), end


class MemoryMeter:
    """``with MemoryMeter(device) as meter: ...`` then ``meter.use``.

    The peak mark of the process (or GPU) is reset on entry, so meters do not nest:
    :class:`NanoinferError` where one is already open.
    """

    _open = False

    def __init__(self, device: str | torch.device = "cpu", *, method: Literal["auto", "sample"] = "auto") -> None:
        self._device = str(device)
        self._cuda = self._device.partition(":")[0] == "cuda"
        self._may_reset = method == "auto"
        self._sampler: _Sampler | None = None
        self._use: MemoryUse | None = None
        self._start = 0
        if self._cuda:
            import torch

            if not torch.cuda.is_available():
                raise DeviceError(f"device '{device}': this machine has no CUDA GPU that torch can use; take 'cpu'")

    def __enter__(self) -> MemoryMeter:
        if MemoryMeter._open:
            raise NanoinferError("memory: a meter is already open; meters share one peak mark and do not nest")
        MemoryMeter._open = True
        try:
            self._begin()
        except BaseException:
            MemoryMeter._open = False
            raise
        return self

    def _begin(self) -> None:
        _give_back_free_memory()
        if self._cuda:
            import torch

            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._start = torch.cuda.memory_allocated(self._device)
        elif self._may_reset and _reset_high_water():
            self._start = _status_bytes("VmRSS")
        else:
            self._sampler = _Sampler()
            self._start = self._sampler.peak
            self._sampler.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        MemoryMeter._open = False
        if self._cuda:
            import torch

            torch.cuda.synchronize(self._device)
            self._use = MemoryUse(
                device=self._device,
                method="torch.cuda peak statistics",
                start=self._start,
                peak=torch.cuda.max_memory_allocated(self._device),
                end=torch.cuda.memory_allocated(self._device),
                reserved_peak=torch.cuda.max_memory_reserved(self._device),
            )
        elif self._sampler is not None:
            peak, end = self._sampler.finish()
            self._use = MemoryUse(self._device, "RSS sampled every 2 ms", self._start, peak, end)
        else:
            peak, end = _status_bytes("VmHWM"), _status_bytes("VmRSS")
            self._use = MemoryUse(self._device, "VmHWM, reset through clear_refs", self._start, peak, end)

    @property
    def use(self) -> MemoryUse:
        """The measurement; :class:`NanoinferError` before the region was left."""
        if self._use is None:
            raise NanoinferError("memory: nothing measured yet; read .use after the 'with' block")
        return self._use

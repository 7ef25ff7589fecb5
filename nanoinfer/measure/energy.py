"""Joules of a region of code, and where they come from.

Counters are best, and both kinds count the whole device: NVML's total of an NVIDIA board (renewed some ten times a
second, so measure for a second or more), and RAPL's of a processor package (Linux; mostly readable by root only).
Without one, a datasheet's watts times seconds is an upper bound rather than a measurement.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoinfer.errors import DeviceError, NanoinferError, check
from nanoinfer.measure.clock import now, synchronize
from nanoinfer.measure.environment import cpu_model
from nanoinfer.theory import hardware

POWERCAP = Path("/sys/class/powercap")
#: A RAPL counter wraps to 0 after some minutes to hours: read this often, no wrap is missed.
POLL_EVERY_S = 30.0


@dataclass(frozen=True)
class EnergyUse:
    """Joules of a region (``None``: unknown), its seconds, and where the joules come from."""

    joules: float | None
    seconds: float
    source: str
    measured: bool

    @property
    def watts(self) -> float | None:
        """Mean power."""
        return None if self.joules is None or not self.seconds else self.joules / self.seconds


# A counter counts joules from its creation on. Reading raises ``OSError`` or ``ValueError``.


class RaplCounter:
    """The package domains below a powercap folder, added up. Raises ``OSError`` where there are none to read.

    Only ``package-*``: cores, graphics and memory controllers lie inside a package, and ``psys`` around it.
    """

    def __init__(self, folder: Path = POWERCAP) -> None:
        zones = sorted(folder.glob("intel-rapl:*"))
        self._domains = [zone for zone in zones if _text(zone / "name").startswith("package")]
        if not self._domains:
            raise OSError(f"no RAPL package in {folder}")
        self._ranges = [int(_text(zone / "max_energy_range_uj")) for zone in self._domains]
        self._last = self._read()
        self._total = 0
        self._lock = threading.Lock()
        self.source = f"RAPL, {len(self._domains)} package(s), whole processor"

    def _read(self) -> list[int]:
        return [int(_text(zone / "energy_uj")) for zone in self._domains]

    def joules(self) -> float:
        """Joules so far; call it at least once a wrap of the counter."""
        with self._lock:
            present = self._read()
            for old, new, wrap in zip(self._last, present, self._ranges, strict=True):
                self._total += new - old if new >= old else new + wrap - old
            self._last = present
            return self._total / 1e6


class NvmlCounter:
    """The energy total of one CUDA device's board. Raises ``OSError`` without NVML, or on a board before Volta."""

    source = "NVML energy counter, whole board"

    def __init__(self, device: str) -> None:
        try:
            import pynvml
        except ImportError:
            raise OSError("nvidia-ml-py is not installed") from None
        import torch

        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            # By its UUID: NVML does not know CUDA_VISIBLE_DEVICES.
            uuid = torch.cuda.get_device_properties(torch.device(device)).uuid
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self._start = self._millijoules()
        except (pynvml.NVMLError, AttributeError) as error:
            raise OSError(f"NVML: {error}") from None

    def _millijoules(self) -> int:
        return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))

    def joules(self) -> float:
        """Joules so far."""
        return (self._millijoules() - self._start) / 1e3


class EnergyMeter:
    """``with EnergyMeter(device) as meter: ...`` then ``meter.use``.

    ``watts`` are assumed where there is no counter, in place of a datasheet's. Raises :class:`NanoinferError` for watts
    not above 0, and on ``use`` before the region was left; :class:`DeviceError` for a CUDA device that is not there.
    """

    def __init__(self, device: str = "cpu", *, watts: float | None = None, powercap: Path = POWERCAP) -> None:
        if watts is not None:
            check("energy: watts", watts, above=0, error=NanoinferError)
        self._device, self._watts, self._powercap = str(device), watts, powercap
        self._cuda = self._device.partition(":")[0] == "cuda"
        self._use: EnergyUse | None = None
        self._finished = threading.Event()

    def __enter__(self) -> EnergyMeter:
        synchronize(self._device)
        self._finished.clear()
        self._counter = self._find_counter()
        if self._counter is not None:
            threading.Thread(target=self._poll, args=(self._counter,), daemon=True).start()
        self._start = now()
        return self

    def __exit__(self, *error: object) -> None:
        synchronize(self._device)
        seconds = now() - self._start
        self._finished.set()
        if self._counter is not None:
            with contextlib.suppress(OSError, ValueError):
                self._use = EnergyUse(self._counter.joules(), seconds, self._counter.source, True)
                return
        watts, source = self._assumed()
        self._use = EnergyUse(None if watts is None else watts * seconds, seconds, source, False)

    def _find_counter(self) -> RaplCounter | NvmlCounter | None:
        with contextlib.suppress(OSError, ValueError):
            if self._cuda:
                return NvmlCounter(self._device)
            if self._device == "cpu":
                return RaplCounter(self._powercap)
        return None

    def _poll(self, counter: RaplCounter | NvmlCounter) -> None:
        with contextlib.suppress(OSError, ValueError):
            while not self._finished.wait(POLL_EVERY_S):
                counter.joules()

    def _assumed(self) -> tuple[float | None, str]:
        """Watts where there is no counter, and their source."""
        if self._watts is not None:
            return self._watts, f"{self._watts:g} W, as given, times seconds"
        if self._cuda:
            import torch

            name = torch.cuda.get_device_name(torch.device(self._device))
        else:
            name = cpu_model()
        with contextlib.suppress(DeviceError):
            row = hardware.device(name)
            if row.watts is not None:
                return row.watts, f"datasheet limit of the {row.name}, {row.watts:g} W, times seconds"
        return None, "unknown: no counter to read, and no datasheet for this device"

    @property
    def use(self) -> EnergyUse:
        """The measurement."""
        if self._use is None:
            raise NanoinferError("energy: nothing measured yet; read .use after the 'with' block")
        return self._use


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()

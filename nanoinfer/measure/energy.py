"""Joules of a region of code, and where they come from.

Counters are best, and both kinds count the whole device, whoever uses it: NVML's total of an
NVIDIA board (renewed some ten times a second, so measure for a second or more), and RAPL's of a
processor package (Linux; reading it mostly needs root). Where there is neither, a datasheet's
watts times seconds is an upper bound rather than a measurement, and where even that is unknown
the answer is ``None``. ``source`` always says which.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from nanoinfer.errors import DeviceError, NanoinferError
from nanoinfer.measure.clock import now, synchronize
from nanoinfer.measure.environment import cpu_model
from nanoinfer.theory import hardware

POWERCAP = Path("/sys/class/powercap")
#: A RAPL counter starts again at 0 after some minutes to hours: looked at this often, no turn is missed.
LOOK_EVERY_S = 30.0


@dataclass(frozen=True)
class EnergyUse:
    """Joules that a region took (``None``: nothing known), its seconds, and where the joules come from."""

    joules: float | None
    seconds: float
    source: str
    measured: bool

    @property
    def watts(self) -> float | None:
        """Mean power."""
        return None if self.joules is None or not self.seconds else self.joules / self.seconds


class Counter(Protocol):
    """Something that counts joules from its creation on."""

    source: str

    def joules(self) -> float:
        """Joules since the counter was made."""


class RaplCounter:
    """The package domains below a powercap folder, added up. Raises ``OSError`` where there are none to read.

    Only ``package-*``: cores, graphics and memory controllers lie inside a package, and ``psys`` around it.
    """

    def __init__(self, folder: Path = POWERCAP) -> None:
        self._domains = [
            zone for zone in sorted(folder.glob("intel-rapl:*")) if _text(zone / "name").startswith("package")
        ]
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
        """Joules so far; call it at least once in each turn of the counter."""
        with self._lock:
            seen = self._read()
            for old, new, turn in zip(self._last, seen, self._ranges, strict=True):
                self._total += new - old if new >= old else new + turn - old
            self._last = seen
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

    Args:
        device: ``cpu``, ``cuda``, ``cuda:1``, ``mps``.
        watts: power to assume where there is no counter, in place of a datasheet's; ``source`` says it is yours.
        powercap: where RAPL's domains are, for tests.

    Raises:
        NanoinferError: watts that are not above 0; on ``use``, before the region was left.
        DeviceError: a CUDA device that is not there.
    """

    def __init__(self, device: str = "cpu", *, watts: float | None = None, powercap: Path = POWERCAP) -> None:
        if watts is not None and not watts > 0:
            raise NanoinferError(f"energy: watts must be above 0, got {watts}")
        self._device, self._given, self._powercap = str(device), watts, powercap
        self._cuda = self._device.partition(":")[0] == "cuda"
        self._use: EnergyUse | None = None
        self._left = threading.Event()

    def __enter__(self) -> EnergyMeter:
        synchronize(self._device)
        self._left.clear()
        self._counter = self._find()
        if self._counter is not None:
            threading.Thread(target=self._look, args=(self._counter,), daemon=True).start()
        self._start = now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        synchronize(self._device)
        seconds = now() - self._start
        self._left.set()
        if self._counter is not None:
            with contextlib.suppress(OSError, ValueError):
                self._use = EnergyUse(self._counter.joules(), seconds, self._counter.source, True)
                return
        watts, source = self._assumed()
        self._use = EnergyUse(None if watts is None else watts * seconds, seconds, source, False)

    def _find(self) -> Counter | None:
        with contextlib.suppress(OSError, ValueError):
            if self._cuda:
                return NvmlCounter(self._device)
            if self._device == "cpu":
                return RaplCounter(self._powercap)
        return None

    def _look(self, counter: Counter) -> None:
        with contextlib.suppress(OSError, ValueError):
            while not self._left.wait(LOOK_EVERY_S):
                counter.joules()

    def _assumed(self) -> tuple[float | None, str]:
        if self._given is not None:
            return self._given, f"{self._given:g} W, as given, times seconds"
        for name in self._names():
            with contextlib.suppress(DeviceError):
                row = hardware.device(name)
                if row.watts is not None:
                    return row.watts, f"datasheet limit of the {row.name}, {row.watts:g} W, times seconds"
        return None, "unknown: no counter to read, and no datasheet for this device"

    def _names(self) -> Iterator[str]:
        if self._cuda:
            import torch

            yield torch.cuda.get_device_name(torch.device(self._device))
        else:
            yield cpu_model()

    @property
    def use(self) -> EnergyUse:
        """The result; :class:`NanoinferError` before the region was left."""
        if self._use is None:
            raise NanoinferError("energy: nothing measured yet; read .use after the 'with' block")
        return self._use


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()

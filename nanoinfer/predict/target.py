"""What to predict for: a device from its datasheet or this machine, a dtype, a number of devices.

With a datasheet nothing here imports torch, so that the commands answer at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from nanoinfer.configs.config import ModelConfig
from nanoinfer.errors import DeviceError, RequestError, nearest
from nanoinfer.theory import arithmetic, capacity, hardware
from nanoinfer.theory.parameters import BYTES
from nanoinfer.theory.roofline import Machine

HERE: Final = "here"
#: Short names of the dtypes that are counted, as datasheets have them.
SHORT: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp8": "float8"}


@dataclass(frozen=True)
class Target:
    """A device to predict for. ``watts`` and ``page`` come from its datasheet, ``None`` for this machine."""

    name: str
    memory_bytes: float
    watts: float | None
    page: str | None
    device: str | None = None  # torch's name, of this machine's

    @property
    def source(self) -> str:
        """Where its rates come from."""
        return "datasheet" if self.device is None else "measured on this machine"


def dtype_named(name: str) -> str:
    """``bf16`` -> ``bfloat16``. Raises :class:`DeviceError` for a dtype that is not counted."""
    found = SHORT.get(name.lower(), name.lower())
    if found not in BYTES:
        raise DeviceError(f"dtype '{name}' is not counted; {nearest(name, (*BYTES, *SHORT))}")
    return found


def target_named(gpu: str, dtype: str) -> Target:
    """A device by name, or ``here``. Raises :class:`DeviceError` for an unknown one, or one that lacks the dtype."""
    if gpu.lower() == HERE:
        return _this_machine()
    row = hardware.device(gpu)
    short = {long: short for short, long in SHORT.items() if short != "half"}.get(dtype, dtype)
    if short not in row.dense_tflops:
        hardware.peak(row, short)  # raises and says what the device has
    return Target(row.name, row.memory_bytes, row.watts, row.source.url)


def _this_machine() -> Target:
    import psutil
    import torch

    from nanoinfer.measure.environment import cpu_model

    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        return Target(found.name, found.total_memory, None, None, "cuda")
    device = "mps" if torch.backends.mps.is_available() else "cpu"
    return Target(cpu_model(), psutil.virtual_memory().total, None, None, device)


def machine_of(target: Target, dtype: str, launch_us: float, notes: list[str]) -> Machine:
    """The rates to predict with; what a reader should know of them goes to ``notes``. Raises as its sources do."""
    if target.device is None:
        if launch_us == 0:
            notes.append(
                "Small operators are taken to be fused and to cost nothing to start; "
                "eager PyTorch starts each, for about 4 us (--launch-us 4)."
            )
        return Machine.datasheet(target.name, dtype, launch_us * 1e-6)
    if launch_us:
        raise RequestError("--launch-us goes with a datasheet; --gpu here has measured it")
    from nanoinfer.calibrate.machine import calibrate

    found = calibrate(target.device)
    if found.disturbed:
        notes.append(f"Other work took {found.waited:.0%} of the calibration's time: every figure is too slow.")
    return Machine.measured(found, dtype)


def model_row(name: str, config: ModelConfig) -> dict[str, Any]:
    """What every record says of the model."""
    return {
        "name": name,
        "family": config.family,
        "parameters": arithmetic.parameters(config),
        "active_parameters": arithmetic.active_parameters(config),
        "context_tokens": config.context,
    }


def bytes_row(used: capacity.Bytes) -> dict[str, float]:
    """Bytes of one device by what they hold."""
    return {
        "weights": used.weights,
        "kv": used.kv,
        "activations": used.activations,
        "unused_in_blocks": used.fragmentation,
    }


def gpus() -> list[dict[str, Any]]:
    """Every device with a datasheet here."""
    return [
        {
            "name": row.name,
            "memory_gb": row.memory_gb,
            "bandwidth_gb_per_s": row.bandwidth_gbs,
            "dense_tflops": {dtype: value for dtype, value in row.dense_tflops.items()},
            "link": row.link and row.link.name,
            "watts": row.watts,
            "source": row.source.url,
        }
        for row in hardware.DEVICES.values()
    ]

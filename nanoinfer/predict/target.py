"""What to predict for: a device from its datasheet or this machine, a dtype, and the links between devices.

With a datasheet nothing here imports torch, so that the commands answer at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any, Final

from nanoinfer.configs.config import ModelConfig
from nanoinfer.errors import DeviceError, RequestError, check, nearest
from nanoinfer.theory import arithmetic, capacity, hardware
from nanoinfer.theory.arithmetic import BYTES
from nanoinfer.theory.communication import Network
from nanoinfer.theory.parallel import ParallelConfig
from nanoinfer.theory.roofline import Machine

HERE: Final = "here"
#: Short names of the dtypes that are counted, as datasheets have them.
SHORT: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp8": "float8"}
#: The link assumed between servers where none is named.
BETWEEN: Final = "ib-ndr"


@dataclass(frozen=True)
class TargetDevice:
    """A device to predict for. ``watts`` and ``page`` come from its datasheet, ``None`` for this machine."""

    name: str
    memory_bytes: float
    watts: float | None
    page: str | None
    device: str | None = None  # torch's name, of this machine's


def dtype_named(name: str) -> str:
    """``bf16`` -> ``bfloat16``. Raises :class:`DeviceError` for a dtype that is not counted."""
    dtype = SHORT.get(name.lower(), name.lower())
    if dtype not in BYTES:
        raise DeviceError(f"dtype '{name}' is not counted; {nearest(name, (*BYTES, *SHORT))}")
    return dtype


def target_named(gpu: str, dtype: str) -> TargetDevice:
    """A device by name, or ``here``. Raises :class:`DeviceError` for an unknown one, or one that lacks the dtype."""
    if gpu.lower() == HERE:
        return local_target()
    row = hardware.device(gpu)
    short = {long: short for short, long in SHORT.items() if short != "half"}.get(dtype, dtype)
    if short not in row.dense_tflops:
        hardware.peak(row, short)  # raises and says what the device has
    return TargetDevice(row.name, row.memory_bytes, row.watts, row.source.url)


def local_target() -> TargetDevice:
    """This machine's GPU if it has one, else its CPU."""
    import psutil
    import torch

    from nanoinfer.measure.environment import cpu_model

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return TargetDevice(properties.name, properties.total_memory, None, None, "cuda")
    device = "mps" if torch.backends.mps.is_available() else "cpu"
    return TargetDevice(cpu_model(), psutil.virtual_memory().total, None, None, device)


def machine_of(target: TargetDevice, dtype: str, launch_us: float, notes: list[str]) -> Machine:
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

    calibration = calibrate(target.device)
    if calibration.disturbed:
        notes.append(f"Other work took {calibration.waited:.0%} of the calibration's time: every figure is too slow.")
    return calibration.machine(dtype)


@dataclass(frozen=True)
class Links:
    """The links of a prediction by name; ``None`` is the device's own inside a server, :data:`BETWEEN` across.

    ``alpha_us`` and ``nodes_alpha_us`` are microseconds of one call, however small; ``None`` takes the link's row.
    A ``link`` that joins servers stands for servers of a single device.
    """

    link: str | None = None
    nodes_link: str | None = None
    per_node: int = 8
    alpha_us: float | None = None
    nodes_alpha_us: float | None = None

    def connect(self, machine: Machine, split: ParallelConfig, notes: list[str]) -> Machine:
        """The machine with these links; what a reader should know of them goes to ``notes``.

        Raises :class:`NanoinferError` for an unknown link, or a split over devices that have none.
        """
        check("--gpus-per-node", self.per_node, at_least=1)
        check("--alpha-us", self.alpha_us or 0, at_least=0)
        check("--nodes-alpha-us", self.nodes_alpha_us or 0, at_least=0)
        inside = None if self.link is None else hardware.link(self.link)
        across = None if self.nodes_link is None else hardware.link(self.nodes_link)
        per_node = self.per_node
        if inside is not None and inside.between_servers:
            across, per_node = across or inside, 1
        if across is None:
            across = hardware.link(BETWEEN)
            if split.group > per_node:
                notes.append(
                    f"{split.group} devices fill more than one server of {per_node}: {across.name} is taken to join "
                    "them, a port for each device (--nodes-link, --gpus-per-node)."
                )
        network = machine.network if inside is None else Network(inside.gbs_one_way * 1e9, inside.latency_us * 1e-6)
        if network is not None:
            alpha = network.alpha if self.alpha_us is None else self.alpha_us * 1e-6
            across_alpha = (across.latency_us if self.nodes_alpha_us is None else self.nodes_alpha_us) * 1e-6
            network = Network(network.link, alpha, across.gbs_one_way * 1e9, across_alpha, per_node)
        machine = replace(machine, network=network)
        if split.group > 1:
            machine.require_network()
            notes.append("What a call costs however small it is (alpha) is an assumption: --alpha-us sets it.")
        return machine


def links_row(machine: Machine, split: ParallelConfig) -> Mapping[str, Any] | None:
    """The links over which a replica's devices communicate; ``None`` for a single device."""
    if split.group == 1:
        return None
    network = machine.require_network()
    servers = network.nodes(split.group)
    return {
        "link_bytes_per_s": network.link,
        "alpha_s": network.alpha,
        "nodes_link_bytes_per_s": network.across if servers > 1 else None,
        "nodes_alpha_s": network.across_alpha if servers > 1 else None,
        "devices_per_server": network.per_node,
        "servers_per_replica": servers,
    }


def model_row(name: str, config: ModelConfig) -> dict[str, Any]:
    """What every record says of the model."""
    return {
        "name": name,
        "family": config.family,
        "parameters": arithmetic.parameters(config),
        "active_parameters": arithmetic.active_parameters(config),
        "context_tokens": config.context,
    }


def machine_row(target: TargetDevice, machine: Machine, devices: int, dtype: str) -> dict[str, Any]:
    """What a record says of the devices and their rates."""
    return {
        "name": target.name,
        "rates_from": "datasheet" if target.device is None else "measured on this machine",
        "datasheet": target.page,
        "devices": devices,
        "dtype": dtype,
        "peak_flops_per_s": machine.peak,
        "bandwidth_bytes_per_s": machine.bandwidth,
        "launch_s": machine.launch_s,
        "memory_bytes": target.memory_bytes,
    }


def bytes_row(used: capacity.Bytes) -> dict[str, float]:
    """Bytes of one device by what they hold."""
    return dict(zip(("weights", "kv", "activations", "unused_in_blocks"), astuple(used), strict=True))


def gpus() -> list[dict[str, Any]]:
    """Every device with a datasheet here."""
    return [
        {
            "name": row.name,
            "memory_gb": row.memory_gb,
            "bandwidth_gb_per_s": row.bandwidth_gbs,
            "dense_tflops": dict(row.dense_tflops),
            "link": row.link and row.link.name,
            "watts": row.watts,
            "source": row.source.url,
        }
        for row in hardware.DEVICES.values()
    ]

"""Which links a prediction takes: a device's own inside a server, and what joins servers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from nanoinfer.errors import RequestError
from nanoinfer.theory import hardware
from nanoinfer.theory.parameters import check_sizes
from nanoinfer.theory.roofline import Machine
from nanoinfer.theory.split import Split

#: What is taken to join servers where nobody says.
BETWEEN: Final = "ib-ndr"


@dataclass(frozen=True)
class Links:
    """What was asked for; ``None`` is not given.

    Attributes:
        link: by name; the device's own. One that joins servers stands for servers of a single device.
        nodes_link: between servers, by name.
        per_node: devices in a server.
        alpha_us: microseconds of one call inside a server; of the link's row.
        nodes_alpha_us: of one call between two servers; of that link's row.
    """

    link: str | None = None
    nodes_link: str | None = None
    per_node: int = 8
    alpha_us: float | None = None
    nodes_alpha_us: float | None = None

    def of(self, machine: Machine, split: Split, notes: list[str]) -> Machine:
        """The machine with these links; what a reader should know of them goes to ``notes``.

        Raises:
            NanoinferError: an unknown link, or a split over devices that have none.
        """
        check_sizes(**{"gpus-per-node": self.per_node})
        for name, value in {"alpha-us": self.alpha_us, "nodes-alpha-us": self.nodes_alpha_us}.items():
            if value is not None and not 0 <= value < math.inf:
                raise RequestError(f"--{name} must be a number and not negative, got {value:g}")
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
        machine = replace(machine, gpus_per_node=per_node, nodes_link=across.gbs_one_way * 1e9)
        machine = replace(machine, nodes_alpha=across.latency_us * 1e-6)
        if inside is not None:
            machine = replace(machine, link=inside.gbs_one_way * 1e9, alpha=inside.latency_us * 1e-6)
        if self.alpha_us is not None:
            machine = replace(machine, alpha=self.alpha_us * 1e-6)
        if self.nodes_alpha_us is not None:
            machine = replace(machine, nodes_alpha=self.nodes_alpha_us * 1e-6)
        if split.group > 1:
            _ = machine.network  # refused now where there is none
            notes.append("What a call costs however small it is (alpha) is an assumption: --alpha-us sets it.")
        return machine

    def record(self, machine: Machine, split: Split) -> Mapping[str, Any] | None:
        """The links that a replica's devices talk over; ``None`` of a single device."""
        if split.group == 1:
            return None
        network = machine.network
        servers = network.nodes(split.group)
        return {
            "link_bytes_per_s": network.link,
            "alpha_s": network.alpha,
            "nodes_link_bytes_per_s": network.across if servers > 1 else None,
            "nodes_alpha_s": network.across_alpha if servers > 1 else None,
            "devices_per_server": network.per_node,
            "servers_per_replica": servers,
        }

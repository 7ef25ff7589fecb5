"""How long messages take where devices sit in servers: a fast link inside one, a slow one between them.

Every device has a port of its own to the other servers, as in machines built for this. A group's ranks fill one
server after the other. An all-reduce over several servers then has three parts: the ranks of a server sum up a share
each, ranks of the same place in all servers sum up those, and the servers spread them out again. So few of the bytes
cross, but everybody waits for them.

Seconds of a call are ``alpha``, however small it is; between ``k`` servers a tree is climbed and ``alpha`` is paid
for each doubling. Source: the cost model in NCCL (src/graph/tuning.cc, https://github.com/NVIDIA/nccl).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from nanoinfer.theory.communication import Traffic
from nanoinfer.theory.parameters import check_sizes


@dataclass(frozen=True)
class Network:
    """The links of one kind of server.

    Attributes:
        link: bytes/s one way between the devices of a server.
        alpha: seconds of one call there.
        across: bytes/s one way of each device to other servers; ``None`` where all devices share ``link``.
        across_alpha: seconds of one call between two servers.
        per_node: devices of a server.
    """

    link: float
    alpha: float
    across: float | None = None
    across_alpha: float = 0.0
    per_node: int = 8

    def nodes(self, n: int, stride: int = 1) -> int:
        """Servers that ``n`` ranks reach into, each ``stride`` devices from the next."""
        check_sizes(n=n, stride=stride)
        return 1 if self.across is None else math.ceil(n / self._together(n, stride))

    def seconds(self, traffic: Iterable[Traffic], n: int, stride: int = 1) -> float:
        """Of all those calls among ``n`` ranks, one after the other."""
        return sum(self._seconds(part, n, stride) for part in traffic)

    def hop(self, part: Traffic, crosses: bool) -> float:
        """Seconds of messages from one device to another, which may be in another server."""
        if crosses and self.across is not None:
            return part.calls * self.across_alpha + part.sent / self.across
        return part.calls * self.alpha + part.sent / self.link

    def _together(self, n: int, stride: int) -> int:
        """Ranks of a group that are in one server."""
        return min(n, max(1, self.per_node // stride))

    def _seconds(self, part: Traffic, n: int, stride: int) -> float:
        k, g = self.nodes(n, stride), self._together(n, stride)
        if k == 1 or self.across is None:
            return self.hop(part, crosses=False)
        if part.kind in ("send", "exchange"):  # of a ring all wait for the pair that is furthest apart
            return self.hop(part, crosses=True)
        if part.kind == "all-to-all":  # both links at once
            inside = part.sent * (g - 1) / (n - 1) / self.link
            return part.calls * self.across_alpha + max(inside, part.sent * (n - g) / (n - 1) / self.across)
        crossing = part.sent * (k - 1) / (n - 1)
        alpha = self.across_alpha * math.ceil(math.log2(k)) + (self.alpha if g > 1 else 0.0)
        return part.calls * alpha + (part.sent - crossing) / self.link + crossing / self.across

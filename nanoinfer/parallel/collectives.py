"""What the ranks say to each other, and how many bytes each of them sends.

Every split of a model comes down to a few collectives. They are PyTorch's own (gloo on CPUs, NCCL on GPUs); what is
added here is the count, by which a split's cost is seen: a :class:`Sent` for each call, with the bytes that leave this
rank when messages go round a ring, which no algorithm undercuts (Patarasuk and Yuan, 2009).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from nanoinfer.measure.clock import now, synchronize

#: Bytes up to which two ranks on CPUs swap messages themselves: measured, half of gloo's time and less.
SWAPPED: Final = 131_072


@dataclass(frozen=True)
class Sent:
    """One call of a collective, as this rank saw it.

    Attributes:
        kind: ``all-reduce``, ``all-gather``, ``all-to-all``, ``send``, ``receive``, ``exchange`` or ``broadcast``.
        message: bytes of the tensor that was handed over (of all parts, for ``all-to-all``).
        sent: bytes that leave this rank.
        seconds: from the call to its end, waiting for the others included.
    """

    kind: str
    message: int
    sent: float
    seconds: float


@dataclass
class Wire:
    """This rank's line to the others of its group. ``log`` grows by one :class:`Sent` a call."""

    group: dist.ProcessGroup | None = None
    log: list[Sent] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, object]) -> Wire:
        """Itself: a copied model talks over the same line."""
        return self

    @property
    def rank(self) -> int:
        """Who this is: 0 to ``size - 1``."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return dist.get_world_size(self.group)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of everybody's ``x``, in its place; each rank sends ``2 (n-1)/n`` of it."""
        start = now()
        if self._swaps(x):
            x += self._swapped(x)
        else:
            dist.all_reduce(x, group=self.group)
        self._note("all-reduce", x, 2 * (self.size - 1) / self.size * _bytes(x), start)
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Everybody's ``x``, of one shape, joined along ``dim`` by rank; each sends ``n-1`` times its own."""
        start = now()
        if self._swaps(x):
            parts = [x, self._swapped(x)] if self.rank == 0 else [self._swapped(x), x]
        else:
            parts = [torch.empty_like(x) for _ in range(self.size)]
            dist.all_gather(parts, x.contiguous(), group=self.group)
        self._note("all-gather", x, (self.size - 1) * _bytes(x), start)
        return torch.cat(parts, dim=dim)

    def all_to_all(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """Part ``i`` goes to rank ``i``; what comes from rank ``i`` fills ``like[i]``, which has its shape."""
        start = now()
        received = list(like)
        sent = [part.contiguous() for part in parts]
        calls = [
            dist.P2POp(op, x[i], self._global(i), self.group)
            for i in self._others()
            for op, x in ((dist.irecv, received), (dist.isend, sent))
            if x[i].numel()
        ]
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()
        received[self.rank] = sent[self.rank]
        away = sum(_bytes(sent[i]) for i in self._others())
        self.log.append(Sent("all-to-all", sum(map(_bytes, sent)), away, now() - start))
        return received

    def send(self, x: Tensor, to: int) -> None:
        """Hand ``x`` to rank ``to``, which must :meth:`receive` it."""
        start = now()
        dist.send(x.contiguous(), self._global(to), self.group)
        self._note("send", x, _bytes(x), start)

    def receive(self, like: Tensor, source: int) -> Tensor:
        """Fill ``like`` with what rank ``source`` sends."""
        start = now()
        dist.recv(like, self._global(source), self.group)
        self._note("receive", like, 0, start)
        return like

    def exchange(self, x: Tensor, to: int, source: int) -> Tensor:
        """Send ``x`` to one rank while a tensor of its shape comes from another: a step of a ring."""
        return self.begin_exchange(x, to, source).wait()

    def begin_exchange(self, x: Tensor, to: int, source: int) -> Pending:
        """As :meth:`exchange`, without waiting: compute meanwhile, then :meth:`Pending.wait`."""
        x, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        # Even ranks send first, odd ones receive first: with NCCL the order of one pair must agree.
        calls = [dist.P2POp(dist.isend, x, self._global(to), self.group)]
        calls.insert(self.rank % 2, dist.P2POp(dist.irecv, received, self._global(source), self.group))
        start = now()
        return Pending(self, x, received, dist.batch_isend_irecv(calls), start)

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        """Rank ``root``'s ``x`` for everybody, in its place; along a chain, the root sends it once."""
        start = now()
        dist.broadcast(x, self._global(root), group=self.group)
        self._note("broadcast", x, _bytes(x) if self.rank == root and self.size > 1 else 0, start)
        return x

    def _swaps(self, x: Tensor) -> bool:
        """Whether two ranks do better to hand each other a message. Gloo's collectives wake more threads on the way."""
        return self.size == 2 and x.device.type == "cpu" and 0 < _bytes(x) <= SWAPPED

    def _swapped(self, x: Tensor) -> Tensor:
        """The other one's ``x``; of two ranks, each then sends as much as in a ring."""
        mine, other = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        there = self._global(1 - self.rank)
        if self.rank == 0:
            dist.send(mine, there, self.group)
        dist.recv(other, there, self.group)
        if self.rank == 1:
            dist.send(mine, there, self.group)
        return other

    def _others(self) -> list[int]:
        """From the next rank round to the one before."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def _note(self, kind: str, x: Tensor, sent: float, start: float) -> None:
        synchronize(x.device)
        self.log.append(Sent(kind, _bytes(x), sent, now() - start))


@dataclass(frozen=True)
class Pending:
    """An exchange under way; ``x`` must live until it has left."""

    wire: Wire
    x: Tensor
    received: Tensor
    works: list[dist.Work]
    start: float

    def wait(self) -> Tensor:
        """What has come, once it has."""
        for work in self.works:
            work.wait()
        self.wire._note("exchange", self.x, _bytes(self.x), self.start)
        return self.received


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()

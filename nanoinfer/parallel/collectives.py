"""Communication between ranks: PyTorch's collectives (gloo on CPUs, NCCL on GPUs), each call logged.

Bytes are those that leave this rank in a ring algorithm, the fewest possible (Patarasuk and Yuan, 2009).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from nanoinfer.measure.clock import now, synchronize

SWAPPED: Final = 131_072  # bytes up to which two ranks on CPUs swap messages: measured, at most half of gloo's time


@dataclass(frozen=True)
class CommRecord:
    """One call of a collective on this rank."""

    kind: str  # all-reduce, all-gather, all-to-all, send, receive, exchange or broadcast
    message: int  # bytes of the tensor passed in (of all parts, for all-to-all)
    sent: float  # bytes that leave this rank
    seconds: float  # from the call to its end, waiting for other ranks included


def total_calls(log: Iterable[CommRecord]) -> list[dict[str, Any]]:
    """Calls of one kind and message size added up: ``kind``, ``message``, ``calls``, ``sent`` and ``seconds``."""
    totals: dict[tuple[str, int], dict[str, Any]] = {}
    for call in log:
        new = {"kind": call.kind, "message": call.message, "calls": 0, "sent": 0.0, "seconds": 0.0}
        total = totals.setdefault((call.kind, call.message), new)
        total["calls"] += 1
        total["sent"] += call.sent
        total["seconds"] += call.seconds
    return list(totals.values())


@dataclass
class Communicator:
    """This rank's connection to the other ranks of its group. ``log`` grows by one :class:`CommRecord` a call."""

    group: dist.ProcessGroup | None = None
    log: list[CommRecord] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, object]) -> Communicator:
        return self  # a copied model uses the same connection

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``, in place; each rank sends ``2 (n-1)/n`` of it."""
        start = now()
        if self._swaps(x):
            x += self._swapped(x)
        else:
            dist.all_reduce(x, group=self.group)
        self._note("all-reduce", x, 2 * (self.size - 1) / self.size * _bytes(x), start)
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """All ranks' ``x``, of one shape, concatenated along ``dim`` by rank; each rank sends ``n-1`` times its own."""
        start = now()
        if self._swaps(x):
            parts = [x, self._swapped(x)] if self.rank == 0 else [self._swapped(x), x]
        else:
            parts = [torch.empty_like(x) for _ in range(self.size)]
            dist.all_gather(parts, x.contiguous(), group=self.group)
        self._note("all-gather", x, (self.size - 1) * _bytes(x), start)
        return torch.cat(parts, dim=dim)

    def all_to_all(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """Part ``i`` goes to rank ``i``; the part from rank ``i`` fills ``like[i]``, which has its shape."""
        start = now()
        received = list(like)
        sent = [part.contiguous() for part in parts]
        others = [(self.rank + i) % self.size for i in range(1, self.size)]  # the next rank first
        calls = [
            dist.P2POp(op, x[i], self._global(i), self.group)
            for i in others
            for op, x in ((dist.irecv, received), (dist.isend, sent))
            if x[i].numel()
        ]
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()
        received[self.rank] = sent[self.rank]
        away = sum(_bytes(sent[i]) for i in others)
        self.log.append(CommRecord("all-to-all", sum(map(_bytes, sent)), away, now() - start))
        return received

    def send(self, x: Tensor, to: int) -> None:
        start = now()
        dist.send(x.contiguous(), self._global(to), self.group)
        self._note("send", x, _bytes(x), start)

    def receive(self, like: Tensor, source: int) -> Tensor:
        start = now()
        dist.recv(like, self._global(source), self.group)
        self._note("receive", like, 0, start)
        return like

    def exchange(self, x: Tensor, to: int, source: int) -> Tensor:
        """Send ``x`` to one rank and receive a tensor of its shape from another: a step of a ring."""
        return self.begin_exchange(x, to, source)()

    def begin_exchange(self, x: Tensor, to: int, source: int) -> Callable[[], Tensor]:
        """As :meth:`exchange`, without waiting: compute meanwhile, then call the result, which waits."""
        x, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        # Even ranks send first, odd ones receive first: with NCCL the order of one pair must agree.
        calls = [dist.P2POp(dist.isend, x, self._global(to), self.group)]
        calls.insert(self.rank % 2, dist.P2POp(dist.irecv, received, self._global(source), self.group))
        start = now()
        works = dist.batch_isend_irecv(calls)

        def wait() -> Tensor:
            for work in works:
                work.wait()
            self._note("exchange", x, _bytes(x), start)  # x must stay alive until it has been sent
            return received

        return wait

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        """Rank ``root``'s ``x`` on every rank, in place; along a chain, so that the root sends it once."""
        start = now()
        dist.broadcast(x, self._global(root), group=self.group)
        self._note("broadcast", x, _bytes(x) if self.rank == root and self.size > 1 else 0, start)
        return x

    def _swaps(self, x: Tensor) -> bool:
        # gloo's collectives wake more threads
        return self.size == 2 and x.device.type == "cpu" and 0 < _bytes(x) <= SWAPPED

    def _swapped(self, x: Tensor) -> Tensor:
        """The other rank's ``x``; each of two ranks sends as much as in a ring."""
        mine, other = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        peer = self._global(1 - self.rank)
        if self.rank == 0:
            dist.send(mine, peer, self.group)
        dist.recv(other, peer, self.group)
        if self.rank == 1:
            dist.send(mine, peer, self.group)
        return other

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def _note(self, kind: str, x: Tensor, sent: float, start: float) -> None:
        synchronize(x.device)
        self.log.append(CommRecord(kind, _bytes(x), sent, now() - start))


def ring_all_reduce(comm: Communicator, x: Tensor) -> Tensor:
    """:meth:`Communicator.all_reduce` written out: n chunks go round a ring of ranks, logged as exchanges.

    Each chunk goes round once while it is summed and once more when complete: ``2 (n-1)`` steps that wait for a
    neighbour, so that for small messages other algorithms are faster. ``x`` has one length on all ranks.
    """
    n, rank, count = comm.size, comm.rank, x.numel()
    if n == 1 or count == 0:
        return x
    buffer = x.new_zeros(n * -(-count // n))
    buffer[:count] = x.flatten()
    chunks = buffer.view(n, -1)

    def pass_on(chunk: int) -> Tensor:  # the previous rank sends the chunk before it
        return comm.exchange(chunks[chunk % n], to=(rank + 1) % n, source=(rank - 1) % n)

    for step in range(n - 1):  # reduce-scatter: a chunk gets one summand a step, and is complete at its last rank
        chunks[(rank - step - 1) % n] += pass_on(rank - step)
    for step in range(n - 1):  # all-gather: the complete chunks go round once more
        chunks[(rank - step) % n] = pass_on(rank - step + 1)
    return x.copy_(buffer[:count].view_as(x))


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()

"""The all-reduce by hand: parts of a sum go round a ring of ranks until everybody has the whole.

Were everybody to send everything to all others, a rank would send its ``m`` bytes ``n-1`` times. In a ring nothing is
sent twice: cut into ``n`` chunks, each of which goes round once while it is added up and once more when it is whole,
a rank sends ``2 (n-1)/n * m`` bytes, which no algorithm undercuts (Patarasuk and Yuan, 2009). The price is ``2 (n-1)``
steps, each of which waits for a neighbour: for a small message that is what counts, and other algorithms are quicker.
"""

from __future__ import annotations

from torch import Tensor

from nanoinfer.parallel.collectives import Wire


def ring_all_reduce(wire: Wire, x: Tensor) -> Tensor:
    """The sum of everybody's ``x``, in its place, as :meth:`Wire.all_reduce`; in ``wire.log`` as the exchanges it is.

    Args:
        wire: to the other ranks.
        x: of any length, the same on every rank. Where ``n`` does not divide that, chunks are as long as the longest.
    """
    n, rank, count = wire.size, wire.rank, x.numel()
    if n == 1 or count == 0:
        return x
    buffer = x.new_zeros(n * -(-count // n))
    buffer[:count] = x.flatten()
    chunks = buffer.view(n, -1)

    def pass_on(chunk: int) -> Tensor:
        """A chunk to the next rank; what comes from the one before is the chunk before."""
        return wire.exchange(chunks[chunk % n], to=(rank + 1) % n, source=(rank - 1) % n)

    for step in range(n - 1):  # reduce-scatter: a chunk grows by one summand a step, and is whole at its last stop
        chunks[(rank - step - 1) % n] += pass_on(rank - step)
    for step in range(n - 1):  # all-gather: the whole chunks go round once more
        chunks[(rank - step) % n] = pass_on(rank - step + 1)
    return x.copy_(buffer[:count].view_as(x))

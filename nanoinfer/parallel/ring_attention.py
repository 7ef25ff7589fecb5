"""Attention over keys that are spread over the ranks: they go round a ring, and partial results are merged.

A softmax over all keys can be put together from softmaxes over some of them, if each comes with the logarithm of what
it was divided by. So a rank attends to the keys that it holds while the next ones are on their way (Liu et al.,
"Ring Attention", 2023).

A rank holds two chunks of the prompt, one from either end (zigzag): of ``2n`` chunks rank ``r`` has ``r`` and
``2n-1-r``. Under a causal mask the first rank would otherwise have next to nothing to do, and the last one twice the
average; so each has the same.
"""

from __future__ import annotations

import math
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.models.attention import causal_mask
from nanoinfer.parallel.collectives import Wire
from nanoinfer.theory.stages import evenly

#: What attention over some of the keys is: ``[B, n_q, T, d_h]`` and its log-sum-exp ``[B, n_q, T]``, both fp32.
Partial = tuple[Tensor, Tensor]


def attend_with_lse(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Partial:
    """Attention over these keys alone, and the log-sum-exp of its scores, by which it can be merged with others.

    Args:
        q: ``[B, n_q, T, d_h]``.
        k, v: ``[B, n_kv, S, d_h]`` with ``n_q`` a multiple of ``n_kv``; ``S`` may be 0.
        mask: ``[T, S]`` bool, true where a token may look; None: everywhere.

    Returns:
        ``[B, n_q, T, d_h]`` and ``[B, n_q, T]`` in fp32. A token that sees none of the keys has 0 and ``-inf``.
    """
    batch, n_q, n_new, d_head = q.shape
    n_kv, n_keys = k.shape[1], k.shape[2]
    group = n_q // n_kv
    # Grouped queries share one product with their keys, which are not copied.
    scores = (q.reshape(batch, n_kv, group * n_new, d_head) @ k.transpose(2, 3)).float() * d_head**-0.5
    if mask is not None:
        scores.view(batch, n_kv, group, n_new, n_keys).masked_fill_(~mask, -math.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - _finite(lse)).exp().to(v.dtype)
    return (weights @ v).float().view(q.shape), lse.view(batch, n_q, n_new)


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the keys of both, from attention over the keys of each; shapes as of each."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    lse = torch.logaddexp(lse_a, lse_b)
    share_a, share_b = ((part - _finite(lse)).exp()[..., None] for part in (lse_a, lse_b))
    return share_a * out_a + share_b * out_b, lse


def _finite(lse: Tensor) -> Tensor:
    """A token that has seen nothing has a log-sum-exp of ``-inf``, and ``-inf - -inf`` would be NaN."""
    return lse.clamp(min=torch.finfo(lse.dtype).min)


def held_by(rank: int, ranks: int) -> tuple[int, int]:
    """Which of the ``2 * ranks`` chunks of a prompt a rank holds: one from either end.

    The chunks are cut by :func:`~nanoinfer.theory.stages.evenly`, which puts the longer ones first. So no rank
    holds more than ``ceil(tokens / ranks)`` tokens, and none differs from another by more than one.
    """
    return rank, 2 * ranks - 1 - rank


def ring_attention(wire: Wire, q: Tensor, k: Tensor, v: Tensor, tokens: int, overlap: bool = True) -> Tensor:
    """Causal attention of a prompt's tokens to all before them, each rank holding two chunks of them.

    What lies ahead of a chunk of queries is not computed. ``n - 1`` times a rank hands on the keys and values that it
    has, ``2 * B * n_kv * ceil(tokens / n) * d_h`` numbers.

    Args:
        wire: to the other ranks.
        q: ``[B, n_q, T, d_h]``, the queries of this rank's chunks, one behind the other.
        k, v: ``[B, n_kv, T, d_h]``, their keys and values.
        tokens: in the whole prompt.
        overlap: compute while the next keys are on their way; False: then wait for them.

    Returns:
        ``[B, T, n_q * d_h]``, of these queries over all keys.
    """
    rank, n = wire.rank, wire.size
    after, before = (rank + 1) % n, (rank - 1) % n
    lengths = [len(chunk) for chunk in evenly(tokens, 2 * n)]
    ours = held_by(rank, n)
    queries = torch.split(q, [lengths[i] for i in ours], dim=2)
    found: dict[int, Partial] = {}

    def look_at(held: Tensor, theirs: tuple[int, int]) -> None:
        start = 0
        for j in theirs:
            keys, values = held.narrow(3, start, lengths[j])
            start += lengths[j]
            for i, query in zip(ours, queries, strict=True):
                if j <= i:
                    mask = causal_mask(lengths[i], lengths[i], q.device) if j == i else None
                    part = attend_with_lse(query, keys, values, mask)
                    found[i] = merge(found[i], part) if i in found else part

    # A rank may have a token less than another: its message has room for one, which is not read.
    held = F.pad(torch.stack((k, v)), (0, 0, 0, -(-tokens // n) - k.shape[2]))
    for step in range(n):
        is_last = step == n - 1
        pending = wire.begin_exchange(held, after, before) if overlap and not is_last else None
        look_at(held, held_by((rank - step) % n, n))
        if not is_last:
            held = wire.exchange(held, after, before) if pending is None else pending.wait()
    out = torch.cat([found[i][0] for i in ours], dim=2)
    return out.to(q.dtype).transpose(1, 2).flatten(2)


def merge_ranks(wire: Wire, part: Partial) -> Partial:
    """Attention over the keys of all ranks, from each one's own part, on every rank; shapes as of the part."""
    out, lse = part
    together = wire.all_gather(torch.cat((out, lse[..., None]), dim=-1)[None], dim=0)  # [n, B, n_q, T, d_h + 1]
    return reduce(merge, ((one[..., :-1], one[..., -1]) for one in together))

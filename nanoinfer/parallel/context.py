"""Context parallel: a long prompt is cut along its tokens, and each rank holds the keys and values of its part.

In a prefill, keys and values go round a ring of ranks (Liu et al., "Ring Attention", 2023). In a decode step all ranks
compute the token, each attends to the keys that it holds, and the results are merged by their log-sum-exp.
"""

from __future__ import annotations

import math
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.cache.contiguous import ContiguousCache
from nanoinfer.configs.config import ModelConfig
from nanoinfer.engines.request import Request
from nanoinfer.engines.static import Forward
from nanoinfer.errors import RequestError
from nanoinfer.models.attention import causal_mask
from nanoinfer.models.registry import LoadedModel
from nanoinfer.parallel.collectives import Communicator
from nanoinfer.parallel.pipeline import RankEngine
from nanoinfer.theory.communication import partition

#: Attention over some of the keys: ``[B, n_q, T, d_h]`` and its log-sum-exp ``[B, n_q, T]``, both fp32.
Partial = tuple[Tensor, Tensor]


def attend_with_lse(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Partial:
    """Attention of ``q`` ``[B, n_q, T, d_h]`` over these keys ``[B, n_kv, S, d_h]`` alone, with its log-sum-exp.

    ``S`` may be 0; ``mask`` is ``[T, S]`` bool. A token that sees none of the keys has 0 and ``-inf``.
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
    """Attention over the keys of both."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    lse = torch.logaddexp(lse_a, lse_b)
    share_a, share_b = ((part - _finite(lse)).exp()[..., None] for part in (lse_a, lse_b))
    return share_a * out_a + share_b * out_b, lse


def _finite(lse: Tensor) -> Tensor:
    """A token that has seen nothing has a log-sum-exp of ``-inf``, and ``-inf - -inf`` would be NaN."""
    return lse.clamp(min=torch.finfo(lse.dtype).min)


def zigzag_chunks(rank: int, ranks: int) -> tuple[int, int]:
    """Which of the ``2 * ranks`` chunks of a prompt a rank holds: one from either end.

    Else, under a causal mask, the first rank would have next to no work and the last one twice the average. Longer
    chunks come first, so ranks hold at most ``ceil(tokens / ranks)`` tokens and differ by at most one.
    """
    return rank, 2 * ranks - 1 - rank


def rank_positions(tokens: int, rank: int, ranks: int) -> list[int]:
    """Positions in the prompt of the tokens of a rank's two chunks."""
    chunks = partition(tokens, 2 * ranks)
    return [position for chunk in zigzag_chunks(rank, ranks) for position in chunks[chunk]]


def ring_attention(comm: Communicator, q: Tensor, k: Tensor, v: Tensor, tokens: int, overlap: bool = True) -> Tensor:
    """Causal attention ``[B, T, n_q * d_h]`` of this rank's two chunks over the keys of all ``tokens`` of a prompt.

    ``q`` is ``[B, n_q, T, d_h]``, ``k`` and ``v`` ``[B, n_kv, T, d_h]``. ``n - 1`` times a rank passes on the keys and
    values that it holds. ``overlap``: compute while the next ones are on their way, else wait for them.
    """
    rank, n = comm.rank, comm.size
    after, before = (rank + 1) % n, (rank - 1) % n
    lengths = [len(chunk) for chunk in partition(tokens, 2 * n)]
    own = zigzag_chunks(rank, n)
    queries = torch.split(q, [lengths[i] for i in own], dim=2)
    merged: dict[int, Partial] = {}

    def attend_to(held: Tensor, chunks: tuple[int, int]) -> None:
        start = 0
        for j in chunks:
            keys, values = held.narrow(3, start, lengths[j])
            start += lengths[j]
            for i, query in zip(own, queries, strict=True):
                if j <= i:
                    mask = causal_mask(lengths[i], lengths[i], q.device) if j == i else None
                    part = attend_with_lse(query, keys, values, mask)
                    merged[i] = merge(merged[i], part) if i in merged else part

    # Ranks may differ by one token: messages are of one size, and the padding is not read.
    held = F.pad(torch.stack((k, v)), (0, 0, 0, -(-tokens // n) - k.shape[2]))
    for step in range(n):
        is_last = step == n - 1
        wait = comm.begin_exchange(held, after, before) if overlap and not is_last else None
        attend_to(held, zigzag_chunks((rank - step) % n, n))
        if not is_last:
            held = comm.exchange(held, after, before) if wait is None else wait()
    out = torch.cat([merged[i][0] for i in own], dim=2)
    return out.to(q.dtype).transpose(1, 2).flatten(2)


class RingCache:
    """A :class:`~nanoinfer.models.attention.KVCache` of which each rank holds a part.

    The first pass is the prompt, ``rows`` of ``tokens`` each, every rank with its :func:`rank_positions`. Later passes
    have one token a row, the same on all ranks, which take turns in storing it: ``room`` of them fit. ``length``
    counts the tokens of a row on all ranks together.
    """

    def __init__(
        self,
        config: ModelConfig,
        comm: Communicator,
        rows: int,
        tokens: int,
        room: int,
        device: torch.device | str,
        dtype: torch.dtype,
        overlap: bool = True,
    ) -> None:
        self.comm, self.tokens, self.overlap, self.length = comm, tokens, overlap, 0
        most = len(rank_positions(tokens, comm.rank, comm.size)) + -(-room // comm.size)
        self.own = ContiguousCache(config, rows, most, device, dtype)

    @property
    def stores_next(self) -> bool:
        return (self.length - self.tokens) % self.comm.size == self.comm.rank

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is None, "rows of one length need no mask"
        if self.length == 0:
            return ring_attention(self.comm, q, *self.own.update(layer, k, v), self.tokens, self.overlap)
        if self.stores_next:
            keys, values = self.own.update(layer, k, v)
        else:
            keys, values = (store[layer, :, :, : self.own.length] for store in (self.own.k, self.own.v))
        part, lse = attend_with_lse(q, keys, values)
        parts = self.comm.all_gather(torch.cat((part, lse[..., None]), dim=-1)[None], dim=0)  # [n, B, n_q, T, d_h + 1]
        out, _ = reduce(merge, ((of_rank[..., :-1], of_rank[..., -1]) for of_rank in parts.unbind()))
        return out.to(q.dtype).transpose(1, 2).flatten(2)

    def advance(self, n_tokens: int) -> None:
        if self.length == 0:
            self.own.advance(n_tokens)
            self.length = self.tokens
        else:
            self.own.advance(n_tokens if self.stores_next else 0)
            self.length += n_tokens


class ContextEngine(RankEngine):
    """The cached engine for long prompts over several ranks, each of which has the whole model.

    Every rank is given the same prompts, of one length; rank 0 chooses the tokens.
    """

    name = "context"

    def __init__(self, loaded: LoadedModel, comm: Communicator, overlap: bool = True) -> None:
        super().__init__(loaded, comm, sampling_rank=0)
        self.overlap = overlap

    def start(self, requests: list[Request]) -> Forward:
        """Allocate this rank's part of the cache; prompts must be of one length, of at least a token a rank."""
        lengths = {len(r.prompt_ids) for r in requests}
        if len(lengths) > 1:
            raise RequestError(
                f"the context engine needs prompts of one length, got {min(lengths)} to {max(lengths)} tokens; "
                "give them one at a time, or take the cached engine"
            )
        if min(lengths) < self.comm.size:
            raise RequestError(
                f"context parallel: {min(lengths)} tokens cannot be spread over {self.comm.size} ranks; "
                "take fewer ranks, or the cached engine"
            )
        return ContextBatch(self, requests)


class ContextBatch:
    """The rows of one batch and this rank's part of their cache."""

    def __init__(self, engine: ContextEngine, requests: list[Request]) -> None:
        self.model, self.comm, self.device = engine.model, engine.comm, engine.device
        self.requests = requests
        self.rows = {request.index: row for row, request in enumerate(requests)}
        self.n_tokens = len(requests[0].prompt_ids)
        room = max(r.limit for r in requests) - 1  # the last token is not fed again
        sizes = len(requests), self.n_tokens, room
        self.cache = RingCache(engine.config, self.comm, *sizes, engine.device, engine.dtype, engine.overlap)

    def __call__(self, running: list[Request]) -> Tensor:
        """Next-token logits ``[R, V]`` of the running requests, on every rank."""
        x = self.prefill() if self.cache.length == 0 else self.decode()
        return self.model.head(x)[[self.rows[r.index] for r in running], -1]

    def prefill(self) -> Tensor:
        """All prompts at once; the hidden states of their last token, ``[B, 1, d]``, from the rank that has it."""
        n = self.comm.size
        positions_of = [rank_positions(self.n_tokens, rank, n) for rank in range(n)]
        positions = torch.tensor([positions_of[self.comm.rank]], device=self.device)
        prompts = torch.tensor([r.prompt_ids for r in self.requests], device=self.device)
        own = prompts[:, positions[0]]
        x = self.model.hidden(own, positions.expand_as(own), self.cache)
        # All ranks compute the head: that takes less time than sending the logits.
        owner = next(rank for rank in range(n) if positions_of[rank][-1] == self.n_tokens - 1)
        return self.comm.broadcast(x[:, -1:].contiguous(), owner)

    def decode(self) -> Tensor:
        """The newest token of each row, on every rank; ``[B, 1, d]``. Rows that have ended repeat their last one."""
        ids = torch.tensor([[r.generated[-1]] for r in self.requests], device=self.device)
        positions = torch.full_like(ids, self.cache.length)
        return self.model.hidden(ids, positions, self.cache)

"""Context parallel: a long prompt is cut along its tokens, and each rank has the keys and values of its part.

Prefill is what gets quicker: every rank computes its share of the tokens, and their keys and values go round a ring.
A decode step has one token a row, which no cut along the tokens makes smaller: all ranks compute it, each looks at the
keys that it has, and what they find is merged. So the cache, which is spread over the ranks, can be as many times as
long, while the weights are on each of them whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.cache.contiguous import ContiguousCache
from nanoinfer.configs.config import ModelConfig
from nanoinfer.engines.request import Request
from nanoinfer.engines.static import Forward
from nanoinfer.errors import RequestError
from nanoinfer.models.registry import LoadedModel
from nanoinfer.parallel.collectives import Wire
from nanoinfer.parallel.rank_engine import RankEngine
from nanoinfer.parallel.ring_attention import attend_with_lse, held_by, merge_ranks, ring_attention
from nanoinfer.theory.stages import evenly


def places(tokens: int, rank: int, ranks: int) -> list[int]:
    """Where in the prompt the tokens of a rank's two chunks stand."""
    chunks = evenly(tokens, 2 * ranks)
    return [place for chunk in held_by(rank, ranks) for place in chunks[chunk]]


class RingCache:
    """A :class:`~nanoinfer.models.attention.KVCache` of which each rank holds a part; the model need not know.

    The first forward pass is the prompt, of which each rank is given its :func:`places`. Those behind it have one
    token a row, the same on all ranks, which take turns in keeping its keys and values.

    Args:
        config: of the whole model.
        wire: to the other ranks.
        rows: B, all of one length.
        tokens: S, in each prompt.
        room: how many tokens may follow.
        device, dtype: of this rank's keys and values.
        overlap: as in :func:`~nanoinfer.parallel.ring_attention.ring_attention`.

    Attributes:
        length: tokens a row that all ranks hold together.
        own: this rank's part of them.
    """

    def __init__(
        self,
        config: ModelConfig,
        wire: Wire,
        rows: int,
        tokens: int,
        room: int,
        device: torch.device | str,
        dtype: torch.dtype,
        overlap: bool = True,
    ) -> None:
        self.wire, self.tokens, self.overlap, self.length = wire, tokens, overlap, 0
        most = len(places(tokens, wire.rank, wire.size)) + -(-room // wire.size)
        self.own = ContiguousCache(config, rows, most, device, dtype)

    @property
    def keeps_next(self) -> bool:
        """Whether it is this rank's turn to keep the next token."""
        return (self.length - self.tokens) % self.wire.size == self.wire.rank

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Keep what is this rank's to keep; let ``q`` look at what all ranks hold."""
        assert mask is None, "rows of one length have nothing to hide"
        if self.length == 0:
            return ring_attention(self.wire, q, *self.own.update(layer, k, v), self.tokens, self.overlap)
        if self.keeps_next:
            keys, values = self.own.update(layer, k, v)
        else:
            keys, values = (kept[layer, :, :, : self.own.length] for kept in (self.own.k, self.own.v))
        out, _ = merge_ranks(self.wire, attend_with_lse(q, keys, values))
        return out.to(q.dtype).transpose(1, 2).flatten(2)

    def advance(self, n_tokens: int) -> None:
        """Move the ends forward once every layer has been kept."""
        if self.length == 0:
            self.own.advance(n_tokens)
            self.length = self.tokens
        else:
            self.own.advance(n_tokens if self.keeps_next else 0)
            self.length += n_tokens


class ContextEngine(RankEngine):
    """The cached engine for long prompts over several ranks, each of which has the whole model.

    Every rank is given the same prompts, which have to be of one length. Rank 0 chooses the tokens.

    Args:
        loaded: the model.
        wire: to the other ranks.
        overlap: let keys and values travel while others are computed with.
    """

    name = "context"

    def __init__(self, loaded: LoadedModel, wire: Wire, overlap: bool = True) -> None:
        super().__init__(loaded, wire, chooser=0)
        self.overlap = overlap

    def start(self, requests: list[Request]) -> Forward:
        """Allocate this rank's part of the cache.

        Raises:
            RequestError: prompts of unlike lengths, or shorter than there are ranks.
        """
        lengths = {len(r.prompt_ids) for r in requests}
        if len(lengths) > 1:
            raise RequestError(
                f"the context engine needs prompts of one length, got {min(lengths)} to {max(lengths)} tokens; "
                "give them one at a time, or take the cached engine"
            )
        if min(lengths) < self.wire.size:
            raise RequestError(
                f"context parallel: {min(lengths)} tokens cannot be spread over {self.wire.size} ranks; "
                "take fewer ranks, or the cached engine"
            )
        return ContextBatch(self, requests)


class ContextBatch:
    """The rows of one batch and this rank's part of their cache."""

    def __init__(self, engine: ContextEngine, requests: list[Request]) -> None:
        self.model, self.wire, self.device = engine.model, engine.wire, engine.device
        self.requests = requests
        self.rows = {request.index: row for row, request in enumerate(requests)}
        self.n_tokens = len(requests[0].prompt_ids)
        room = max(r.limit for r in requests) - 1  # nothing follows the last one
        sizes = len(requests), self.n_tokens, room
        self.cache = RingCache(engine.config, self.wire, *sizes, engine.device, engine.dtype, engine.overlap)

    def __call__(self, running: list[Request]) -> Tensor:
        """Next-token logits ``[R, V]`` of the running requests, on every rank."""
        x = self.prefill() if self.cache.length == 0 else self.decode()
        return self.model.head(x)[[self.rows[r.index] for r in running], -1]

    def prefill(self) -> Tensor:
        """All prompts at once; behind their last token, ``[B, 1, d]``, from the rank that has it."""
        n = self.wire.size
        every = [places(self.n_tokens, rank, n) for rank in range(n)]
        positions = torch.tensor([every[self.wire.rank]], device=self.device)
        prompts = torch.tensor([r.prompt_ids for r in self.requests], device=self.device)
        own = prompts[:, positions[0]]
        x = self.model.hidden(own, positions.expand_as(own), self.cache)
        # Whoever has the last token has it last. The head is better worked out by all than its logits sent.
        owner = next(rank for rank in range(n) if every[rank][-1] == self.n_tokens - 1)
        return self.wire.broadcast(x[:, -1:].contiguous(), owner)

    def decode(self) -> Tensor:
        """The newest token of each row, on every rank; ``[B, 1, d]``. Rows that have ended repeat their last one."""
        ids = torch.tensor([[r.generated[-1]] for r in self.requests], device=self.device)
        positions = torch.full_like(ids, self.cache.length)
        return self.model.hidden(ids, positions, self.cache)

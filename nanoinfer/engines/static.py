"""Static batching: the rows of a batch start together, and the batch lasts until its longest row ends.

:class:`NaiveEngine` runs the whole text through the model for every token, as NanoGPT does: the reference that every
other engine is held to. :class:`CachedEngine` keeps the keys and values: it prefills the prompts once, then feeds one
token a row and step. :class:`BatchedEngine` does so for a few rows at a time, and counts what that wastes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from nanoinfer.cache.contiguous import ContiguousCache
from nanoinfer.engines.engine import Engine
from nanoinfer.engines.request import Event, Request
from nanoinfer.errors import check
from nanoinfer.measure.clock import now
from nanoinfer.models.model import Model
from nanoinfer.models.registry import LoadedModel

#: Logits ``[R, V]`` for the next token of each of R running requests, in their order.
Forward = Callable[[list[Request]], Tensor]


class StaticEngine(Engine):
    """One batch at a time: no request joins it, and it lasts as long as its longest row."""

    @abstractmethod
    def start(self, requests: list[Request]) -> Forward:
        """Prepare for one batch; return the function that each step calls with the running requests."""

    def run(self, requests: list[Request]) -> Generator[Event, None, None]:
        """Logits of the running rows, one token each, their events; until all have ended."""
        forward: Forward | None = None
        while running := [r for r in requests if r.finish_reason is None]:
            with torch.inference_mode():
                forward = forward or self.start(running)
                token_ids = self.choose(forward(running), running)
            t = now()
            for request, token_id in zip(running, token_ids, strict=True):
                yield request.accept(token_id, t)


# --- rows of unlike lengths in one batch ------------------------------------------------


@dataclass(frozen=True)
class Padded:
    """A batch ready for a model."""

    ids: Tensor  # [B, T]
    positions: Tensor  # [B, T]
    pads: Tensor  # [B], how much of each row is padding
    mask: Tensor | None  # [B, 1, T, T] bool; None where no row is padded (plain causal attention)


def left_pad(rows: Sequence[Sequence[int]], device: torch.device | str = "cpu", pad_id: int = 0) -> Padded:
    """Pad rows of token ids on the left to the longest, so that all rows end together.

    Positions count real tokens only. Which slots are padding follows from lengths, never from ids: ``pad_id`` may well
    be a real token of a prompt.
    """
    longest = max(len(row) for row in rows)
    padding = [longest - len(row) for row in rows]
    ids = torch.tensor([[pad_id] * n + list(row) for n, row in zip(padding, rows, strict=True)], device=device)
    pads = torch.tensor(padding, device=device)
    slots = torch.arange(longest, device=device)
    positions = (slots - pads[:, None]).clamp(min=0)
    if not any(padding):
        return Padded(ids, positions, pads, None)
    causal = slots[None, :] <= slots[:, None]  # [T, T]
    real = slots >= pads[:, None]  # [B, T]
    mask = causal & real[:, None, None, :]
    # A padding slot sees itself, or its softmax over nothing would be NaN. No real token sees it.
    mask = mask | torch.eye(longest, dtype=torch.bool, device=device)
    return Padded(ids, positions, pads, mask)


# --- without and with a cache -----------------------------------------------------------


def recompute(model: Model, rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Next-token logits ``[B, V]`` of whole rows, each cropped to its last ``context`` tokens."""
    batch = left_pad([row[-model.config.context :] for row in rows], device)
    return model(batch.ids, batch.positions, mask=batch.mask, last_only=True)[:, -1]


class NaiveEngine(StaticEngine):
    """Full recompute at every step, for a batch of any size; nothing is kept between steps."""

    name = "naive"

    def start(self, requests: list[Request]) -> Forward:
        return lambda running: recompute(self.model, [r.ids for r in running], self.device)


class CachedEngine(StaticEngine):
    """Prefill, then decode over a preallocated contiguous cache."""

    name = "cached"

    def start(self, requests: list[Request]) -> Forward:
        return CachedBatch(self, requests)


class CachedBatch:
    """The rows of one batch and their cache, laid out for the longest. Rows that have ended keep their slots."""

    def __init__(self, engine: CachedEngine, requests: list[Request]) -> None:
        self.model: Model = engine.model
        self.config, self.device = engine.config, engine.device
        self.requests = requests
        self.rows = {request.index: row for row, request in enumerate(requests)}
        self.batch = left_pad([r.prompt_ids for r in requests], self.device)
        # Every row is fed all its tokens but the last one, and none beyond the context.
        longest = max(min(r.limit, self.config.context - len(r.prompt_ids) + 1) for r in requests)
        capacity = self.batch.ids.shape[1] + longest - 1
        self.cache = ContiguousCache(self.config, len(requests), capacity, self.device, engine.dtype)
        self.cropped = False

    def __call__(self, running: list[Request]) -> Tensor:
        """Next-token logits ``[R, V]`` of the running requests."""
        # Cropping shifts every position, so from then on nothing in the cache is valid any more.
        self.cropped = self.cropped or any(r.length > self.config.context for r in running)
        if self.cropped:
            return recompute(self.model, [r.ids for r in running], self.device)
        logits = self.prefill() if self.cache.length == 0 else self.decode()
        return logits[[self.rows[r.index] for r in running]]

    def prefill(self) -> Tensor:
        """All prompts at once; ``[B, V]``."""
        batch = self.batch
        return self.model(batch.ids, batch.positions, self.cache, batch.mask, last_only=True)[:, -1]

    def decode(self) -> Tensor:
        """The newest token of each row; ``[B, V]``. Rows that have ended repeat their last one, unread."""
        ids = torch.tensor([[r.generated[-1]] for r in self.requests], device=self.device)
        last = torch.tensor([[r.length - 1] for r in self.requests], device=self.device)
        positions = last.clamp(max=self.config.context - 1)
        mask = None
        if self.batch.mask is not None:
            slots = torch.arange(self.cache.length + 1, device=self.device)
            mask = (slots >= self.batch.pads[:, None])[:, None, None, :]  # [B, 1, 1, S]
        return self.model(ids, positions, self.cache, mask)[:, -1]


# --- many requests, a few at a time -----------------------------------------------------


@dataclass(frozen=True)
class Waste:
    """What passes over static batches computed and held, and how much of it was for nothing.

    A batch that crops recomputes the rows that still run: such a pass takes whole rows, and finds nothing live.
    """

    prefill_slots: int = 0  # B * T, summed over the passes that take whole rows
    prefill_padding: int = 0  # those of them that were padding
    decode_rows: int = 0  # rows of the passes that take one token a row
    decode_ended: int = 0  # those of them whose request had ended
    kv_held: int = 0  # slots of the cache, B times its capacity, once for each pass
    kv_live: int = 0  # those of them that held a token of a running request after the pass

    @property
    def padding_share(self) -> float:
        return self.prefill_padding / max(1, self.prefill_slots)

    @property
    def ended_share(self) -> float:
        return self.decode_ended / max(1, self.decode_rows)

    @property
    def kv_idle_share(self) -> float:
        """``1 - kv_live / kv_held``, 0 to 1: padding, slots not yet filled, and rows that have ended."""
        return 1 - self.kv_live / self.kv_held if self.kv_held else 0.0

    def __add__(self, other: Waste) -> Waste:
        return Waste(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class BatchedEngine(CachedEngine):
    """The cached engine on batches of at most ``batch_size`` rows, one after the other, in the order they came.

    ``waste`` is that of the last run, so far. Raises :class:`RequestError` for a batch size below 1.
    """

    name = "batched"

    def __init__(self, loaded: LoadedModel, batch_size: int = 32) -> None:
        check("batch_size", batch_size, at_least=1, whole=True)
        super().__init__(loaded)
        self.batch_size = int(batch_size)
        self.waste = Waste()

    def run(self, requests: list[Request]) -> Generator[Event, None, None]:
        self.waste = Waste()
        for first in range(0, len(requests), self.batch_size):
            yield from super().run(requests[first : first + self.batch_size])

    def start(self, requests: list[Request]) -> Forward:
        batch = CachedBatch(self, requests)
        n_rows, kv_held = len(requests), len(requests) * batch.cache.capacity

        def forward(running: list[Request]) -> Tensor:
            takes_prompts = batch.cache.length == 0
            logits = batch(running)
            lengths = [min(r.length, self.config.context) for r in running]
            if batch.cropped or takes_prompts:
                slots, live = len(running) * max(lengths), 0 if batch.cropped else sum(lengths)
                self.waste += Waste(slots, slots - sum(lengths), kv_held=kv_held, kv_live=live)
            else:
                ended = n_rows - len(running)
                self.waste += Waste(0, 0, n_rows, ended, kv_held, sum(lengths))
            return logits

        return forward

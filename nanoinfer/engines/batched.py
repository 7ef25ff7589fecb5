"""Static batching: many requests, a few rows at a time, each batch from its first row to its last.

Requests are served in the order they came. A batch starts together, is padded on the left to its longest
prompt, and lasts until its longest answer ends; only then does the next one start. What that costs is counted.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import astuple, dataclass

from torch import Tensor

from nanoinfer.engines.cached import CachedBatch, CachedEngine
from nanoinfer.engines.engine import Forward
from nanoinfer.engines.request import Event, Request
from nanoinfer.errors import check
from nanoinfer.models.registry import LoadedModel


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
    """The cached engine on batches of at most ``batch_size`` rows, one after the other.

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
        return CountedBatch(self, requests)


class CountedBatch(CachedBatch):
    """A batch that adds up what its passes waste."""

    def __init__(self, engine: BatchedEngine, requests: list[Request]) -> None:
        super().__init__(engine, requests)
        self.engine = engine
        self.kv_slots = len(requests) * self.cache.capacity

    def recompute(self, running: list[Request]) -> Tensor:
        self._count_whole_rows([min(r.length, self.config.context) for r in running], kv_live=0)
        return super().recompute(running)

    def prefill(self) -> Tensor:
        lengths = [r.length for r in self.requests]
        self._count_whole_rows(lengths, kv_live=sum(lengths))
        return super().prefill()

    def decode(self) -> Tensor:
        live = [r.length for r in self.requests if r.finish_reason is None]
        rows = len(self.requests)
        self.engine.waste += Waste(
            decode_rows=rows, decode_ended=rows - len(live), kv_held=self.kv_slots, kv_live=sum(live)
        )
        return super().decode()

    def _count_whole_rows(self, lengths: list[int], kv_live: int) -> None:
        slots = len(lengths) * max(lengths)
        self.engine.waste += Waste(slots, slots - sum(lengths), kv_held=self.kv_slots, kv_live=kv_live)

"""Whether keys and values travel unseen: a long prefill with the ring beside the computation, and both in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanoinfer.measure.clock import timed
from nanoinfer.models.weights import assemble, random_state
from nanoinfer.parallel.bubble import SHAPE
from nanoinfer.parallel.collectives import Wire
from nanoinfer.parallel.context import RingCache, places


class TimedCache(RingCache):
    """A ring cache that adds up the seconds spent in it."""

    seconds = 0.0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """As :meth:`RingCache.attend`."""
        out, seconds = timed(lambda: super(TimedCache, self).attend(layer, q, k, v, mask), q.device)
        self.seconds += seconds
        return out


def measure_overlap(
    wire: Wire,
    *,
    tokens: Sequence[int] = (256, 1024, 4096),
    layers: int = 2,
    repeats: int = 5,
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """A task for :func:`~nanoinfer.parallel.launch.launch`: the prefill of one prompt, both ways in turns.

    Args:
        wire: to the other ranks.
        tokens: in the prompt; each is a measurement of its own.
        layers: of the random model, which has a KV head for every query head: the hardest case for the ring.
        repeats: passes each way, after one that is thrown away.
        device: of all ranks.

    Returns:
        for each length, in seconds of each pass on this rank: ``overlapped_s`` and ``in_turn_s`` from the first token
        to the end of all ranks, and of the latter ``exchange_s`` and ``attention_s``; ``sent`` are the bytes that left
        this rank in a pass.
    """
    config = replace(SHAPE, n_layers=layers, context=max(tokens))
    weights = random_state(config, torch.float32, 0, torch.device(device))
    model = assemble(config, weights, torch.device(device))

    def once(length: int, overlap: bool) -> dict[str, float]:
        cache = TimedCache(config, wire, 1, length, 0, device, torch.float32, overlap)
        positions = torch.tensor([places(length, wire.rank, wire.size)], device=device)
        wire.log.clear()
        dist.barrier(wire.group)

        def work() -> None:
            model.hidden(positions % config.vocab_size, positions, cache)
            dist.barrier(wire.group)

        _, seconds = timed(work, device)
        exchange = sum(sent.seconds for sent in wire.log)
        sent = sum(sent.sent for sent in wire.log)
        return {"wall": seconds, "exchange": exchange, "attention": cache.seconds - exchange, "sent": sent}

    answer = []
    with torch.inference_mode():
        for length in tokens:
            passes = [(once(length, True), once(length, False)) for _ in range(1 + repeats)][1:]
            answer.append(
                {
                    "tokens": length,
                    "overlapped_s": [beside["wall"] for beside, _ in passes],
                    "in_turn_s": [in_turn["wall"] for _, in_turn in passes],
                    "exchange_s": [in_turn["exchange"] for _, in_turn in passes],
                    "attention_s": [in_turn["attention"] for _, in_turn in passes],
                    "sent": passes[0][0]["sent"],
                }
            )
    return answer

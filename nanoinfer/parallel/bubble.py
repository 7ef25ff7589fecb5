"""How long the stages of a pipeline wait: busy against wall-clock time, for several numbers of micro-batches."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from nanoinfer.configs.config import SHAPES
from nanoinfer.errors import RequestError
from nanoinfer.measure.clock import now
from nanoinfer.models.weights import assemble, random_state
from nanoinfer.parallel.collectives import Wire
from nanoinfer.parallel.pipeline import Stage, cut
from nanoinfer.theory.communication import bubble

#: Wide enough for its products to be most of the work, with next to no vocabulary: so the stages are equal.
SHAPE = replace(SHAPES["tiny-llama"], d_model=384, n_heads=6, n_kv_heads=6, d_head=64, d_ff=1024)


def measure_bubble(
    wire: Wire,
    *,
    micro_batches: Sequence[int] = (1, 2, 4, 8),
    layers_per_stage: int = 2,
    rows: int = 8,
    tokens: int = 128,
    repeats: int = 5,
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """A task for :func:`~nanoinfer.parallel.launch.launch`: one prefill of the same batch, cut in several ways.

    The stages are equal: as many layers each, and a head of no weight. Each pass begins and ends with all ranks
    together, and the ways take turns, so that what the machine does beside falls on all alike.

    Args:
        wire: to the other stages.
        micro_batches: into how many parts the batch is cut; each a divisor of ``rows``.
        layers_per_stage: of a random model that has as many for each rank.
        rows: prompts in the batch.
        tokens: in each prompt.
        repeats: passes for each way, after one that is thrown away.
        device: of all ranks.

    Returns:
        for each number of micro-batches ``{"micro_batches", "busy_s", "wall_s"}``: what this stage computed in each
        pass, in seconds, and how long the pass took.

    Raises:
        RequestError: micro-batches of unlike size.
    """
    if odd := [m for m in micro_batches if m < 1 or rows % m]:
        raise RequestError(f"{rows} rows cannot be cut into {odd[0]} equal micro-batches; take a divisor of {rows}")
    config = replace(SHAPE, n_layers=layers_per_stage * wire.size)
    weights = random_state(config, torch.float32, 0, torch.device(device))
    stage = Stage(cut(assemble(config, weights, torch.device(device)), wire.rank, wire.size), wire)
    ids = torch.arange(rows * tokens, device=device).view(rows, tokens) % config.vocab_size
    positions = torch.arange(tokens, device=device).expand(rows, tokens)

    def once(m: int) -> tuple[float, float]:
        dist.barrier(wire.group)
        start, stage.busy = now(), 0.0
        for part in zip(ids.chunk(m), positions.chunk(m), strict=True):
            stage(*part, last_only=True)
        dist.barrier(wire.group)
        return stage.busy, now() - start

    with torch.inference_mode():
        passes = [[once(m) for m in micro_batches] for _ in range(1 + repeats)][1:]
    return [
        {"micro_batches": m, "busy_s": [busy for busy, _ in measured], "wall_s": [wall for _, wall in measured]}
        for m, measured in zip(micro_batches, zip(*passes, strict=True), strict=True)
    ]


@dataclass(frozen=True)
class Idle:
    """Which share of the time a stage waits, on average over the stages.

    Attributes:
        micro_batches: ``m``.
        predicted: ``(p-1) / (m+p-1)``, for equal stages and hops that take no time.
        measured: the median of the passes; ``low`` and ``high`` are the least and the most.
    """

    micro_batches: int
    predicted: float
    measured: float
    low: float
    high: float


def idle(answers: Sequence[list[dict[str, Any]]]) -> list[Idle]:
    """What the ranks' answers of :func:`measure_bubble` come to, for each number of micro-batches."""
    found = []
    for stages in zip(*answers, strict=True):
        m = stages[0]["micro_batches"]
        waited = [[1 - b / w for b, w in zip(stage["busy_s"], stage["wall_s"], strict=True)] for stage in stages]
        shares = [statistics.fmean(one) for one in zip(*waited, strict=True)]
        found.append(Idle(m, bubble(len(stages), m), statistics.median(shares), min(shares), max(shares)))
    return found

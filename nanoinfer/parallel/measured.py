"""What a chapter asks of its ranks: one model in several ways, timed, with all that was sent; several tasks at once."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from nanoinfer.engines.cached import CachedEngine
from nanoinfer.engines.engine import Engine
from nanoinfer.errors import RequestError, nearest
from nanoinfer.measure import metrics
from nanoinfer.measure.clock import repeat
from nanoinfer.models.gpt2 import GPT2
from nanoinfer.models.llama import Llama
from nanoinfer.models.registry import LoadedModel, load_model
from nanoinfer.parallel.collectives import Sent, Wire
from nanoinfer.parallel.context import ContextEngine
from nanoinfer.parallel.data_parallel import assign
from nanoinfer.parallel.pipeline import PipelineEngine
from nanoinfer.parallel.ring import ring_all_reduce
from nanoinfer.parallel.tensor import shard
from nanoinfer.sampling.params import SamplingParams

Call = dict[str, Any]

#: Every way to share a model, and the engine of a rank in it. ``one`` is rank 0 alone, while the others wait.
WAYS: Final[Mapping[str, Callable[[LoadedModel, Wire], Engine]]] = {
    "one": lambda loaded, _: CachedEngine(loaded),
    "replicas": lambda loaded, _: CachedEngine(loaded),
    "tp": lambda loaded, wire: CachedEngine(shard(loaded, wire, uneven=True)),
    "pp": lambda loaded, wire: PipelineEngine(loaded, wire),
    "pp, filled": lambda loaded, wire: PipelineEngine(loaded, wire, micro_batches=wire.size),
    "cp": lambda loaded, wire: ContextEngine(loaded, wire),
}


def several(wire: Wire, tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A task for :func:`~nanoinfer.parallel.launch.launch` made of several, one behind the other.

    Args:
        wire: to the other ranks; its log is empty at the beginning of each task.
        tasks: the options of each, by ``module:function``.
    """
    found = {}
    for task, options in tasks.items():
        wire.log.clear()
        module, _, function = task.partition(":")
        found[task] = getattr(importlib.import_module(module), function)(wire, **options)
    return found


def split(
    wire: Wire,
    *,
    model: str,
    prompts: Sequence[Sequence[int]],
    new: int,
    ways: Sequence[str] = tuple(WAYS),
    rounds: int = 2,
    **place: Any,
) -> dict[str, dict[str, Any]]:
    """A task for :func:`~nanoinfer.parallel.launch.launch`: the same prompts answered in several ways, in turns.

    Args:
        wire: to the other ranks.
        model: by name.
        prompts: of one length. Replicas deal them out, in every other way they are one batch.
        new: tokens of each answer, the most likely ones.
        ways: of :data:`WAYS`.
        rounds: that count, after one of two tokens that warms up.
        place: ``device``, ``dtype`` and ``seed`` of the model.

    Returns:
        of each way that this rank took part in: ``token_ids`` of its prompts; ``prefill_s`` of each round and
        ``step_s`` of each decode step, in seconds; the calls of the last round's ``prefill`` and of all its decode
        ``steps``, as :func:`summed` has them; ``weights``, the bytes that this rank needs of the model.

    Raises:
        RequestError: an unknown way, or what the way itself refuses.
    """
    if unknown := [way for way in ways if way not in WAYS]:
        raise RequestError(f"no way '{unknown[0]}' to share a model; {nearest(unknown[0], WAYS)}")
    loaded = load_model(model, **place)
    cold, warm = (SamplingParams(max_tokens=n, ignore_eos=True) for n in (min(2, new), new))
    engines = {way: WAYS[way](loaded, wire) for way in ways}
    dealt = assign([len(prompt) + new for prompt in prompts], wire.size)[wire.rank]
    own = {"one": range(len(prompts)) if wire.rank == 0 else (), "replicas": dealt}
    found: dict[str, dict[str, Any]] = {}
    for turn in range(1 + rounds):
        for way, engine in engines.items():
            mine = own.get(way, range(len(prompts)))
            dist.barrier(wire.group)
            if not mine:
                continue
            answer = _answer(wire, engine, [prompts[i] for i in mine], warm if turn else cold)
            if turn == 0:
                found[way] = {"weights": sum(p.nbytes for p in _parameters(engine)), "prefill_s": [], "step_s": []}
                continue
            found[way]["prefill_s"].append(answer.pop("prefill_s"))
            found[way]["step_s"] += answer.pop("step_s")
            found[way] |= answer
    return found


def _parameters(engine: Engine) -> Iterable[torch.Tensor]:
    model: Any = engine.model
    parameters: Iterable[torch.Tensor] = model.parameters()
    return parameters


def _answer(wire: Wire, engine: Engine, prompts: list[Sequence[int]], params: SamplingParams) -> dict[str, Any]:
    wire.log.clear()
    generation, first = engine.stream(prompts, params), None
    for _ in generation:
        first = len(wire.log) if first is None else first
    trace = generation.completions[0].trace  # all rows of a batch get their tokens together
    return {
        "token_ids": [done.token_ids for done in generation.completions],
        "prefill_s": metrics.ttft(trace),
        "step_s": metrics.chunk_gaps(trace),
        "prefill": summed(wire.log[:first]),
        "steps": summed(wire.log[first:]),
    }


def crowding(wire: Wire, *, model: str, rows: Sequence[int], **place: Any) -> dict[str, list[float]]:
    """A task for :func:`~nanoinfer.parallel.launch.launch`: how much ranks that share a machine hold each other up.

    Args:
        wire: to the other ranks.
        model: by name.
        rows: each a measurement of its own.
        place: ``device``, ``dtype`` and ``seed`` of the model.

    Returns:
        seconds of the model's products of so many rows (:func:`products_s`), on all ranks ``together``; and on rank 0
        ``alone``, while the others wait.
    """
    loaded = load_model(model, **place)
    found: dict[str, list[float]] = {"alone": [], "together": []}
    for count in rows:
        for case in found:
            dist.barrier(wire.group)
            if case == "together" or wire.rank == 0:
                found[case].append(products_s(loaded.model, count))
    return found


@torch.inference_mode()
def products_s(model: GPT2 | Llama, rows: int, repeats: int = 5) -> float:
    """Seconds of the products of all layers with ``rows`` rows, each behind another, so that weights come from memory.

    The median of so many repeats, after two that warm up.
    """
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    inputs = {weight.shape[1]: weight.new_ones(rows, weight.shape[1]) for weight in weights}

    def work() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    timing = repeat(work, device=weights[0].device, warmup=2, repeats=repeats)
    median = timing.summary.median
    assert median is not None
    return median


def summed(log: Iterable[Sent]) -> list[Call]:
    """Calls of one kind and size of message together: ``kind``, ``message``, ``calls``, ``sent`` and ``seconds``."""
    found: dict[tuple[str, int], Call] = {}
    for call in log:
        new = {"kind": call.kind, "message": call.message, "calls": 0, "sent": 0.0, "seconds": 0.0}
        alike = found.setdefault((call.kind, call.message), new)
        alike["calls"] += 1
        alike["sent"] += call.sent
        alike["seconds"] += call.seconds
    return list(found.values())


def rings(wire: Wire, *, numbers: int, device: str = "cpu") -> dict[str, Any]:
    """A task for :func:`~nanoinfer.parallel.launch.launch`: the same sum by PyTorch's all-reduce and by the ring.

    Args:
        wire: to the other ranks.
        numbers: that each rank has, fp32.
        device: of all ranks.

    Returns:
        by how much the two sums ``differ`` at most, and the calls of each: ``library`` and ``ring`` (:func:`summed`).
    """
    x = torch.randn(numbers, generator=torch.Generator().manual_seed(wire.rank)).to(device)
    for warm_up in (wire.all_reduce, partial(ring_all_reduce, wire)):
        warm_up(x.clone())
    wire.log.clear()
    theirs = wire.all_reduce(x.clone())
    library = summed(wire.log)
    wire.log.clear()
    ours = ring_all_reduce(wire, x.clone())
    return {"differ": float((ours - theirs).abs().max()), "library": library, "ring": summed(wire.log)}

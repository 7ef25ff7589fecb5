"""The experiments of chapter 19, tasks for :func:`~nanoinfer.parallel.launch.launch`; times are seconds on this rank.

What is compared takes turns, so that disturbances of the machine fall on all cases alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.configs.config import SHAPES, ModelConfig
from nanoinfer.engines.engine import Engine
from nanoinfer.engines.static import CachedEngine
from nanoinfer.errors import RequestError, nearest
from nanoinfer.measure import metrics
from nanoinfer.measure.clock import now, repeat, timed
from nanoinfer.models.gpt2 import GPT2
from nanoinfer.models.llama import Llama
from nanoinfer.models.model import Decoder
from nanoinfer.models.registry import LoadedModel, load_model
from nanoinfer.models.weights import assemble, random_state
from nanoinfer.parallel.collectives import Communicator, ring_all_reduce, total_calls
from nanoinfer.parallel.context import ContextEngine, RingCache, rank_positions
from nanoinfer.parallel.data_parallel import assign
from nanoinfer.parallel.pipeline import PipelineEngine, Stage, cut
from nanoinfer.parallel.tensor import shard
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.theory.communication import bubble

K = TypeVar("K")
T = TypeVar("T")

#: The engine of a rank in each strategy. ``one`` is rank 0 alone, while the others wait.
STRATEGIES: Final[Mapping[str, Callable[[LoadedModel, Communicator], Engine]]] = {
    "one": lambda loaded, _: CachedEngine(loaded),
    "replicas": lambda loaded, _: CachedEngine(loaded),
    "tp": lambda loaded, comm: CachedEngine(shard(loaded, comm, uneven=True)),
    "pp": lambda loaded, comm: PipelineEngine(loaded, comm),
    "pp, filled": lambda loaded, comm: PipelineEngine(loaded, comm, micro_batches=comm.size),
    "cp": lambda loaded, comm: ContextEngine(loaded, comm),
}
#: Of random models: wide, so that products are most of the work, and with a small vocabulary, so that stages are equal.
SHAPE = replace(SHAPES["tiny-llama"], d_model=384, n_heads=6, n_kv_heads=6, d_head=64, d_ff=1024)


def take_turns(comm: Communicator, cases: Mapping[K, Callable[[], T]], rounds: int) -> dict[K, list[T]]:
    """Results of each case in each round; all ranks start a case together."""
    results: dict[K, list[T]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case, run in cases.items():
            dist.barrier(comm.group)
            results[case].append(run())
    return results


def compare_strategies(
    comm: Communicator,
    *,
    model: str,
    prompts: Sequence[Sequence[int]],
    new: int,
    strategies: Sequence[str] = tuple(STRATEGIES),
    rounds: int = 2,
    **place: Any,
) -> dict[str, dict[str, Any]]:
    """The same prompts, of one length, answered by a model in several :data:`STRATEGIES` with ``new`` greedy tokens.

    ``place`` has the model's ``device``, ``dtype`` and ``seed``. For each strategy that this rank took part in, the
    answer has the ``token_ids``; ``prefill_s`` of each round and ``step_s`` of each decode step; the calls of the last
    round's ``prefill`` and of its decode ``steps`` (:func:`~.collectives.total_calls`); ``weights`` in bytes. Raises
    :class:`RequestError` for an unknown strategy, or as the strategy itself.
    """
    if unknown := [name for name in strategies if name not in STRATEGIES]:
        raise RequestError(f"unknown strategy '{unknown[0]}'; {nearest(unknown[0], STRATEGIES)}")
    loaded = load_model(model, **place)
    engines = {name: STRATEGIES[name](loaded, comm) for name in strategies}
    mine = assign([len(prompt) + new for prompt in prompts], comm.size)[comm.rank]
    parts = {"one": prompts if comm.rank == 0 else (), "replicas": [prompts[i] for i in mine]}

    def run(tokens: int, rounds: int) -> dict[str, list[dict[str, Any]]]:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        cases = {
            name: partial(_answer, comm, engine, parts.get(name, prompts), params) for name, engine in engines.items()
        }
        return take_turns(comm, cases, rounds)

    run(min(2, new), 1)  # warms up
    return {
        name: {
            **answers[-1],
            "weights": sum(p.nbytes for p in engines[name].model.parameters()),
            "prefill_s": [answer["prefill_s"] for answer in answers],
            "step_s": [seconds for answer in answers for seconds in answer["step_s"]],
        }
        for name, answers in run(new, rounds).items()
        if parts.get(name, prompts)
    }


def _answer(
    comm: Communicator, engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> dict[str, Any]:
    if not prompts:
        return {}
    comm.log.clear()
    generation, in_prefill = engine.stream(list(prompts), params), None
    for _ in generation:
        in_prefill = len(comm.log) if in_prefill is None else in_prefill
    trace = generation.completions[0].trace  # all rows of a batch get their tokens together
    return {
        "token_ids": [completion.token_ids for completion in generation.completions],
        "prefill_s": metrics.ttft(trace),
        "step_s": metrics.chunk_gaps(trace),
        "prefill": total_calls(comm.log[:in_prefill]),
        "steps": total_calls(comm.log[in_prefill:]),
    }


def compare_all_reduces(comm: Communicator, *, numbers: int, device: str = "cpu") -> dict[str, Any]:
    """The sum of ``numbers`` fp32 numbers of each rank by PyTorch's all-reduce and by :func:`~.ring_all_reduce`.

    The answer has by how much the sums ``differ`` at most, and the calls of each: ``library`` and ``ring``.
    """
    x = torch.randn(numbers, generator=torch.Generator().manual_seed(comm.rank)).to(device)
    cases: dict[str, Callable[[Tensor], Tensor]] = {"library": comm.all_reduce, "ring": partial(ring_all_reduce, comm)}
    sums, calls = [], {}
    for name, reduce in cases.items():
        reduce(x.clone())  # warms up
        comm.log.clear()
        sums.append(reduce(x.clone()))
        calls[name] = total_calls(comm.log)
    return {"differ": float((sums[0] - sums[1]).abs().max()), **calls}


def contention(comm: Communicator, *, model: str, rows: Sequence[int], **place: Any) -> dict[str, list[float]]:
    """:func:`time_products` for each number of rows, on all ranks ``together`` and on rank 0 ``alone``."""
    loaded = load_model(model, **place)
    seconds: dict[str, list[float]] = {"alone": [], "together": []}
    for count in rows:
        measure = partial(time_products, loaded.model, count)
        cases = {"alone": measure if comm.rank == 0 else lambda: None, "together": measure}
        for case, (result,) in take_turns(comm, cases, 1).items():
            seconds[case] += [] if result is None else [result]
    return seconds


@torch.inference_mode()
def time_products(model: Decoder, rows: int, repeats: int = 5) -> float:
    """Median seconds of the products of all layers with ``rows`` rows, in sequence: weights come from memory."""
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    inputs = {weight.shape[1]: weight.new_ones(rows, weight.shape[1]) for weight in weights}

    def work() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    timing = repeat(work, device=weights[0].device, warmup=2, repeats=repeats)
    median = timing.summary.median
    assert median is not None
    return median


def measure_bubble(
    comm: Communicator,
    *,
    micro_batches: Sequence[int] = (1, 2, 4, 8),
    layers_per_stage: int = 2,
    rows: int = 8,
    tokens: int = 128,
    repeats: int = 5,
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """Prefill of a random model of :data:`SHAPE` over equal stages, for several numbers of micro-batches.

    The batch has ``rows`` prompts of ``tokens`` each. The answer has ``busy_s``, what this stage computed in each pass,
    and ``wall_s``, until all stages were done; a first pass of each number is dropped. Raises :class:`RequestError` for
    micro-batches that do not divide the rows.
    """
    if odd := [m for m in micro_batches if m < 1 or rows % m]:
        raise RequestError(f"{rows} rows cannot be cut into {odd[0]} equal micro-batches; take a divisor of {rows}")
    stage = Stage(cut(_random_model(layers_per_stage * comm.size, tokens, device), comm.rank, comm.size), comm)
    ids = torch.arange(rows * tokens, device=device).view(rows, tokens) % SHAPE.vocab_size
    positions = torch.arange(tokens, device=device).expand(rows, tokens)

    def run(m: int) -> tuple[float, float]:
        start, stage.busy = now(), 0.0
        for part in zip(ids.chunk(m), positions.chunk(m), strict=True):
            stage(*part, last_only=True)
        dist.barrier(comm.group)
        return stage.busy, now() - start

    with torch.inference_mode():
        passes = take_turns(comm, {m: partial(run, m) for m in micro_batches}, 1 + repeats)
    return [
        {"micro_batches": m, "busy_s": [busy for busy, _ in times[1:]], "wall_s": [wall for _, wall in times[1:]]}
        for m, times in passes.items()
    ]


def _random_model(n_layers: int, context: int, device: str) -> GPT2 | Llama:
    config = replace(SHAPE, n_layers=n_layers, context=max(context, SHAPE.context))
    return assemble(config, random_state(config, torch.float32, 0, torch.device(device)), torch.device(device))


@dataclass(frozen=True)
class IdleShare:
    """The share of the time that a stage waits, as a mean over stages."""

    micro_batches: int
    predicted: float  # for equal stages and no time between them
    measured: float  # the median over passes
    low: float
    high: float


def idle_shares(answers: Sequence[list[dict[str, Any]]]) -> list[IdleShare]:
    """For each number of micro-batches, from the ranks' results of :func:`measure_bubble`."""
    result = []
    for stages in zip(*answers, strict=True):
        m = stages[0]["micro_batches"]
        waited = [[1 - b / w for b, w in zip(stage["busy_s"], stage["wall_s"], strict=True)] for stage in stages]
        shares = [statistics.fmean(one_pass) for one_pass in zip(*waited, strict=True)]
        result.append(IdleShare(m, bubble(len(stages), m), statistics.median(shares), min(shares), max(shares)))
    return result


class TimedCache(RingCache):
    """A ring cache that adds up the seconds spent in it."""

    seconds = 0.0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out, seconds = timed(lambda: super(TimedCache, self).attend(layer, q, k, v, mask), q.device)
        self.seconds += seconds
        return out


def measure_overlap(
    comm: Communicator,
    *,
    tokens: Sequence[int] = (256, 1024, 4096),
    layers: int = 2,
    repeats: int = 5,
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """Prefill of one prompt with the ring's exchanges during attention, and in turn with it.

    The model is random, of :data:`SHAPE`: a KV head for every query head is the hardest case for the ring. The answer
    has for each number of ``tokens``, in each pass but the first, ``overlapped_s`` and ``in_turn_s`` until all ranks
    were done, ``exchange_s`` and ``attention_s`` of the latter; and ``sent``, the bytes that left this rank in a pass.
    """
    model = _random_model(layers, max(tokens), device)
    config: ModelConfig = model.config

    def run(length: int, overlap: bool) -> dict[str, float]:
        cache = TimedCache(config, comm, 1, length, 0, device, torch.float32, overlap)
        positions = torch.tensor([rank_positions(length, comm.rank, comm.size)], device=device)
        comm.log.clear()
        dist.barrier(comm.group)  # after the cache is allocated

        def work() -> None:
            model.hidden(positions % config.vocab_size, positions, cache)
            dist.barrier(comm.group)

        _, wall = timed(work, device)
        exchange, sent = sum(call.seconds for call in comm.log), sum(call.sent for call in comm.log)
        return {"wall": wall, "exchange_s": exchange, "attention_s": cache.seconds - exchange, "sent": sent}

    answer = []
    with torch.inference_mode():
        for length in tokens:
            cases = {"overlapped_s": partial(run, length, True), "in_turn_s": partial(run, length, False)}
            passes = {case: results[1:] for case, results in take_turns(comm, cases, 1 + repeats).items()}
            walls = {case: [result["wall"] for result in results] for case, results in passes.items()}
            parts = {key: [result[key] for result in passes["in_turn_s"]] for key in ("exchange_s", "attention_s")}
            answer.append({"tokens": length, **walls, **parts, "sent": passes["in_turn_s"][0]["sent"]})
    return answer

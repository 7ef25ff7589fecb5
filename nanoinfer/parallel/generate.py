"""``nanoinfer generate --tp N`` and ``--pp N``: one reply by several ranks, the same as by one process."""

from __future__ import annotations

import secrets
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Final

import torch.distributed as dist

from nanoinfer.engines.engine import Engine
from nanoinfer.engines.load import load
from nanoinfer.errors import RequestError, check, nearest
from nanoinfer.log import say
from nanoinfer.measure.trace import Trace
from nanoinfer.models.registry import check_dtype, find_model, load_model
from nanoinfer.parallel.collectives import CommRecord, Communicator
from nanoinfer.parallel.launch import launch
from nanoinfer.parallel.pipeline import PipelineEngine
from nanoinfer.parallel.tensor import is_even, shard
from nanoinfer.reply import GenerateOptions, completion_record, summary_line
from nanoinfer.sampling.params import SamplingParams

SPLITS: Final = {"tp": "tensor parallel", "pp": "pipeline parallel"}
#: Engines that run on a slice of a model; ``auto`` tries optimizations that slices do not have.
ENGINES: Final = ("naive", "cached", "batched", "continuous", "speculative")
LONGEST_S: Final = 24 * 3600.0


def generate(options: GenerateOptions, prints: bool = True) -> dict[str, Any]:
    """A reply by ``tp`` or ``pp`` ranks, as the record that ``nanoinfer generate --json`` prints.

    Its ``parallel`` has the split, the bytes that each rank sent for the prompt and for the tokens after the first,
    and rank 0's calls by kind. ``prints``: rank 0 writes the text to standard output as it comes. Raises
    :class:`RequestError` for what cannot be split, or not in this way.
    """
    split, ranks = _split(options)
    params = options.sampling_params()
    find_model(options.model)
    check_dtype(options.device, options.dtype)
    if params.seed is None:  # all ranks must draw the same tokens
        params = replace(params, seed=secrets.randbits(63))
    task = {"options": asdict(options), "params": asdict(params), "split": split, "prints": prints}
    answers = launch(f"{__name__}:reply", ranks, task, device=options.device, timeout_s=LONGEST_S)
    first: dict[str, Any] = answers[0]["record"]
    sent = {phase: [answer["sent"][phase] for answer in answers] for phase in ("prompt", "tokens")}
    each = sum(sent["tokens"]) / (n - 1) if (n := first["output_tokens"]) > 1 else None
    traffic = {"split": SPLITS[split], "ranks": ranks, "sent_bytes": sent, "sent_bytes_per_token": each}
    return {**first, "parallel": {**traffic, "rank_0": answers[0]["calls"]}}


def figures_line(record: dict[str, Any]) -> str:
    """The figures of a reply in one line, as of one process, and how much the ranks sent."""
    line, traffic = summary_line(Trace(**record["trace"]), record["finish_reason"]), record["parallel"]
    each = traffic["sent_bytes_per_token"]
    sent = "" if each is None else f": {each / 1000:.1f} kB sent a token, by all together"
    return f"{line} | {traffic['ranks']} ranks, {traffic['split']}{sent}"


def _split(options: GenerateOptions) -> tuple[str, int]:
    tp, pp, engine = options.tp, options.pp, options.engine
    check("--tp", tp, at_least=1)
    check("--pp", pp, at_least=1)
    if tp > 1 and pp > 1:
        raise RequestError("--tp and --pp do not go together here: give one of them")
    if options.speed not in (None, "plain"):
        raise RequestError("--speed does not go with --tp or --pp: ranks run the plain model")
    if engine not in ENGINES:
        raise RequestError(f"no engine '{engine}' for several ranks; {nearest(engine, ENGINES)}")
    if pp > 1 and engine != "cached":
        raise RequestError(f"--pp runs the cached engine over stages, not '{engine}': leave --engine out")
    return ("tp", tp) if tp > 1 else ("pp", pp)


def reply(
    comm: Communicator, options: dict[str, Any], params: dict[str, Any], split: str, prints: bool
) -> dict[str, Any]:
    """This rank's part: what it sent, and at rank 0 the record."""
    settings, sampling = GenerateOptions(**options), SamplingParams(**params)
    prints = prints and comm.rank == 0
    if prints and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # any text must print, whatever the locale
    warnings.formatwarning = lambda message, *_, **__: f"warning: {' '.join(str(message).split())}\n"

    for turn in range(comm.size):  # rank 0 first, which downloads; and so at most one whole model is in memory
        if turn == comm.rank:
            engine = _engine(settings, comm, split, len(settings.prompt.encode()) + 2 + sampling.max_tokens)
        dist.barrier(comm.group)
    comm.log.clear()
    generation = engine.stream(settings.prompt, sampling)
    in_prompt = None
    for event in generation:
        in_prompt = len(comm.log) if in_prompt is None else in_prompt
        if prints:
            print(event.text, end="", flush=True)
    if prints:
        print(flush=True)
    phases = {"prompt": comm.log[:in_prompt], "tokens": comm.log[in_prompt:]}
    answer: dict[str, Any] = {"sent": {phase: sum(call.sent for call in calls) for phase, calls in phases.items()}}
    if comm.rank == 0:
        (completion,) = generation.completions
        answer["record"] = completion_record(engine, completion, sampling)
        answer["calls"] = {phase: _by_kind(calls) for phase, calls in phases.items()}
    return answer


def _engine(settings: GenerateOptions, comm: Communicator, split: str, most_tokens: int) -> Engine:
    """An engine over this rank's part of the model, which alone stays in memory."""
    loaded = load_model(settings.model, device=settings.device, dtype=settings.dtype, seed=settings.seed or 0)
    if split == "pp":
        return PipelineEngine(loaded, comm)
    config, options = loaded.model.config, dict[str, Any]()
    part = shard(loaded, comm, uneven=True)
    if comm.rank == 0 and not is_even(config, comm.size):
        heads = f"{config.n_heads} query heads and {config.n_kv_heads} KV heads"
        say(f"nanoinfer: {comm.size} ranks share {heads} unevenly, and the largest share decides the speed")
    if settings.engine == "continuous":  # else it would take what memory is free, and ranks would differ
        options["cache_tokens"] = min(most_tokens, config.context) + 8
    return load(part, settings.engine, **options)


def _by_kind(calls: Sequence[CommRecord]) -> dict[str, dict[str, float]]:
    kinds: dict[str, dict[str, float]] = {}
    for call in calls:
        total = kinds.setdefault(call.kind, {"calls": 0, "sent_bytes": 0.0, "seconds": 0.0})
        total["calls"] += 1
        total["sent_bytes"] += call.sent
        total["seconds"] += call.seconds
    return kinds

"""Offline batches: workers on a Ray cluster, each with an engine, and one driver that hands out shards.

Ray restarts a worker that dies, on another machine if need be, and reports the shards that died with it; the driver
hands these out again. It writes what comes back, so machines need no common disk. A driver that was killed is simply
started again: what is on the disk is done (:mod:`nanoinfer.cluster.shards`).
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanoinfer.cluster import BatchOptions
from nanoinfer.cluster.ray_runtime import check_room, connected, require
from nanoinfer.cluster.shards import Item, Row, Shards, read_prompts
from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.engines.load import load
from nanoinfer.errors import NanoinferError, RequestError, check
from nanoinfer.models.registry import find_model
from nanoinfer.sampling.params import SamplingParams

AT_ONCE = 2  # shards of a worker: while the last rows of one run, the next keeps the batch full
TRIES = 3  # of a shard whose worker died each time: then the shard is the cause


class Worker:
    """An engine somewhere in the cluster, with the sampling parameters of every prompt."""

    def __init__(self, model: str, params: SamplingParams, options: Mapping[str, Any]) -> None:
        engine = load(model, "continuous", **options)
        assert isinstance(engine, ContinuousEngine)
        self.engine, self.params = engine, params

    async def ready(self) -> None:
        """Returns once the model is loaded."""

    async def run(self, items: Sequence[Item]) -> list[Row]:
        """One row for each prompt, in order: an answer, or the error that it is."""
        return list(await asyncio.gather(*(self._row(item) for item in items)))

    async def _row(self, item: Item) -> Row:
        row: Row = {"index": item.index} | ({} if item.id is None else {"id": item.id})
        # Its own seed: what is drawn depends neither on what ran before it nor on how often the shard was begun.
        params = self.params
        if params.seed is not None:
            params = replace(params, seed=params.seed + item.index)
        if item.max_tokens is not None:
            params = replace(params, max_tokens=item.max_tokens)
        try:
            stream = await self.engine.submit(item.prompt, params)
            (completion,) = await stream.finished()
        except NanoinferError as error:
            return row | {"error": str(error)}
        if self.engine.tokenizer is None:
            row["token_ids"] = completion.token_ids
        else:
            row["text"] = completion.text
        return row | {
            "finish_reason": completion.finish_reason,
            "prompt_tokens": len(completion.prompt_ids),
            "completion_tokens": len(completion.token_ids),
        }


@dataclass(frozen=True)
class BatchResult:
    """Rows in all, errors among them, shards that were done before, and that were handed out again."""

    rows: int
    errors: int
    found: int
    again: int


def run_batch(options: BatchOptions, params: SamplingParams | None = None) -> BatchResult:
    """Answer all prompts of a file; after a kill of anything, call it again and it goes on where it was.

    ``out`` gets one row a prompt, in their order: ``index``, ``id`` if given, and ``text`` (``token_ids`` of a model
    without a tokenizer), ``finish_reason``, ``prompt_tokens``, ``completion_tokens``; or ``error``. Each prompt's
    seed is that of ``params``, if any, plus its index; without ``params``, they are those of ``options``.

    Raises:
        NanoinferError: prompts that cannot be read, answers of another batch in the way, no cluster or too little room
            in it, or a shard that brings down every worker.
    """
    find_model(options.model)
    if params is None:
        params = SamplingParams(
            max_tokens=options.max_tokens, temperature=options.temperature, seed=options.sampling_seed
        )
    if params.n != 1:
        raise RequestError("a batch has one answer a prompt: leave n at 1, and write a prompt as often as you want it")
    check("workers", options.workers, at_least=1)
    engine = options.engine_options()
    settings = {"model": options.model, "params": repr(params), **engine}
    shards = Shards(read_prompts(options.prompts), options.out, settings, options.shard)
    with shards.held():
        missing = shards.missing()
        found, again = shards.count - len(missing), 0
        if missing:
            with connected(options.address, options.workers * options.cpus) as ray:
                check_room(options.workers, options.cpus, options.gpus)
                actor = ray.remote(
                    num_cpus=options.cpus, num_gpus=options.gpus, max_restarts=-1, scheduling_strategy="SPREAD"
                )(Worker)
                n_workers = min(options.workers, len(missing))
                workers = [actor.remote(options.model, params, engine) for _ in range(n_workers)]
                again = hand_out(shards, missing, workers)
        rows, errors = shards.finish()
    return BatchResult(rows, errors, found, again)


def hand_out(shards: Shards, missing: Sequence[int], workers: Sequence[Any]) -> int:
    """Give shards to workers that have room, write what comes back, and retry what was lost; how often that was."""
    ray = require()
    waiting, lost = deque(missing), Counter[int]()
    pending: dict[Any, tuple[int, int | None]] = {_ready(actor): (worker, None) for worker, actor in enumerate(workers)}
    has: list[list[int] | None] = [None] * len(workers)  # shards; None of a worker that is not ready yet
    done = shards.count - len(missing)
    while waiting or any(shard is not None for _, shard in pending.values()):
        (ref,), _ = ray.wait(list(pending), num_returns=1)
        worker, shard = pending.pop(ref)
        try:
            rows = ray.get(ref)
        except ray.exceptions.RayTaskError:  # a mistake of ours
            raise
        except ray.exceptions.RayError as error:
            if shard is None:  # it does not start, and Ray has given it up
                raise NanoinferError(f"a worker does not start: {_reason(error)}") from None
            lost[shard] += 1
            if lost[shard] == TRIES:
                first, last = shards.of(shard)[0].index, shards.of(shard)[-1].index
                raise NanoinferError(
                    f"prompts {first} to {last} have brought down their worker {TRIES} times (out of memory?): "
                    "all that was done is kept; mend them, or give the workers more room, and run it again"
                ) from None
            waiting.appendleft(shard)
            if has[worker] is not None:  # the first of its shards that comes back like this
                has[worker] = None
                pending[_ready(workers[worker])] = (worker, None)
        else:
            if shard is None:
                has[worker] = []
            else:
                shards.write(shard, rows)
                done += 1
                print(f"\rnanoinfer: {done} of {shards.count} shards", end="", file=sys.stderr, flush=True)
                if (running := has[worker]) is not None:
                    running.remove(shard)
        for worker, running in enumerate(has):  # all workers: one takes over what another has lost
            while running is not None and waiting and _has_room(running, waiting[0], lost):
                running.append(shard := waiting.popleft())
                pending[workers[worker].run.remote(shards.of(shard))] = (worker, shard)
    print(file=sys.stderr)
    return lost.total()


def _has_room(running: Sequence[int], shard: int, lost: Mapping[int, int]) -> bool:
    """Whether a worker that runs these may get this one too. Suspects run alone, to find the one that crashes it."""
    alone = any(lost[other] for other in (*running, shard))
    return not running if alone else len(running) < AT_ONCE


def _ready(worker: Any) -> Any:
    """Resolves when the worker is (re)started, however long that takes."""
    return worker.ready.options(max_task_retries=-1).remote()


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__

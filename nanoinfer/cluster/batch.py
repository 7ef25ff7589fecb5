"""Offline batches: workers on a Ray cluster, each with an engine, and one driver that deals out shards.

Ray restarts a worker that dies, on another machine if need be, and reports the shards that died with it; the driver
deals these out again. It writes what comes back, so machines need no common disk. A driver that was killed is simply
started again: what is on the disk is done (:mod:`nanoinfer.cluster.shards`).
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanoinfer.cluster.shards import Item, Row, Shards, read_prompts
from nanoinfer.cluster.start import check_room, connected, require
from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.engines.load import load
from nanoinfer.errors import NanoinferError, RequestError
from nanoinfer.models.registry import find_model
from nanoinfer.sampling.params import SamplingParams

AT_ONCE = 2  # shards of a worker: while the last rows of one run, the next keeps the batch full
TRIES = 3  # of a shard whose worker died each time: then it is the shard that kills


class Worker:
    """An engine somewhere in the cluster.

    Args:
        model: as for :func:`nanoinfer.load`.
        params: for every prompt.
        options: of the continuous engine, and device, dtype and seed.
    """

    def __init__(self, model: str, params: SamplingParams, options: Mapping[str, Any]) -> None:
        engine = load(model, "continuous", **options)
        assert isinstance(engine, ContinuousEngine)
        self.engine, self.params = engine, params

    async def ready(self) -> None:
        """Answered once the model is loaded."""

    async def run(self, items: Sequence[Item]) -> list[Row]:
        """One row for each prompt, in order: an answer, or the error that it is."""
        return list(await asyncio.gather(*(self._row(item) for item in items)))

    async def _row(self, item: Item) -> Row:
        row: Row = {"index": item.index} | ({} if item.id is None else {"id": item.id})
        # Its own seed: what is drawn does not depend on what ran before it, nor on how often the shard was begun.
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
class Done:
    """Of a batch: rows in all, errors among them, shards that were there before, and that were dealt again."""

    rows: int
    errors: int
    found: int
    again: int


def run_batch(
    model: str,
    prompts: Path,
    out: Path,
    *,
    params: SamplingParams | None = None,
    workers: int = 2,
    address: str | None = None,
    cpus: int = 1,
    gpus: float = 0,
    shard: int = 64,
    options: Mapping[str, Any] | None = None,
) -> Done:
    """Answer all prompts of a file; after a kill of anything, call it again and it goes on where it was.

    Args:
        model: as for :func:`nanoinfer.load`; every machine must be able to load it.
        prompts: as for :func:`nanoinfer.cluster.shards.read_prompts`.
        out: gets one row a prompt, in their order: ``index``, ``id`` if given, and ``text`` (``token_ids`` of a model
            without a tokenizer), ``finish_reason``, ``prompt_tokens``, ``completion_tokens``; or ``error``.
        params: for every prompt; greedy if None. Each prompt's seed is this one's plus its index.
        workers: engines, spread over the machines.
        address: of a Ray cluster, as for :func:`nanoinfer.cluster.start.connected`.
        cpus: cores of a worker.
        gpus: of a worker.
        shard: prompts that are dealt out, and written, together.
        options: of the engine, and ``device``, ``dtype`` and ``seed`` (of random weights).

    Raises:
        NanoinferError: prompts that cannot be read, answers of another batch in the way, no cluster or too little room
            in it, or a shard that brings down every worker.
    """
    find_model(model)
    params, options = params or SamplingParams(), dict(options or {})
    if params.n != 1:
        raise RequestError("a batch has one answer a prompt: leave n at 1, and write a prompt as often as you want it")
    if workers < 1:
        raise RequestError(f"workers must be at least 1, got {workers}")
    shards = Shards(read_prompts(prompts), out, {"model": model, "params": repr(params), **options}, shard)
    with shards.held():
        missing = shards.missing()
        found, again = shards.count - len(missing), 0
        if missing:
            with connected(address, workers * cpus) as ray:
                check_room(workers, cpus, gpus)
                kind = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=-1, scheduling_strategy="SPREAD")(Worker)
                team = [kind.remote(model, params, options) for _ in range(min(workers, len(missing)))]
                again = deal(shards, missing, team)
        rows, errors = shards.finish()
    return Done(rows, errors, found, again)


def deal(shards: Shards, missing: Sequence[int], team: Sequence[Any]) -> int:
    """Give shards to whoever is ready, write what comes back, and deal again what was lost; how often that was."""
    ray = require()
    waiting, lost = deque(missing), Counter[int]()
    under_way: dict[Any, tuple[int, int | None]] = {_ready(worker): (who, None) for who, worker in enumerate(team)}
    has: list[list[int] | None] = [None] * len(team)  # shards; None of a worker that is still to say that it is there
    done = shards.count - len(missing)
    while waiting or any(shard is not None for _, shard in under_way.values()):
        (ref,), _ = ray.wait(list(under_way), num_returns=1)
        who, shard = under_way.pop(ref)
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
            if has[who] is not None:  # the first of its shards that comes back like this
                has[who] = None
                under_way[_ready(team[who])] = (who, None)
        else:
            if shard is None:
                has[who] = []
            else:
                shards.write(shard, rows)
                done += 1
                print(f"\rnanoinfer: {done} of {shards.count} shards", end="", file=sys.stderr, flush=True)
                if (own := has[who]) is not None:
                    own.remove(shard)
        for who, own in enumerate(has):  # all of them: what one has lost may be another's
            while own is not None and waiting and _has_room(own, waiting[0], lost):
                own.append(shard := waiting.popleft())
                under_way[team[who].run.remote(shards.of(shard))] = (who, shard)
    print(file=sys.stderr)
    return lost.total()


def _has_room(own: Sequence[int], shard: int, lost: Mapping[int, int]) -> bool:
    """Whether a worker that has these may get this one too. One that was lost before runs alone: which one kills?"""
    alone = any(lost[other] for other in (*own, shard))
    return not own if alone else len(own) < AT_ONCE


def _ready(worker: Any) -> Any:
    """Is answered when the worker is there (again), however long that takes."""
    return worker.ready.options(max_task_retries=-1).remote()


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__

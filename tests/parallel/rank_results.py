"""What ranks compute for all test files, in one launch for each number of ranks: starting them takes seconds."""

from __future__ import annotations

import atexit
import functools
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock

from nanoinfer.errors import NanoinferError
from nanoinfer.parallel.collectives import Communicator
from nanoinfer.parallel.generate import reply
from nanoinfer.parallel.launch import launch
from nanoinfer.reply import GenerateOptions
from tests.parallel import context_ranks, expert_ranks, pipeline_ranks, slice_ranks

Ends = dict[str, list[int]]
HERE = "tests.parallel.rank_results"
SAMPLED: dict[str, Any] = {"max_tokens": 9, "temperature": 1.2, "top_p": 0.9, "seed": 7}
#: What two ranks reply to.
REPLIES = {
    "tp": GenerateOptions(model="random:tiny-llama", prompt="hello", engine="continuous", tp=2, **SAMPLED),
    "pp": GenerateOptions(model="random:tiny-llama", prompt="hello", pp=2, **SAMPLED),
}
#: Tasks of the library that two ranks do too.
OF_TWO: dict[str, dict[str, Any]] = {
    "nanoinfer.parallel.data_parallel:generate": {
        "model": "random:tiny-llama",
        "prompts": [f"prompt {'long ' * i}{i}" for i in range(5)],
        "params": {"max_tokens": 6},
        "seed": 3,
    },
    "nanoinfer.parallel.experiments:compare_strategies": {
        "model": "random:tiny-llama",
        "prompts": [[7, 1, 99, 3, 5, 8], [6, 250, 4, 4, 2, 9], [31, 41, 59, 26, 53, 58]],
        "new": 4,
        "rounds": 2,
        "seed": 5,
    },
    "nanoinfer.parallel.experiments:compare_all_reduces": {"numbers": 12},
    "nanoinfer.parallel.experiments:contention": {"model": "random:tiny-llama", "rows": [1, 30]},
}


def answers(ranks: int, task: str) -> list[Any]:
    """The result of every rank for a task of the library, or of this module by its name."""
    if isinstance(results := _results(ranks), Exception):
        raise results
    return [result[task if ":" in task else f"{HERE}:of_{task}"] for result in results]


def reply_task(split: str) -> dict[str, Any]:
    """What ``nanoinfer generate`` launches for one of the :data:`REPLIES`."""
    options = REPLIES[split]
    params = asdict(options.sampling_params())
    return {"options": asdict(options), "params": params, "split": split, "prints": False}


@functools.cache
def _results(ranks: int) -> list[Any] | Exception:
    """Of one launch, which the workers of pytest-xdist share."""
    if (run := os.environ.get("PYTEST_XDIST_TESTRUNUID")) is None:
        return _launch(ranks)
    path = Path(tempfile.gettempdir()) / f"nanoinfer-tests-{run}-{ranks}.json"
    lock = f"{path}.lock"
    with FileLock(lock):
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
        results = _launch(ranks)
        if not isinstance(results, Exception):
            path.write_text(json.dumps(results), encoding="utf-8")
            for file in (path, Path(lock)):
                atexit.register(file.unlink, missing_ok=True)
        return results


def _launch(ranks: int) -> list[Any] | Exception:
    tasks: dict[str, dict[str, Any]] = {
        f"{HERE}:of_pipeline": {"ends": pipeline_ends()},
        f"{HERE}:of_context": {"ends": context_ends()},
        f"{HERE}:of_expert": {},
        f"{HERE}:of_slice": {},
        **({**OF_TWO, f"{HERE}:of_replies": {"tasks": [reply_task(split) for split in REPLIES]}} if ranks == 2 else {}),
    }
    try:
        return launch("nanoinfer.parallel.launch:run_tasks", ranks, {"tasks": tasks})
    except NanoinferError as error:  # cached too, else every test would launch again
        return error


@functools.cache
def pipeline_ends() -> Ends:
    return {name: pipeline_ranks.ends(c, pipeline_ranks.RAGGED) for name, c in pipeline_ranks.CONFIGS.items()}


@functools.cache
def context_ends() -> Ends:
    return {name: pipeline_ranks.ends(c, context_ranks.prompts(13)) for name, c in context_ranks.CONFIGS.items()}


def of_pipeline(comm: Communicator, ends: Ends) -> Any:
    return pipeline_ranks.check(comm, ends)


def of_context(comm: Communicator, ends: Ends) -> Any:
    return context_ranks.check(comm, ends)


def of_expert(comm: Communicator) -> Any:
    return expert_ranks.check(comm)


def of_slice(comm: Communicator) -> Any:
    return slice_ranks.check(comm)


def of_replies(comm: Communicator, tasks: list[dict[str, Any]]) -> Any:
    return {task["split"]: reply(comm, **task) for task in tasks}

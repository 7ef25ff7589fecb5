"""What ranks do for all test files, in one launch for each number of ranks: starting them takes seconds."""

from __future__ import annotations

import functools
from typing import Any

from nanoinfer.errors import NanoinferError
from nanoinfer.parallel.collectives import Wire
from nanoinfer.parallel.launch import launch
from tests.parallel import context_ranks, expert_ranks, pipeline_ranks, slice_ranks

Ends = dict[str, list[int]]
HERE = "tests.parallel.together"
#: Tasks of the library that two ranks do too, each for one test file.
OF_TWO: dict[str, dict[str, Any]] = {
    "nanoinfer.parallel.data_parallel:generate": {
        "model": "random:tiny-llama",
        "prompts": [f"prompt {'long ' * i}{i}" for i in range(5)],
        "params": {"max_tokens": 6},
        "seed": 3,
    },
    "nanoinfer.parallel.measured:split": {
        "model": "random:tiny-llama",
        "prompts": [[7, 1, 99, 3, 5, 8], [6, 250, 4, 4, 2, 9], [31, 41, 59, 26, 53, 58]],
        "new": 4,
        "rounds": 2,
        "seed": 5,
    },
    "nanoinfer.parallel.measured:rings": {"numbers": 12},
    "nanoinfer.parallel.measured:crowding": {"model": "random:tiny-llama", "rows": [1, 30]},
}


def answers(ranks: int, task: str) -> list[Any]:
    """What every rank found for one test file: of a task of the library, or of this module by its name."""
    if isinstance(found := _found(ranks), Exception):
        raise found
    return [answer[task if ":" in task else f"{HERE}:of_{task}"] for answer in found]


@functools.cache
def _found(ranks: int) -> list[Any] | Exception:
    tasks: dict[str, dict[str, Any]] = {
        f"{HERE}:of_pipeline": {"ends": pipeline_ends()},
        f"{HERE}:of_context": {"ends": context_ends()},
        f"{HERE}:of_expert": {},
        f"{HERE}:of_slice": {},
        **(OF_TWO if ranks == 2 else {}),
    }
    try:
        return launch("nanoinfer.parallel.measured:several", ranks, {"tasks": tasks})
    except NanoinferError as error:  # kept too, or every test would launch anew
        return error


@functools.cache
def pipeline_ends() -> Ends:
    return {name: pipeline_ranks.ends(c, pipeline_ranks.RAGGED) for name, c in pipeline_ranks.CONFIGS.items()}


@functools.cache
def context_ends() -> Ends:
    return {name: pipeline_ranks.ends(c, context_ranks.prompts(13)) for name, c in context_ranks.CONFIGS.items()}


def of_pipeline(wire: Wire, ends: Ends) -> Any:
    return pipeline_ranks.check(wire, ends)


def of_context(wire: Wire, ends: Ends) -> Any:
    return context_ranks.check(wire, ends)


def of_expert(wire: Wire) -> Any:
    return expert_ranks.check(wire)


def of_slice(wire: Wire) -> Any:
    return slice_ranks.check(wire)

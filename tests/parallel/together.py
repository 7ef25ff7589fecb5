"""What ranks do for all test files, in one launch for each number of ranks: starting them takes seconds."""

from __future__ import annotations

import functools
from typing import Any

from nanoinfer.errors import NanoinferError
from nanoinfer.parallel.launch import launch
from nanoinfer.parallel.wire import Wire
from tests.parallel import context_ranks, expert_ranks, pipeline_ranks, slice_ranks

Ends = dict[str, list[int]]


def answers(ranks: int, of: str) -> list[Any]:
    """What every rank found for one test file."""
    if isinstance(found := _found(ranks), Exception):
        raise found
    return [answer[of] for answer in found]


@functools.cache
def _found(ranks: int) -> list[Any] | Exception:
    ends = {"pipeline": pipeline_ends(), "context": context_ends()}
    try:
        return launch("tests.parallel.together:everything", ranks, ends)
    except NanoinferError as error:  # kept too, or every test would launch anew
        return error


@functools.cache
def pipeline_ends() -> Ends:
    return {name: pipeline_ranks.ends(c, pipeline_ranks.RAGGED) for name, c in pipeline_ranks.CONFIGS.items()}


@functools.cache
def context_ends() -> Ends:
    return {name: pipeline_ranks.ends(c, context_ranks.prompts(13)) for name, c in context_ranks.CONFIGS.items()}


def everything(wire: Wire, pipeline: Ends, context: Ends) -> dict[str, Any]:
    """Each with a log of its own."""
    del wire
    return {
        "pipeline": pipeline_ranks.check(Wire(), pipeline),
        "context": context_ranks.check(Wire(), context),
        "expert": expert_ranks.check(Wire()),
        "slice": slice_ranks.check(Wire()),
    }

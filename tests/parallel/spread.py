"""What ranks do for the tests of pipelines and of context parallel, in one launch: starting them takes seconds."""

from __future__ import annotations

import functools
from typing import Any

from nanoinfer.parallel.launch import launch
from nanoinfer.parallel.wire import Wire
from tests.parallel import context_ranks, pipeline_ranks

Ends = dict[str, list[int]]


@functools.cache
def answers(ranks: int) -> list[dict[str, Any]]:
    """What every rank found, an entry for each test file."""
    return launch("tests.parallel.spread:everything", ranks, {"pipeline": pipeline_ends(), "context": context_ends()})


@functools.cache
def pipeline_ends() -> Ends:
    return {name: pipeline_ranks.ends(c, pipeline_ranks.RAGGED) for name, c in pipeline_ranks.CONFIGS.items()}


@functools.cache
def context_ends() -> Ends:
    return {name: pipeline_ranks.ends(c, context_ranks.prompts(13)) for name, c in context_ranks.CONFIGS.items()}


def everything(wire: Wire, pipeline: Ends, context: Ends) -> dict[str, Any]:
    return {"pipeline": pipeline_ranks.check(wire, pipeline), "context": context_ranks.check(wire, context)}

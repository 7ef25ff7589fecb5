"""nanoinfer itself as a worker. Settings: model, dtype, rows, length, and engines: the options of each by name."""

from __future__ import annotations

from typing import Any

import protocol

import nanoinfer
from nanoinfer import SamplingParams
from nanoinfer.models.registry import load_model
from nanoinfer.optimize.options import Optimizations


def load(settings: dict[str, Any]) -> tuple[protocol.Run, str]:
    """Engines of ours, which share one model."""
    model = load_model(settings["model"], dtype=settings["dtype"])
    rows, length = settings["rows"], settings["length"]
    engines = {
        name: nanoinfer.load(
            model,
            "continuous",
            speed=Optimizations(**speed),
            max_running=rows,
            cache_tokens=rows * length,
            token_budget=rows * length,  # all prompts in one step, as with the others
            share_prefixes=False,  # a prompt that was seen before would cost nothing
        )
        for name, speed in settings["engines"].items()
    }

    def run(engine: str, prompts: list[list[int]], new: int) -> tuple[list[list[int]], float, float]:
        clock = protocol.Stopwatch()
        generation = engines[engine].stream(prompts, SamplingParams(max_tokens=new, ignore_eos=True))
        started: set[int] = set()
        for event in generation:
            started.add(event.request)
            if len(started) == len(prompts):
                clock.lap()
        first, total = clock.end()
        return [c.token_ids for c in generation.completions], first, total

    return run, nanoinfer.__version__


if __name__ == "__main__":
    protocol.serve(load)

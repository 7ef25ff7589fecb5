"""nanoinfer itself as a worker. Settings: model, engine, dtype, options."""

from __future__ import annotations

from typing import Any

import protocol

import nanoinfer
from nanoinfer import SamplingParams
from nanoinfer.speed.options import Speed


def load(settings: dict[str, Any]) -> tuple[protocol.Run, str]:
    """An engine of ours."""
    options = dict(settings.get("options", {}))
    if "speed" in options:
        options["speed"] = Speed(**options["speed"])
    if settings["engine"] == "continuous":
        options["share_prefixes"] = False  # a prompt that was seen before would cost nothing
        options["token_budget"] = 4096  # all prompts in one step, as with the others
    engine = nanoinfer.load(settings["model"], settings["engine"], dtype=settings["dtype"], **options)

    def run(prompts: list[list[int]], new: int) -> tuple[list[list[int]], float, float]:
        clock = protocol.Stopwatch()
        generation = engine.stream(prompts, SamplingParams(max_tokens=new, ignore_eos=True))
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

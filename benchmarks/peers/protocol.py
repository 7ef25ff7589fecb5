"""How the benchmark talks to an engine in an environment of its own: one JSON object a line, in and out.

Nothing here needs more than Python, since each peer's environment holds only that peer. A worker loads its model once
and then answers jobs, so that runs of different engines can be taken in turns in one session.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

#: Which engine (a worker may hold several over one model), prompts, and how many tokens to generate for each.
#: Returns ids, and seconds to the first token of all and to the end.
Run = Callable[[str, list[list[int]], int], tuple[list[list[int]], float, float]]

PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal to get when the parent dies


class Stopwatch:
    """Seconds since it was made; ``lap`` notes the first token once."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.first: float | None = None

    def lap(self) -> None:
        """The first tokens are there."""
        if self.first is None:
            self.first = time.perf_counter() - self.start

    def end(self) -> tuple[float, float]:
        """Seconds to the first tokens, and in all."""
        total = time.perf_counter() - self.start
        return self.first if self.first is not None else total, total


def serve(load: Callable[[dict[str, Any]], tuple[Run, str]]) -> None:
    """Answer jobs until input ends. ``load`` gets the settings on the command line and returns a run and a version."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", DO_NOT_TRACK="1", VLLM_NO_USAGE_STATS="1")
    if sys.platform == "linux":
        # It is stopped between jobs, and would not notice that the benchmark was killed.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # What libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    try:
        run, version = load(json.loads(sys.argv[1]))
        answer(ready=True, version=version)
        for line in sys.stdin:
            job = json.loads(line)
            tokens, first, total = run(job["engine"], job["prompts"], job["new"])
            answer(tokens=tokens, first_s=first, total_s=total)
    except Exception as error:
        traceback.print_exc()
        answer(error=f"{type(error).__name__}: {error}")

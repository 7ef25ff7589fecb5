"""nanoinfer: LLM inference from first principles, small enough to read. Folders from the bottom up:

- ``configs`` shapes of models; ``text`` tokenizers; ``sampling`` from logits to a token; ``models``; ``cache`` keys and
  values; ``engines`` the loops that generate: the core, to be read in this order.
- ``theory`` counts and predicts a step, ``measure`` times it, ``optimize`` makes it faster, ``calibrate`` measures
  what this machine reaches.
- ``workload`` what clients send; ``simulate`` the scheduler on a computed clock; ``serve`` an OpenAI-compatible server;
  ``bench`` the load generator; ``parallel`` one model over several processes; ``cluster`` replicas on Ray.
- ``predict`` the records of predict, fit, plan and simulate; ``show`` terminal, HTML and figures; ``book`` chapters;
  ``cli`` the commands; ``data`` datasheets and texts.

Importing this package is quick and brings no torch: the names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# OpenMP threads spin while they wait for each other. Where another program has one of the cores, GNU's
# library spins through whole time slices: a decode step of 40 ms took over a second. Spinning for about as
# long as an operator takes, then sleeping, costs nothing on a quiet machine. Read when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if TYPE_CHECKING:
    from nanoinfer.engines.engine import Engine as Engine
    from nanoinfer.engines.load import load as load
    from nanoinfer.errors import NanoinferError as NanoinferError
    from nanoinfer.sampling.params import SamplingParams as SamplingParams

_HOMES = {
    "load": "nanoinfer.engines.load",
    "Engine": "nanoinfer.engines.engine",
    "SamplingParams": "nanoinfer.sampling.params",
    "NanoinferError": "nanoinfer.errors",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nanoinfer' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)

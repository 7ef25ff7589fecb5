"""nanoinfer: LLM inference from first principles, small enough to read.

The package's folders from the bottom to the top; each imports only from those before it in this list, and says what to
read first:

- ``errors``, ``log``, ``store``, ``option_types``: one-line errors, lines for people, cached files, shared options
- ``data``: datasheets and texts that ship with the library; ``show``: text, tables and figures
- ``configs``: the shape of a model; ``text``: tokenizer and chat templates; ``sampling``: from logits to a token
- ``workload``: which requests come, and when
- ``theory``: parameters, arithmetic, roofline, several devices; formulas only, no torch
- ``models``: GPT-2, Llama and mixtures of experts, and what brings their weights in
- ``measure``: trace, metrics, statistics, meters; ``cache``: the KV caches
- ``optimize``: what makes a step faster: fused, packed, quantised, compiled, a C++ kernel, CUDA graphs
- ``engines``: from the naive loop to continuous batching and speculative decoding
- ``reply``: what ``nanoinfer generate`` takes and reports
- ``reply``: the options of a generated reply, and its record
- ``simulate``: the scheduler on a computed clock; ``parallel``: one model over several processes
- ``serve``: an OpenAI-compatible server
- ``calibrate``: the ceilings of this machine, measured; ``cluster``: replicas and batches on Ray
- ``bench``: load generator and sweeps
- ``predict``: time, memory and cost on devices that need not be there; ``book``: chapters and pages
- ``cli``: the command line

A reader who wants to rebuild it reads configs, text, sampling, models, cache and engines, in this order.

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

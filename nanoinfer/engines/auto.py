"""``engine="auto"``: the continuous engine with whatever makes this model quickest on this machine.

What is quickest is not known beforehand, so it is tried: each way answers a short request a few times, turn about. The
answer is kept in the user's cache until model, library, PyTorch or machine change, and said on screen. Only ways
that compute in the model's own dtype take part: one that costs quality has to be asked for.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

import psutil
import torch

from nanoinfer import cache, engines, models, optimize
from nanoinfer.engines.continuous import PLAIN, ContinuousEngine
from nanoinfer.errors import DeviceError, RequestError
from nanoinfer.measure.clock import now
from nanoinfer.measure.environment import machine_key
from nanoinfer.models.registry import LoadedModel
from nanoinfer.optimize.options import Optimizations
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.store import cache_file, write_whole

#: For prompts: products as large and as few as they can be.
PROMPTS = Optimizations(fuse=True, pack=True)
WAYS: dict[str, dict[str, Optimizations]] = {
    "cpu": {
        "plain": PLAIN,
        "packed": PROMPTS,
        "kernel": Optimizations(kernel=True),
        "kernel, packed for prompts": Optimizations(kernel=True, fuse=True, pack=True),
    },
    "cuda": {
        "plain": PLAIN,
        "fused": Optimizations(fuse=True),
        "graphs": Optimizations(fuse=True, graphs=True),
        "compiled, graphs": Optimizations(fuse=True, compiled=True, graphs=True),
    },
}
ROUNDS, PROMPT, NEW = 4, 64, 32
MOST_SECONDS = 20.0  # no further round is begun after so long


def quickest(loaded: LoadedModel) -> Optimizations:
    """The way that answers quickest, tried once and then remembered."""
    path = _path(loaded)
    with contextlib.suppress(OSError, ValueError, TypeError, RequestError):
        return Optimizations(**json.loads(path.read_text(encoding="utf-8")))
    seconds = trial(loaded)
    name = min(seconds, key=lambda way: seconds[way])
    told = ", ".join(f"{way} {s:.2f} s" for way, s in seconds.items())
    print(
        f"nanoinfer: {PROMPT} + {NEW} tokens of {loaded.name} take {told}: '{name}' it is", file=sys.stderr, flush=True
    )
    with contextlib.suppress(OSError):  # a disk that refuses costs the next start a trial
        write_whole(path, json.dumps(asdict(ways(loaded)[name])))
    return ways(loaded)[name]


def ways(loaded: LoadedModel) -> dict[str, Optimizations]:
    """What there is to try on this model's device."""
    device = next(loaded.model.parameters()).device.type
    return WAYS.get(device, {"plain": PLAIN})


def trial(loaded: LoadedModel) -> dict[str, float]:
    """Seconds of a short request by each way that this machine has; the quickest of the rounds."""
    length = min(PROMPT, loaded.model.config.context // 2)
    prompt, one = [[1] * length], SamplingParams(max_tokens=min(NEW, length), ignore_eos=True)
    most, tried = 2 * (length + one.max_tokens), {}
    for name, way in ways(loaded).items():
        if not _has_room(loaded, way):
            continue
        with contextlib.suppress(DeviceError):
            tried[name] = ContinuousEngine(loaded, max_running=1, cache_tokens=most, share_prefixes=False, speed=way)
    found: dict[str, list[float]] = {name: [] for name in tried}
    started = now()
    for round_ in range(ROUNDS):
        for name, engine in tried.items():
            before = now()
            engine.generate(prompt, one)
            found[name].append(now() - before)
        if round_ and now() - started > MOST_SECONDS:
            break
    return {name: min(times[1:]) for name, times in found.items()}


def _has_room(loaded: LoadedModel, way: Optimizations) -> bool:
    """Whether the weights that this way lays out anew fit beside the model."""
    copies = way.kernel + (way.fuse or way.pack)
    weight = next(loaded.model.parameters())
    if weight.device.type == "cuda":
        free = torch.cuda.mem_get_info(weight.device)[0]
    else:
        free = psutil.virtual_memory().available
    return copies * sum(p.nbytes for p in loaded.model.parameters()) < free // 2


def _path(loaded: LoadedModel) -> Path:
    weight = next(loaded.model.parameters())
    code = (Path(package.__path__[0]) for package in (optimize, engines, cache, models))
    return cache_file("auto", [loaded.source, weight.dtype, weight.device, *machine_key()], code)

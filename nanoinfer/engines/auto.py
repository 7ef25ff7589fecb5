"""``engine="auto"``: the continuous engine with whatever makes this model's steps quickest on this machine.

What is quickest is not known beforehand, so it is tried: each way decodes for a second or two, turn about. The answer
is kept in the user's cache until model, library, PyTorch or machine change, and said on screen. Only ways
that compute in the model's own dtype take part: one that costs quality has to be asked for.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from nanoinfer import speed
from nanoinfer.engines.continuous import PLAIN, ContinuousEngine
from nanoinfer.errors import DeviceError, RequestError
from nanoinfer.measure.files import write_whole
from nanoinfer.measure.machine import describe_machine
from nanoinfer.measure.metrics import tpot
from nanoinfer.models.fetch import cache_dir
from nanoinfer.models.registry import LoadedModel
from nanoinfer.sampling import SamplingParams
from nanoinfer.speed.options import Speed

WAYS = {"plain": PLAIN, "kernel": Speed(kernel=True)}
ROUNDS, TOKENS = 3, 16


def quickest(loaded: LoadedModel) -> Speed:
    """The way that decodes quickest, tried once and then remembered."""
    path = _path(loaded)
    with contextlib.suppress(OSError, ValueError, TypeError, RequestError):
        return Speed(**json.loads(path.read_text(encoding="utf-8")))
    seconds = trial(loaded)
    name = min(seconds, key=lambda way: seconds[way])
    told = ", ".join(f"{way} {1000 * s:.1f} ms" for way, s in seconds.items())
    print(f"nanoinfer: a decode step of {loaded.name} takes {told}: {name} it is", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):  # a disk that refuses costs the next start a trial
        write_whole(path, json.dumps(asdict(WAYS[name])))
    return WAYS[name]


def trial(loaded: LoadedModel) -> dict[str, float]:
    """Seconds of a decode step of one row by each way that this machine has; the quickest of the rounds."""
    engines = {}
    for name, way in WAYS.items():
        with contextlib.suppress(DeviceError):
            engines[name] = ContinuousEngine(loaded, max_running=1, cache_tokens=64, speed=way)
    one = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    found: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(ROUNDS + 1):
        for name, engine in engines.items():
            found[name].append(tpot(engine.generate([[0, 1]], one)[0].trace) or 0.0)
    return {name: min(times[1:]) for name, times in found.items()}


def _path(loaded: LoadedModel) -> Path:
    weight, told, code = next(loaded.model.parameters()), describe_machine(), hashlib.sha256()
    for file in sorted(Path(speed.__file__).parent.iterdir()):
        if file.suffix in (".py", ".cpp"):
            code.update(file.read_bytes())
    machine = [torch.__version__, torch.get_num_threads(), told["cpu"], told["gpus"]]
    key = json.dumps([loaded.source, str(weight.dtype), str(weight.device), machine, code.hexdigest()], default=str)
    return cache_dir() / "auto" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"

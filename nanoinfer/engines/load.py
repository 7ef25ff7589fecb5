"""From names to a ready engine; with ``engine="auto"`` the continuous one with the optimizations fastest here.

What is fastest is not known beforehand, so it is tried: each candidate answers a short request a few times, in turn.
The answer is kept in the user's cache until model, library, PyTorch or machine change, and said on standard error.
Only candidates that compute in the model's own dtype take part: one that costs quality has to be given by name.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import torch

from nanoinfer import cache, engines, models, optimize
from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.engines.engine import Engine
from nanoinfer.engines.speculative import SpeculativeEngine
from nanoinfer.engines.static import BatchedEngine, CachedEngine, NaiveEngine
from nanoinfer.errors import DeviceError, RequestError, nearest
from nanoinfer.log import say
from nanoinfer.measure.clock import now
from nanoinfer.measure.environment import machine_key
from nanoinfer.models.registry import LoadedModel, load_model
from nanoinfer.optimize.options import Optimizations
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.store import cache_file, cached

ENGINES: dict[str, type[Engine]] = {
    engine.name: engine for engine in (NaiveEngine, CachedEngine, BatchedEngine, ContinuousEngine, SpeculativeEngine)
}

#: What is tried on a device: a name for it, and the optimizations.
CANDIDATES = {
    "cpu": {
        "plain": "plain",
        "packed": "fuse,pack",  # products as large and as few as they can be
        "kernel": "kernel",
        "kernel, packed for prompts": "kernel,fuse,pack",
    },
    "cuda": {"plain": "plain", "fused": "fuse", "graphs": "fuse,graphs", "compiled, graphs": "fuse,compiled,graphs"},
}
ROUNDS, PROMPT_TOKENS, NEW_TOKENS = 4, 64, 32
MAX_SECONDS = 20.0  # no further round is begun after this


def load(
    model: str | Path | LoadedModel = "smollm2-135m",
    engine: str = "cached",
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "float32",
    seed: int = 0,
    **options: Any,
) -> Engine:
    """Load a model and give it an engine.

    ``model`` is a name (``nanoinfer models`` lists them), a folder, a ``.gguf`` file, a hub id, or a model that is
    loaded already, which is then shared (device, dtype and seed are its own). ``engine`` is ``naive``, ``cached``,
    ``batched``, ``continuous``, ``speculative``, or ``auto``: continuous, with the optimizations that a short trial
    finds fastest on this machine. ``options`` are the engine's own, such as ``max_running`` of ``continuous``.
    Raises :class:`NanoinferError`: one line that names what is unknown, missing or damaged, and the way out.
    """
    is_auto = engine == "auto" and "speed" not in options
    engine = "continuous" if engine == "auto" else engine
    if engine not in ENGINES:
        raise RequestError(f"unknown engine '{engine}'; {nearest(str(engine), [*ENGINES, 'auto'])}")
    known = list(inspect.signature(ENGINES[engine]).parameters)[1:]
    for option in [name for name in options if name not in known]:
        hint = nearest(option, known) if known else "it has none"
        raise RequestError(f"engine '{engine}' has no option '{option}'; {hint}")
    result: Future[Engine] = Future()

    def make() -> None:
        try:
            loaded = model
            if not isinstance(loaded, LoadedModel):
                loaded = load_model(loaded, device=device, dtype=dtype, seed=seed)
            speed = {"speed": fastest(loaded)} if is_auto else {}
            result.set_result(ENGINES[engine](loaded, **options, **speed))
        except BaseException as error:
            result.set_exception(error)

    # In a thread that then ends: one that has computed keeps its OpenMP team, and with more threads in teams than cores
    # the thread that later runs the steps is several times slower. A daemon, so that Ctrl-C does not wait for it.
    threading.Thread(target=make, name="nanoinfer-load", daemon=True).start()
    return result.result()


# --- auto -----------------------------------------------------------------------------


def fastest(loaded: LoadedModel) -> Optimizations:
    """The candidate that answers fastest, tried once and then remembered."""

    def measure() -> Optimizations:
        seconds = trial(loaded)
        best = min(seconds, key=lambda name: seconds[name])
        times = ", ".join(f"{name} {s:.2f} s" for name, s in seconds.items())
        say(f"nanoinfer: {PROMPT_TOKENS} + {NEW_TOKENS} tokens of {loaded.name} take {times}: taking '{best}'")
        return candidates(loaded)[best]

    weight = next(loaded.model.parameters())
    code = (Path(package.__path__[0]) for package in (optimize, engines, cache, models))
    path = cache_file("auto", [loaded.source, weight.dtype, weight.device, *machine_key()], code)
    return cached(path, Optimizations, measure)


def candidates(loaded: LoadedModel) -> dict[str, Optimizations]:
    """What there is to try on this model's device, by name."""
    texts = CANDIDATES.get(next(loaded.model.parameters()).device.type, {"plain": "plain"})
    return {name: Optimizations.parse(text) for name, text in texts.items()}


def trial(loaded: LoadedModel) -> dict[str, float]:
    """Seconds of a short request by each candidate that this machine can run; the best of the rounds."""
    length = min(PROMPT_TOKENS, loaded.model.config.context // 2)
    prompt, params = [[1] * length], SamplingParams(max_tokens=min(NEW_TOKENS, length), ignore_eos=True)
    options: dict[str, Any] = {"max_running": 1, "cache_tokens": 2 * (length + params.max_tokens)}
    tried: dict[str, tuple[ContinuousEngine, list[float]]] = {}
    for name, speed in candidates(loaded).items():
        if has_memory(loaded, speed):
            with contextlib.suppress(DeviceError):
                tried[name] = ContinuousEngine(loaded, share_prefixes=False, speed=speed, **options), []
    started = now()
    for round_ in range(ROUNDS):
        for engine, seconds in tried.values():
            before = now()
            engine.generate(prompt, params)
            seconds.append(now() - before)
        if round_ and now() - started > MAX_SECONDS:
            break
    return {name: min(seconds[1:]) for name, (_, seconds) in tried.items()}


def has_memory(loaded: LoadedModel, speed: Optimizations) -> bool:
    """Whether the copies of the weights that these optimizations make fit next to the model."""
    copies = speed.kernel + (speed.fuse or speed.pack)
    device = next(loaded.model.parameters()).device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return copies * sum(p.nbytes for p in loaded.model.parameters()) < free // 2

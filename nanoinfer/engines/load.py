"""From names to a ready engine."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from nanoinfer.engines.auto import quickest
from nanoinfer.engines.batched import BatchedEngine
from nanoinfer.engines.cached import CachedEngine
from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.engines.engine import Engine
from nanoinfer.engines.naive import NaiveEngine
from nanoinfer.engines.speculative import SpeculativeEngine
from nanoinfer.errors import RequestError, nearest
from nanoinfer.models.registry import LoadedModel, load_model

ENGINES: dict[str, type[Engine]] = {
    engine.name: engine for engine in (NaiveEngine, CachedEngine, BatchedEngine, ContinuousEngine, SpeculativeEngine)
}


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

    Args:
        model: a name (``nanoinfer models`` lists them), a folder, a ``.gguf`` file, a hub id, or a
            model that is loaded already, which is then shared (device, dtype and seed are its own).
        engine: ``naive``, ``cached``, ``batched``, ``continuous``, ``speculative``, or ``auto``: continuous, at the
            speed that a short trial finds best on this machine.
        device: ``cpu``, ``cuda``, ``cuda:1``, ``mps``.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        seed: of the weights, for ``random:`` models.
        options: the engine's own, such as ``batch_size`` of ``batched`` or ``max_running`` of ``continuous``.

    Raises:
        NanoinferError: one line that names what is unknown, missing or damaged, and the way out.
    """
    is_auto = engine == "auto" and "speed" not in options
    engine = "continuous" if engine == "auto" else engine
    if engine not in ENGINES:
        raise RequestError(f"unknown engine '{engine}'; {nearest(str(engine), [*ENGINES, 'auto'])}")
    known = list(inspect.signature(ENGINES[engine]).parameters)[1:]
    for option in options:
        if option not in known:
            raise RequestError(
                f"engine '{engine}' has no option '{option}'; {nearest(option, known) if known else 'it has none'}"
            )

    def made() -> Engine:
        loaded = model if isinstance(model, LoadedModel) else load_model(model, device=device, dtype=dtype, seed=seed)
        if is_auto:
            options["speed"] = quickest(loaded)
        return ENGINES[engine](loaded, **options)

    return _elsewhere(made)


def _elsewhere(make: Callable[[], Engine]) -> Engine:
    """Made by a thread that then ends.

    A thread that has computed keeps a team of OpenMP's for the next time, and with more threads in teams than there are
    cores, all of them are put to sleep early: a step by another thread, as :meth:`ContinuousEngine.submit` has, would
    take several times as long. Ctrl-C is not held up: nobody waits for the thread then.
    """
    done: Future[Engine] = Future()

    def work() -> None:
        try:
            done.set_result(make())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=work, name="nanoinfer-load", daemon=True).start()
    return done.result()

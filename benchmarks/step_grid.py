"""Step times of the cached engine over batch, context and dtype, predicted and measured.

For each model and dtype, the operators are timed one by one first; the step-time model puts its
predictions together from those; then the steps are run. Run ``python -m benchmarks.step_grid`` on a
quiet machine (about ten minutes on two cores). The result is stored under ``results/``; chapter 6
shows it next to a few points that it measures live.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from benchmarks.store import options, store
from nanoinfer.cache.contiguous import ContiguousCache
from nanoinfer.calibrate.operators import measure_operators
from nanoinfer.measure.clock import repeat
from nanoinfer.measure.environment import provenance
from nanoinfer.models.registry import LoadedModel, load_model
from nanoinfer.theory.roofline import Machine, decode_step, prefill_step

MODELS = ("smollm2-135m", "random:gpt2")
DTYPES = ("float32", "bfloat16")
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (64, 256, 1024, 2048)
MOST_PREFILL_TOKENS = 4096  # batch x prompt; beyond that a point takes longer than it teaches
MOST_CACHE_BYTES = 8 * 2**30


@dataclass(frozen=True)
class Point:
    """One step. ``context`` is the tokens a row holds after it; times in seconds, ``predicted`` before it ran."""

    model: str
    dtype: str
    phase: str
    batch: int
    context: int
    predicted: float
    seconds: float
    low: float
    high: float
    repeats: int


def decode_point(loaded: LoadedModel, machine: Machine, batch: int, context: int, repeats: int) -> Point:
    """A decode step of ``batch`` rows that hold ``context`` tokens each, the new one included."""
    model, config = loaded.model, loaded.model.config
    weight = next(model.parameters())
    cache = ContiguousCache(config, batch, context, weight.device, weight.dtype)
    cache.k.normal_()
    cache.v.normal_()
    ids = torch.full((batch, 1), 5, device=weight.device)
    positions = torch.full_like(ids, context - 1)

    @torch.inference_mode()
    def step() -> None:
        cache.length = context - 1  # the same slot each time
        model(ids, positions, cache)[:, -1].argmax(dim=-1).tolist()

    predicted = decode_step(config, machine, batch, context).seconds
    return point(loaded, "decode", batch, context, predicted, step, repeats)


def prefill_point(loaded: LoadedModel, machine: Machine, batch: int, context: int, repeats: int) -> Point:
    """A prefill of ``batch`` prompts of ``context`` tokens each, logits of the last position."""
    model, config = loaded.model, loaded.model.config
    weight = next(model.parameters())
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (batch, context), generator=generator).to(weight.device)
    positions = torch.arange(context, device=weight.device).expand_as(ids)
    cache = ContiguousCache(config, batch, context, weight.device, weight.dtype)

    @torch.inference_mode()
    def step() -> None:
        cache.length = 0
        model(ids, positions, cache, last_only=True)[:, -1].argmax(dim=-1).tolist()

    predicted = prefill_step(config, machine, batch, context).seconds
    return point(loaded, "prefill", batch, context, predicted, step, repeats)


def point(
    loaded: LoadedModel,
    phase: str,
    batch: int,
    context: int,
    predicted: float,
    step: Callable[[], None],
    repeats: int,
) -> Point:
    """Time one step: warm-up, then repeats; the median and the range."""
    weight = next(loaded.model.parameters())
    samples = repeat(step, device=weight.device, warmup=1, repeats=repeats).samples
    dtype = str(weight.dtype).removeprefix("torch.")
    median = statistics.median_low(samples)
    return Point(loaded.name, dtype, phase, batch, context, predicted, median, min(samples), max(samples), repeats)


def grid(models: tuple[str, ...], dtypes: tuple[str, ...], device: str) -> list[Point]:
    """Measure every point that fits; prints one line a point."""
    points: list[Point] = []
    for name in models:
        for dtype in dtypes:
            loaded = load_model(name, device=device, dtype=dtype)
            config = loaded.model.config
            machine = Machine("this machine", dtype, 1.0, 1.0, curves=measure_operators(loaded))
            for context in (c for c in CONTEXTS if c <= config.context):
                for batch in BATCHES:
                    cache = 4 * config.n_layers * config.n_kv_heads * config.d_head * batch * context * 2
                    if cache <= MOST_CACHE_BYTES:
                        points.append(decode_point(loaded, machine, batch, context, repeats=5))
                        print(points[-1], flush=True)
                    if batch * context <= MOST_PREFILL_TOKENS:
                        points.append(prefill_point(loaded, machine, batch, context, repeats=3))
                        print(points[-1], flush=True)
    return points


def main() -> None:
    """Measure and store."""
    args = options(__doc__, "results/step_grid.json", device="cpu", models=list(MODELS), dtypes=list(DTYPES))
    points = grid(tuple(args.models), tuple(args.dtypes), args.device)
    errors = sorted(abs(p.predicted / p.seconds - 1) for p in points)
    print(f"absolute error of the prediction: median {errors[len(errors) // 2]:.1%}, worst {errors[-1]:.1%}")
    record = {"provenance": provenance(), "points": [asdict(p) for p in points]}
    store(args.out, record)
    print(f"{len(points)} points written to {args.out}")


if __name__ == "__main__":
    main()

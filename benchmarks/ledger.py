"""What each optimisation gains, one at a time: decode steps by number of rows, and a prompt, all in turns.

Every engine runs the same rows in one process; a round takes each in shuffled order, so that what disturbs one disturbs
all. Decode is the time between tokens, prefill that to the first one. ``python -m benchmarks.ledger`` takes some ten
minutes on two cores, a minute of it for compiling, and stores its result under ``results/``; chapter 10 shows it.
"""

from __future__ import annotations

import gc
import random
import statistics
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.store import options, store
from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.measure.clock import now
from nanoinfer.measure.environment import provenance
from nanoinfer.measure.stats import ratio_of_medians
from nanoinfer.models.registry import LoadedModel, load_model
from nanoinfer.optimize.options import Optimizations
from nanoinfer.sampling.params import SamplingParams

WAYS: dict[str, Optimizations] = {
    "plain": Optimizations(),
    "fused projections": Optimizations(fuse=True),
    "packed weights": Optimizations(fuse=True, pack=True),
    "compiled layers": Optimizations(fuse=True, pack=True, compiled=True),
    "int8 rows": Optimizations(fuse=True, weights="int8"),
    "int4 groups": Optimizations(fuse=True, weights="int4"),
    "one kernel": Optimizations(kernel=True),
    "one kernel, int8": Optimizations(kernel=True, weights="int8"),
}
EXACT = ("plain", "fused projections", "packed weights", "compiled layers", "one kernel")
BATCHES = (1, 4, 8, 16, 32)
PROMPT, NEW, LONG = 64, 24, 512


def decode_seconds(engine: ContinuousEngine, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """Seconds between tokens while all rows decode, and the tokens."""
    times: list[float] = []
    generation = engine.stream(prompts, SamplingParams(max_tokens=NEW, ignore_eos=True))
    for _ in generation:
        times.append(now())
    steps = times[len(prompts) - 1 :: len(prompts)]  # the last event of each step
    return (steps[-1] - steps[0]) / (len(steps) - 1), [c.token_ids for c in generation.completions]


def prefill_seconds(engine: ContinuousEngine, prompt: list[int]) -> float:
    """Seconds to the first token of one long prompt."""
    started = now()
    engine.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
    return now() - started


def measure(loaded: LoadedModel, dtype: str, rounds: int, seed: int) -> dict[str, Any]:
    """Seconds of every way by rows, and ratios against the plain engine."""
    rng = random.Random(seed)
    vocab = loaded.model.config.vocab_size
    ways = {name: way for name, way in WAYS.items() if dtype == "bfloat16" or way.weights is None}
    engines = {
        name: ContinuousEngine(loaded, token_budget=4096, cache_tokens=8192, share_prefixes=False, speed=way)
        for name, way in ways.items()
    }
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in engines}
    for batch in (*BATCHES, 0):  # 0: the long prompt
        prompts = [[rng.randrange(vocab) for _ in range(PROMPT if batch else LONG)] for _ in range(max(batch, 1))]
        said = {}
        for round_ in range(rounds + 1):  # the first one warms up
            order = list(engines)
            rng.shuffle(order)
            for name in order:
                if batch:
                    took, said[name] = decode_seconds(engines[name], prompts)
                else:
                    took = prefill_seconds(engines[name], prompts[0])
                if round_:
                    seconds[name].setdefault(f"decode {batch}" if batch else f"prefill {LONG}", []).append(took)
        if dtype == "float32" and batch:
            for name in EXACT:
                if said[name] != said["plain"]:
                    raise RuntimeError(f"{name} does not give the plain engine's tokens at {batch} rows")
        what = f"decode {batch}" if batch else f"prefill {LONG}"
        for name in engines:
            median = statistics.median(seconds[name][what])
            print(f"{dtype}, {what:12} {name:20} {1000 * median:8.2f} ms", flush=True)
    ratios = {
        name: {what: asdict(ratio_of_medians(seconds["plain"][what], taken)) for what, taken in by.items()}
        for name, by in seconds.items()
    }
    return {"seconds": seconds, "gain": ratios}


def main() -> None:
    """Measure, print and store."""
    args = options(
        __doc__, "results/ledger.json", model="smollm2-135m", dtypes=["bfloat16", "float32"], rounds=7, seed=0
    )
    settings = {"model": args.model, "prompt": PROMPT, "new": NEW, "threads": torch.get_num_threads()}
    record: dict[str, Any] = {"provenance": provenance(), "settings": settings}
    for dtype in args.dtypes:
        record[dtype] = measure(load_model(args.model, dtype=dtype), dtype, args.rounds, args.seed)
        gc.collect()
    store(args.out, record)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()

"""How close to the machine's limits: bandwidth at one row, ragged rows, a long prompt, and the way to the first token.

Each share has its ceiling measured with it, in turns. ``python -m benchmarks.limits`` takes some three minutes on
two cores and stores its result under ``results/``.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from benchmarks.ledger import decode_seconds, prefill_seconds
from benchmarks.store import options, store
from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.measure.clock import now
from nanoinfer.measure.environment import provenance
from nanoinfer.measure.stats import ratio_of_medians
from nanoinfer.models.registry import LoadedModel, load_model
from nanoinfer.optimize.cpu_kernel import DecodeKernel
from nanoinfer.optimize.options import Optimizations
from nanoinfer.theory.arithmetic import kv_bytes, prefill_flops

ROWS, LONG, CONTEXT = 32, 512, 96
READ_BYTES = 2**29  # far beyond any cache
FIRST_TOKEN = """
import time; start = time.perf_counter()
import nanoinfer
from nanoinfer.optimize.options import Optimizations
engine = nanoinfer.load({model!r}, "continuous", dtype={dtype!r}, speed=Optimizations(kernel=True))
engine.generate("The sea", nanoinfer.SamplingParams(max_tokens=1))
print(time.perf_counter() - start)
"""


def turn_about(takes: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Samples of each, taken in turn; the first round warms up."""
    found: dict[str, list[float]] = {name: [] for name in takes}
    for round_ in range(rounds + 1):
        for name, take in takes.items():
            value = take()
            if round_:
                found[name].append(value)
    return found


def bandwidth(loaded: LoadedModel, rounds: int) -> dict[str, Any]:
    """Bytes a second that a kernel's step of one row reads, next to what reading alone reaches."""
    kernel = DecodeKernel(loaded.model)
    engine = ContinuousEngine(loaded, max_running=1, cache_tokens=256, speed=Optimizations(kernel=True))
    buffer = torch.randn(READ_BYTES // 4)
    table = engine.pool.open([])
    engine.pool.grow(table, CONTEXT + 1)
    engine.pool.commit(table, list(range(CONTEXT)), CONTEXT)
    read = kernel.nbytes + kv_bytes(loaded.model.config, 1, CONTEXT + 1, "bfloat16")

    def rate(nbytes: float, call: Callable[[], object]) -> float:
        started = now()
        call()
        return nbytes / (now() - started)

    from nanoinfer.cache.paged import NewTokens

    def step() -> None:
        for _ in range(10):
            kernel(engine.cache, [NewTokens(table, 1)], [7])

    found = turn_about(
        {
            "step": partial(rate, 10 * read, step),
            "torch.dot": partial(rate, READ_BYTES, lambda: torch.dot(buffer, buffer)),
            "torch.sum": partial(rate, READ_BYTES, buffer.sum),
        },
        rounds,
    )
    best = max(("torch.dot", "torch.sum"), key=lambda way: statistics.median(found[way]))
    return {"bytes_per_second": found, "share": asdict(ratio_of_medians(found["step"], found[best])), "of": best}


def ragged(loaded: LoadedModel, rounds: int, rng: random.Random) -> dict[str, Any]:
    """The decode rate of rows of very different length, next to rows that are alike and hold as much in all."""
    lengths = [16 + 16 * i for i in range(ROWS)]
    mean = sum(lengths) // ROWS

    def texts(of: list[int]) -> list[list[int]]:
        return [[rng.randrange(loaded.model.config.vocab_size) for _ in range(n)] for n in of]

    many = {"ragged": texts(lengths), "alike": texts([mean] * ROWS)}
    found = {}
    for name, speed in {"plain": Optimizations(), "kernel": Optimizations(kernel=True)}.items():
        engine = ContinuousEngine(loaded, token_budget=2**15, cache_tokens=2**15, share_prefixes=False, speed=speed)

        def rate(prompts: list[list[int]], engine: ContinuousEngine = engine) -> float:
            return ROWS / decode_seconds(engine, prompts)[0]

        rates = turn_about({kind: partial(rate, prompts) for kind, prompts in many.items()}, max(3, rounds // 5))
        found[name] = {
            "tokens_per_second": rates,
            "share": asdict(ratio_of_medians(rates["ragged"], rates["alike"])),
        }
    return {"lengths": lengths, **found}


def prefill(loaded: LoadedModel, rounds: int, rng: random.Random) -> dict[str, Any]:
    """FLOP/s of a prompt of 512 tokens, next to those of a large square product."""
    packed = Optimizations(fuse=True, pack=True)  # products as large and as few as they can be
    engine = ContinuousEngine(loaded, token_budget=LONG, cache_tokens=2048, share_prefixes=False, speed=packed)
    prompt = [rng.randrange(loaded.model.config.vocab_size) for _ in range(LONG)]
    square = torch.randn(2048, 2048).to(engine.dtype)
    flops = prefill_flops(loaded.model.config, LONG)

    def product() -> float:
        started = now()
        torch.mm(square, square)
        return 2 * 2048**3 / (now() - started)

    found = turn_about({"prefill": lambda: flops / prefill_seconds(engine, prompt), "product": product}, rounds)
    return {"flops_per_second": found, "share": asdict(ratio_of_medians(found["prefill"], found["product"]))}


def first_token(model: str, dtype: str, rounds: int) -> dict[str, Any]:
    """Seconds from a bare Python to the first token, with the model and the kernel in their caches."""
    command = [sys.executable, "-c", FIRST_TOKEN.format(model=model, dtype=dtype)]
    seconds = [
        float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(rounds + 1)
    ]
    return {"seconds": seconds[1:], "median": statistics.median(seconds[1:])}


def main() -> None:
    """Measure, print and store."""
    args = options(__doc__, "results/limits.json", model="smollm2-135m", rounds=15, seed=0)
    rng, loaded = random.Random(args.seed), load_model(args.model, dtype="bfloat16")
    record: dict[str, Any] = {"provenance": provenance(), "model": args.model, "dtype": "bfloat16"}
    with torch.inference_mode():
        record["bandwidth"] = bandwidth(loaded, args.rounds)
        record["prefill"] = prefill(loaded, args.rounds, rng)
        record["ragged"] = ragged(loaded, args.rounds, rng)
    record["first token"] = first_token(args.model, "bfloat16", max(3, args.rounds // 3))
    shares = {
        "bandwidth": record["bandwidth"],
        "prefill": record["prefill"],
        **{f"ragged, {name}": record["ragged"][name] for name in ("plain", "kernel")},
    }
    for name, found in shares.items():
        share = found["share"]
        print(f"{name:16} {share['value']:.1%} ({share['low']:.1%} to {share['high']:.1%})")
    print(f"first token      {record['first token']['median']:.2f} s")
    store(args.out, record)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()

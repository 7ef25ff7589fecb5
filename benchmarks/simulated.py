"""Does the simulation tell what this machine does? The same Poisson work by the real engine and on the virtual clock.

Two rates below the knee, as shares of what the simulation says the machine can do at most. The simulation is given what
is known beforehand (the model's operators timed one by one, the arrivals, the lengths, the engine's sizes) and nothing
of the run. Run ``python -m benchmarks.simulated`` on a quiet machine; the result is stored under ``results/``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

from benchmarks.store import options, store
from nanoinfer.bench.loadgen import EngineTarget, Run, open_loop
from nanoinfer.cache.blocks import BlockPool
from nanoinfer.calibrate.operators import this_machine
from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.engines.load import load
from nanoinfer.engines.scheduler import Scheduler
from nanoinfer.measure.clock import now
from nanoinfer.measure.environment import provenance
from nanoinfer.measure.metrics import client_delay, collect
from nanoinfer.measure.trace import Trace
from nanoinfer.models.registry import LoadedModel, load_model
from nanoinfer.simulate import simulate
from nanoinfer.theory.roofline import StepTimes
from nanoinfer.workload.arrivals import poisson
from nanoinfer.workload.items import WorkItem, parse_lengths, schedule_at, synthetic

PROMPTS, OUTPUTS = "uniform:16-128", "uniform:16-64"
RUNNING, BUDGET, BLOCK = 32, 256, 8
SHARES = (0.3, 0.6)
FIGURES = ("ttft", "tpot", "e2e")


def requests(vocab_size: int, n: int, seed: int, stream: str = "measured") -> list[WorkItem]:
    """Made-up requests of random ids, not yet due at any time."""
    lengths = parse_lengths(PROMPTS), parse_lengths(OUTPUTS)
    return list(islice(synthetic(*lengths, seed=seed, vocab_size=vocab_size, stream=stream), n))


def virtually(work: Sequence[WorkItem], times: StepTimes, blocks: int) -> list[Trace]:
    """On the virtual clock, with the engine's sizes."""
    scheduler = Scheduler(BlockPool(blocks, BLOCK, share_prefixes=False), RUNNING, BUDGET)
    return list(simulate(sorted(work, key=lambda w: w.at), scheduler, times))


def really(loaded: LoadedModel, work: Sequence[WorkItem], warmup: Sequence[WorkItem]) -> tuple[Run, int]:
    """By the engine in this process; and the blocks that it has."""
    engine = load(
        loaded, "continuous", max_running=RUNNING, token_budget=BUDGET, block_size=BLOCK, share_prefixes=False
    )
    assert isinstance(engine, ContinuousEngine)
    try:
        return asyncio.run(open_loop(EngineTarget(engine), work, warmup=warmup)), engine.pool.n_blocks
    finally:
        engine.close()


def as_work(traces: Sequence[Trace]) -> list[WorkItem]:
    """What came and when, warm-up included: prompts' ids do not matter to a clock."""
    return [WorkItem(bytes(t.prompt_tokens), t.output_tokens, t.t_sent) for t in traces]


def compared(loaded: LoadedModel, times: StepTimes, rate: float, n: int, seed: int) -> dict[str, Any]:
    """One rate served both ways."""
    vocab = loaded.model.config.vocab_size
    warmup = schedule_at(requests(vocab, max(8, n // 10), seed, "warm-up"), poisson(rate, seed + 1))
    work = schedule_at(requests(vocab, n, seed), poisson(rate, seed))
    run, blocks = really(loaded, work, warmup)
    failed = [trace for trace in run.traces if trace.status != "ok"]
    assert not failed, f"{len(failed)} requests failed: {failed[0].error}"
    start = now()
    virtual = virtually(as_work(run.traces), times, blocks)
    took = now() - start
    sides = {"real": run.measured(), "simulated": [t for t in virtual if run.start <= t.t_scheduled < run.end]}
    means = {
        side: {name: sum(values) / len(values) for name in FIGURES if (values := collect(traces, name).values)}
        for side, traces in sides.items()
    }
    return {
        "rate_per_s": rate,
        "requests": len(sides["real"]),
        "window_s": run.end - run.start,
        "mean_s": means,
        "simulated_over_real": {name: means["simulated"][name] / means["real"][name] for name in FIGURES},
        "send_lag_max_s": max(map(client_delay, run.traces), default=0.0),
        "simulation_took_s": took,
    }


def main() -> None:
    """Measure, print and store."""
    args = options(
        __doc__, "results/simulated.json", model="smollm2-135m", device="cpu", dtype="bfloat16", requests=100, seed=0
    )
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    with ThreadPoolExecutor(1) as one:  # a thread that ends: see load
        loaded = one.submit(load_model, args.model, device=args.device, dtype=args.dtype).result()
        machine = one.submit(this_machine, loaded, fresh=True).result()
    config = loaded.model.config
    times = StepTimes(config, machine)
    # All there at once: no order of arrivals lets the machine do more.
    at_once = virtually(requests(config.vocab_size, 400, args.seed), times, 4096)
    capacity = len(at_once) / max(t.t_end or 0.0 for t in at_once)
    print(f"at most {capacity:.2f} requests/s by the simulation", flush=True)
    rows = []
    for share in SHARES:
        rows.append({"share": share, **compared(loaded, times, share * capacity, args.requests, args.seed)})
        for name, ratio in rows[-1]["simulated_over_real"].items():
            mean = rows[-1]["mean_s"]
            print(
                f"{share:.0%} of it, {rows[-1]['rate_per_s']:.2f}/s: mean {name} {mean['real'][name] * 1e3:.1f} ms, "
                f"simulated {mean['simulated'][name] * 1e3:.1f} ms ({ratio - 1:+.0%})",
                flush=True,
            )
    record = {
        "provenance": provenance(),
        "started": started,
        "settings": {k: str(v) for k, v in vars(args).items() if k != "out"}
        | {"prompts": PROMPTS, "outputs": OUTPUTS, "max_running": RUNNING, "token_budget": BUDGET},
        "capacity_per_s": capacity,
        "rates": rows,
    }
    store(args.out, record)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()

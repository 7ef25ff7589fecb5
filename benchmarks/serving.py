"""Two hundred unlike requests, served four ways in one run: what continuous batching and its cache are worth.

Static batches, continuous batching, and one by one without a cache (a seeded sample), in turns; then a shared
512-token beginning, cold and warm. Run ``python -m benchmarks.serving`` on a quiet machine (some fifteen minutes on
two cores). The result is stored under ``results/``; chapters 14 and 15 show it next to what they measure live.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.store import options, store
from nanoinfer.cache.blocks import BlockPool
from nanoinfer.calibrate.operators import this_machine
from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.engines.engine import Engine
from nanoinfer.engines.request import Completion
from nanoinfer.engines.scheduler import Scheduler
from nanoinfer.engines.static import BatchedEngine, NaiveEngine, Waste
from nanoinfer.measure.clock import now
from nanoinfer.measure.environment import provenance
from nanoinfer.measure.metrics import chunk_gaps, ttft
from nanoinfer.measure.stats import ratio_of_medians
from nanoinfer.models.registry import LoadedModel, load_model
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.simulate import simulate
from nanoinfer.theory.roofline import StepTimes, batched_seconds
from nanoinfer.workload.items import WorkItem, log_normal_work

PROMPTS, OUTPUTS = (16, 512), (8, 256)
ROWS = 32
PREFIX, TAIL = 512, 16


class Watched(ContinuousEngine):
    """The continuous engine with a stopwatch on its scheduler and an eye on its blocks.

    Of each step: seconds in the scheduler, seconds in all, who runs, slots allocated and slots live.
    """

    name = "continuous"

    def __init__(self, loaded: LoadedModel, **options: Any) -> None:
        super().__init__(loaded, **options)
        self.steps: list[tuple[float, float, int, int, int]] = []
        self._in_scheduler = 0.0
        self.scheduler.schedule = self._watch(self.scheduler.schedule)  # type: ignore[method-assign]
        self.scheduler.commit = self._watch(self.scheduler.commit)  # type: ignore[method-assign]
        self.scheduler.remove = self._watch(self.scheduler.remove)  # type: ignore[method-assign]

    def step(self) -> None:
        """A step, watched."""
        self._in_scheduler, start = 0.0, now()
        super().step()
        took = now() - start
        live, used = self.pool.live_tokens(self.scheduler.tables), self.pool.used * self.pool.block_size
        self.steps.append((self._in_scheduler, took, len(self.scheduler.running), used, live))

    def _watch(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            start = now()
            try:
                return fn(*args)
            finally:
                self._in_scheduler += now() - start

        return watched


def serve(engine: Engine, work: Sequence[WorkItem]) -> tuple[float, list[Completion]]:
    """Seconds for all of the work, all of it there at the start."""
    params = [SamplingParams(max_tokens=w.output, ignore_eos=True) for w in work]
    start = now()
    done = engine.generate([list(w.prompt) for w in work], params)
    return now() - start, done


def longest(done: Sequence[Completion]) -> dict[str, float]:
    """The longest wait for a first step, and the longest pause between two tokens, in seconds."""
    waits = [(c.trace.t_start or c.trace.chunks[0][0]) - c.trace.t_scheduled for c in done]
    return {"wait_s": max(waits), "pause_s": max(max(chunk_gaps(c.trace), default=0.0) for c in done)}


def shares(engine: Watched) -> dict[str, float]:
    """Of all steps: KV memory wasted; of those without a free slot: the scheduler's share of the time."""
    held, live = (sum(step[i] for step in engine.steps) for i in (3, 4))
    full = [(s, took) for s, took, running, _, _ in engine.steps if running == engine.scheduler.max_running]
    return {
        "kv_waste": 1 - live / held,
        "scheduler_share": sum(s for s, _ in full) / sum(took for _, took in full) if full else 0.0,
        "steps": len(engine.steps),
        "full_steps": len(full),
    }


def rates(loaded: LoadedModel, work: Sequence[WorkItem], rounds: int, sample: int, seed: int) -> dict[str, Any]:
    """Output tokens per second of the three ways, in turns."""
    few = random.Random(seed).sample(list(work), sample)
    one_by_one = NaiveEngine(loaded)
    found: dict[str, list[float]] = {"static": [], "continuous": []}
    alone: list[tuple[int, float]] = []  # tokens and seconds of each request of the sample
    watched: list[dict[str, float]] = []
    waste = Waste()
    warm = [WorkItem(w.prompt, 2) for w in few[:2]]
    for engine in (BatchedEngine(loaded, ROWS), Watched(loaded), one_by_one):
        serve(engine, warm)
    for round_ in range(rounds):
        order = ["static", "continuous", "naive"]
        random.Random(seed + round_).shuffle(order)
        for way in order:
            if way == "naive":
                # One request at a time: the seconds of each by itself.
                for w in few[round_::rounds]:
                    seconds, _ = serve(one_by_one, [w])
                    alone.append((w.output, seconds))
                continue
            engine = BatchedEngine(loaded, ROWS) if way == "static" else Watched(loaded, max_running=ROWS)
            seconds, done = serve(engine, work)
            found[way].append(sum(w.output for w in work) / seconds)
            if isinstance(engine, Watched):
                engine.scheduler.check()
                watched.append(shares(engine) | longest(done))
            elif isinstance(engine, BatchedEngine):
                waste = engine.waste
            print(f"round {round_ + 1}: {way} {found[way][-1]:.1f} output tokens/s in {seconds:.1f} s", flush=True)
    print("naive, one by one:", ", ".join(f"{tokens / s:.2f}" for tokens, s in alone), flush=True)
    return {
        "rates": found,
        "continuous": watched,
        "static": asdict(waste)
        | {"padding": waste.padding_share, "ended": waste.ended_share, "kv_idle": waste.kv_idle_share},
        "continuous_over_static": asdict(ratio_of_medians(found["continuous"], found["static"])),
        "naive": {"tokens_and_seconds": alone},
        "continuous_over_naive": over_sample(statistics.median(found["continuous"]), alone, seed),
    }


def over_sample(rate: float, alone: Sequence[tuple[int, float]], seed: int) -> dict[str, float]:
    """A rate over that of the sample, tokens over seconds of all its requests; 95% bootstrap interval over requests."""

    def ratio(requests: Sequence[tuple[int, float]]) -> float:
        return rate * sum(seconds for _, seconds in requests) / sum(tokens for tokens, _ in requests)

    rng = random.Random(seed)
    drawn = sorted(ratio(rng.choices(alone, k=len(alone))) for _ in range(2000))
    return {"value": ratio(alone), "low": drawn[49], "high": drawn[1949], "confidence": 0.95}


def predicted(loaded: LoadedModel, work: Sequence[WorkItem]) -> dict[str, float]:
    """Seconds for all of the work by the step-time model: static batches, and the scheduler on a virtual clock."""
    config, machine = loaded.model.config, this_machine(loaded, fresh=True)
    prompts, outputs = [len(w.prompt) for w in work], [w.output for w in work]
    scheduler = Scheduler(BlockPool(4096), ROWS)
    tokens = sum(outputs)
    return {
        "static": tokens / sum(batched_seconds(config, machine, prompts, outputs, ROWS)),
        "continuous": tokens / max(t.t_end or 0.0 for t in simulate(work, scheduler, StepTimes(config, machine))),
    }


def prefix(loaded: LoadedModel, repeats: int, seed: int) -> dict[str, Any]:
    """Seconds to the first token of a request that shares its first 512 tokens with an earlier one, and without one."""
    rng = random.Random(seed)
    vocab = loaded.model.config.vocab_size
    engine = ContinuousEngine(loaded, max_running=4, token_budget=PREFIX + TAIL + 8)
    found: dict[str, list[float]] = {"cold": [], "warm": []}
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    for _ in range(repeats + 1):
        beginning = [rng.randrange(vocab) for _ in range(PREFIX)]
        for way in ("cold", "warm"):
            (done,) = engine.generate([[*beginning, *(rng.randrange(vocab) for _ in range(TAIL))]], one)
            assert done.trace.cached_tokens == (PREFIX if way == "warm" else 0)
            found[way].append(ttft(done.trace) or 0.0)
    cold, warm = found["cold"][1:], found["warm"][1:]  # the first pair warms up
    return {"cold_s": cold, "warm_s": warm, "cold_over_warm": asdict(ratio_of_medians(cold, warm))}


def main() -> None:
    """Measure, print and store."""
    args = options(
        __doc__,
        "results/serving.json",
        model="smollm2-135m",
        device="cpu",
        dtype="bfloat16",
        requests=200,
        rounds=3,
        sample=(10, "requests that the naive engine serves"),
        seed=0,
    )
    loaded = load_model(args.model, device=args.device, dtype=args.dtype)
    work = log_normal_work(args.requests, loaded.model.config.vocab_size, PROMPTS, OUTPUTS, args.seed)
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    record = {
        "provenance": provenance(),
        "started": started,
        "settings": {k: str(v) for k, v in vars(args).items() if k != "out"},
        "work": {
            "prompt_tokens": sum(len(w.prompt) for w in work),
            "output_tokens": sum(w.output for w in work),
        },
        "predicted": predicted(loaded, work),
        **rates(loaded, work, args.rounds, args.sample, args.seed),
        "prefix": prefix(loaded, 10, args.seed),
    }
    for key in ("predicted", "continuous_over_static", "continuous_over_naive"):
        print(key, record[key])
    print("prefix", record["prefix"]["cold_over_warm"])
    print("medians", {k: statistics.median(v) for k, v in record["rates"].items()})
    store(args.out, record)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()

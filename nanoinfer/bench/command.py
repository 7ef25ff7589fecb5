"""What ``nanoinfer bench`` does: the client's own floor first, then the load, then what is kept of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoinfer.bench.loadgen import closed_loop, open_loop
from nanoinfer.bench.options import BenchConfig, LoadPlan
from nanoinfer.bench.progress import Progress
from nanoinfer.bench.run import Run, save_run
from nanoinfer.bench.sweep import Sweep, named, sweep
from nanoinfer.bench.target import Target
from nanoinfer.log import say
from nanoinfer.show.text import ms
from nanoinfer.store import write_whole

if TYPE_CHECKING:
    from nanoinfer.engines.continuous import ContinuousEngine


def bench(config: BenchConfig) -> dict[str, Any]:
    """Measure, keep, and return the record: the summary of the run, or with ``--sweep`` that of all its levels.

    Raises:
        NanoinferError: what cannot be done, before the load.
        KeyboardInterrupt: Ctrl-C before the load; a load it ends, and what was measured is kept.
    """
    plan = LoadPlan(config)
    if config.out is not None:
        import nanoinfer.bench.report  # noqa: F401  # it needs matplotlib: better known now than after the load

        config.out.mkdir(parents=True, exist_ok=True)
    engine = None if config.is_remote else load_engine(config)
    try:
        return asyncio.run(_measure(plan, engine))
    finally:
        if engine is not None:
            engine.close()


async def _measure(plan: LoadPlan, engine: ContinuousEngine | None) -> dict[str, Any]:
    """Run the levels; a run without ``--sweep`` is a sweep of one level, kept in the folder itself."""
    config, runs = plan.config, list[Run]()
    # A model in this process is called without a network: what the HTTP client adds plays no part.
    floor = None if config.no_floor or engine is not None else await _floor(plan)
    async with open_target(config, engine) as target:

        async def level(value: float) -> Run:
            index = plan.levels.index(value)
            run = await _load(plan, index, target, None if engine is None else engine.config.vocab_size, floor)
            runs.append(run)
            if config.out is not None:  # before anything is made of it
                save_run(run, config.out / f"level-{value:g}" if config.sweep else config.out)
            return run

        swept = await sweep(level, plan.levels, plan.slo, kind=plan.kind, needed=config.share)
    record = swept.as_dict() if config.sweep else dict(swept.points[0].summary)
    if config.out is not None:
        _write(config.out, swept if config.sweep else runs[0], record)
    return record


async def _load(
    plan: LoadPlan, index: int, target: Target, vocab_size: int | None, floor: dict[str, Any] | None
) -> Run:
    """Send one level's load."""
    config, level = plan.config, plan.levels[index]
    warm, works = plan.work(index, vocab_size)
    settings = plan.settings(index) | ({} if floor is None else {"floor": floor})
    total = len(works) if isinstance(works, list) else plan.most
    with Progress(named(plan.kind, level), None if total is None else total + len(warm)) as progress:
        common: dict[str, Any] = {"warmup": warm, "timeout_s": config.timeout, "watch": progress, "settings": settings}
        if isinstance(works, list):
            return await open_loop(target, works, seconds=config.seconds, **common)
        common |= {"users": int(level), "think_s": config.think or 0.0, "requests": plan.most}
        return await closed_loop(target, works, seconds=config.seconds, **common)


async def _floor(plan: LoadPlan) -> dict[str, Any]:
    """What this client adds at the highest level, against a mock of known timing."""
    from nanoinfer.bench.overhead import measure_floor

    most = plan.most_level
    found = await (measure_floor(streams=int(most)) if plan.kind == "users" else measure_floor(rate=most))
    words = [f"{ms(found.overhead_mean_s)} ms a chunk (p99 {ms(found.overhead_p99_s)} ms)"]
    if found.send_lag_p99_s is not None:
        words.append(f"send lag p99 {ms(found.send_lag_p99_s)} ms")
    words.append(f"{found.cpu_share:.0%} of a core")
    say(f"the client's own floor at {named(plan.kind, most)}, against a mock: {', '.join(words)}")
    for problem in found.problems():
        say(f"the client is beyond its error budget there: {problem}")
    return found.as_json()


@asynccontextmanager
async def open_target(config: BenchConfig, engine: ContinuousEngine | None) -> AsyncIterator[Target]:
    """The server, asked once whether it answers, or the engine in this process."""
    target: Target
    if engine is not None:
        from nanoinfer.bench.engine_target import EngineTarget

        target = EngineTarget(engine)
    else:
        from nanoinfer.bench.client import HttpTarget

        endpoint: Any = config.endpoint  # checked there
        target = await HttpTarget.connect(config.target, model=config.model, endpoint=endpoint, api_key=config.api_key)
    try:
        yield target
    finally:
        await target.close()


def load_engine(config: BenchConfig) -> ContinuousEngine:
    """The engine that ``nanoinfer serve`` would have, without the server around it."""
    from nanoinfer.engines.continuous import ContinuousEngine
    from nanoinfer.engines.load import load
    from nanoinfer.optimize.options import Optimizations

    words = config.speed
    speed = {} if words is None else {"speed": Optimizations.parse(words)}
    engine = load(
        config.target,
        "auto" if words is None else "continuous",
        device=config.device or "cpu",
        dtype=config.dtype or "bfloat16",
        seed=config.seed,
        **speed,
    )
    assert isinstance(engine, ContinuousEngine)
    return engine


def _write(out: Path, found: Run | Sweep, record: dict[str, Any]) -> None:
    from nanoinfer.bench.report import html

    write_whole(out / "summary.json", json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    write_whole(out / "report.html", html(found, record))
    say(f"kept in {out}")

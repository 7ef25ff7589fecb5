"""What ``nanoinfer bench`` does: the client's own floor first, then the load, then what is kept of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoinfer.bench.loadgen import closed_loop, open_loop
from nanoinfer.bench.options import Options, Plan, is_url
from nanoinfer.bench.progress import Progress
from nanoinfer.bench.run import Run, save_run
from nanoinfer.bench.summary import summarise
from nanoinfer.bench.sweep import Sweep, named, sweep
from nanoinfer.bench.target import Target
from nanoinfer.log import say
from nanoinfer.show.text import ms
from nanoinfer.store import write_whole

if TYPE_CHECKING:
    from nanoinfer.engines.continuous import ContinuousEngine


def bench(options: Options) -> tuple[Run | Sweep, dict[str, Any]]:
    """Measure, keep, and return the run with its summary, or the sweep with its record.

    Raises:
        NanoinferError: what cannot be done, before the load.
        KeyboardInterrupt: Ctrl-C before the load; a load it ends, and what was measured is kept.
    """
    plan = Plan(options)
    if options.out is not None:
        import nanoinfer.bench.report  # noqa: F401  # it needs matplotlib: better known now than after the load

        options.out.mkdir(parents=True, exist_ok=True)
    engine = None if is_url(options.target) else _engine(options)
    try:
        return asyncio.run(_measure(plan, engine))
    finally:
        if engine is not None:
            engine.close()


async def _measure(plan: Plan, engine: ContinuousEngine | None) -> tuple[Run | Sweep, dict[str, Any]]:
    options, out = plan.options, plan.options.out
    # A model in this process is called without a network: what the HTTP client adds plays no part.
    floor = await _floor(plan) if options.floor and engine is None else None
    async with _target(options, engine) as target:

        async def level(index: int, folder: Path | None) -> Run:
            run = await _load(plan, index, target, None if engine is None else engine.config.vocab_size, floor)
            if folder is not None:
                save_run(run, folder)  # before anything is made of it
            return run

        if options.sweep is None:
            found: Run | Sweep
            found = run = await level(0, out)
            record = summarise(run, plan.slo)
        else:
            found = await sweep(
                lambda value: level(plan.levels.index(value), out and out / f"level-{value:g}"),
                plan.levels,
                plan.slo,
                kind=plan.kind,
                needed=options.share,
            )
            record = found.as_dict()
    if out is not None:
        _write(out, found, record)
    return found, record


async def _load(plan: Plan, index: int, target: Target, vocab_size: int | None, floor: dict[str, Any] | None) -> Run:
    """Send one level's load."""
    asked, level = plan.options, plan.levels[index]
    warm, works = plan.work(index, vocab_size)
    settings = {"load": plan.settings(index), **({} if floor is None else {"floor": floor})}
    total = len(works) if isinstance(works, list) else plan.most
    with Progress(named(plan.kind, level), None if total is None else total + len(warm)) as progress:
        common: dict[str, Any] = {"warmup": warm, "timeout_s": asked.timeout, "watch": progress, "settings": settings}
        if isinstance(works, list):
            return await open_loop(target, works, seconds=asked.seconds, **common)
        common |= {"users": int(level), "think_s": asked.think or 0.0, "requests": plan.most}
        return await closed_loop(target, works, seconds=asked.seconds, **common)


async def _floor(plan: Plan) -> dict[str, Any]:
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
async def _target(options: Options, engine: ContinuousEngine | None) -> AsyncIterator[Target]:
    target: Target
    if engine is not None:
        from nanoinfer.bench.engine_target import EngineTarget

        target = EngineTarget(engine)
    else:
        from nanoinfer.bench.client import HttpTarget

        endpoint: Any = options.endpoint  # checked there
        target = await HttpTarget.connect(
            options.target, model=options.model, endpoint=endpoint, api_key=options.api_key
        )
    try:
        yield target
    finally:
        await target.close()


def _engine(options: Options) -> ContinuousEngine:
    """The engine that ``nanoinfer serve`` would have, without the server around it."""
    from nanoinfer.engines.continuous import ContinuousEngine
    from nanoinfer.engines.load import load
    from nanoinfer.optimize.options import Optimizations

    words = options.speed
    speed = {} if words is None else {"speed": Optimizations.parse(words)}
    engine = load(
        options.target,
        "auto" if words is None else "continuous",
        device=options.device or "cpu",
        dtype=options.dtype or "bfloat16",
        seed=options.seed,
        **speed,
    )
    assert isinstance(engine, ContinuousEngine)
    return engine


def _write(out: Path, found: Run | Sweep, record: dict[str, Any]) -> None:
    from nanoinfer.bench.report import html

    write_whole(out / "summary.json", json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    write_whole(out / "report.html", html(found, record))
    say(f"kept in {out}")

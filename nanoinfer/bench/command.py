"""What ``nanoinfer bench`` does: measure the client's own floor, then send the load, then keep and report it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from nanoinfer.bench.loadgen import EngineTarget, Run, Target, closed_loop, open_loop, save_run
from nanoinfer.bench.options import BenchConfig, LoadPlan
from nanoinfer.bench.sweep import format_level, sweep
from nanoinfer.log import say
from nanoinfer.measure import metrics
from nanoinfer.measure.clock import now
from nanoinfer.measure.stats import least_n, percentile
from nanoinfer.measure.trace import Trace
from nanoinfer.show.text import ms
from nanoinfer.store import write_whole

if TYPE_CHECKING:
    from nanoinfer.engines.continuous import ContinuousEngine

#: Requests that the running percentiles are of, and their metrics.
LAST: Final = 1000
SHOWN: Final = ("ttft", "tpot")


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
    target = await open_target(config, engine)

    async def level(value: float) -> Run:
        index = plan.levels.index(value)
        run = await _load(plan, index, target, None if engine is None else engine.config.vocab_size)
        run.settings |= plan.settings(index) | ({} if floor is None else {"floor": floor})
        runs.append(run)
        if config.out is not None:  # before anything is made of it
            save_run(run, config.out / f"level-{value:g}" if config.sweep else config.out)
        return run

    try:
        swept = await sweep(level, plan.levels, plan.slo, kind=plan.kind, needed=config.share)
    finally:
        await target.close()
    record = swept.as_dict() if config.sweep else dict(swept.points[0].summary)
    if config.out is not None:
        from nanoinfer.bench.report import run_page, sweep_page

        text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False)
        write_whole(config.out / "summary.json", text + "\n")
        page = sweep_page(record) if config.sweep else run_page(runs[0], record)
        write_whole(config.out / "report.html", page)
        say(f"kept in {config.out}")
    return record


async def _load(plan: LoadPlan, index: int, target: Target, vocab_size: int | None) -> Run:
    """Send one level's load."""
    config, level = plan.config, plan.levels[index]
    warm, items = plan.work(index, vocab_size)
    total = len(items) if isinstance(items, list) else plan.most
    with progress(format_level(plan.kind, level), None if total is None else total + len(warm)) as on_done:
        common: dict[str, Any] = {
            "warmup": warm,
            "seconds": config.seconds,
            "timeout_s": config.timeout,
            "on_done": on_done,
        }
        if isinstance(items, list):
            return await open_loop(target, items, **common)
        think_s = config.think or 0.0
        return await closed_loop(target, items, users=int(level), think_s=think_s, requests=plan.most, **common)


async def _floor(plan: LoadPlan) -> dict[str, Any]:
    """What this client adds at the highest level, against a mock of known timing."""
    from nanoinfer.bench.mock import measure_floor

    most = plan.most_level
    floor = await (measure_floor(streams=int(most)) if plan.kind == "users" else measure_floor(rate=most))
    figures = [f"{ms(floor.overhead_mean_s)} ms a chunk (p99 {ms(floor.overhead_p99_s)} ms)"]
    if floor.send_lag_p99_s is not None:
        figures.append(f"send lag p99 {ms(floor.send_lag_p99_s)} ms")
    figures.append(f"{floor.cpu_share:.0%} of a core")
    say(f"the client's own floor at {format_level(plan.kind, most)}, against a mock: {', '.join(figures)}")
    for problem in floor.problems():
        say(f"the client is beyond its error budget there: {problem}")
    return floor.as_json()


async def open_target(config: BenchConfig, engine: ContinuousEngine | None) -> Target:
    """The server, once it has answered a small request, or the engine in this process."""
    if engine is not None:
        return EngineTarget(engine)
    from nanoinfer.bench.client import HttpTarget

    endpoint: Any = config.endpoint  # checked there
    return await HttpTarget.connect(config.target, model=config.model, endpoint=endpoint, api_key=config.api_key)


def load_engine(config: BenchConfig) -> ContinuousEngine:
    """The engine that ``nanoinfer serve`` would have, without the server around it."""
    from nanoinfer.engines.continuous import ContinuousEngine
    from nanoinfer.engines.load import load
    from nanoinfer.optimize.options import Optimizations

    speed = {} if config.speed is None else {"speed": Optimizations.parse(config.speed)}
    engine = load(
        config.target,
        "auto" if config.speed is None else "continuous",
        device=config.device or "cpu",
        dtype=config.dtype or "bfloat16",
        seed=config.seed,
        **speed,
    )
    assert isinstance(engine, ContinuousEngine)
    return engine


@contextmanager
def progress(
    title: str, total: int | None = None, stream: TextIO | None = None, clock: Callable[[], float] = now
) -> Iterator[Callable[[Trace], None]]:
    """Print counts and running percentiles of a run of ``total`` requests, on standard error.

    What it gives is called with each trace as it ends, in the event loop that also reads the chunks. So drawing is kept
    short (a line, twice a second at most, over the last thousand requests) and is not moved to a thread, which would
    take the interpreter at a moment of its own choice. What it costs shows among the loop's stalls. A ``stream`` that
    is no terminal gets whole lines, and fewer.
    """
    stream = stream or sys.stderr
    live = None
    if stream.isatty():
        console = Console(file=stream)
        live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
    begun = drawn = clock()
    ended, tokens = Counter[str](), 0
    last: dict[str, deque[float]] = {name: deque(maxlen=LAST) for name in SHOWN}

    def line() -> str:
        done, seconds = sum(ended.values()), clock() - begun
        counted = f"{done:,}" if total is None else f"{done:,} of {total:,}"
        rate = f", {tokens / seconds:,.0f} tok/s" if seconds > 0 else ""
        failed = ", ".join(f"{n} {status}" for status, n in ended.items() if status != "ok")
        percentiles = [f"{name.upper()} {_percentiles(values)}" for name, values in last.items()]
        return " | ".join([f"{title}: {counted} ended{rate}", *([failed] if failed else []), *percentiles])

    def note(trace: Trace) -> None:
        nonlocal drawn, tokens
        ended[trace.status] += 1
        tokens += metrics.output_tokens(trace)
        if trace.status == "ok":
            for name, values in last.items():
                if (value := metrics.metric_named(name)(trace)) is not None:
                    values.append(value)
        if (time := clock()) - drawn >= (0.5 if live else 5.0):
            drawn = time
            if live:
                live.update(Text(line(), overflow="ellipsis", no_wrap=True), refresh=True)
            else:
                print(line(), file=stream, flush=True)

    try:
        with live or nullcontext():
            yield note
    finally:
        if ended:
            print(line(), file=stream, flush=True)


def _percentiles(values: Iterable[float]) -> str:
    """The median and the tails that so few values can show, in milliseconds."""
    if not (ordered := sorted(values)):
        return "not measured yet"
    shown = [q for q in (50.0, 90.0, 99.0) if q == 50 or len(ordered) >= least_n(q)]
    return " ".join([*(f"p{q:g} {ms(percentile(ordered, q))}" for q in shown), "ms"])

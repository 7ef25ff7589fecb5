"""Sending a load to a target, the open loop and the closed one; its raw records, and what is needed to judge them.

Warm-up requests come first and the measured ones follow without a pause, so that the window opens under full load.
The two have different prompts, or the prefix cache would answer for the model.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from nanoinfer.errors import NanoinferError, RequestError, check
from nanoinfer.measure.clock import now
from nanoinfer.measure.environment import provenance
from nanoinfer.measure.metrics import client_delay
from nanoinfer.measure.trace import Trace, load_traces, save_traces
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.store import write_whole
from nanoinfer.workload.items import WorkItem

if TYPE_CHECKING:
    from nanoinfer.engines.continuous import ContinuousEngine

#: Seconds after which a user of a closed loop comes again whose request failed, perhaps at once.
AFTER_FAILURE_S: Final = 1.0
#: Seconds between two looks at how late the event loop is.
TICK_S: Final = 0.01
TRACES, RUN = "traces.jsonl", "run.json"


@dataclass
class Run:
    """One load on one target; times in seconds from its start."""

    traces: list[Trace]  # in the order in which they were due, warm-up included
    start: float  # of the measured window; requests due before are warm-up
    end: float  # of the window; nothing was due from then on, but requests may have been under way
    settings: dict[str, Any]  # load, target, lengths and seed, as JSON
    loop_stalls_s: list[float] = field(default_factory=list)  # how late each tick of a clock in the event loop was
    interrupted: bool = False  # by Ctrl-C; requests that were under way are ``cancelled``
    provenance: dict[str, Any] = field(default_factory=dict)  # machine, versions, date, commit
    zero: float = field(default=0.0, compare=False)  # the start on this machine's clock; not stored

    def measured(self) -> list[Trace]:
        """The traces that were due inside the window."""
        return [trace for trace in self.traces if self.start <= trace.t_scheduled < self.end]


def save_run(run: Run, folder: Path) -> None:
    """Write ``traces.jsonl`` (raw records) and ``run.json`` (all else) into a folder, made if need be.

    Raises:
        OSError: a disk that refuses.
    """
    record = {
        "start_s": run.start,
        "end_s": run.end,
        "interrupted": run.interrupted,
        "settings": run.settings,
        "client": {"send_lag_s": list(map(client_delay, run.traces)), "loop_stalls_s": run.loop_stalls_s},
        "provenance": run.provenance,
    }
    text = json.dumps(record, allow_nan=False)
    save_traces(folder / TRACES, run.traces)
    write_whole(folder / RUN, text + "\n")


def load_run(folder: Path) -> Run:
    """Read what :func:`save_run` wrote.

    Raises:
        NanoinferError: a folder that holds no run, naming the file.
    """
    path = folder / RUN
    for file in (path, folder / TRACES):
        if not file.is_file():
            raise NanoinferError(f"{file} is missing: name a folder that `nanoinfer bench` wrote")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        settings = dict(record["settings"])
        if isinstance(loop := settings.get("loop"), dict):  # as earlier runs nest them: loop.kind, load.users
            settings |= {"loop": loop.pop("kind"), **loop, **settings.pop("load", {})}
        return Run(
            list(load_traces(folder / TRACES)),
            float(record["start_s"]),
            float(record["end_s"]),
            settings,
            list(record["client"]["loop_stalls_s"]),
            bool(record["interrupted"]),
            dict(record["provenance"]),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise NanoinferError(f"{path}: not the record of a run ({error!r})") from None


class Target(Protocol):
    """What a load is sent to: a server, or an engine in this process.

    ``settings`` is how it is set up, as JSON, without secrets. ``messages`` holds, for each kind of error that its
    traces name, the text that first came with it.
    """

    name: str
    messages: dict[str, str]

    @property
    def settings(self) -> dict[str, Any]:
        """Kept in a stored run."""

    async def send(self, work: WorkItem, trace: Trace) -> None:
        """Serve one request and fill its trace, all times as :func:`nanoinfer.measure.clock.now` gives them.

        What the server does wrong goes into the trace and is never raised. A cancelled one notes ``t_end`` and
        status ``cancelled`` before it lets CancelledError pass.

        Raises:
            RequestError: work that can never be sent there, a mistake of the user.
        """

    async def close(self) -> None:
        """Close connections."""

    def fail(self, trace: Trace, kind: str, message: str) -> None:
        """Note an error in a trace, and the message of the first of its kind."""
        trace.status, trace.error = "error", kind
        self.messages.setdefault(kind, message or kind)


class EngineTarget(Target):
    """An engine in this process, which its caller closes. A chunk is an event, timed when its reader has it.

    What a server adds is the difference to this.
    """

    def __init__(self, engine: ContinuousEngine) -> None:
        self.engine = engine
        self.name = f"{engine.loaded.name} in this process"
        self.messages: dict[str, str] = {}

    @property
    def settings(self) -> dict[str, Any]:
        """Which engine, of which sizes."""
        scheduler, pool = self.engine.scheduler, self.engine.pool
        return {
            "engine": self.engine.name,
            "model": self.engine.loaded.name,
            "device": str(self.engine.device),
            "dtype": str(self.engine.dtype).removeprefix("torch."),
            "max_running": scheduler.max_running,
            "token_budget": scheduler.token_budget,
            "cache_tokens": pool.n_blocks * pool.block_size,
            "ignore_eos": True,
        }

    async def send(self, work: WorkItem, trace: Trace) -> None:
        """Submit one request and read its events."""
        trace.t_sent = now()
        stream = None
        try:
            params = SamplingParams(max_tokens=work.output, ignore_eos=True)
            stream = await self.engine.submit(work.prompt, params)
            trace.prompt_tokens = len(stream.requests[0].prompt_ids)
            async for event in stream:
                if event.token_id is not None:
                    trace.token(now())
                    trace.kinds.append("content")
            if stream.requests[0].finish_reason is None:  # its engine was closed
                self.fail(trace, "cut off", "the engine was closed before the answer had ended")
        except asyncio.CancelledError:
            trace.status = "cancelled"
            if stream is not None:
                stream.cancel()
            raise
        except RequestError as error:
            self.fail(trace, "refused" if stream is None else "engine", str(error))
        finally:
            trace.t_end = now()
            if stream is not None:
                served = stream.requests[0].trace
                trace.t_start, trace.cached_tokens = served.t_start, served.cached_tokens
                trace.preemptions = served.preemptions

    async def close(self) -> None:
        """Leave the engine open."""


async def open_loop(
    target: Target,
    items: Sequence[WorkItem],
    *,
    warmup: Sequence[WorkItem] = (),
    seconds: float | None = None,
    timeout_s: float = 600.0,
    on_done: Callable[[Trace], None] | None = None,
) -> Run:
    """Send each item at its time, whatever has become of those before: none is skipped or put off.

    Ctrl-C (or another cancellation) ends the run early, and what there is of it is returned, ``interrupted``.

    Args:
        target: stays open.
        items: with their times, from the opening of the window.
        warmup: sent before, at times of their own; the window opens where their schedule ends. Where they are
            all due at once, it opens when all have ended.
        seconds: length of the window. None: that of the schedule, which ends a mean gap after its last request, so
            that requests over window is the rate; where all are due at once, until the last has ended.
        timeout_s: after which a request is given up.
        on_done: called with each trace when it has ended.

    Raises:
        RequestError: before anything is sent, for times before 0 or after the window, or a warm-up prompt that
            is measured too.
    """
    warm, ordered = _by_time(warmup), _by_time(items)
    if not ordered:
        raise RequestError("there is no request to send")
    session = LoadSession(target, warm, seconds, timeout_s, on_done)
    if ordered[-1].at >= session.length:
        raise RequestError(f"a request is due at {ordered[-1].at:g} s, after the window of {seconds:g} s")
    for item in ordered:
        session.refuse_warm(item)

    async def drive(group: asyncio.TaskGroup) -> None:
        tasks = []
        for item in warm:
            await sleep_until(due := session.run.zero + item.at)
            tasks.append(group.create_task(session.send(item, due)))
        opened = session.run.zero + _span(warm)
        if tasks and not _span(warm):
            await asyncio.wait(tasks)
            opened = now()
        session.opened = opened
        for item in ordered:
            await sleep_until(due := opened + item.at)
            group.create_task(session.send(item, due))

    await session.send_all(drive)
    return session.ended(seconds or _span(ordered), {"loop": "open", "requests": len(items), "seconds": seconds})


async def closed_loop(
    target: Target,
    items: Iterable[WorkItem],
    *,
    users: int,
    think_s: float = 0.0,
    seconds: float | None = None,
    requests: int | None = None,
    warmup: Sequence[WorkItem] = (),
    timeout_s: float = 600.0,
    on_done: Callable[[Trace], None] | None = None,
) -> Run:
    """Let some users each send an item, wait for its end, think, and send the next; the run as of :func:`open_loop`.

    A request is due the moment its user is ready for it, so a slow server is asked less, and requests that it would
    have kept waiting never show. A user whose request failed pauses for a second at least: a server that refuses at
    once would otherwise be asked as fast as this machine can.

    Args:
        items: taken in order, their times ignored; may have no end where ``seconds`` or ``requests`` is set.
        think_s: from an answer's end to its user's next request.
        seconds: length of the window: users who are ready later send no more. None: until the last has ended.
        requests: how many to send in all, warm-up aside.
        warmup: what the users send first; the window opens with the first item after these.

    Raises:
        RequestError: numbers that make no load, or a warm-up prompt that is measured too.
    """
    check("users", users, at_least=1)
    check("think_s", think_s, at_least=0)
    if requests is not None:
        check("requests", requests, at_least=1)
    elif seconds is None and not isinstance(items, Sequence):
        raise RequestError("a closed loop over work without end needs a number of requests, or seconds")
    session = LoadSession(target, warmup, seconds, timeout_s, on_done)
    first, source = deque(warmup), iter(items)
    taken, ran_out = 0, False

    async def user() -> None:
        nonlocal taken, ran_out
        due = session.run.zero
        while True:
            if first:
                item = first.popleft()
            else:
                if session.opened is None:  # all of the warm-up is taken
                    session.opened = math.nextafter(max(due, now()), math.inf) if warmup else due
                due = max(due, session.opened)
                if taken == requests or due >= session.opened + session.length:
                    return
                if (measured := next(source, None)) is None:
                    ran_out = True
                    return
                session.refuse_warm(item := measured)
                taken += 1
            await sleep_until(due)
            trace = await session.send(item, due)
            pause = think_s if trace.status == "ok" else max(think_s, AFTER_FAILURE_S)
            due = session.run.zero + (trace.t_end or 0.0) + pause

    async def drive(group: asyncio.TaskGroup) -> None:
        for _ in range(users):
            group.create_task(user())

    await session.send_all(drive)
    load = {
        "loop": "closed",
        "users": users,
        "think_s": think_s,
        "requests": requests,
        "seconds": seconds,
        "ran_out": ran_out,  # of items, before the time was up
    }
    return session.ended(None if ran_out else seconds, load)


class LoadSession:
    """Requests under way, each sent as a task of its own and timed, and the run that they make."""

    def __init__(
        self,
        target: Target,
        warmup: Sequence[WorkItem],
        seconds: float | None,
        timeout_s: float,
        on_done: Callable[[Trace], None] | None,
    ) -> None:
        check("timeout_s", timeout_s, above=0)
        if seconds is not None:
            check("seconds", seconds, above=0)
        self.target, self.timeout_s, self.on_done = target, timeout_s, on_done
        self.length = math.inf if seconds is None else seconds
        self.n_warmup, self._warm_prompts = len(warmup), set(map(_prompt_key, warmup))
        # The provenance takes a while: not with a server waiting, nor after Ctrl-C.
        self.run = Run([], 0.0, 0.0, {}, provenance=provenance())
        self.opened: float | None = None  # when the window did, on the clock
        self.ended_at = 0.0  # in seconds from the run's start

    def refuse_warm(self, item: WorkItem) -> None:
        """Raise :class:`RequestError` for a prompt that the warm-up has too."""
        if self._warm_prompts and _prompt_key(item) in self._warm_prompts:
            raise RequestError(
                "a prompt of the warm-up is measured too, and would be found in the prefix cache; "
                "warm up with other prompts (another stream or seed)"
            )

    async def send_all(self, drive: Callable[[asyncio.TaskGroup], Awaitable[None]]) -> None:
        """Drive until all has been sent and has ended, or Ctrl-C ends it."""
        gc.freeze()  # existing objects need not be scanned while requests wait
        self.run.zero = now()
        ticker = asyncio.create_task(self._tick())
        try:
            async with asyncio.TaskGroup() as group:
                await drive(group)
        except asyncio.CancelledError:
            self.run.interrupted = True
            if (task := asyncio.current_task()) is not None:
                task.uncancel()  # it is dealt with
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self.ended_at = now() - self.run.zero
            ticker.cancel()
            gc.unfreeze()

    async def send(self, item: WorkItem, due: float) -> Trace:
        """Send one request that is due at ``due`` on the clock; its record, in seconds from the run's start."""
        trace = Trace(due, due)
        self.run.traces.append(trace)
        try:
            async with asyncio.timeout(self.timeout_s):
                await self.target.send(item, trace)
        except TimeoutError:
            if trace.status == "cancelled":  # and not ended a moment before
                trace.status, trace.error = "timeout", "timeout"
        finally:
            for name in ("t_scheduled", "t_sent", "t_start", "t_end"):
                if (t := getattr(trace, name)) is not None:
                    setattr(trace, name, t - self.run.zero)
            trace.chunks = [(t - self.run.zero, n) for t, n in trace.chunks]
            if self.on_done is not None:
                self.on_done(trace)
        return trace

    async def _tick(self) -> None:
        while True:
            due = now() + TICK_S
            await asyncio.sleep(TICK_S)
            self.run.loop_stalls_s.append(max(0.0, now() - due))

    def ended(self, length: float | None, load: Mapping[str, Any]) -> Run:
        """The run, its window so many seconds long, or until the last request has ended. Ctrl-C closes it, too."""
        run = self.run
        run.traces.sort(key=lambda trace: trace.t_scheduled)
        run.start = self.ended_at if self.opened is None else self.opened - run.zero
        last = max((t.t_end or 0.0 for t in run.traces if t.t_scheduled >= run.start), default=self.ended_at)
        # A window is open at its end: the last request is inside.
        run.end = run.start + length if length else math.nextafter(last, math.inf)
        if run.interrupted:
            run.end = max(run.start, min(run.end, self.ended_at))
        run.settings = {
            **load,
            "warmup": self.n_warmup,
            "timeout_s": self.timeout_s,
            "target": {"name": self.target.name, **self.target.settings},
            "error_messages": dict(self.target.messages),
        }
        return run


async def sleep_until(due: float) -> None:
    """Sleep until that time of the clock, and never less."""
    while (wait := due - now()) > 0:
        await asyncio.sleep(wait)


def _span(ordered: Sequence[WorkItem]) -> float:
    """Seconds of a schedule: to its last request and a mean gap on; 0 where all are due at once."""
    n = len(ordered)
    return ordered[-1].at * n / (n - 1) if n > 1 else 0.0


def _by_time(items: Iterable[WorkItem]) -> list[WorkItem]:
    ordered = sorted(items, key=lambda item: item.at)
    if ordered and not (ordered[0].at >= 0 and math.isfinite(ordered[-1].at)):
        raise RequestError(f"requests are due from 0 s on, got {ordered[0].at:g} to {ordered[-1].at:g}")
    return ordered


def _prompt_key(item: WorkItem) -> str | tuple[int, ...]:
    return item.prompt if isinstance(item.prompt, str) else tuple(item.prompt)

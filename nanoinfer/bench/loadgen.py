"""Sending a load and keeping its records: the open loop and the closed one.

In an open loop requests come when they come, however the server fares: their times are fixed beforehand, and none is
skipped or put off. In a closed loop each of some users waits for an answer before asking again, so a slow server is
asked less; what it would have kept waiting never shows. Both note when a request was due and when it was really sent.

Warm-up requests come first and the measured ones follow without a pause, so the window opens on a house that is as
full as it will be. The two have different prompts, or the prefix cache would answer for the model.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nanoinfer.bench.run import Run
from nanoinfer.bench.sending import Sending, Watch, until
from nanoinfer.bench.target import Target
from nanoinfer.errors import RequestError
from nanoinfer.measure.clock import now
from nanoinfer.workload.items import WorkItem

#: Seconds after which a user of a closed loop comes again whose request failed, perhaps at once.
AFTER_FAILURE_S = 1.0
_NONE: Mapping[str, Any] = MappingProxyType({})


async def open_loop(
    target: Target,
    works: Sequence[WorkItem],
    *,
    warmup: Sequence[WorkItem] = (),
    seconds: float | None = None,
    timeout_s: float = 600.0,
    watch: Watch | None = None,
    settings: Mapping[str, Any] = _NONE,
) -> Run:
    """Send each work at its time, whatever has become of those before.

    Args:
        target: what to send to; stays open.
        works: with their times, from the opening of the window.
        warmup: sent before, by times of their own; the window opens where their schedule ends. Where they are
            all due at once, it opens when all have ended.
        seconds: length of the window. None: that of the schedule, a mean gap longer than its last request is
            late, so that requests over window is the rate; where all are due at once, until the last has ended.
        timeout_s: seconds that a request may take before it is given up.
        watch: called with each trace when it has ended.
        settings: kept in the run, beside what is known here.

    Returns:
        the run; after Ctrl-C (or another cancellation) what there is of it, ``interrupted``.

    Raises:
        RequestError: before anything is sent, for times before 0 or beyond the window, or a warm-up prompt that
            is measured too.
    """
    warm, ordered = _by_time(warmup), _by_time(works)
    if not ordered:
        raise RequestError("there is no request to send")
    length = _span(ordered) if seconds is None else _above_0("seconds", seconds)
    if seconds is not None and ordered[-1].at >= seconds:
        raise RequestError(f"a request is due at {ordered[-1].at:g} s, after the window of {seconds:g} s")
    seen = {_key(work) for work in warm}
    for work in ordered:
        _refuse_seen(work, seen)
    opened: float | None = None  # on the clock

    async def drive(load: Sending, group: asyncio.TaskGroup) -> None:
        nonlocal opened
        tasks = []
        for work in warm:
            await until(due := load.zero + work.at)
            tasks.append(group.create_task(load.send(work, due)))
        if tasks and _span(warm) == 0:
            await asyncio.wait(tasks)
            opened = now()
        else:
            opened = load.zero + _span(warm)
        tasks.clear()
        for work in ordered:
            await until(due := opened + work.at)
            group.create_task(load.send(work, due))

    load = Sending(target, timeout_s, watch)
    await load.run(drive)
    known = {"loop": "open", "requests": len(works), "seconds": seconds}
    return load.result(opened, length, known, len(warm), settings)


async def closed_loop(
    target: Target,
    works: Iterable[WorkItem],
    *,
    users: int,
    think_s: float = 0.0,
    seconds: float | None = None,
    requests: int | None = None,
    warmup: Sequence[WorkItem] = (),
    timeout_s: float = 600.0,
    watch: Watch | None = None,
    settings: Mapping[str, Any] = _NONE,
) -> Run:
    """Let some users each send a work, wait for its end, think, and send the next.

    A request is due the moment its user is ready for it. A user whose request failed pauses for a second at least:
    a server that refuses at once would otherwise be asked as fast as this machine can.

    Args:
        target: what to send to; stays open.
        works: taken one after another, their times ignored; may have no end where ``seconds`` or ``requests`` is set.
        users: how many.
        think_s: seconds from an answer's end to its user's next request.
        seconds: length of the window: who is ready after it sends no more. None: until the last has ended.
        requests: how many to send in all, warm-up aside.
        warmup: what the users send first; the window opens with the first work after these.
        timeout_s: as for :func:`open_loop`, and so are ``watch`` and ``settings``.

    Returns:
        the run, as for :func:`open_loop`.

    Raises:
        RequestError: numbers that make no load, or a warm-up prompt that is measured too.
    """
    if users < 1 or think_s < 0 or (requests is not None and requests < 1):
        raise RequestError(
            f"users and requests must be at least 1 and think time 0, got {users}, {requests}, {think_s}"
        )
    if seconds is None and requests is None and not isinstance(works, Sequence):
        raise RequestError("a closed loop over work without end needs a number of requests, or seconds")
    length = math.inf if seconds is None else _above_0("seconds", seconds)
    first, source, seen = deque(warmup), iter(works), {_key(work) for work in warmup}
    opened: float | None = None
    taken, ran_out = 0, False

    def take(ready: float) -> tuple[WorkItem, float] | None:
        """The next work for a user who is ready, and when it is due."""
        nonlocal opened, taken, ran_out
        if first:
            return first.popleft(), ready
        if opened is None:  # behind all of the warm-up
            opened = math.nextafter(max(ready, now()), math.inf) if warmup else ready
        ready = max(ready, opened)
        if taken == requests or ready >= opened + length:
            return None
        if (work := next(source, None)) is None:
            ran_out = True
            return None
        _refuse_seen(work, seen)
        taken += 1
        return work, ready

    async def user(load: Sending) -> None:
        ready = load.zero
        while (next_one := take(ready)) is not None:
            work, due = next_one
            await until(due)
            trace = await load.send(work, due)
            pause = think_s if trace.status == "ok" else max(think_s, AFTER_FAILURE_S)
            ready = load.zero + (trace.t_end or 0.0) + pause

    async def drive(load: Sending, group: asyncio.TaskGroup) -> None:
        for _ in range(users):
            group.create_task(user(load))

    load = Sending(target, timeout_s, watch)
    await load.run(drive)
    known: dict[str, Any] = {
        "loop": "closed",
        "users": users,
        "think_s": think_s,
        "requests": requests,
        "seconds": seconds,
    }
    known["ran_out"] = ran_out  # of works, before the time was up
    return load.result(opened, 0.0 if seconds is None or ran_out else length, known, len(warmup), settings)


def _span(ordered: Sequence[WorkItem]) -> float:
    """Seconds of a schedule: to its last request and a mean gap on; 0 where all are due at once."""
    n = len(ordered)
    return ordered[-1].at * n / (n - 1) if n > 1 else 0.0


def _by_time(works: Iterable[WorkItem]) -> list[WorkItem]:
    ordered = sorted(works, key=lambda work: work.at)
    if ordered and not (ordered[0].at >= 0 and math.isfinite(ordered[-1].at)):
        raise RequestError(f"requests are due from 0 s on, got {ordered[0].at:g} to {ordered[-1].at:g}")
    return ordered


def _above_0(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise RequestError(f"{name} must be above 0, got {value:g}")
    return value


def _key(work: WorkItem) -> str | tuple[int, ...]:
    return work.prompt if isinstance(work.prompt, str) else tuple(work.prompt)


def _refuse_seen(work: WorkItem, seen: set[str | tuple[int, ...]]) -> None:
    if seen and _key(work) in seen:
        raise RequestError(
            "a prompt of the warm-up is measured too, and would be found in the prefix cache; "
            "warm up with other prompts (another stream or seed)"
        )

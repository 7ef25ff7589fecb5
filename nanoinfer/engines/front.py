"""A front for many callers: requests come from any thread or event loop, one thread owns the model.

front = Front(engine)
stream = await front.submit("Once upon a time")     # waits while the house is full
async for event in stream: ...
stream.cancel()                                     # at any moment; the blocks are free within a step
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from typing import Protocol

from nanoinfer.engines.engine import Prompt
from nanoinfer.engines.request import Completion, Deliver, Event, Request, by_prompt, checked
from nanoinfer.errors import RequestError
from nanoinfer.measure.clock import now
from nanoinfer.sampling import SamplingParams

#: What a caller's end of the line takes: events, an error, or None where nothing more comes.
Line = Callable[[Event | RequestError | None], None]


class Stepper(Protocol):
    """What a front asks of an engine, all of it from one thread but :meth:`admit`."""

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""

    def admit(self, prompts: list[Prompt], params: SamplingParams | None) -> list[Request]:
        """Requests, checked. Raises :class:`RequestError`."""

    def add(self, samples: list[Request], deliver: Deliver) -> None:
        """Queue the samples of one prompt."""

    def cancel(self, request: Request) -> None:
        """Drop a request."""

    def step(self) -> None:
        """One step, delivering events."""


class Busy(RequestError):
    """The house is full: try again later."""


class Stream(AsyncIterator[Event]):
    """The events of one prompt, as they come. ``completions`` once it is exhausted.

    Events wait here until they are read. There are never more than the request has tokens, so a slow
    reader costs little memory and nobody else's time.
    """

    def __init__(self, front: Front, requests: list[Request]) -> None:
        self.requests = requests
        self._front, self._loop = front, asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | RequestError | None] = asyncio.Queue()
        self._left = len(requests)

    async def __anext__(self) -> Event:
        if self._left == 0:
            raise StopAsyncIteration
        item = await self._events.get()
        if item is None:  # cancelled, or the front was closed
            self._left = 0
            raise StopAsyncIteration
        if isinstance(item, RequestError) or item.finish_reason is not None:
            self._left -= 1
        return checked(item)

    def cancel(self) -> None:
        """End it now; iteration stops behind the events that are there. Safe from any thread, and twice."""
        self._front.cancel(self.requests)
        self.deliver(None)

    @property
    def completions(self) -> list[Completion]:
        """One for each sample. Raises :class:`RequestError` before the end."""
        return [request.completion() for request in self.requests]

    async def finished(self) -> list[Completion]:
        """Read to the end and return the completions."""
        async for _ in self:
            pass
        return self.completions

    def deliver(self, item: Event | RequestError | None) -> None:
        """Called by the owner of the model, from its thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._events.put_nowait, item)


class Front:
    """Owns an engine in a thread of its own.

    Args:
        engine: nobody else may call its ``step`` from now on; ``generate`` and ``stream`` go through the front.
        max_outstanding: prompts that run or wait at a time. :meth:`submit` waits for a place,
            :meth:`submit_nowait` raises :class:`Busy`.
    """

    def __init__(self, engine: Stepper, max_outstanding: int = 256) -> None:
        self.engine, self.max_outstanding = engine, max_outstanding
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._outstanding, self._closed = 0, False
        self._in_line: deque[asyncio.Future[None]] = deque()
        self._under_way: dict[int, tuple[list[Request], Line]] = {}
        self._thread = threading.Thread(target=self._own, name="nanoinfer-engine", daemon=True)
        self._thread.start()

    # --- callers --------------------------------------------------------------------------

    async def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Queue one prompt, once there is a place; what can never be served is refused at once (RequestError)."""
        requests = self.engine.admit([prompt], params)
        await self._wait_for_place()
        return self._start(requests)

    def submit_nowait(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Queue one prompt, or raise :class:`Busy`. For callers in an event loop."""
        requests = self.engine.admit([prompt], params)
        if not self._take_place():
            raise Busy(f"{self.max_outstanding} requests are under way, and no more are taken; try again later")
        return self._start(requests)

    def cancel(self, requests: list[Request]) -> None:
        """Drop requests; those that have ended are left alone."""
        self._inbox.put(lambda: self._drop(requests))

    def run(self, requests: list[Request]) -> Generator[Event, None, None]:
        """Events of these requests, for a caller without an event loop."""
        arrived: queue.SimpleQueue[Event | RequestError | None] = queue.SimpleQueue()
        left = len(requests)
        groups = by_prompt(requests)
        with self._lock:
            self._outstanding += len(groups)
        for samples in groups:
            self._post(samples, arrived.put)
        try:
            while left and (item := arrived.get()) is not None:
                left -= isinstance(item, RequestError) or item.finish_reason is not None
                yield checked(item)
        finally:
            if left:
                self.cancel(requests)

    def close(self) -> None:
        """Stop; what is under way ends as cancelled. Returns once the thread has ended."""
        self._closed = True
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _start(self, requests: list[Request]) -> Stream:
        stream = Stream(self, requests)
        if requests[0].limit == 0:
            for request in requests:
                stream.deliver(request.finish_empty(now()))
            self._leave_place()
        else:
            self._post(requests, stream.deliver)
        return stream

    # --- places ---------------------------------------------------------------------------

    def _take_place(self, turn: asyncio.Future[None] | None = None) -> bool:
        """Take a place if there is one; else ``turn`` joins the line, and is set when one has become free."""
        with self._lock:
            if self._outstanding < self.max_outstanding:
                self._outstanding += 1
                return True
            if turn is not None:
                self._in_line.append(turn)
            return False

    async def _wait_for_place(self) -> None:
        while not self._take_place(turn := asyncio.get_running_loop().create_future()):
            try:
                await turn
            except asyncio.CancelledError:
                self._call_next()  # the turn may have come already: hand it on
                raise

    def _leave_place(self) -> None:
        with self._lock:
            self._outstanding -= 1
        self._call_next()

    def _call_next(self) -> None:
        """Wake the first in line who still waits."""
        with self._lock:
            while self._in_line:
                turn = self._in_line.popleft()
                if not turn.done() and not turn.get_loop().is_closed():
                    turn.get_loop().call_soon_threadsafe(_set, turn)
                    return

    # --- the owner's thread ---------------------------------------------------------------

    def _post(self, requests: list[Request], deliver: Line) -> None:
        if self._closed:
            raise RequestError("this front was closed; make a new one")
        self._inbox.put(lambda: self._take_in(requests, deliver))

    def _take_in(self, requests: list[Request], deliver: Line) -> None:
        def passing_on(item: Event | RequestError) -> None:
            deliver(item)
            if all(r.trace.t_end is not None for r in requests):
                self._forget(requests)

        self._under_way[id(requests)] = (requests, deliver)
        self.engine.add(requests, passing_on)

    def _forget(self, requests: list[Request]) -> None:
        if self._under_way.pop(id(requests), None) is not None:
            self._leave_place()

    def _drop(self, requests: list[Request]) -> None:
        for request in requests:
            self.engine.cancel(request)
        for group, deliver in list(self._under_way.values()):
            if all(r.trace.t_end is not None for r in group):
                deliver(None)
                self._forget(group)

    def _own(self) -> None:
        """Take in what has come, then a step; sleep when there is nothing to do."""
        while True:
            while not self.engine.busy or not self._inbox.empty():
                if (job := self._inbox.get()) is None:
                    self._drop([r for group, _ in self._under_way.values() for r in group])
                    return
                job()
            try:
                self.engine.step()
            except Exception as error:  # the model failed, not a request: nobody can go on
                for group, deliver in list(self._under_way.values()):
                    deliver(RequestError(f"the engine failed: {type(error).__name__}: {error}"))
                    self._drop(group)


def _set(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)

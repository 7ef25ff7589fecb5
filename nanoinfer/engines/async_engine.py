"""A front for many callers: requests come from any thread or event loop, one thread owns the model.

front = Front(engine)
stream = await front.submit("Once upon a time")     # waits while the house is full
async for event in stream: ...
stream.cancel()                                     # at any moment; the blocks are free within a step

A stream that nobody holds any more, because its reader was cancelled or has lost interest, is cancelled too.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import queue
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import suppress
from typing import Protocol

from nanoinfer.engines.engine import Prompt
from nanoinfer.engines.request import Completion, Deliver, Event, Request, by_prompt, checked
from nanoinfer.errors import RequestError
from nanoinfer.measure.clock import now
from nanoinfer.sampling.params import SamplingParams

#: What a caller's end of the line takes: events, an error, or None where nothing more comes.
Line = Callable[[Event | RequestError | None], None]

CUT_SHORT = "the request was cancelled, or its engine closed, before it had ended"


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
        """One step, delivering events. If it raises, every request has been given the error."""


class Busy(RequestError):
    """The house is full: try again later."""


class Stream(AsyncIterator[Event]):
    """The events of one prompt, as they come. ``completions`` once it is exhausted.

    Events wait here until they are read. There are never more than the request has tokens, so a slow
    reader costs little memory and nobody else's time.
    """

    def __init__(self, front: Front, requests: list[Request]) -> None:
        self.requests = requests
        self._left = len(requests)
        self._events: asyncio.Queue[Event | RequestError | None] = asyncio.Queue()
        #: Called by the owner of the model, from its thread.
        self.deliver = _to(asyncio.get_running_loop(), self._events)
        self._cancel = weakref.finalize(self, front.cancel, requests)  # so nobody else may hold the stream itself
        self._cancel.atexit = False

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
        self._cancel()
        self.deliver(None)

    @property
    def completions(self) -> list[Completion]:
        """One for each sample. Raises :class:`RequestError` before the end."""
        return [request.completion() for request in self.requests]

    async def finished(self) -> list[Completion]:
        """Read to the end and return the completions. Raises :class:`RequestError` if that is not reached."""
        async for _ in self:
            pass
        if any(request.finish_reason is None for request in self.requests):
            raise RequestError(CUT_SHORT)
        return self.completions


class Front:
    """Owns an engine in a thread of its own.

    Args:
        engine: nobody else may call its ``step`` from now on; ``generate`` and ``stream`` go through the front.
        max_outstanding: prompts that run or wait at a time. :meth:`submit` waits for a place,
            :meth:`submit_nowait` raises :class:`Busy`. Callers without an event loop do not wait.
    """

    def __init__(self, engine: Stepper, max_outstanding: int = 256) -> None:
        if max_outstanding < 1:
            raise RequestError(f"max_outstanding must be at least 1, got {max_outstanding}")
        self.engine, self.max_outstanding = engine, max_outstanding
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # An abandoned submit is thrown out by the garbage collector, maybe while its thread holds this: hence RLock.
        self._lock = threading.RLock()
        self._outstanding, self._closed = 0, False
        self._in_line: deque[asyncio.Future[None]] = deque()
        self._under_way: dict[int, tuple[list[Request], Line]] = {}
        self._thread = threading.Thread(target=self._own, name="nanoinfer-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that is still in a step when Python leaves brings it down

    @property
    def is_alive(self) -> bool:
        """Whether anybody steps the engine: without its thread, callers would wait for ever."""
        return self._thread.is_alive()

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
        """Drop all requests of some prompts; those that have ended are left alone."""
        if any(request.trace.t_end is None for request in requests):
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
            while left:
                item = arrived.get() or RequestError(CUT_SHORT)
                left -= isinstance(item, RequestError) or item.finish_reason is not None
                yield checked(item)
        finally:
            if left:
                self.cancel(requests)

    def close(self) -> None:
        """Stop; what is under way ends as cancelled. Returns once the thread has ended."""
        with self._lock:  # what is posted comes before the end or not at all
            self._closed = True
            self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self.close)

    def _start(self, requests: list[Request]) -> Stream:
        stream = Stream(self, requests)
        if requests[0].limit == 0:
            for request in requests:
                stream.deliver(request.finish_empty(now()))
            self._leave_place()
            return stream
        try:
            self._post(requests, stream.deliver)
        except RequestError:
            self._leave_place()
            raise
        return stream

    # --- places ---------------------------------------------------------------------------

    def _take_place(self) -> bool:
        """Take a place if there is one; then nobody is in line."""
        with self._lock:
            is_free = self._outstanding < self.max_outstanding
            self._outstanding += is_free
            return is_free

    async def _wait_for_place(self) -> None:
        with self._lock:
            if self._take_place():
                return
            turn = asyncio.get_running_loop().create_future()
            self._in_line.append(turn)
        try:
            await turn
        except BaseException:  # cancelled, in line or with the place in hand
            with self._lock:
                if turn in self._in_line:
                    self._in_line.remove(turn)
                else:
                    self._leave_place()
            raise

    def _leave_place(self) -> None:
        """Hand the place to the first in line: nobody who comes later can slip in."""
        with self._lock:
            self._outstanding -= 1
            while self._in_line and self._take_place():
                turn = self._in_line.popleft()
                try:
                    turn.get_loop().call_soon_threadsafe(_set, turn)
                except RuntimeError:  # that loop is closed
                    self._outstanding -= 1

    # --- the owner's thread ---------------------------------------------------------------

    def _post(self, requests: list[Request], deliver: Line) -> None:
        with self._lock:
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
            except Exception:  # the model failed, not a request: all have been told, and here is what to mend
                logging.getLogger(__name__).exception("a step failed")


def _set(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


class _Post:
    """Carries what the owner's thread says into one event loop: one wake-up for all that a step has to say."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._woken = weakref.ref(loop), False  # a loop lives as long as its owner wants
        self._items: deque[tuple[asyncio.Queue[Event | RequestError | None], Event | RequestError | None]] = deque()

    def put(self, events: asyncio.Queue[Event | RequestError | None], item: Event | RequestError | None) -> None:
        """From any thread."""
        self._items.append((events, item))
        if not self._woken:  # else it will be found: the flag goes down before the items are taken
            self._woken = True
            with suppress(RuntimeError):  # the loop is closed: nobody will read this
                if (loop := self._loop()) is not None:
                    loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        self._woken = False
        while self._items:
            events, item = self._items.popleft()
            events.put_nowait(item)


_posts: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Post] = weakref.WeakKeyDictionary()


def _to(loop: asyncio.AbstractEventLoop, events: asyncio.Queue[Event | RequestError | None]) -> Line:
    """Called from the loop itself, when a stream begins."""
    post = _posts.get(loop)
    if post is None:
        post = _posts[loop] = _Post(loop)
    return lambda item: post.put(events, item)

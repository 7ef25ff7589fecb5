"""An engine for many callers in an event loop: a thread of its own runs the steps, streams bring the events.

stream = await AsyncEngine(ContinuousEngine(loaded)).submit("Once upon a time")  # waits for a free slot
async for event in stream: ...
stream.cancel()  # at any moment; the blocks are free within a step. So is one that nothing refers to any more
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol

from nanoinfer.engines.engine import Prompt
from nanoinfer.engines.request import Completion, Deliver, Event, Request, RequestCancelled, is_last, unwrap
from nanoinfer.errors import RequestError, check
from nanoinfer.measure.clock import now
from nanoinfer.sampling.params import SamplingParams


class SteppableEngine(Protocol):
    """What of :class:`ContinuousEngine` is needed here. All but :meth:`step` may be called while a step is run."""

    @property
    def busy(self) -> bool: ...

    def admit(self, prompts: list[Prompt], params: SamplingParams | None) -> list[Request]: ...

    def add(self, samples: list[Request], deliver: Deliver) -> None: ...

    def cancel(self, request: Request) -> None: ...

    def cancel_all(self) -> None: ...

    def step(self) -> None: ...


#: Steps in a row that may fail before the engine counts as broken.
MOST_FAILURES: Final = 3


class QueueFull(RequestError):
    """No free slot: try again later."""


class Mailbox:
    """The events of one prompt that have come and are not yet read.

    The engine refers to this and not to the stream, so that a stream that is not read any more can be seen to be so.
    """

    def __init__(self, n_samples: int) -> None:
        self.unfinished = n_samples
        self.events: asyncio.Queue[Event | RequestError] = asyncio.Queue()


class LoopBinding:
    """The event loop of an engine's callers: a slot for each prompt, and the way there for what the steps bring."""

    def __init__(self, loop: asyncio.AbstractEventLoop, slots: int) -> None:
        self.loop, self.slots = loop, asyncio.Semaphore(slots)
        self._items: deque[tuple[Mailbox, Event | RequestError]] = deque()
        self._is_woken = False

    def call(self, function: Callable[..., None], *args: Any) -> None:
        """Have the loop call a function, from any thread."""
        with suppress(RuntimeError):  # the loop is closed: no task is left to hear of it
            self.loop.call_soon_threadsafe(function, *args)

    def deliver(self, mailbox: Mailbox, item: Event | RequestError) -> None:
        """Put an item into a mailbox, from any thread; one wake-up of the loop for all that a step brings."""
        self._items.append((mailbox, item))
        if not self._is_woken:  # else it will be seen: the flag goes down before the items are taken
            self._is_woken = True
            self.call(self._hand_out)

    def _hand_out(self) -> None:
        self._is_woken = False
        while self._items:
            mailbox, item = self._items.popleft()
            mailbox.events.put_nowait(item)
            if is_last(item):
                mailbox.unfinished -= 1
                if not mailbox.unfinished:
                    self.slots.release()


class Stream(AsyncIterator[Event]):
    """The events of one prompt, as they come. ``completions`` once it is exhausted.

    Events wait here until they are read, never more than the request has tokens: a slow reader holds up no other.
    """

    def __init__(self, engine: SteppableEngine, requests: list[Request], mailbox: Mailbox, loop: LoopBinding) -> None:
        self.requests, self._mailbox, self._loop = requests, mailbox, loop
        self._unread = len(requests)  # last items
        self._drop = weakref.finalize(self, _cancel_requests, engine, requests)
        self._drop.atexit = False

    async def __anext__(self) -> Event:
        if self._unread == 0:
            raise StopAsyncIteration
        item = await self._mailbox.events.get()
        if isinstance(item, RequestCancelled):
            self._unread = 0
            raise StopAsyncIteration
        self._unread -= is_last(item)
        return unwrap(item)

    def cancel(self) -> None:
        """End it now; iteration stops after the events that are there. Safe from any thread, and twice."""
        self._drop()
        self._loop.call(self._mailbox.events.put_nowait, RequestCancelled())  # not only after a step that is run

    @property
    def completions(self) -> list[Completion]:
        """One for each sample. Raises :class:`RequestError` before the end."""
        return [request.completion() for request in self.requests]

    async def finished(self) -> list[Completion]:
        """Read to the end and return the completions. Raises :class:`RequestError` if that is not reached."""
        async for _ in self:
            pass
        if any(request.finish_reason is None for request in self.requests):
            raise RequestCancelled
        return self.completions


def _cancel_requests(engine: SteppableEngine, requests: list[Request]) -> None:
    for request in requests:
        if request.trace.t_end is None:
            engine.cancel(request)


class AsyncEngine:
    """Runs an engine's steps in a thread of its own, for at most ``max_outstanding`` prompts of one event loop."""

    def __init__(self, engine: SteppableEngine, max_outstanding: int = 256) -> None:
        check("max_outstanding", max_outstanding, at_least=1, whole=True)
        self.engine, self.max_outstanding = engine, max_outstanding
        self._binding: LoopBinding | None = None
        self._is_closed = False
        self._closing = threading.Lock()  # a request is added before the engine is closed, or not at all
        self._wake = threading.Event()
        self._step_began: float | None = None
        self._failures = 0  # of the last steps, in a row
        self._thread = threading.Thread(target=self._run_steps, name="nanoinfer-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that is still in a step when Python ends makes it crash

    def problem(self, longest_step_s: float) -> str | None:
        """Why callers would wait for ever: no thread, a step that hangs, or steps that all fail; else ``None``."""
        began = self._step_began
        if not self._thread.is_alive():
            return "the engine's thread has ended"
        if began is not None and (seconds := now() - began) > longest_step_s:
            return f"a step has been running for {seconds:.0f} s"
        return f"the last {self._failures} steps failed" if self._failures >= MOST_FAILURES else None

    async def submit(self, prompt: Prompt, params: SamplingParams | None = None, *, wait: bool = True) -> Stream:
        """Queue one prompt, once there is a free slot, in the order of the calls.

        Raises :class:`QueueFull` where no slot is free and ``wait`` is false, and :class:`RequestError` for what can
        never be served and after the engine was closed.
        """
        requests = self.engine.admit([prompt], params)
        loop = asyncio.get_running_loop()
        if self._binding is None or self._binding.loop.is_closed():
            self._binding = LoopBinding(loop, self.max_outstanding)
        binding = self._binding
        if binding.loop is not loop:
            raise RequestError("this engine has callers in another event loop: use one loop, or close() it first")
        if not wait and binding.slots.locked():
            raise QueueFull(f"{self.max_outstanding} requests are under way, and no more are taken; try again later")
        await binding.slots.acquire()
        mailbox = Mailbox(len(requests))
        deliver = partial(binding.deliver, mailbox)
        with self._closing:
            if self._is_closed:
                binding.slots.release()
                raise RequestError("this engine was closed; make a new one")
            if requests[0].limit == 0:
                for request in requests:
                    deliver(request.finish_empty(now()))
            else:
                self.engine.add(requests, deliver)
        self._wake.set()
        return Stream(self.engine, requests, mailbox, binding)

    def close(self) -> None:
        """Stop; what is under way ends as cancelled. Returns once the thread has ended."""
        with self._closing:
            self._is_closed = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.engine.cancel_all()
        atexit.unregister(self.close)

    def _run_steps(self) -> None:
        """One step after the other; sleep when there is nothing to do."""
        while True:
            self._wake.clear()  # before looking: what comes after the look wakes it again
            if self._is_closed:
                return
            if not self.engine.busy:
                self._wake.wait()
                continue
            self._step_began = now()
            try:
                self.engine.step()
                self._failures = 0
            except Exception:  # the model failed, not a request: all readers have the error, and the log the cause
                logging.getLogger(__name__).exception("a step failed")
                self._failures += 1
            self._step_began = None

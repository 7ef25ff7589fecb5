"""An event loop whose clock leaps to the next thing that is due: hours in milliseconds, and no busy machine matters."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
#: Added to each leap, so that rounding never leaves the clock a hair before what it leapt to.
HAIR = 1e-9


class VirtualLoop(asyncio.SelectorEventLoop):
    """``at`` is its time; a test may move it on, as work that blocks the loop would."""

    def __init__(self) -> None:
        self.at = 1000.0
        super().__init__(_Leaping(self))

    def time(self) -> float:
        return self.at


class _Leaping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "all tasks wait, and nothing is due"
            self._loop.at += timeout + HAIR
        return ready


class Clock:
    """What tests use: ``run`` a coroutine on virtual time, read and move ``at``."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop

    @property
    def at(self) -> float:
        return self.loop.at

    def block(self, seconds: float) -> None:
        """Time goes by, and the loop sleeps through it."""
        self.loop.at += seconds

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

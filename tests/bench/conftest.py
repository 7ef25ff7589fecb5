"""Fixtures of the tests of loads."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.bench.virtual_time import Clock, VirtualLoop


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """Virtual time for the event loop and for ``nanoinfer.measure.clock.now``."""
    loop = VirtualLoop()
    monkeypatch.setattr("nanoinfer.measure.clock.time", SimpleNamespace(perf_counter=lambda: loop.at))
    yield Clock(loop)
    loop.close()

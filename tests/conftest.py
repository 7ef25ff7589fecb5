"""For every test: no telemetry, no network by accident, few Hypothesis examples, and a count of what was left out."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from tests.examples import load_profile

if TYPE_CHECKING:
    from nanoinfer.models.registry import LoadedModel

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")
# Tests compute tiny things: threads that wait for each other cost more than they bring, above all on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

load_profile()

# A shell starts jobs of the background with Ctrl-C ignored, and they hand that on to all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

MARKERS = ("gpu", "browser", "ray", "network", "slow")
left_out: Counter[str] = Counter()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        left_out.update(marker for marker in MARKERS if item.get_closest_marker(marker))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:  # a worker of pytest-xdist
        output["left_out"] = dict(left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    left_out.update(Counter(getattr(node, "workeroutput", {}).get("left_out", {})) - left_out)  # all leave out the same


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if left_out:
        counts = ", ".join(f"{left_out[marker]} {marker}" for marker in MARKERS if left_out[marker])
        terminalreporter.write_line(f"left out by marker: {counts}")


@pytest.fixture(scope="session")
def loaded_smollm2() -> LoadedModel:
    """The real default model, loaded once for all tests that only read it."""
    from nanoinfer.models.registry import load_model  # brings torch, which most tests of the command line do without

    return load_model("smollm2-135m", dtype="float32")

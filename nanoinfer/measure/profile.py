"""Where the time goes: torch.profiler, reduced to operators, calls and shares of each phase.

Profiling slows the code down: shares are to be believed, absolute times are not.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanoinfer.errors import NanoinferError, check
from nanoinfer.measure.clock import require_cuda, synchronize

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class OperatorTime:
    """One operator in one phase."""

    phase: str
    operator: str
    calls: int
    self_ms: float  # in the operator itself, not in those it calls; on CUDA that of the kernels it launched
    share: float  # of the phase's total, 0 to 1


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the profiler's own log lines out of a notebook: C++ writes them past sys.stderr and no level stops all."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    saved = os.dup(2)
    try:
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def profile_phases(
    phases: Mapping[str, Callable[[], object]], device: str | torch.device = "cpu", top: int = 8, warmup: int = 1
) -> list[OperatorTime]:
    """Profile each phase, after ``warmup`` calls, and return its ``top`` operators, the largest share first.

    The others are summed in one row, ``(other)``, so that the shares of a phase add up to 1.
    """
    from torch.profiler import ProfilerActivity, profile

    check("profile: top", top, at_least=1, whole=True, error=NanoinferError)
    cuda = str(device).partition(":")[0] == "cuda"
    if cuda:
        require_cuda(f"device '{device}'")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    rows: list[OperatorTime] = []
    for phase, fn in phases.items():
        for _ in range(warmup):
            fn()
        synchronize(device)
        with _quiet():
            profiler = profile(activities=activities, acc_events=True)
            profiler.start()
        try:
            fn()
            synchronize(device)
        finally:
            with _quiet():
                profiler.stop()
        with _quiet():
            events = profiler.key_averages()
        times = sorted(
            (
                ((event.self_device_time_total if cuda else event.self_cpu_time_total) / 1000, event.key, event.count)
                for event in events
                # The list has kernels next to the operators that launched them: count the operators.
                if event.device_type.name == "CPU"
            ),
            reverse=True,
        )
        total = sum(ms for ms, _, _ in times) or 1.0
        rows += [OperatorTime(phase, name, calls, ms, ms / total) for ms, name, calls in times[:top] if ms > 0]
        if rest := [(ms, calls) for ms, _, calls in times[top:] if ms > 0]:
            ms, calls = sum(ms for ms, _ in rest), sum(calls for _, calls in rest)
            rows.append(OperatorTime(phase, "(other)", calls, ms, ms / total))
    return rows

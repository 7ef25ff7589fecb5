"""Ranks start, fail and end, whatever happens to them or to their caller. (That they return, other tests need.)"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from nanoinfer.errors import DeviceError, ModelError, RequestError
from nanoinfer.parallel.launch import collect_results, launch

TASKS = "tests.parallel.launch_tasks"


def test_a_rank_that_is_killed_ends_all(capfd: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    with pytest.raises(DeviceError, match=r"^rank 1 was killed \(signal 9\); was it out of memory\?$"):
        launch(f"{TASKS}:killed", 2)
    assert time.monotonic() - start < 60  # far from the timeout
    assert capfd.readouterr() == ("", "")


def test_the_first_failure_is_raised(tmp_path: Path) -> None:
    (tmp_path / "torchrun.log").write_text("a traceback\nand its end\n")

    def fails(rank: int, kind: str, text: str, at: float) -> None:
        failure = {"rank": rank, "kind": kind, "text": text, "at": at}
        (tmp_path / f"error-{rank}.json").write_text(json.dumps(failure))

    with pytest.raises(DeviceError, match="the ranks died: torchrun ended with 3: and its end"):
        collect_results(tmp_path, 2, 3, 9.0)
    fails(0, "RuntimeError", "the other has left", 5.0)
    with pytest.raises(DeviceError, match="rank 0 died: RuntimeError: the other has left"):
        collect_results(tmp_path, 2, 1, 9.0)
    fails(1, "ModelError", "no such model", 4.0)
    with pytest.raises(ModelError, match="no such model"):
        collect_results(tmp_path, 2, 1, 9.0)
    fails(2, "BrokenPipeError", "", 3.0)
    with pytest.raises(BrokenPipeError):
        collect_results(tmp_path, 3, 1, 9.0)


def test_ranks_that_take_too_long_are_stopped(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="the 1 ranks were stopped: they had not ended after 1 s"):
        launch(f"{TASKS}:wait", 1, {"folder": str(tmp_path)}, timeout_s=1)


def test_ranks_end_with_their_caller(tmp_path: Path) -> None:
    code = f"from nanoinfer.parallel.launch import launch; launch('{TASKS}:wait', 2, {{'folder': {str(tmp_path)!r}}})"
    with subprocess.Popen([sys.executable, "-c", code]) as caller:
        _until(lambda: len(list(tmp_path.iterdir())) == 2)
        caller.kill()
    _until(lambda: not any(psutil.pid_exists(int(path.name)) for path in tmp_path.iterdir()))


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_cannot_start() -> None:
    with pytest.raises(RequestError, match="ranks must be 1 to 64, got 0"):
        launch(f"{TASKS}:wait", 0)
    with pytest.raises(RequestError, match="ranks must be 1 to 64, got 65"):
        launch(f"{TASKS}:wait", 65)
    with pytest.raises(DeviceError, match="ranks run on cpu or cuda, not on 'mps'"):
        launch(f"{TASKS}:wait", 2, device="mps")

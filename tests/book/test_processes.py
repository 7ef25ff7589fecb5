"""Nothing that a chapter started outlives it, however the run ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import nbformat
import psutil
import pytest

from nanoinfer.book.chapter import executed_path
from nanoinfer.book.execute import WIDGET_VIEW, run_chapters
from nanoinfer.book.processes import MARK, end, guarded, marked
from nanoinfer.errors import ChapterError
from tests.book.helpers import FakeKernel, write

SECONDS = 30.0
SLEEP = "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
WAIT = (
    SLEEP
    + "import pathlib, os, time\npathlib.Path('started').write_text(f'{os.getpid()} {child.pid}')\ntime.sleep(600)"
)


def soon(is_so: Callable[[], bool]) -> None:
    limit = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(0.05)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def sleeper(mark: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, MARK: mark})


def test_what_carries_the_mark_is_ended_and_nothing_else() -> None:
    ours, other = sleeper("a"), sleeper("b")
    try:
        soon(lambda: [p.pid for p in marked("a")] == [ours.pid])
        end("a")
        assert gone(ours.pid) and not gone(other.pid)
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()


def test_a_block_ends_its_processes() -> None:
    with guarded() as mark:
        child = sleeper(mark)
        soon(lambda: bool(marked(mark)))
    assert gone(child.pid)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_runner_that_is_ended_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    write(tmp_path, "01_a", [])
    run_chapters(tmp_path, None, "smoke", execute=FakeKernel())
    before = executed_path(tmp_path, "01_a").read_bytes()
    write(tmp_path, "01_a", [("code", WAIT)])
    code = (
        "from pathlib import Path\nfrom nanoinfer.book.execute import run_chapters\n"
        f"run_chapters(Path({str(tmp_path)!r}), None, 'smoke')"
    )
    runner = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stderr=subprocess.DEVNULL)
    soon(lambda: (tmp_path / "started").exists() and bool((tmp_path / "started").read_text()))
    kernel, child = map(int, (tmp_path / "started").read_text().split())
    os.killpg(runner.pid, number)
    assert runner.wait(SECONDS) != 0
    soon(lambda: gone(kernel) and gone(child))
    assert executed_path(tmp_path, "01_a").read_bytes() == before


@pytest.mark.slow
def test_a_killed_kernel_is_tried_again_after_its_children_are_gone(tmp_path: Path) -> None:
    once = (
        SLEEP + "import os, pathlib, signal\nmark = pathlib.Path('child')\n"
        "if not mark.exists():\n    mark.write_text(str(child.pid))\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "import psutil\nassert not psutil.pid_exists(int(mark.read_text()))"
    )
    write(tmp_path, "01_once", [("code", once)])
    assert [outcome.status for outcome in run_chapters(tmp_path, None, "smoke")] == ["done"]
    assert gone(int((tmp_path / "child").read_text()))


@pytest.mark.slow
def test_an_intended_error_is_no_failure_and_another_one_is(tmp_path: Path) -> None:
    path = write(tmp_path, "01_a", [("code", "1 / 0"), ("code", "print('on')")])
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[2].metadata["tags"] = ["raises-exception"]
    nbformat.write(notebook, path)
    assert [outcome.status for outcome in run_chapters(tmp_path, None, "smoke")] == ["done"]
    shown = nbformat.read(executed_path(tmp_path, "01_a"), as_version=4)
    assert not any("papermill-error-cell-tag" in cell.metadata.get("tags", []) for cell in shown.cells)
    assert shown.cells[-1].outputs[0].text == "on\n"
    notebook.cells[3].source = "0 / 0"
    nbformat.write(notebook, path)
    with pytest.raises(ChapterError, match="01_a, cell 4 of 4: ZeroDivisionError"):
        run_chapters(tmp_path, None, "smoke")


@pytest.mark.slow
def test_a_control_leaves_its_still_figure_and_no_view_without_state(tmp_path: Path) -> None:
    control = (
        "from nanoinfer.show import Choice, panel, table\n"
        "panel({'n': Choice('n', [1, 2])}, lambda n: table(['n'], [[n]], 'A number'))"
    )
    write(tmp_path, "01_a", [("code", control)])
    run_chapters(tmp_path, None, "smoke")
    shown = nbformat.read(executed_path(tmp_path, "01_a"), as_version=4)
    (output,) = shown.cells[-1].outputs
    assert WIDGET_VIEW not in output.data and "A number" in output.data["text/html"]
    assert "widgets" not in shown.metadata


def test_a_notebook_without_cell_ids_runs(tmp_path: Path) -> None:
    path = write(tmp_path, "01_a", [("code", "1 + 1")])
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        del cell["id"]
    notebook.nbformat_minor = 4
    nbformat.write(notebook, path)
    assert [outcome.status for outcome in run_chapters(tmp_path, None, "smoke", execute=FakeKernel())] == ["done"]

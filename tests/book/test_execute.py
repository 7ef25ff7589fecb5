"""Running chapters: parameters, failures, resuming, dead kernels; real kernels where they decide, a fake elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from nbclient.exceptions import DeadKernelError
from papermill.exceptions import PapermillExecutionError

from nanoinfer.book.chapter import executed_path, read_notebook
from nanoinfer.book.execute import Execute, execute_notebook, run_chapters
from nanoinfer.errors import ChapterError, NanoinferError
from tests.book.helpers import PARAMETERS, FakeKernel, write


def outputs(path: Path) -> str:
    return "".join(o.get("text", "") for cell in read_notebook(path).cells for o in cell.get("outputs", ()))


def test_a_chapter_runs_in_this_python_from_the_root_and_leaves_no_private_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stray = tmp_path / "user" / "kernels" / "python3"
    stray.mkdir(parents=True)
    spec = {"argv": ["/bin/false"], "display_name": "x", "language": "python"}
    (stray / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "user"))
    book = tmp_path / "book"
    book.mkdir()
    monkeypatch.chdir(tmp_path)
    show = "import os, sys\nprint(sys.executable, os.getcwd(), MODEL, PROFILE, SEED, sep='\\n')"
    source = write(book, "01_a", [("code", show)])
    before = source.read_bytes()

    (outcome,) = run_chapters(book, None, "smoke", {"SEED": "1e3"})

    assert outcome.status == "done"
    done = book / "_build" / "executed" / "01_a.ipynb"
    assert outputs(done).split("\n")[:5] == [sys.executable, str(book), "random:tiny-gpt2", "smoke", "1000"]
    assert source.read_bytes() == before
    metadata = read_notebook(done).metadata
    assert metadata.papermill.parameters.PROFILE == "smoke"
    assert metadata.papermill.exception is None
    assert metadata.kernelspec == {"display_name": "Python 3", "language": "python", "name": "python3"}
    assert str(tmp_path) not in json.dumps(metadata)
    assert "widgets" not in metadata
    injected = [c for c in read_notebook(done).cells if "injected-parameters" in c.metadata.get("tags", [])]
    assert [c.metadata.tags for c in injected] == [["injected-parameters", "remove-input"]]
    log = capsys.readouterr().out
    assert sys.executable in log
    assert "\r" not in log

    fake = FakeKernel()
    assert run_chapters(book, None, "smoke", {"SEED": 1000}, execute=fake)[0].status == "fresh"
    assert run_chapters(book, None, "smoke", {"SEED": 2}, execute=fake)[0].status == "done"
    assert run_chapters(book, None, "smoke", {"SEED": 2}, True, execute=fake)[0].status == "done"
    assert [parameters["SEED"] for _, parameters in fake.runs] == [2, 2]
    assert json.loads((book / "_build" / "run.json").read_text("utf8"))["seconds"]["smoke"].keys() == {"01_a"}


def test_a_failure_names_chapter_cell_and_error_and_the_next_run_resumes_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "01_good", [])
    write(tmp_path, "02_bad", [("markdown", "x"), ("code", "1 / 0"), ("code", "print('after')")])
    write(tmp_path, "03_later", [])
    with pytest.raises(ChapterError, match=r"02_bad, cell 4 of 5: ZeroDivisionError: division by zero"):
        run_chapters(tmp_path, None, "smoke")
    text = capfd.readouterr().err
    assert "FAILED  02_bad, cell 4 of 5" in text
    assert "\x1b" not in text
    build = tmp_path / "_build"
    assert [p.name for p in sorted((build / "executed").iterdir())] == ["01_good.ipynb"]
    assert "ZeroDivisionError" in (build / "failed" / "02_bad.ipynb").read_text("utf8")
    statuses = [c["status"] for c in json.loads((build / "run.json").read_text("utf8"))["chapters"]]
    assert statuses == ["done", "failed"]

    write(tmp_path, "02_bad", [])
    outcomes = run_chapters(tmp_path, None, "smoke", execute=FakeKernel())
    assert [o.status for o in outcomes] == ["fresh", "done", "done"]
    assert not list((build / "failed").iterdir())


@pytest.mark.parametrize(
    "execute",
    [
        FakeKernel([PapermillExecutionError(0, 0, "raise SystemExit(3)", "SystemExit", "3", [])]),
        pytest.param(execute_notebook, marks=pytest.mark.slow),
    ],
)
def test_a_chapter_that_fails_later_leaves_no_old_copy_behind(tmp_path: Path, execute: Execute) -> None:
    write(tmp_path, "01_a", [])
    run_chapters(tmp_path, None, "smoke", execute=FakeKernel())
    write(tmp_path, "01_a", [("code", "raise SystemExit(3)")])
    with pytest.raises(ChapterError, match="01_a, cell 3 of 3: SystemExit: 3"):
        run_chapters(tmp_path, None, "smoke", execute=execute)
    assert not (tmp_path / "_build" / "executed" / "01_a.ipynb").exists()


DEAD = DeadKernelError("Kernel died")


@pytest.mark.parametrize(
    "execute", [FakeKernel([DEAD, None, DEAD, DEAD]), pytest.param(execute_notebook, marks=pytest.mark.slow)]
)
def test_a_dead_kernel_is_tried_once_more(tmp_path: Path, capsys: pytest.CaptureFixture[str], execute: Execute) -> None:
    once = "import os, pathlib\nmark = pathlib.Path('mark')\nif not mark.exists():\n    mark.touch()\n    os._exit(1)"
    write(tmp_path, "01_once", [("code", once)])
    write(tmp_path, "02_ever", [("code", "import os\nos._exit(1)")])
    with pytest.raises(ChapterError, match="02_ever, cell 3 of 3: the kernel died twice"):
        run_chapters(tmp_path, None, "smoke", execute=execute)
    assert "01_once: the kernel died at cell 3 of 3; once more" in capsys.readouterr().out
    assert (tmp_path / "_build" / "executed" / "01_once.ipynb").exists()


@pytest.mark.parametrize(
    ("profile", "given", "message"),
    [
        ("laptpo", {}, "no profile 'laptpo': did you mean 'laptop'"),
        ("smoke", {"MODLE": "x"}, "01_a has no parameter 'MODLE': did you mean 'MODEL'"),
        ("smoke", {"SEED": "abc"}, "01_a: parameter SEED takes a whole number"),
        ("smoke", {"PROFILE": "gpu"}, "use --profile"),
        ("smoke", {"MODEL": "smolm2"}, "unknown model 'smolm2'.*did you mean 'smollm2-135m'"),
        ("smoke", {"DEVICE": "gpu"}, "unknown device 'gpu'"),
        ("smoke", {"DTYPE": "int8"}, "unknown dtype 'int8'"),
        ("gpu", {"DEVICE": "cuda:x"}, "unknown device 'cuda:x'"),
    ],
)
def test_a_mistake_is_refused_before_anything_runs(
    tmp_path: Path, profile: str, given: dict[str, object], message: str
) -> None:
    write(tmp_path, "01_a", [])
    with pytest.raises(NanoinferError, match=message):
        run_chapters(tmp_path, None, profile, given)
    assert not (tmp_path / "_build").exists()


def test_an_interrupted_run_keeps_the_finished_one(tmp_path: Path) -> None:
    write(tmp_path, "01_a", [])
    run_chapters(tmp_path, None, "smoke", execute=FakeKernel())
    before = executed_path(tmp_path, "01_a").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        run_chapters(tmp_path, None, "smoke", fresh=True, execute=FakeKernel([KeyboardInterrupt()]))
    assert executed_path(tmp_path, "01_a").read_bytes() == before


def test_a_log_that_cannot_be_written_is_named_and_leaves_no_half(tmp_path: Path) -> None:
    log = tmp_path / "_build" / "run.json"
    (log / "in the way").mkdir(parents=True)
    write(tmp_path, "01_a", [])
    with pytest.raises(ChapterError, match=r"run\.json: cannot be written"):
        run_chapters(tmp_path, None, "smoke", execute=FakeKernel())
    assert not list(log.parent.glob("*.part"))


def test_an_untagged_parameters_cell_is_refused_before_anything_runs(tmp_path: Path) -> None:
    write(tmp_path, "01_a", [])
    path = write(tmp_path, "02_untagged", [], PARAMETERS)
    path.write_text(path.read_text("utf8").replace('"parameters"', '"params"'), encoding="utf-8")
    with pytest.raises(ChapterError, match="02_untagged: needs exactly one code cell tagged 'parameters'"):
        run_chapters(tmp_path, None, "smoke")
    assert not (tmp_path / "_build").exists()

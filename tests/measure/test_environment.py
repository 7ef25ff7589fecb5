from __future__ import annotations

import datetime
import getpass
import json
import platform
import shutil
from pathlib import Path

import pytest
import torch

from nanoinfer.measure import environment


def test_provenance_is_complete_and_private() -> None:
    record = environment.provenance()
    text = json.dumps(record)
    assert set(record) == {"machine", "versions", "date", "commit"}
    assert record["versions"]["python"] == platform.python_version()
    assert record["versions"]["torch"] == torch.__version__
    assert record["machine"]["cores"] >= 1
    assert record["machine"]["memory_bytes"] > 1 << 28
    assert record["machine"]["cpu"]
    assert datetime.datetime.fromisoformat(record["date"]).utcoffset() == datetime.timedelta(0)
    user = getpass.getuser()
    for private in (platform.node(), str(Path.home()), str(Path.cwd()), *([user] if user != "root" else [])):
        assert private not in text


def test_describe_machine_hands_out_copies() -> None:
    environment.describe_machine()["gpus"].append({"name": "imaginary"})
    assert {"name": "imaginary"} not in environment.describe_machine()["gpus"]


def test_commit_is_none_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_output", lambda *command: None)
    assert environment.git_commit() is None


def test_commit_marks_local_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"ls-files": "environment.py", "rev-parse": "abc123", "status": " M x.py"}
    monkeypatch.setattr(environment, "_output", lambda *command: answers[command[3]])
    assert environment.git_commit() == "abc123+changes"
    answers["status"] = ""
    assert environment.git_commit() == "abc123"


@pytest.mark.skipif(
    shutil.which("git") is None or not (Path(environment.__file__).parents[2] / ".git").exists(),
    reason="is about a checkout",
)
def test_a_checkout_has_a_commit() -> None:
    commit = environment.git_commit()
    assert commit is not None and len(commit.removesuffix("+changes")) == 12


def test_other_programs_are_what_neither_this_process_nor_its_children_used(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"now": 10.0, "busy": 100.0, "own": 5.0}
    monkeypatch.setattr(environment, "now", lambda: times["now"])
    monkeypatch.setattr(environment.os, "times", lambda: (times["own"], 0.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr(environment.psutil, "cpu_times", lambda: (times["busy"], 0.0, 0.0, 999.0))
    others = environment.OtherPrograms()
    assert others.cores() == 0.0
    times.update(now=14.0, busy=109.0, own=8.0)
    assert others.cores() == pytest.approx((9 - 3) / 4)

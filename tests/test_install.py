"""What make installs and from where, with a pip that writes down what it is asked."""

from __future__ import annotations

import importlib.util
import platform
import shutil
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
FROM_CPU_INDEX = "--no-deps --index-url https://download.pytorch.org/whl/cpu --timeout 10 --retries 1 torch==2.13.0"
PIP = """#!/bin/sh
case "$1" in
config) cat config; exit;;
check) exit $(cat check);;
esac
for last; do :; done
[ -f "$last" ] && asked="$asked $(tr "\\n" " " <"$last")"
echo "$@ $asked" >>asked
case "$*" in *"$(cat refused)"*) echo "no route" >&2; exit 1;; esac
"""


class Machine:
    """A folder with a lock, a pip, and what that pip answers."""

    def __init__(self, folder: Path, install: ModuleType) -> None:
        self.folder, self.install = folder, install
        (folder / "requirements.lock").write_text("# a lock\nnumpy==2.0.0\ntorch==2.13.0\ntyper==0.20.0\n")
        (folder / "pip").write_text(PIP)
        (folder / "pip").chmod(0o755)
        self.answers()

    def answers(self, config: str = "", check: int = 0, refused: str = "nothing") -> None:
        for name, text in (("config", config), ("check", str(check)), ("refused", refused)):
            (self.folder / name).write_text(text)

    def asked(self) -> list[str]:
        return (self.folder / "asked").read_text().splitlines() if (self.folder / "asked").exists() else []


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Linux without an NVIDIA GPU and without torch."""
    spec = importlib.util.spec_from_file_location("install", ROOT / "scripts" / "install.py")
    assert spec is not None and spec.loader is not None
    install = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(install)
    monkeypatch.setattr(install, "PIP", (str(tmp_path / "pip"),))
    monkeypatch.setattr(install, "INSTALL", (str(tmp_path / "pip"), "install"))
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(install, "DRIVER_FILES", ())
    monkeypatch.setattr(install.importlib.metadata, "version", not_installed)
    monkeypatch.chdir(tmp_path)
    return Machine(tmp_path, install)


def not_installed(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


def test_without_a_gpu_torch_alone_comes_from_pytorchs_index(machine: Machine) -> None:
    assert machine.install.install_torch() == 0
    assert machine.asked() == [f"install {FROM_CPU_INDEX} ", "install -c requirements.lock torch "]


@pytest.mark.parametrize(
    "setting",
    [
        "global.index-url='https://mirror.example/simple'",
        "global.extra-index-url='file:///opt/pypi/simple'",
        ":env:.find-links='/opt/wheels'",
        "install.constraint='/etc/pip/constraints.txt'",
        "user.no-index='1'",
    ],
)
def test_what_the_user_has_said_to_pip_wins(machine: Machine, setting: str) -> None:
    machine.answers(config=f":env:.cert='/etc/ssl/ca.crt'\n{setting}\n")
    assert machine.install.install_torch() == 0
    assert machine.asked() == ["install -c requirements.lock torch "]


def test_settings_that_name_no_source_do_not_count(machine: Machine) -> None:
    machine.answers(config="global.cert='/etc/ssl/ca.crt'\n:env:.default-timeout='180'\nglobal.proxy='http://p:1'\n")
    assert machine.install.cpu_torch() == "torch==2.13.0"


def test_a_gpu_macos_or_torch_itself_make_it_needless(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as here:
        here.setattr(platform, "system", lambda: "Darwin")
        assert machine.install.cpu_torch() is None
    with monkeypatch.context() as here:
        here.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi" if name == "nvidia-smi" else None)
        assert machine.install.cpu_torch() is None
    with monkeypatch.context() as here:
        here.setattr(machine.install, "DRIVER_FILES", (str(machine.folder / "pip"),))
        assert machine.install.cpu_torch() is None
    with monkeypatch.context() as here:
        here.setattr(machine.install.importlib.metadata, "version", lambda name: "2.13.0+cu130")
        assert machine.install.cpu_torch() is None
    with monkeypatch.context() as here:
        here.setattr(machine.install.importlib.metadata, "version", lambda name: "2.12.0+cpu")
        assert machine.install.cpu_torch() == "torch==2.13.0"


def test_out_of_reach_it_is_as_if_there_were_no_such_index(machine: Machine, capfd: pytest.CaptureFixture[str]) -> None:
    machine.answers(refused="whl/cpu")
    assert machine.install.install_torch() == 0
    assert machine.asked()[1:] == ["install -c requirements.lock torch "]
    out, err = capfd.readouterr()
    assert [line.partition(":")[0] for line in out.splitlines()] == ["No NVIDIA GPU", "Not to be had from there"]
    assert err == ""


def test_two_pips_share_the_lock(machine: Machine) -> None:
    assert machine.install.install_lock() == 0
    first, second = machine.asked()
    assert "--no-deps" in first and "--no-deps" in second
    packages = [line.rpartition(".txt ")[2].split() for line in (first, second)]
    assert sorted(packages) == [["numpy==2.0.0", "typer==0.20.0"], ["torch==2.13.0"]]


def test_what_the_lock_lacks_is_looked_for(machine: Machine) -> None:
    machine.answers(check=1)
    assert machine.install.install_lock() == 0
    assert machine.asked()[2].startswith("install -r requirements.lock")


def test_a_pip_that_fails_ends_it(machine: Machine, capfd: pytest.CaptureFixture[str]) -> None:
    machine.answers(refused="0.txt")
    assert machine.install.main() == 1
    assert "no route" in capfd.readouterr().err
    assert len(machine.asked()) == 4  # PyTorch twice, both halves of the lock, and not the project

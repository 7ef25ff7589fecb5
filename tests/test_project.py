"""The project's own files agree with each other, and `make` ends clearly where it must."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]
#: The extras that `make` installs; `gpu` is for those who have one.
MADE = ("book", "serve", "bench", "dev")


def lock() -> dict[str, Requirement]:
    lines = (ROOT / "requirements.lock").read_text("utf8").splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


def test_the_lock_pins_each_package_to_one_public_version() -> None:
    for requirement in lock().values():
        assert re.fullmatch(r"==[0-9][0-9A-Za-z.]*", str(requirement.specifier)), requirement  # no +cpu, no range
        assert requirement.url is None


def test_every_range_in_pyproject_holds_the_locked_version() -> None:
    wanted = PROJECT["dependencies"] + [line for extra in MADE for line in PROJECT["optional-dependencies"][extra]]
    pins = lock()
    for line in wanted:
        requirement = Requirement(line)
        pin = pins[canonicalize_name(requirement.name)]
        version = str(pin.specifier).removeprefix("==")
        assert requirement.specifier.contains(version), f"{line} does not hold the locked {version}"
        assert str(requirement.specifier), f"{line} has no range"


def test_conda_makes_the_environment_of_the_lock_and_installs_the_project() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text("utf8"))
    conda = [item for item in environment["dependencies"] if isinstance(item, str)]
    (pip,) = [item["pip"] for item in environment["dependencies"] if isinstance(item, dict)]
    assert environment["channels"] == ["conda-forge"]
    assert conda == [f"python{PROJECT['requires-python']}", "pip"]
    assert pip == ["-r requirements.lock", "-e ."]


def test_the_readme_names_both_commands_and_the_right_pythons() -> None:
    readme = (ROOT / "README.md").read_text("utf8")
    for needed in ("make book", "make test", "Python 3.11, 3.12 or 3.13"):
        assert needed in readme


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A machine with make and a few plain tools; the test adds its Pythons to ``bin``."""
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy2(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "bin").mkdir()
    for tool in ("sh", "rm", "touch", "mkdir", "cat", "chmod", "make"):
        os.symlink(shutil.which(tool) or pytest.fail(f"{tool} is not installed"), tmp_path / "bin" / tool)
    return tmp_path


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "-j4", *arguments]
    environment = {"PATH": str(folder / "bin"), "HOME": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_make_says_in_one_line_that_there_is_no_fitting_python(bare: Path) -> None:
    script(bare / "bin" / "python3", "exit 1")  # too old, or a shim that starts nothing
    done = make(bare, "test")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].startswith("nanoinfer needs Python 3.11, 3.12 or 3.13")
    assert not (bare / ".venv").exists()


def test_make_passes_over_a_shim_and_says_where_pip_failed(bare: Path) -> None:
    script(bare / "bin" / "python3", "echo 'command not found' >&2; exit 127")
    script(bare / "broken", "echo no route >&2; exit 1")
    venv = "mkdir -p .venv/bin; cat broken >.venv/bin/python; chmod +x .venv/bin/python"
    script(bare / "bin" / "python3.12", f'case "$1" in -V) echo Python 3.12.1;; -m) {venv};; esac')
    done = make(bare, "book", "test")
    assert done.returncode == 2
    assert "Making .venv with Python 3.12.1 (python3.12)" in done.stdout
    assert "no route" in done.stderr
    assert "pip's reason stands above" in done.stderr
    assert not (bare / ".venv" / ".nanoinfer-installed").exists()


def test_make_help_lists_the_commands() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in ("book", "test", "test-all", "lint", "smoke", "lab", "clean"):
        assert f"make {target}:" in done.stdout

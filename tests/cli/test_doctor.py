from __future__ import annotations

import getpass
import json
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from nanoinfer.cli import app as cli
from nanoinfer.cli import doctor


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    doctor.is_installed.cache_clear()


def test_this_machine_passes() -> None:
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 0, result.output
    for word in ("Python", "torch", "free memory", "free disk", "model smollm2-135m", "C++ compiler", "Chromium"):
        assert word in result.stdout
    assert result.stdout.endswith("Everything needed is here.\n")


def test_json_is_complete_and_private() -> None:
    result = CliRunner().invoke(cli.app, ["doctor", "--json"])
    record = json.loads(result.stdout)
    assert record["ok"] is True
    assert record["machine"]["cores"] >= 1
    assert record["versions"]["python"] == platform.python_version()
    assert {"name", "ok", "detail", "fix", "needed"} == set(record["checks"][0])
    user = getpass.getuser()
    for private in (platform.node(), str(Path.home()), *([user] if user != "root" else [])):
        assert private not in result.stdout


def test_something_needed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "is_installed", lambda module: module != "tiktoken")
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 1
    assert "MISSING  tiktoken: not installed; needed for tokenizers" in result.stdout
    assert "-> pip install tiktoken" in result.stdout


def test_a_machine_without_torch_still_gets_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.importlib.import_module

    def without_torch(name: str) -> Any:
        if name == "torch":
            raise OSError("libtorch.so: cannot open shared object file")
        return real(name)

    monkeypatch.setattr(doctor.importlib, "import_module", without_torch)
    report = doctor.examine()
    assert not report.ok
    assert report.machine is None
    lines = list(report.lines())
    assert any(line.startswith("MISSING  torch: libtorch.so") for line in lines)
    assert not any("GPU" in line for line in lines)


def test_scarce_memory_and_disk_are_said_but_do_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 28, total=1 << 30))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 20))
    checks = {check.name: check for check in doctor.examine().checks}
    assert (checks["free memory"].ok, checks["free memory"].detail[:7]) == (False, "0.2 GiB")
    assert not checks["free disk for models"].ok
    assert doctor.examine().ok


def test_the_disk_looked_at_is_that_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Path] = []

    def usage(folder: Path) -> SimpleNamespace:
        asked.append(folder)
        return SimpleNamespace(free=1 << 40)

    monkeypatch.setattr(doctor.shutil, "disk_usage", usage)
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path / "not" / "yet"))
    assert next(iter(doctor.check_disk())).ok and asked == [tmp_path]


def test_what_is_optional_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("NANOINFER_CHROMIUM", "PLAYWRIGHT_BROWSERS_PATH", "CXX", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor, "is_installed", lambda module: module not in doctor.BOOK)
    report = doctor.examine()
    missing = {check.name: check.fix for check in report.checks if not check.ok}
    assert {"C++ compiler", "git", "the book's tools", "Chromium"} <= set(missing)
    assert all(missing.values())
    assert report.ok  # a plain `generate` needs none of them


def test_the_compiler_is_the_one_that_builds_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoinfer.measure.environment.compiler", lambda: None)
    (check,) = doctor.check_compiler()
    assert not check.ok and "the CPU kernel and torch.compile need it" in check.fix
    monkeypatch.setattr("nanoinfer.measure.environment.compiler", lambda: "/usr/bin/clang++")
    assert next(iter(doctor.check_compiler())) == doctor.Check("C++ compiler", True, "clang++", check.fix)


def test_chromium_by_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    browser = tmp_path / "chrome"
    browser.touch()
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PLAYWRIGHT_BROWSERS_PATH", raising=False)
    monkeypatch.setenv("NANOINFER_CHROMIUM", str(browser))
    assert next(iter(doctor.check_chromium())).ok
    monkeypatch.setenv("NANOINFER_CHROMIUM", str(tmp_path / "gone"))
    assert not next(iter(doctor.check_chromium())).ok

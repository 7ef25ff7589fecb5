"""``nanoinfer doctor``: what this machine has, what it lacks, and the way to mend it.

Nothing here stops at the first fault: a machine without torch is the very one that
needs the rest of the report.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from nanoinfer.cli.options import Json
from nanoinfer.show.text import emit

commands = typer.Typer()

GIB = 1 << 30
#: Memory that the default model takes in float32, with room to work; disk for its caches and the book.
LEAST_MEMORY, LEAST_DISK = 2 * GIB, 2 * GIB

#: Import name to what it is for.
NEEDED = {
    "numpy": "arrays",
    "tiktoken": "tokenizers",
    "safetensors": "weights",
    "gguf": "the default model's file",
    "jinja2": "chat templates",
    "huggingface_hub": "models from the hub",
    "platformdirs": "the place of the model cache",
    "psutil": "memory figures",
}
BOOK = ("papermill", "jupyter_book", "ipywidgets", "matplotlib")


@dataclass(frozen=True)
class Check:
    """One finding. ``fix`` says how to mend it; only a failed ``needed`` one fails the examination."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
    needed: bool = False


@dataclass(frozen=True)
class Report:
    """All findings, the machine (``None`` where torch does not import) and the versions."""

    machine: dict[str, Any] | None
    versions: dict[str, str]
    checks: list[Check]

    @property
    def ok(self) -> bool:
        """Whether everything needed is here."""
        return all(check.ok or not check.needed for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """The report for machines; no paths or names of people or hosts."""
        return {
            "ok": self.ok,
            "machine": self.machine,
            "versions": self.versions,
            "checks": [asdict(check) for check in self.checks],
        }

    def lines(self) -> Iterator[str]:
        """The report for people."""
        if self.machine is not None:
            gpus = ", ".join(gpu["name"] for gpu in self.machine["gpus"]) or "no GPU"
            yield f"{self.machine['cpu']}, {self.machine['cores']} cores, {gpus}, {self.machine['os']}"
        yield ", ".join(f"{name} {version}" for name, version in self.versions.items())
        for check in self.checks:
            mark = "ok     " if check.ok else "MISSING" if check.needed else "without"
            yield f"{mark}  {check.name}: {check.detail}"
            if not check.ok and check.fix:
                yield f"         -> {check.fix}"
        yield "Everything needed is here." if self.ok else "Something needed is missing: see MISSING above."


def examine() -> Report:
    """Look at everything; never raises for something missing."""
    from nanoinfer.measure import environment

    torch_check = _torch()
    return Report(
        machine=environment.describe_machine() if torch_check.ok and _has("psutil") else None,
        versions=environment.versions(),
        checks=[
            _python(),
            torch_check,
            *_packages(),
            *([_memory()] if _has("psutil") else []),
            *([_disk()] if _has("platformdirs") else []),
            *_models(),
            *_gpu(torch_check.ok),
            _compiler(),
            _git(),
            _book(),
            _chromium(),
        ],
    )


@functools.cache
def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _python() -> Check:
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return Check("Python", fits, platform.python_version(), "install Python 3.11, 3.12 or 3.13", needed=True)


def _torch() -> Check:
    fix = "make test sets up the environment; or: pip install torch"
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        return Check("torch", False, " ".join(str(error).split()) or "does not import", fix, needed=True)
    return Check("torch", True, str(torch.__version__), needed=True)


def _packages() -> Iterator[Check]:
    for module, purpose in NEEDED.items():
        if not _has(module):
            name = module.replace("_", "-")
            yield Check(name, False, f"not installed; needed for {purpose}", f"pip install {name}", needed=True)


def _memory() -> Check:
    import psutil

    free = psutil.virtual_memory().available
    fix = "close something, or take --dtype bfloat16 or a random:tiny model"
    return Check("free memory", free >= LEAST_MEMORY, f"{free / GIB:.1f} GiB (2 are enough for smollm2-135m)", fix)


def _disk() -> Check:
    from nanoinfer.store import cache_dir

    folder = cache_dir().absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    fix = "make room there, or point NANOINFER_CACHE at a folder on another disk"
    return Check("free disk for models", free >= LEAST_DISK, f"{free / GIB:.1f} GiB (2 are enough)", fix)


def _gpu(torch_ok: bool) -> Iterator[Check]:
    if not torch_ok:
        return
    torch = importlib.import_module("torch")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            detail = f"{torch.cuda.get_device_name(index)}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
            yield Check(f"GPU cuda:{index}", True, detail)
        return
    if torch.version.cuda is None and shutil.which("nvidia-smi"):
        fix = "pip install --force-reinstall torch, from the index for your CUDA version (see pytorch.org)"
        yield Check("GPU", False, "there is an NVIDIA driver, but this torch is built without CUDA", fix)
    else:
        yield Check(
            "GPU", False, "none that torch can use; all chapters run on the CPU too", "run the gpu profile elsewhere"
        )


def _compiler() -> Check:
    wanted = os.environ.get("CXX") or "c++"
    found = next((name for name in (wanted, "g++", "clang++", "cl") if shutil.which(name)), None)
    fix = "Debian and Ubuntu: apt install g++; macOS: xcode-select --install; only torch.compile needs it"
    return Check("C++ compiler", found is not None, found or "none found", fix)


def _git() -> Check:
    found = shutil.which("git") is not None
    return Check("git", found, "found" if found else "none found", "install git; results then name their commit")


def _book() -> Check:
    missing = [module.replace("_", "-") for module in BOOK if not _has(module)]
    detail = f"missing: {', '.join(missing)}" if missing else "papermill, jupyter-book and widgets are installed"
    return Check("the book's tools", not missing, detail, "make book installs them; or: pip install 'nanoinfer[book]'")


def _chromium() -> Check:
    places = [
        os.environ.get("PLAYWRIGHT_BROWSERS_PATH", ""),
        "~/.cache/ms-playwright",
        "~/Library/Caches/ms-playwright",
    ]
    if local := os.environ.get("LOCALAPPDATA"):
        places.append(f"{local}/ms-playwright")
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    found = (
        Path(os.environ.get("NANOINFER_CHROMIUM") or os.devnull).is_file()
        or any(shutil.which(name) for name in names)
        or any(next(Path(place).expanduser().glob("chromium*"), None) for place in places if place)
    )
    fix = "python -m playwright install chromium, or point NANOINFER_CHROMIUM at one; only the browser tests need it"
    return Check("Chromium", found, "found" if found else "none found", fix)


def _models() -> Iterator[Check]:
    try:
        from nanoinfer.models.registry import known_models

        rows = known_models()
    except ImportError:  # a missing package, which stands in the report already
        return
    for row in rows:
        if row.name.startswith("random:"):  # made here, never missing
            continue
        yield Check(f"model {row.name}", row.on_disk, "on disk" if row.on_disk else "not on disk", row.how)


@commands.command()
def doctor(as_json: Json = False) -> None:
    """Look at this machine: what is here, what is missing, and how to get it."""
    report = examine()
    if as_json:
        emit(report.as_dict())
    else:
        for line in report.lines():
            print(line)
    if not report.ok:
        raise typer.Exit(1)

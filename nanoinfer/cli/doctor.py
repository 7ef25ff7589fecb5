"""``nanoinfer doctor`` and ``nanoinfer models``: what this machine has, what it lacks, and how to get it.

Nothing here stops at the first fault: a machine without torch needs the rest of the report most.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import typer

from nanoinfer.cli.options import Json
from nanoinfer.show.text import as_table, console, emit

commands = typer.Typer()

GIB: Final = 1 << 30
#: Memory that the default model takes in float32, with room to work; disk for its caches and the book.
LEAST_MEMORY: Final = 2 * GIB
LEAST_DISK: Final = 2 * GIB
#: Import name to what it is for.
NEEDED: Final = {
    "numpy": "arrays",
    "tiktoken": "tokenizers",
    "safetensors": "weights",
    "gguf": "the default model's file",
    "jinja2": "chat templates",
    "huggingface_hub": "models from the hub",
    "platformdirs": "the place of the model cache",
    "psutil": "memory figures",
}
BOOK: Final = ("papermill", "jupyter_book", "ipywidgets", "matplotlib")


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
        """For JSON; no paths or names of people or hosts."""
        checks = [asdict(check) for check in self.checks]
        return {"ok": self.ok, "machine": self.machine, "versions": self.versions, "checks": checks}

    def lines(self) -> Iterator[str]:
        """For a terminal."""
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


@functools.cache
def is_installed(module: str) -> bool:
    """Whether it could be imported."""
    return importlib.util.find_spec(module) is not None


def check_python() -> Iterator[Check]:
    """Its version."""
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield Check("Python", fits, platform.python_version(), "install Python 3.11, 3.12 or 3.13", needed=True)


def check_torch() -> Iterator[Check]:
    """Whether it imports."""
    fix = "make test sets up the environment; or: pip install torch"
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        yield Check("torch", False, " ".join(str(error).split()) or "does not import", fix, needed=True)
    else:
        yield Check("torch", True, str(torch.__version__), needed=True)


def check_packages() -> Iterator[Check]:
    """Those that are missing."""
    for module, purpose in NEEDED.items():
        if not is_installed(module):
            name = module.replace("_", "-")
            yield Check(name, False, f"not installed; needed for {purpose}", f"pip install {name}", needed=True)


def check_memory() -> Iterator[Check]:
    """What is free."""
    import psutil

    free = psutil.virtual_memory().available
    fix = "close something, or take --dtype bfloat16 or a random:tiny model"
    yield Check("free memory", free >= LEAST_MEMORY, f"{free / GIB:.1f} GiB (2 are enough for smollm2-135m)", fix)


def check_disk() -> Iterator[Check]:
    """What is free where models are kept."""
    from nanoinfer.store import cache_dir

    folder = cache_dir().absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    fix = "make room there, or point NANOINFER_CACHE at a folder on another disk"
    yield Check("free disk for models", free >= LEAST_DISK, f"{free / GIB:.1f} GiB (2 are enough)", fix)


def check_models() -> Iterator[Check]:
    """Those that have a name and are not made here."""
    try:
        from nanoinfer.models.registry import known_models
    except ImportError:  # a missing package, which stands in the report already
        return
    for row in known_models():
        if not row.name.startswith("random:"):
            yield Check(f"model {row.name}", row.on_disk, "on disk" if row.on_disk else "not on disk", row.how)


def check_gpu() -> Iterator[Check]:
    """Each GPU that torch can use."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError):
        return
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        detail = f"{torch.cuda.get_device_name(index)}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        yield Check(f"GPU cuda:{index}", True, detail)
    if not torch.cuda.is_available() and torch.version.cuda is None and shutil.which("nvidia-smi"):
        detail = "there is an NVIDIA driver, but this torch is built without CUDA"
        fix = "pip install --force-reinstall torch, from the index for your CUDA version (see pytorch.org)"
        yield Check("GPU", False, detail, fix)
    elif not torch.cuda.is_available():
        detail = "none that torch can use; all chapters run on the CPU too"
        yield Check("GPU", False, detail, "run the gpu profile elsewhere")


def check_compiler() -> Iterator[Check]:
    """Of C++, as the CPU kernel looks for it."""
    from nanoinfer.measure.environment import compiler

    path = compiler()
    fix = "Debian and Ubuntu: apt install g++; macOS: xcode-select --install; the CPU kernel and torch.compile need it"
    yield Check("C++ compiler", path is not None, "none found" if path is None else Path(path).name, fix)


def check_git() -> Iterator[Check]:
    """For results that name their commit."""
    found = shutil.which("git") is not None
    yield Check("git", found, "found" if found else "none found", "install git; results then name their commit")


def check_book() -> Iterator[Check]:
    """The packages of the extra ``book``."""
    missing = [module.replace("_", "-") for module in BOOK if not is_installed(module)]
    detail = f"missing: {', '.join(missing)}" if missing else "papermill, jupyter-book and widgets are installed"
    yield Check("the book's tools", not missing, detail, "make book installs them; or: pip install 'nanoinfer[book]'")


def check_chromium() -> Iterator[Check]:
    """Playwright's, the system's, or the one that NANOINFER_CHROMIUM names."""
    folders = [
        os.environ.get("PLAYWRIGHT_BROWSERS_PATH", ""),
        "~/.cache/ms-playwright",
        "~/Library/Caches/ms-playwright",
    ]
    if local := os.environ.get("LOCALAPPDATA"):
        folders.append(f"{local}/ms-playwright")
    found = (
        Path(os.environ.get("NANOINFER_CHROMIUM") or os.devnull).is_file()
        or any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome", "chrome"))
        or any(next(Path(folder).expanduser().glob("chromium*"), None) for folder in folders if folder)
    )
    fix = "python -m playwright install chromium, or point NANOINFER_CHROMIUM at one; only the browser tests need it"
    yield Check("Chromium", found, "found" if found else "none found", fix)


#: Each check, and the package without which it cannot be made.
CHECKS: Final[tuple[tuple[Callable[[], Iterable[Check]], str | None], ...]] = (
    (check_python, None),
    (check_torch, None),
    (check_packages, None),
    (check_memory, "psutil"),
    (check_disk, "platformdirs"),
    (check_models, None),
    (check_gpu, None),
    (check_compiler, None),
    (check_git, None),
    (check_book, None),
    (check_chromium, None),
)


def examine() -> Report:
    """Look at everything; never raises for something missing."""
    from nanoinfer.measure import environment

    checks = [found for check, package in CHECKS if package is None or is_installed(package) for found in check()]
    has_torch = any(check.name == "torch" and check.ok for check in checks)
    machine = environment.describe_machine() if has_torch and is_installed("psutil") else None
    return Report(machine, environment.versions(), checks)


@commands.command()
def models(as_json: Json = False) -> None:
    """List the models that have a name here, and how to get them."""
    from nanoinfer.models.registry import known_models

    rows = [asdict(row) for row in known_models()]
    if as_json:
        emit(rows)
        return
    header = [key.replace("_", " ") for key in rows[0]]
    console().print(as_table((header, ([cell_text(value) for value in row.values()] for row in rows))))


def cell_text(value: object) -> str:
    """``yes`` or ``no``, whole numbers with commas, nothing for ``None``."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)


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

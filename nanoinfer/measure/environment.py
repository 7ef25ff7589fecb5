"""What a number was measured on: only what bears on speed.

Host names, user names, paths and kernel build strings stay out: results are published.
"""

from __future__ import annotations

import copy
import datetime
import functools
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil

from nanoinfer.measure.clock import now

#: The packages that can change a measured number or a token.
PACKAGES = ("nanoinfer", "torch", "numpy", "tiktoken", "safetensors", "gguf", "transformers", "triton")


def cpu_model() -> str:
    """The processor's name as its maker writes it, else the architecture."""
    name = _cpuinfo("model name", "Model")
    if name is None and platform.system() == "Darwin":
        name = _output("sysctl", "-n", "machdep.cpu.brand_string")
    return name or platform.processor() or platform.machine()


def cpu_features() -> str:
    """The processor's instruction sets as the system lists them; its name where there is no such list.

    Machines of one name can differ: a virtual one has what its host allows.
    """
    return _cpuinfo("flags", "Features") or cpu_model()


def _cpuinfo(*keys: str) -> str | None:
    """The first such field of Linux's /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in keys and value.strip():
            return value.strip()
    return None


def _output(*command: str) -> str | None:
    """What a command prints, stripped; ``None`` where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def usable_cores() -> int:
    """Cores that this process may run on (a container's share, not the host's)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _os_name() -> str:
    if platform.system() != "Linux":
        return f"{platform.system()} {platform.release()}"
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    except OSError:
        return "Linux"


@functools.cache
def _describe() -> dict[str, Any]:
    import psutil
    import torch

    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count() if torch.cuda.is_available() else 0))
    return {
        "cpu": cpu_model(),
        "architecture": platform.machine(),
        "cores": usable_cores(),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [
            {"name": gpu.name, "memory_bytes": gpu.total_memory, "compute_capability": f"{gpu.major}.{gpu.minor}"}
            for gpu in gpus
        ],
        "cuda": torch.version.cuda,
        "os": _os_name(),
    }


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory (bytes), GPUs, operating system."""
    return copy.deepcopy(_describe())


def versions() -> dict[str, str]:
    """Python and the packages of :data:`PACKAGES` that are installed."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def git_commit() -> str | None:
    """The commit of the checkout this package runs from, ``+changes`` where files differ; ``None`` when installed."""
    here = str(Path(__file__).resolve().parent)
    # A package installed in a .venv inside another repository is not tracked by it.
    if _output("git", "-C", here, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    commit = _output("git", "-C", here, "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", here, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if commit and changed else commit


def provenance() -> dict[str, Any]:
    """Machine, versions, UTC date and commit: what every stored result carries."""
    return {
        "machine": describe_machine(),
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
    }


class OtherPrograms:
    """Processor time of the programs that are not this process and not its children, from now on."""

    def __init__(self) -> None:
        self._start = self._times()

    def cores(self) -> float:
        """How many cores they kept busy on average since the start; 0 in the first second (coarse counters)."""
        wall, busy, own = (end - start for end, start in zip(self._times(), self._start, strict=True))
        return max(0.0, busy - own) / wall if wall > 1 else 0.0

    @staticmethod
    def _times() -> tuple[float, float, float]:
        """Seconds: of the clock, all cores' busy time, and this process' own with its children, ended ones too."""
        own = sum(os.times()[:4])
        for child in psutil.Process().children(recursive=True):
            try:
                own += sum(child.cpu_times()[:2])
            except psutil.Error:
                continue  # it has just ended: os.times() has it when it is reaped
        return now(), sum(psutil.cpu_times()[:3]), own


def machine_key() -> list[object]:
    """What a measurement on this machine depends on: PyTorch, its threads, the processor, the GPUs."""
    import torch

    machine = describe_machine()
    return [torch.__version__, torch.get_num_threads(), machine["cpu"], machine["gpus"]]


def compiler() -> str | None:
    """Path of the C++ compiler: what ``CXX`` names, else the first of c++, g++ and clang++; None if there is none."""
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)

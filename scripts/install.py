"""Fill the environment whose Python runs this with what requirements.lock names, and the project itself. For make.

pip and not uv: uv reads none of pip's settings, so a user's index, certificate, constraint or files would not count.

Quick, where that is safe: the lock is complete, so packages need no resolving and two pips can share them; bytecode is
left to the first import, since most modules of most packages are never imported. On Linux without an NVIDIA GPU,
PyTorch's build for processors (about 200 MB in place of gigabytes) comes from PyTorch's own index, unless the user has
an index, a constraint or files of their own.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

LOCK = Path("requirements.lock")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
#: Seconds without an answer after which PyTorch's index counts as out of reach.
CPU_INDEX_TIMEOUT = "10"
#: Settings with which users say where their packages come from: then they come from there.
USERS_OWN = ("index-url", "extra-index-url", "no-index", "find-links", "constraint")
#: Of NVIDIA's driver: its device, that of Jetson boards, and its tool on WSL.
DRIVER_FILES = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/usr/lib/wsl/lib/nvidia-smi")
PIP = (sys.executable, "-m", "pip")
INSTALL = (*PIP, "install", "--quiet", "--progress-bar", "off", "--no-compile")


def lines() -> list[str]:
    """The lock's requirements."""
    return [line for line in LOCK.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]


def has_nvidia_gpu() -> bool:
    """Whether NVIDIA's driver is here."""
    return shutil.which("nvidia-smi") is not None or any(Path(file).exists() for file in DRIVER_FILES)


def users_settings() -> Iterator[str]:
    """Where packages come from, as far as the user has said it to pip, by file or environment."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=False).stdout
    for line in listed.splitlines():
        name = line.partition("=")[0].rpartition(".")[2]
        if name in USERS_OWN:
            yield name


def cpu_torch() -> str | None:
    """The requirement that PyTorch's own index shall fulfil; None where torch comes as every package does."""
    (torch,) = [line for line in lines() if line.startswith("torch==")]
    if platform.system() != "Linux" or has_nvidia_gpu() or any(users_settings()):
        return None
    try:
        installed = importlib.metadata.version("torch").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return torch
    return None if torch == f"torch=={installed}" else torch


def install_torch() -> int:
    """PyTorch and what it needs; the exit status of pip."""
    if (torch := cpu_torch()) is not None:
        print(f"No NVIDIA GPU: PyTorch's build for processors, from {CPU_INDEX}", flush=True)
        own = ["--no-deps", "--index-url", CPU_INDEX, "--timeout", CPU_INDEX_TIMEOUT, "--retries", "1"]
        if subprocess.run([*INSTALL, *own, torch], capture_output=True, check=False).returncode:
            print("Not to be had from there: PyTorch comes from the usual index, with gigabytes of CUDA", flush=True)
    return subprocess.run([*INSTALL, "-c", str(LOCK), "torch"], check=False).returncode


def install_lock() -> int:
    """All other packages, by two pips at once; then by one that resolves, if the lock lacks something here."""
    requirements = lines()
    with tempfile.TemporaryDirectory() as folder:
        parts = [Path(folder) / f"{start}.txt" for start in range(2)]
        for start, part in enumerate(parts):
            part.write_text("\n".join(requirements[start::2]) + "\n", encoding="utf-8")
        pips = [subprocess.Popen([*INSTALL, "--no-deps", "-r", str(part)]) for part in parts]
        status = max(abs(pip.wait()) for pip in pips)
    if status == 0 and subprocess.run([*PIP, "check"], capture_output=True, check=False).returncode:
        return subprocess.run([*INSTALL, "-r", str(LOCK)], check=False).returncode
    return status


def main() -> int:
    """0 once all is there; else pip's reason stands on standard error."""
    print("Installing 1/3: PyTorch (the largest, some minutes on a slow line)", flush=True)
    if status := install_torch():
        return status
    print(f"Installing 2/3: the other packages of {LOCK}", flush=True)
    if status := install_lock():
        return status
    print("Installing 3/3: nanoinfer itself", flush=True)
    return subprocess.run([*INSTALL, "--no-deps", "--no-build-isolation", "-e", "."], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

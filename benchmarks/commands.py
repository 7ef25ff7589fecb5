"""Do the README's commands print the same in two checkouts? Differences, with what a machine measures masked.

    python -m benchmarks.commands BEFORE AFTER [--only predict]

Each checkout has its .venv, or both use ``--python``. What is computed (predict, plan, simulate) must be equal to 12
digits, JSON in any order of its keys. In what is measured (generate's figures, doctor, bench, lens) every number is
masked, and in all of it paths and spaces.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

PROMPT: Final = ("--prompt", "The sea is", "--max-tokens", "32")
LOAD: Final = ("--slo", "ttft=500ms,tpot=50ms", "--output-tokens", "8", "--prompt-tokens", "16")
LLAMA: Final = ("llama-3.1-8b", "--gpu", "H100")
#: Commands of the README whose output is computed from constants.
COMPUTED: Final = (
    ("predict", *LLAMA, "--batch", "32", "--context", "2048", "--usd-per-hour", "3"),
    ("predict", *LLAMA, "--tp", "4", "--new", "256"),
    ("predict", "llama-3-70b", "--gpu", "H100", "--tp", "8", "--batch", "32", "--context", "2048", "--want", "latency"),
    ("fit", *LLAMA, "--tp", "2", "--context", "8192"),
    ("gpus",),
    ("models",),
    ("plan", *LLAMA, "--users", "1000000", "--per-user", "12", "--slo", "ttft=1s,tpot=50ms"),
    ("simulate", "--model", *LLAMA, "--rate", "20", "--slo", "ttft=200ms,tpot=50ms"),
)
#: Those whose output holds figures of this machine and moment.
MEASURED: Final = (
    ("doctor",),
    ("predict", "smollm2-135m", "--gpu", "here", "--dtype", "float32"),
    ("generate", "smollm2-135m", *PROMPT),
    ("generate", "smollm2-135m", *PROMPT, "--tp", "2"),
    ("generate", *PROMPT, "--engine", "continuous", "--dtype", "bfloat16", "--speed", "kernel,int8"),
    ("cluster", "--help"),
)
#: Against a server that the same checkout runs; ``run`` and ``sweep`` are folders of the run.
SERVED: Final = (
    ("bench", "URL", "--rate", "2", "--requests", "8", *LOAD, "--out", "run"),
    ("bench", "URL", "--sweep", "1,2", "--requests", "4", *LOAD, "--out", "sweep"),
    ("lens", "run"),
)
JSON: Final = ("generate", "predict", "fit", "gpus", "models", "plan", "simulate", "bench", "lens", "doctor")
NUMBER: Final = re.compile(r"\b[0-9a-f]{40}\b|[-+]?\d[\d,]*(\.\d+)?([eE][-+]?\d+)?|–|\binf\b|\bnull\b|n/a")
START_S: Final = 120.0


@dataclass(frozen=True)
class Checkout:
    """A folder with the project, a Python with its packages, and a folder for what its commands write."""

    root: Path
    python: Path
    scratch: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.root), "COLUMNS": "120", "PYTHONDONTWRITEBYTECODE": "1"}

    def command(self, *words: str) -> list[str]:
        return [str(self.python), "-m", "nanoinfer", *words]

    def output(self, *words: str) -> str:
        """Exit status, standard output and standard error."""
        done = subprocess.run(
            self.command(*words), cwd=self.scratch, env=self.environment, capture_output=True, text=True, check=False
        )
        stdout = done.stdout
        if "--json" in words and stdout:
            record = json.loads(stdout, parse_float=lambda text: float(f"{float(text):.12g}"))
            stdout = json.dumps(record, indent=1, sort_keys=True)
        return f"exit {done.returncode}\n{stdout}\n-- stderr\n{done.stderr}"

    @contextmanager
    def server(self) -> Iterator[str]:
        """The address of ``nanoinfer serve``."""
        command = self.command("serve", "smollm2-135m", "--port", "0", "--speed", "plain")
        with subprocess.Popen(
            command, cwd=self.scratch, env=self.environment, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            deadline = time.monotonic() + START_S
            try:
                for line in process.stderr:
                    if match := re.search(r"http://\S+:\d+", line):
                        yield match[0]
                        break
                    if time.monotonic() > deadline:
                        raise TimeoutError(line)
            finally:
                process.terminate()


def masked(text: str, checkout: Checkout, is_measured: bool) -> list[str]:
    """Lines without paths, widths of columns and, where measured, numbers."""
    for folder, name in ((checkout.scratch, "SCRATCH"), (checkout.root, "ROOT")):
        text = text.replace(str(folder), name)
    text = re.sub(r"http://127\.0\.0\.1:\d+", "URL", text)
    if is_measured:
        text = re.sub(r"# [nµmkMGTP]?(s|B|FLOP)\b", r"# \1", NUMBER.sub("#", text))
    lines = (re.sub(r"[ ─━]+", " ", line).strip() for line in text.splitlines())
    return [line for line in lines if line]


def outputs(checkout: Checkout, only: str) -> Iterator[tuple[str, list[str]]]:
    """Each command's line and its masked output."""
    for commands, is_measured in ((COMPUTED, False), (MEASURED, True)):
        for words in commands:
            if only in words[0]:
                yield from _both(checkout, words, is_measured)
    if only in "serve bench lens":
        with checkout.server() as url:
            for words in SERVED:
                yield from _both(checkout, tuple(url if word == "URL" else word for word in words), True)


def _both(checkout: Checkout, words: tuple[str, ...], is_measured: bool) -> Iterator[tuple[str, list[str]]]:
    """The command's text and, where it has one, its JSON."""
    for more in ((), ("--json",)) if words[0] in JSON else ((),):
        line = re.sub(r"http://\S+", "URL", " ".join((*words, *more)))
        started = time.monotonic()
        yield line, masked(checkout.output(*words, *more), checkout, is_measured)
        print(f"{checkout.root.name}: {line} ({time.monotonic() - started:.0f} s)", file=sys.stderr, flush=True)


def main(
    before: Annotated[Path, typer.Argument(help="A checkout.")],
    after: Annotated[Path, typer.Argument(help="Another one.")],
    python: Annotated[Path | None, typer.Option(help="For both; else each one's .venv.")] = None,
    only: Annotated[str, typer.Option(help="Commands whose name holds this.")] = "",
) -> None:
    """Run the README's commands in both and print how the outputs differ."""
    results = []
    for root in (before.resolve(), after.resolve()):
        with tempfile.TemporaryDirectory() as scratch:
            checkout = Checkout(root, python or root / ".venv" / "bin" / "python", Path(scratch))
            results.append(dict(outputs(checkout, only)))
    differing = 0
    for line, lines in results[0].items():
        diff = list(difflib.unified_diff(lines, results[1][line], "before", "after", lineterm="", n=0))
        differing += bool(diff)
        print("\n".join([f"== {line}: {'differs' if diff else 'the same'}", *diff[2:]]))
    print(f"{differing} of {len(results[0])} outputs differ")


if __name__ == "__main__":
    typer.run(main)

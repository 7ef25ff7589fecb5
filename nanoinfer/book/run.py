"""Run chapters through papermill, so that every number in the book was made on this machine.

papermill does the running. What is added is what a reader of a long log needs: nothing
starts on a mistaken parameter, a finished chapter is not run twice, a failed one never
lies where the book would pick it up, and the failure says where to look.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import nbformat
import papermill
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import DeadKernelError
from nbformat import NotebookNode
from papermill.exceptions import PapermillExecutionError
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from nanoinfer.book.chapter import (
    PROFILES,
    choose_chapters,
    executed_path,
    fit_parameter,
    read_notebook,
    read_parameters,
    run_record,
    source_hash,
    why_not_fresh,
)
from nanoinfer.errors import ChapterError, nearest
from nanoinfer.store import write_whole

#: No chapter may call home or draw progress bars into its page.
QUIET = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class ThisPython(AsyncKernelManager):
    """Starts the kernel in the very interpreter that runs us.

    A user's own kernelspec named ``python3`` may point to any other environment; it is
    never looked up.
    """

    @property
    def kernel_spec(self) -> KernelSpec:
        """ipykernel under ``sys.executable``, deaf to the user's IPython start-up files."""
        return KernelSpec(
            argv=[sys.executable, "-m", "ipykernel_launcher", "--log-level=CRITICAL", "-f", "{connection_file}"],
            display_name="Python 3",
            language="python",
            env={**QUIET, "IPYTHONDIR": str(Path.cwd() / "_build" / "ipython")},
        )


@dataclass
class Outcome:
    """How one chapter's turn went. ``seconds`` is wall time, retry included."""

    chapter: str
    status: Literal["done", "fresh", "failed"]
    seconds: float
    parameters: dict[str, Any] = field(default_factory=dict)
    cell: str | None = None
    error: str | None = None


def run_chapters(
    root: Path,
    chapters: list[str] | None = None,
    profile: str = "laptop",
    parameters: Mapping[str, Any] | None = None,
    fresh: bool = False,
) -> list[Outcome]:
    """Run chapters in order; skip those whose executed copy is still fresh, unless ``fresh``.

    ``chapters``: names or numbers, all by default. ``parameters`` go over the profile's;
    each must stand in every chosen chapter's ``parameters`` cell. Stops at the first
    chapter that fails; the next call starts there. Writes ``_build/executed/NAME.ipynb``
    and ``_build/run.json``. Raises :class:`ChapterError`.
    """
    root = root.resolve()
    if profile not in PROFILES:
        raise ChapterError(f"there is no profile '{profile}': {nearest(profile, PROFILES)}")
    sources = {name: (path, read_notebook(path)) for name, path in choose_chapters(root, chapters).items()}
    settings, given = dict(PROFILES[profile]), parameters or {}
    if profile == "gpu" and "MODEL" not in given:
        from nanoinfer.models.registry import check_device

        check_device(str(given.get("DEVICE", settings["DEVICE"])))  # before the hub is asked for anything
        settings["MODEL"] = _gpu_model()
    plans = {name: _plan(name, notebook, settings, given, profile) for name, (_, notebook) in sources.items()}
    stale = [name for name, (path, _) in sources.items() if fresh or not _is_current(root, name, path, plans[name])]
    _refuse_what_cannot_run([plans[name] for name in stale])

    log, seconds = root / "_build" / "run.json", _seconds_of_last_runs(root)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{len(plans)} chapters, profile {profile}, on {sys.executable} (Python {platform.python_version()})")
    outcomes: list[Outcome] = []
    for name, (_, notebook) in sources.items():
        expected = seconds.get(profile, {}).get(name) or _minutes(notebook, profile)
        if name not in stale:
            outcome = Outcome(name, "fresh", 0.0, plans[name])
            console.print(f"{name}: unchanged since its last run")
        else:
            outcome = _run_one(console, root, name, notebook, plans[name], expected)
            if outcome.status == "done":
                seconds.setdefault(profile, {})[name] = round(outcome.seconds, 2)
        outcomes.append(outcome)
        _write_log(log, profile, outcomes, seconds)
        if outcome.status == "failed":
            break
    _print_summary(console, outcomes, log.relative_to(root))
    if outcomes[-1].status == "failed":
        last = outcomes[-1]
        raise ChapterError(
            f"{last.chapter}, {last.cell}: {last.error} (the whole run: _build/failed/{last.chapter}.ipynb)"
        )
    return outcomes


# --- before anything runs ------------------------------------------------------


def _plan(
    name: str, notebook: NotebookNode, settings: Mapping[str, Any], given: Mapping[str, Any], profile: str
) -> dict[str, Any]:
    """The parameters one chapter will get; refuses a name or a type its cell does not know."""
    defaults = read_parameters(notebook, name)
    for parameter in given:
        if parameter not in defaults:
            raise ChapterError(f"{name} has no parameter '{parameter}': {nearest(parameter, defaults)}")
    if "PROFILE" in given:
        raise ChapterError("PROFILE is set by the profile itself: use --profile")
    wanted = {**settings, "PROFILE": profile, **given}
    return {key: fit_parameter(name, key, value, defaults[key]) for key, value in wanted.items() if key in defaults}


def _is_current(root: Path, name: str, path: Path, plan: Mapping[str, Any]) -> bool:
    if why_not_fresh(root, name, path):
        return False
    record = run_record(read_notebook(executed_path(root, name)))
    return record.get("parameters") == dict(plan) and record.get("python") == platform.python_version()


def _refuse_what_cannot_run(plans: list[dict[str, Any]]) -> None:
    """A model, device or dtype that is not there is said now, and not by a cell with a traceback."""
    if not plans:
        return
    from nanoinfer.models.registry import check_dtype, find_model

    for plan in plans:
        if "MODEL" in plan:
            find_model(plan["MODEL"])
        if "DEVICE" in plan:
            check_dtype(plan["DEVICE"], plan.get("DTYPE", "float32"))


def _gpu_model() -> str:
    """GPT-2 XL's real weights if this machine has or can reach them, else its shape."""
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download("openai-community/gpt2-xl", "config.json", etag_timeout=10)
    except Exception as error:
        reason = type(error).__name__
        print(f"gpt2-xl cannot be fetched here ({reason}): random weights of its true shape take its place", flush=True)
        return "random:gpt2-xl"
    return "gpt2-xl"


def _minutes(notebook: NotebookNode, profile: str) -> float | None:
    """What the chapter itself says it takes (``metadata.nanoinfer.minutes``), in seconds."""
    minutes = notebook.metadata.get("nanoinfer", {}).get("minutes", {})
    return float(minutes[profile]) * 60 if profile in minutes else None


def _seconds_of_last_runs(root: Path) -> dict[str, dict[str, float]]:
    try:
        known = json.loads((root / "_build" / "run.json").read_text(encoding="utf-8"))["seconds"]
    except (OSError, ValueError, KeyError):
        return {}
    return known if isinstance(known, dict) else {}


# --- one chapter ---------------------------------------------------------------


def _run_one(
    console: Console, root: Path, name: str, notebook: NotebookNode, plan: dict[str, Any], expected: float | None
) -> Outcome:
    running = root / "_build" / "running" / f"{name}.ipynb"
    done, failed = executed_path(root, name), root / "_build" / "failed" / f"{name}.ipynb"
    for path in (running, done, failed):
        path.parent.mkdir(parents=True, exist_ok=True)
    failed.unlink(missing_ok=True)
    source = source_hash(root, notebook)  # taken now: an edit while the chapter runs makes it stale
    where, start = _Where(notebook), time.perf_counter()
    error: Exception | None = None
    with _live_line(console, name, expected):
        for attempt in (1, 2):
            try:
                _execute(root, notebook, running, plan, where)
                error = None
                break
            except DeadKernelError as dead:
                error = dead
                if attempt == 1:
                    console.print(f"{name}: the kernel died at {where.text}; once more")
            except Exception as other:
                error = other
                break
    seconds = time.perf_counter() - start
    if error is None:
        _finish(running, done, source, plan)
        console.print(f"{name}: done in {seconds:.1f} s")
        return Outcome(name, "done", seconds, plan)
    done.unlink(missing_ok=True)  # a run that fails takes the old copy's place; one that is broken off loses nothing
    if running.is_file():
        shutil.move(running, failed)
    reason, detail = _explain(error)
    rule = "-" * 72
    print(f"{rule}\nFAILED  {name}, {where.text}\n{detail}\n{rule}", file=sys.stderr, flush=True)
    return Outcome(name, "failed", seconds, plan, where.text, reason)


class _Where:
    """Which cell of the source is running; papermill's own injected cell shifts its count."""

    def __init__(self, source: NotebookNode) -> None:
        self.numbers = {cell.id: number for number, cell in enumerate(source.cells, start=1)}
        self.text = "before the first cell"

    def __call__(self, cell: NotebookNode, **_: Any) -> None:
        number = self.numbers.get(cell.id)
        self.text = f"cell {number} of {len(self.numbers)}" if number else "the injected parameters"


def _execute(root: Path, notebook: NotebookNode, running: Path, plan: dict[str, Any], where: _Where) -> None:
    logging.getLogger("papermill").setLevel(logging.ERROR)
    papermill.execute_notebook(
        notebook,
        running,
        parameters=plan,
        kernel_name="python3",
        language="python",
        kernel_manager_class=ThisPython,
        on_cell_execute=where,
        progress_bar=False,
        cwd=root,
    )


def _explain(error: Exception) -> tuple[str, str]:
    """An error in one line, and in a block for the log, without terminal colours."""
    if isinstance(error, PapermillExecutionError):
        line = f"{error.ename}: {error.evalue}".strip().splitlines()[0]
        return ANSI.sub("", line), ANSI.sub("", "\n".join(error.traceback) or str(error))
    line = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    if isinstance(error, DeadKernelError):
        line = "the kernel died twice (out of memory?)"
    return line, line


def _finish(running: Path, done: Path, source: str, plan: dict[str, Any]) -> None:
    """Clean a finished run of what is not the reader's, sign it, and move it into place."""
    notebook = read_notebook(running)
    for cell in notebook.cells:
        for noise in ("papermill", "execution"):
            cell.metadata.pop(noise, None)
        if "injected-parameters" in cell.metadata.get("tags", []):
            cell.metadata["tags"].append("remove-input")  # the banner says the same in words
    meta = notebook.metadata
    meta.pop("widgets", None)
    for private in ("input_path", "output_path", "environment_variables"):
        meta.papermill.pop(private, None)
    meta["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    meta.setdefault("nanoinfer", {})["run"] = {
        "source": source,
        "parameters": plan,
        "python": platform.python_version(),
        "machine": _machine(plan.get("DEVICE", "cpu")),
        "date": datetime.now(UTC).date().isoformat(),
    }
    nbformat.validate(notebook)
    with running.open("w", encoding="utf-8") as out:
        nbformat.write(notebook, out)
    os.replace(running, done)


def _machine(device: str) -> str:
    from nanoinfer.measure.environment import describe_machine

    machine = describe_machine()
    if device.startswith("cuda") and machine["gpus"]:
        return str(machine["gpus"][0]["name"])
    return f"{machine['cpu']}, {machine['cores']} cores"


# --- what the person at the terminal sees ---------------------------------------


@contextmanager
def _live_line(console: Console, name: str, expected: float | None) -> Iterator[None]:
    """A running clock on a terminal; in a log one plain line at the start."""
    text = f"{name}: running" + (f", about {expected:.0f} s" if expected else "")
    if not console.is_terminal:
        console.print(text)
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(text, total=None)
        yield


def _print_summary(console: Console, outcomes: list[Outcome], log: Path) -> None:
    table = Table("chapter", "status", "seconds")
    for outcome in outcomes:
        table.add_row(outcome.chapter, outcome.status, f"{outcome.seconds:.1f}")
    console.print(table)
    console.print(f"written to {log}")


def _write_log(path: Path, profile: str, outcomes: list[Outcome], seconds: dict[str, dict[str, float]]) -> None:
    record = {
        "profile": profile,
        "python": sys.executable,
        "chapters": [asdict(outcome) for outcome in outcomes],
        "seconds": seconds,
    }
    try:
        write_whole(path, json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise ChapterError(f"{path}: cannot be written ({error.strerror})") from None

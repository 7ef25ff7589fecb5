"""Execute chapters through papermill, so that every number in the book was made on this machine.

Added to it: parameters are checked before anything starts, a finished chapter is not run twice, and a failed one never
lies where the book would pick it up.
"""

from __future__ import annotations

import json
import logging
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
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

from nanoinfer.book.chapter import (
    PROFILES,
    choose_chapters,
    executed_path,
    fit_parameter,
    read_notebook,
    read_parameters,
    run_record,
    source_hash,
    tags,
    why_not_fresh,
)
from nanoinfer.book.processes import MARK, guarded
from nanoinfer.book.results import machine_name
from nanoinfer.errors import ChapterError, nearest
from nanoinfer.log import say
from nanoinfer.show.text import as_table
from nanoinfer.store import write_whole

#: No chapter may send telemetry or draw progress bars into its page.
QUIET = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
#: Seconds that a cell may run.
CELL_S = 900
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
#: Runs a notebook with parameters in a folder, calling back at each cell, and writes the executed copy to the path.
Execute = Callable[[NotebookNode, Path, Mapping[str, Any], Path, Callable[..., None]], object]


class ThisPython(AsyncKernelManager):
    """Starts the kernel in the interpreter that runs us: a user's kernelspec ``python3`` may name any environment."""

    #: What all processes of the run carry.
    mark = ""

    @property
    def kernel_spec(self) -> KernelSpec:
        """ipykernel under ``sys.executable``, which ignores the user's IPython start-up files."""
        return KernelSpec(
            argv=[sys.executable, "-m", "ipykernel_launcher", "--log-level=CRITICAL", "-f", "{connection_file}"],
            display_name="Python 3",
            language="python",
            env={**QUIET, MARK: self.mark, "IPYTHONDIR": str(Path.cwd() / "_build" / "ipython")},
        )


@dataclass
class Outcome:
    """How one chapter's run ended. ``seconds`` is wall time, retry included."""

    chapter: str
    status: Literal["done", "fresh", "failed"]
    seconds: float
    parameters: dict[str, Any] = field(default_factory=dict)
    cell: str | None = None
    error: str | None = None


def execute_notebook(
    notebook: NotebookNode, output: Path, parameters: Mapping[str, Any], root: Path, on_cell: Callable[..., None]
) -> None:
    """Papermill, in this Python; what the chapter started is gone afterwards.

    Raises ``PapermillExecutionError``, ``DeadKernelError``, ``CellTimeoutError`` and others.
    """
    logging.getLogger("papermill").setLevel(logging.ERROR)
    with guarded() as mark:
        try:
            papermill.execute_notebook(
                notebook,
                output,
                parameters=dict(parameters),
                kernel_name="python3",
                language="python",
                kernel_manager_class=type("MarkedPython", (ThisPython,), {"mark": mark}),
                on_cell_execute=on_cell,
                progress_bar=False,
                cwd=root,
                execution_timeout=CELL_S,
            )
        except PapermillExecutionError:
            if not _only_intended_errors(output):
                raise


def _only_intended_errors(output: Path) -> bool:
    """Whether all errors are in cells tagged ``raises-exception``; if so, drop papermill's note."""
    notebook = nbformat.read(output, as_version=4)
    errors = [cell for cell in notebook.cells if any(o.output_type == "error" for o in cell.get("outputs", ()))]
    if not all("raises-exception" in tags(cell) for cell in errors):
        return False
    notebook.cells = [cell for cell in notebook.cells if "papermill-error-cell-tag" not in tags(cell)]
    nbformat.write(notebook, output)
    return True


def run_chapters(
    root: Path,
    chapters: list[str] | None = None,
    profile: str = "laptop",
    parameters: Mapping[str, Any] | None = None,
    fresh: bool = False,
    execute: Execute = execute_notebook,
) -> list[Outcome]:
    """Run chapters in order; skip those whose executed copy is still fresh, unless ``fresh``.

    Stops at the first chapter that fails; the next call starts there. Writes ``_build/executed/NAME.ipynb`` and
    ``_build/run.json``.

    Args:
        chapters: names or numbers, all by default.
        parameters: go over the profile's; each must stand in every chosen chapter's ``parameters`` cell.

    Raises:
        ChapterError: an unknown chapter, profile or parameter, or a chapter that fails.
    """
    root = root.resolve()
    if profile not in PROFILES:
        raise ChapterError(f"there is no profile '{profile}': {nearest(profile, PROFILES)}")
    sources = {name: (path, read_notebook(path)) for name, path in choose_chapters(root, chapters).items()}
    settings, overrides = dict(PROFILES[profile]), parameters or {}
    if profile == "gpu" and "MODEL" not in overrides:
        from nanoinfer.models.registry import check_device

        check_device(str(overrides.get("DEVICE", settings["DEVICE"])))  # before the hub is contacted
        settings["MODEL"] = _gpu_model()
    settings = {**settings, "PROFILE": profile}
    chosen = {name: _parameters_of(name, notebook, settings, overrides) for name, (_, notebook) in sources.items()}
    stale = [name for name, (path, _) in sources.items() if fresh or not _is_current(root, name, path, chosen[name])]
    for name in stale:
        _check_model_and_device(chosen[name])

    log = root / "_build" / "run.json"
    known_seconds = _read_log(log)
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{len(chosen)} chapters, profile {profile}, on {sys.executable} (Python {platform.python_version()})"
    )
    outcomes: list[Outcome] = []
    for name, (_, notebook) in sources.items():
        if name in stale:
            expected = known_seconds.get(profile, {}).get(name) or _stated_seconds(notebook, profile)
            with _live_line(console, name, expected):
                outcome = _run_chapter(console, root, name, notebook, chosen[name], execute)
        else:
            outcome = Outcome(name, "fresh", 0.0, chosen[name])
            console.print(f"{name}: unchanged since its last run")
        if outcome.status == "done":
            console.print(f"{name}: done in {outcome.seconds:.1f} s")
            known_seconds.setdefault(profile, {})[name] = round(outcome.seconds, 2)
        outcomes.append(outcome)
        _write_log(log, profile, outcomes, known_seconds)
        if outcome.status == "failed":
            break
    rows = [(outcome.chapter, outcome.status, f"{outcome.seconds:.1f}") for outcome in outcomes]
    console.print(as_table((("chapter", "status", "seconds"), rows)))
    console.print(f"written to {log.relative_to(root)}")
    if outcome.status == "failed":
        raise ChapterError(f"{name}, {outcome.cell}: {outcome.error} (the whole run: _build/failed/{name}.ipynb)")
    return outcomes


# --- before anything runs ------------------------------------------------------


def _parameters_of(
    name: str, notebook: NotebookNode, settings: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """The parameters one chapter will get; refuses a name or a type that its cell does not know."""
    defaults = read_parameters(notebook, name)
    for parameter in overrides:
        if parameter not in defaults:
            raise ChapterError(f"{name} has no parameter '{parameter}': {nearest(parameter, defaults)}")
    if "PROFILE" in overrides:
        raise ChapterError("PROFILE is set by the profile itself: use --profile")
    wanted = {**settings, **overrides}
    return {key: fit_parameter(name, key, value, defaults[key]) for key, value in wanted.items() if key in defaults}


def _is_current(root: Path, name: str, path: Path, parameters: Mapping[str, Any]) -> bool:
    if why_not_fresh(root, name, path):
        return False
    record = run_record(read_notebook(executed_path(root, name)))
    return record.get("parameters") == dict(parameters) and record.get("python") == platform.python_version()


def _check_model_and_device(parameters: Mapping[str, Any]) -> None:
    """Refuse a missing model, device or dtype now, not by a cell with a traceback."""
    from nanoinfer.models.registry import check_dtype, find_model

    if "MODEL" in parameters:
        find_model(parameters["MODEL"])
    if "DEVICE" in parameters:
        check_dtype(parameters["DEVICE"], parameters.get("DTYPE", "float32"))


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


def _stated_seconds(notebook: NotebookNode, profile: str) -> float | None:
    """The duration that the chapter's ``metadata.nanoinfer.minutes`` states."""
    minutes = notebook.metadata.get("nanoinfer", {}).get("minutes", {})
    return float(minutes[profile]) * 60 if profile in minutes else None


def _read_log(path: Path) -> dict[str, dict[str, float]]:
    """Seconds of the last runs, by profile and chapter."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        seconds = json.loads(path.read_text(encoding="utf-8"))["seconds"]
        if isinstance(seconds, dict):
            return seconds
    return {}


def _write_log(path: Path, profile: str, outcomes: list[Outcome], seconds: Mapping[str, Mapping[str, float]]) -> None:
    chapters = [asdict(outcome) for outcome in outcomes]
    record = {"profile": profile, "python": sys.executable, "chapters": chapters, "seconds": seconds}
    try:
        write_whole(path, json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise ChapterError(f"{path}: cannot be written ({error.strerror})") from None


# --- one chapter ---------------------------------------------------------------


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


def _run_chapter(
    console: Console, root: Path, name: str, notebook: NotebookNode, parameters: dict[str, Any], execute: Execute
) -> Outcome:
    """Run one chapter, once more where the kernel dies; its copy goes to ``executed`` or to ``failed``."""
    done = executed_path(root, name)
    running, failed = (root / "_build" / folder / done.name for folder in ("running", "failed"))
    for path in (running, done, failed):
        path.parent.mkdir(parents=True, exist_ok=True)
    failed.unlink(missing_ok=True)
    source = source_hash(root, notebook)  # before the run: an edit while it runs makes it stale
    position, start = _Position(notebook), time.perf_counter()
    error: Exception | None = None
    for attempt in (1, 2):
        try:
            execute(notebook, running, parameters, root, position)
            error = None
        except Exception as failure:
            error = failure
        if attempt == 2 or not isinstance(error, DeadKernelError):
            break
        console.print(f"{name}: the kernel died at {position.text}; once more")
    seconds = time.perf_counter() - start
    if error is None:
        _publish(running, done, source, parameters)
        return Outcome(name, "done", seconds, parameters)
    done.unlink(missing_ok=True)  # a failed run invalidates the old copy; an interrupted one loses nothing
    if running.is_file():
        notebook = nbformat.read(running, as_version=4)
        _drop_widget_views(notebook)
        nbformat.write(notebook, running)
        running.replace(failed)
    reason, detail = _explain(error)
    rule = "-" * 72
    say(f"{rule}\nFAILED  {name}, {position.text}\n{detail}\n{rule}")
    return Outcome(name, "failed", seconds, parameters, position.text, reason)


class _Position:
    """Which cell of the source is running; papermill's injected cell shifts its own count."""

    def __init__(self, source: NotebookNode) -> None:
        self.numbers = {cell.id: number for number, cell in enumerate(source.cells, start=1)}
        self.text = "before the first cell"

    def __call__(self, cell: NotebookNode, **_: Any) -> None:
        number = self.numbers.get(cell.id)
        self.text = f"cell {number} of {len(self.numbers)}" if number else "the injected parameters"


def _explain(error: Exception) -> tuple[str, str]:
    """An error in one line, and in a block for the log, without terminal colours."""
    if isinstance(error, PapermillExecutionError):
        line = f"{error.ename}: {error.evalue}".strip().splitlines()[0]
        return ANSI.sub("", line), ANSI.sub("", "\n".join(error.traceback) or str(error))
    line = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    if isinstance(error, DeadKernelError):
        line = "the kernel died twice (out of memory?)"
    return line, line


def _drop_widget_views(notebook: NotebookNode) -> None:
    """A view without its state shows an error when the copy is opened again; the still figure beside it stays."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop(WIDGET_VIEW, None)


def _publish(running: Path, done: Path, source: str, parameters: dict[str, Any]) -> None:
    """Remove what is private from a finished run, record how it was made, and move it into place."""
    from nanoinfer.measure.environment import describe_machine

    notebook = read_notebook(running)
    _drop_widget_views(notebook)
    for cell in notebook.cells:
        for noise in ("papermill", "execution"):
            cell.metadata.pop(noise, None)
        if "injected-parameters" in tags(cell):
            cell.metadata["tags"].append("remove-input")  # the banner says the same in words
    meta = notebook.metadata
    for private in ("input_path", "output_path", "environment_variables"):
        meta.papermill.pop(private, None)
    meta["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    meta.setdefault("nanoinfer", {})["run"] = {
        "source": source,
        "parameters": parameters,
        "python": platform.python_version(),
        "machine": machine_name(describe_machine(), parameters.get("DEVICE", "cpu")),
        "date": datetime.now(UTC).date().isoformat(),
    }
    nbformat.validate(notebook)
    with running.open("w", encoding="utf-8") as out:
        nbformat.write(notebook, out)
    running.replace(done)

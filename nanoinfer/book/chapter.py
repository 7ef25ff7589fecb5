"""A chapter on disk: its source, its executed copy, and whether one still belongs to the other.

The runner and the Sphinx hook must agree on what "fresh" means, or the book shows
numbers that its own code did not make. So that question is answered here, once.
"""

from __future__ import annotations

import ast
import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from nanoinfer.errors import ChapterError, nearest

#: What each profile sets in a chapter's ``parameters`` cell.
PROFILES: Mapping[str, Mapping[str, Any]] = {
    "smoke": {"MODEL": "random:tiny-gpt2", "DEVICE": "cpu", "DTYPE": "float32"},
    "laptop": {"MODEL": "smollm2-135m", "DEVICE": "cpu", "DTYPE": "float32"},
    "gpu": {"MODEL": "gpt2-xl", "DEVICE": "cuda", "DTYPE": "bfloat16"},
}


def find_chapters(root: Path) -> dict[str, Path]:
    """Every chapter by its name (``05_the_kv_cache``), in reading order."""
    return {path.stem: path for path in sorted((root / "notebooks").glob("[0-9][0-9]_*.ipynb"))}


def choose_chapters(root: Path, wanted: list[str] | None) -> dict[str, Path]:
    """Find chapters by name or number (``5``, ``05``); ``None`` or an empty list means all.

    Raises :class:`ChapterError` naming what is near an unknown one.
    """
    known = find_chapters(root)
    if not known:
        raise ChapterError(f"no chapters in {root / 'notebooks'}: run this in the folder that holds the book")
    chosen = set()
    for word in wanted or known:
        stem = Path(word).stem
        names = [name for name in known if name == stem or (stem.isdecimal() and int(name[:2]) == int(stem))]
        if not names:
            raise ChapterError(f"there is no chapter '{word}': {nearest(stem, known)}")
        chosen.update(names)
    return {name: path for name, path in known.items() if name in chosen}


def executed_path(root: Path, name: str) -> Path:
    """Where the finished run of a chapter lies."""
    return root / "_build" / "executed" / f"{name}.ipynb"


def read_notebook(path: Path) -> NotebookNode:
    """Read and validate a notebook. Raises :class:`ChapterError` naming the file."""
    try:
        notebook = nbformat.v4.reads(path.read_text(encoding="utf-8"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a doubled or missing cell id would be mended in silence
            nbformat.validate(notebook)
    except (OSError, ValueError, AttributeError, Warning, nbformat.ValidationError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ChapterError(f"{path}: not a valid notebook ({reason})") from None
    return notebook


def tags(cell: NotebookNode) -> list[str]:
    """A cell's tags."""
    return list(cell.metadata.get("tags", ()))


def read_parameters(notebook: NotebookNode, name: str) -> dict[str, Any]:
    """What the one cell tagged ``parameters`` sets: name to default value.

    Raises :class:`ChapterError` where that cell is missing, doubled, or holds anything
    but ``NAME = literal``: papermill would pass over a mistake in silence.
    """
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and "parameters" in tags(cell)]
    if len(cells) != 1:
        raise ChapterError(f"{name}: needs exactly one code cell tagged 'parameters', has {len(cells)}")
    defaults = {}
    try:
        for statement in ast.parse(cells[0].source).body:
            match statement:
                case (
                    ast.Assign(targets=[ast.Name(id=key)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=key), value=ast.expr() as value)
                ):
                    defaults[key] = ast.literal_eval(value)
                case _:
                    raise ValueError(f"line {statement.lineno} is not 'NAME = value'")
    except (SyntaxError, ValueError) as error:
        raise ChapterError(f"{name}: the parameters cell must hold plain values only ({error})") from None
    return defaults


def fit_parameter(chapter: str, name: str, value: Any, default: Any) -> Any:
    """Turn a given value into the type of the default, or refuse it.

    A text that came from the command line is read as a Python value unless the default
    is itself a text, so ``007`` stays a name and ``[1, 2]`` becomes a list; ``1e3`` is a
    fine whole number. Raises :class:`ChapterError`.
    """
    given = value
    if isinstance(value, str) and not isinstance(default, str):
        try:
            value = ast.literal_eval(value.strip())
        except (SyntaxError, ValueError):
            if default is None:
                return given
            raise _misfit(chapter, name, given, default) from None
    if isinstance(value, tuple) and isinstance(default, list):
        value = list(value)
    if isinstance(default, bool) or isinstance(value, bool):
        fits = default is None or type(value) is type(default)
    elif isinstance(default, int) and isinstance(value, float) and value.is_integer():
        value, fits = int(value), True
    elif isinstance(default, float):
        fits = isinstance(value, int | float)
    else:
        fits = default is None or isinstance(value, type(default))
    if not fits:
        raise _misfit(chapter, name, given, default)
    return value


def _misfit(chapter: str, name: str, value: Any, default: Any) -> ChapterError:
    kind = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", list: "a list"}
    wanted = kind.get(type(default), type(default).__name__)
    return ChapterError(f"{chapter}: parameter {name} takes {wanted} such as {default!r}, not {value!r}")


def library_hash(root: Path) -> str:
    """One hash over all that a chapter's output depends on besides its own cells.

    The library (but for ``nanoinfer/book``, which only carries chapters about), the
    lock, and the stored results that chapters quote.
    """
    package = Path(__file__).resolve().parents[1]
    files = [path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    files = [path for path in files if path.relative_to(package).parts[0] != "book"]
    digest = hashlib.sha256()
    for base, path in [(package, path) for path in files] + [
        (root, path) for path in [root / "requirements.lock", *(root / "results").glob("*.json")] if path.is_file()
    ]:
        digest.update(f"{path.relative_to(base).as_posix()}\0{_file_hash(path)}\n".encode())
    return digest.hexdigest()


def _file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def source_hash(root: Path, notebook: NotebookNode) -> str:
    """What an executed copy must carry to count as fresh.

    Covers the cells' texts and tags and :func:`library_hash`; saving a chapter in
    JupyterLab, which only adds outputs, changes nothing.
    """
    cells = [[cell.cell_type, cell.source, tags(cell)] for cell in notebook.cells]
    return hashlib.sha256(f"{json.dumps(cells)}\0{library_hash(root)}".encode()).hexdigest()


def why_not_fresh(root: Path, name: str, path: Path) -> str:
    """Why a chapter's executed copy may not be shown: ``""`` when it may."""
    done = executed_path(root, name)
    if not done.is_file():
        failed = (root / "_build" / "failed" / done.name).is_file()
        return "its last run failed" if failed else "it was never run"
    try:
        notebook = read_notebook(done)
    except ChapterError:
        return "its executed copy is damaged"
    if has_failed(notebook):
        return "its last run failed"
    if run_record(notebook).get("source") != source_hash(root, read_notebook(path)):
        return "the chapter or the library has changed since it was run"
    return ""


def has_failed(notebook: NotebookNode) -> bool:
    """Whether a run ended in an error, or left an error's traceback in any cell."""
    if notebook.metadata.get("papermill", {}).get("exception"):
        return True
    return any(output.output_type == "error" for cell in notebook.cells for output in cell.get("outputs", ()))


def run_record(notebook: NotebookNode) -> dict[str, Any]:
    """What the runner wrote about a run: profile, parameters, machine, date, source hash."""
    return dict(notebook.metadata.get("nanoinfer", {}).get("run", {}))

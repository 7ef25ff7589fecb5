"""A chapter on disk: its source, its executed copy, and whether the copy is still fresh.

The runner and the Sphinx hook must agree on that, or the book shows numbers that its own code did not make.
"""

from __future__ import annotations

import ast
import hashlib
import json
import warnings
from collections.abc import Mapping
from contextlib import suppress
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
    """Every chapter by its name (``04_the_kv_cache``), in reading order."""
    return {path.stem: path for path in sorted((root / "notebooks").glob("[0-9][0-9]_*.ipynb"))}


def choose_chapters(root: Path, wanted: list[str] | None) -> dict[str, Path]:
    """Chapters by name or number (``5``, ``05``), all where none is wanted. Raises :class:`ChapterError`."""
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
    """The path of a chapter's finished run."""
    return root / "_build" / "executed" / f"{name}.ipynb"


def read_notebook(path: Path) -> NotebookNode:
    """Read and validate a notebook. Raises :class:`ChapterError` naming the file."""
    try:
        notebook = nbformat.v4.reads(path.read_text(encoding="utf-8"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a doubled or missing cell id would be repaired silently
            nbformat.validate(notebook)
        if (notebook.nbformat, notebook.nbformat_minor) < (4, 5):  # cells have ids since then
            notebook.nbformat_minor = 5
            for number, cell in enumerate(notebook.cells):
                cell["id"] = f"cell-{number}"
    except (OSError, ValueError, AttributeError, Warning, nbformat.ValidationError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ChapterError(f"{path}: not a valid notebook ({reason})") from None
    return notebook


def tags(cell: NotebookNode) -> list[str]:
    """A cell's tags."""
    return list(cell.metadata.get("tags", ()))


def read_parameters(notebook: NotebookNode, name: str) -> dict[str, Any]:
    """The defaults that the one cell tagged ``parameters`` sets, by name.

    Raises :class:`ChapterError` where that cell is missing, doubled, or holds anything but ``NAME = literal``:
    papermill would ignore a mistake.
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
    """Convert a value to the type of the default, or refuse it with :class:`ChapterError`.

    A text from the command line is read as a Python value unless the default is itself a text, so ``007`` stays a name
    and ``[1, 2]`` becomes a list; ``1e3`` is a whole number.
    """
    fitted = value
    if isinstance(value, str) and not isinstance(default, str):
        with suppress(SyntaxError, ValueError):
            fitted = ast.literal_eval(value.strip())
    if isinstance(fitted, tuple) and isinstance(default, list):
        fitted = list(fitted)
    if default is None:
        return fitted
    if type(default) is int and isinstance(fitted, float) and fitted.is_integer():
        fitted = int(fitted)
    allowed = (int, float) if isinstance(default, float) else type(default)
    if isinstance(fitted, bool) == isinstance(default, bool) and isinstance(fitted, allowed):
        return fitted
    kinds = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", list: "a list"}
    wanted = kinds.get(type(default), type(default).__name__)
    raise ChapterError(f"{chapter}: parameter {name} takes {wanted} such as {default!r}, not {value!r}")


def library_hash(root: Path) -> str:
    """One hash over all that a chapter's output depends on besides its own cells.

    The library (but for ``nanoinfer/book``, which only runs chapters), the lock, and the stored results that chapters
    quote.
    """
    package = Path(__file__).resolve().parents[1]
    library = [path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    files = [(package, path) for path in library if path.relative_to(package).parts[0] != "book"]
    files += [(root, path) for path in [root / "requirements.lock", *(root / "results").glob("*.json")]]
    digest = hashlib.sha256()
    for base, path in files:
        if path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(base).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()


def source_hash(root: Path, notebook: NotebookNode) -> str:
    """What a fresh executed copy carries: a hash of the cells' texts and tags and of :func:`library_hash`.

    Saving a chapter in JupyterLab, which only adds outputs, changes nothing.
    """
    cells = [[cell.cell_type, cell.source, tags(cell)] for cell in notebook.cells]
    return hashlib.sha256(f"{json.dumps(cells)}\0{library_hash(root)}".encode()).hexdigest()


def why_not_fresh(root: Path, name: str, path: Path) -> str:
    """Why a chapter's executed copy may not be shown, or an empty text."""
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

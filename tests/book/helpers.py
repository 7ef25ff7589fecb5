"""A small book in a temporary folder, with this repository's own configuration."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]

PARAMETERS = 'MODEL = "smollm2-135m"\nDEVICE = "cpu"\nDTYPE = "float32"\nSEED = 0\nPROFILE = "laptop"'

Cells = list[tuple[str, str]]


def chapter(cells: Cells, parameters: str = PARAMETERS) -> NotebookNode:
    """A stripped notebook: a title, the parameters cell, then ``(kind, text)`` pairs."""
    new = {"code": nbformat.v4.new_code_cell, "markdown": nbformat.v4.new_markdown_cell}
    notebook = nbformat.v4.new_notebook()
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.cells = [
        nbformat.v4.new_markdown_cell("# A small chapter"),
        nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}),
        *(new[kind](text) for kind, text in cells),
    ]
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    return notebook


def write(root: Path, name: str, cells: Cells, parameters: str = PARAMETERS) -> Path:
    """Write ``notebooks/NAME.ipynb`` into a temporary book."""
    path = root / "notebooks" / f"{name}.ipynb"
    path.parent.mkdir(exist_ok=True)
    nbformat.write(chapter(cells, parameters), path)
    return path


def copy_book(target: Path, chapters: list[str]) -> None:
    """Copy the real configuration and pages, with a table of contents of these chapters."""
    shutil.copytree(ROOT / "book", target / "book")
    for page in (target / "book").glob("*.md"):  # the real chapters are not there to be linked to
        text = page.read_text(encoding="utf-8")
        page.write_text(re.sub(r"\[([^\]]*)\]\(\.\./notebooks/[^)]*\)", r"\1", text), encoding="utf-8")
    shutil.copy2(ROOT / "_config.yml", target)
    lines = [f"      - file: notebooks/{name}" for name in chapters]
    toc = "format: jb-book\nroot: book/preface\nparts:\n  - caption: All\n    chapters:\n"
    pages = ["      - file: book/setup", *lines, "      - file: book/bibliography"]
    (target / "_toc.yml").write_text(toc + "\n".join(pages) + "\n", encoding="utf-8")


class FakeKernel:
    """Executes a notebook without running it: every run ends as its turn in ``endings`` says, the later ones well."""

    def __init__(self, endings: Sequence[BaseException | None] = ()) -> None:
        self.endings = list(endings)
        self.runs: list[tuple[Path, dict[str, Any]]] = []

    def __call__(
        self,
        notebook: NotebookNode,
        output: Path,
        parameters: Mapping[str, Any],
        root: Path,
        on_cell: Callable[..., None],
    ) -> None:
        number = len(self.runs)
        self.runs.append((output, dict(parameters)))
        executed = copy.deepcopy(notebook)
        executed.metadata["papermill"] = {"exception": None, "parameters": dict(parameters)}
        nbformat.write(executed, output)
        for cell in notebook.cells:
            on_cell(cell=cell)
        if (ending := self.endings[number] if number < len(self.endings) else None) is not None:
            raise ending

"""What a chapter's source must hold to: each check returns complaints that name the cell."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from mdit_py_plugins.amsmath import amsmath_plugin
from mdit_py_plugins.dollarmath import dollarmath_plugin
from nbformat import NotebookNode

from nanoinfer.book.chapter import read_notebook, read_parameters, tags
from nanoinfer.errors import ChapterError

PARAMETERS = {"MODEL", "DEVICE", "DTYPE", "SEED", "PROFILE"}
FOLDED = {"hide-input", "hide-cell", "remove-input", "remove-cell"}
LONGEST_CELL = 25
LONGEST_FOLDED_CELL = 40  # lines
MARKDOWN = MarkdownIt("commonmark").use(amsmath_plugin).use(dollarmath_plugin, allow_digits=False)

Complaints = Iterator[str]


def check(path: Path) -> list[str]:
    """All complaints about one chapter."""
    try:
        notebook = read_notebook(path)
    except ChapterError as error:
        return [str(error)]
    return [f"{path.name}: {complaint}" for rule in RULES for complaint in rule(notebook, path)]


def is_stripped(notebook: NotebookNode, path: Path) -> Complaints:
    for number, cell in enumerate(notebook.cells, start=1):
        if cell.get("outputs") or cell.get("execution_count"):
            yield f"cell {number} carries outputs or an execution count"
        if noise := set(cell.metadata) - {"tags", "editable", "slideshow", "jupyter", "mystnb"}:
            yield f"cell {number} carries metadata {sorted(noise)}"
    if "widgets" in notebook.metadata or "papermill" in notebook.metadata:
        yield "carries widget state or papermill's metadata"


def names_its_kernel(notebook: NotebookNode, path: Path) -> Complaints:
    kernel = notebook.metadata.get("kernelspec", {})
    if (kernel.get("name"), kernel.get("language")) != ("python3", "python"):
        yield f"kernelspec must be name python3, language python; is {dict(kernel)}"
    if notebook.metadata.get("language_info", {}).get("name") != "python":
        yield "language_info must name python"


def has_parameters(notebook: NotebookNode, path: Path) -> Complaints:
    try:
        missing = PARAMETERS - read_parameters(notebook, path.stem).keys()
    except ChapterError as error:
        yield str(error)
        return
    if missing:
        yield f"the parameters cell lacks {sorted(missing)}"


def begins_with_a_title(notebook: NotebookNode, path: Path) -> Complaints:
    if not notebook.cells or not notebook.cells[0].source.startswith("# "):
        yield "the first cell must begin with the title ('# ...')"


def has_short_cells(notebook: NotebookNode, path: Path) -> Complaints:
    for number, cell in _cells(notebook, "code"):
        # Drawing code is folded on the page; what a reader follows line by line stays short.
        longest = LONGEST_FOLDED_CELL if "hide-input" in tags(cell) else LONGEST_CELL
        if (lines := len(cell.source.splitlines())) > longest:
            yield f"cell {number} has {lines} lines (at most {longest})"


def folds_in_jupyterlab_too(notebook: NotebookNode, path: Path) -> Complaints:
    for number, cell in _cells(notebook, "code"):
        is_folded = bool(FOLDED & set(tags(cell)))
        if cell.metadata.get("jupyter", {}).get("source_hidden", False) != is_folded:
            yield f"cell {number}: 'jupyter.source_hidden' must be {str(is_folded).lower()}, as its tags have it"


def keeps_money_out_of_maths(notebook: NotebookNode, path: Path) -> Complaints:
    for number, cell in _cells(notebook, "markdown"):
        for block in MARKDOWN.parse(cell.source):
            for token in [block, *(block.children or ())]:
                if "math" not in token.type:
                    continue
                bare = re.sub(r"\\(text|mathrm|operatorname|mathit|textbf)\s*\{[^}]*\}|\\[A-Za-z]+", " ", token.content)
                if re.search(r"[A-Za-z]{2,},?\s+[A-Za-z]{2,}|\d,?\s+(in|per|and|out|an?)\b|\d/h\b", bare):
                    yield f"cell {number}: '${token.content}$' reads as mathematics; write money as \\$5"


def has_working_links(notebook: NotebookNode, path: Path) -> Complaints:
    for number, cell in _cells(notebook, "markdown"):
        for target in re.findall(r"\]\(([^)\s]+)\)", cell.source):
            if re.match(r"[a-z]+:|#", target):
                continue
            if not (path.parent / target.split("#")[0]).exists():
                yield f"cell {number}: link to '{target}', which does not exist"
            elif target.startswith("../book/bibliography.md"):
                key = target.partition("#")[2]
                if f"{{{key}," not in (path.parent / "../book/references.bib").read_text(encoding="utf-8"):
                    yield f"cell {number}: link to '{target}', which names no entry of references.bib (#key)"


def agrees_with_the_library(notebook: NotebookNode, path: Path) -> Complaints:
    """Cells tagged ``defines:module`` hold the same syntax trees as that module."""
    for number, cell in _cells(notebook, "code"):
        for tag in tags(cell):
            if not tag.startswith("defines:"):
                continue
            module = tag.removeprefix("defines:")
            theirs, ours = _definitions(_module_source(module)), _definitions(cell.source)
            if not ours:
                yield f"cell {number} is tagged '{tag}' and defines nothing"
            for name, tree in ours.items():
                if name not in theirs:
                    yield f"cell {number}: {module} has no '{name}'"
                elif theirs[name] != tree:
                    yield f"cell {number}: '{name}' differs from {module}"


RULES: list[Callable[[NotebookNode, Path], Complaints]] = [
    is_stripped,
    names_its_kernel,
    has_parameters,
    begins_with_a_title,
    has_short_cells,
    folds_in_jupyterlab_too,
    keeps_money_out_of_maths,
    has_working_links,
    agrees_with_the_library,
]


def _cells(notebook: NotebookNode, kind: str) -> Iterator[tuple[int, NotebookNode]]:
    return ((number, cell) for number, cell in enumerate(notebook.cells, start=1) if cell.cell_type == kind)


def _definitions(source: str) -> dict[str, str]:
    """Top-level functions and classes by name, as syntax trees without docstrings: a chapter has prose instead."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return {node.name: ast.dump(node) for node in tree.body if isinstance(node, kinds)}


def _module_source(module: str) -> str:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return ""
    return Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""

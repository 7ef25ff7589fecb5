"""A Sphinx extension: pages show executed chapters or the build stops.

The chapters in ``notebooks/`` hold no outputs. So each is replaced by its executed copy while Sphinx reads it, and the
build refuses where a copy is missing, failed or older than its source. MathJax comes out of an installed package, so no
page loads anything from another host.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError

from nanoinfer.book.chapter import executed_path, read_notebook, run_record, why_not_fresh
from nanoinfer.errors import ChapterError

#: SVG output needs no fonts, which browsers refuse to pages opened from a folder.
MATHJAX = "tex-svg.js"
#: ``[Yu et al. (2022)](../book/bibliography.md#yu2022orca)``
CITATION = re.compile(r"\[[^\]]*\]\(\.\./book/bibliography\.md#([\w-]+)\)")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("config-inited", use_own_mathjax)
    app.connect("env-before-read-docs", refuse_what_is_not_fresh)
    app.connect("source-read", show_executed_copy)
    app.connect("build-finished", copy_mathjax)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def _chapters(env: BuildEnvironment) -> dict[str, Path]:
    """The table of contents' notebooks: docname to source path."""
    pages = {doc: Path(env.doc2path(doc)) for doc in env.found_docs}
    return {doc: path for doc, path in pages.items() if path.suffix == ".ipynb"}


def refuse_what_is_not_fresh(app: Sphinx, env: BuildEnvironment, docnames: list[str]) -> None:
    """Stop before anything is read, naming every chapter that may not be shown."""
    root, bad = Path(app.srcdir), []
    for docname, path in sorted(_chapters(env).items()):
        try:
            if reason := why_not_fresh(root, path.stem, path):
                bad.append(f"{docname}: {reason}")
        except ChapterError as error:
            bad.append(str(error))
        if docname not in docnames:
            docnames.append(docname)  # its executed copy may have changed where its source has not
    if bad:
        raise ExtensionError("the book shows only chapters that ran; run `nanoinfer run` first:\n  " + "\n  ".join(bad))


def show_executed_copy(app: Sphinx, docname: str, source: list[str]) -> None:
    """Give Sphinx the executed copy in place of the stripped source."""
    path = _chapters(app.env).get(docname)
    if path is None:
        return
    notebook = read_notebook(executed_path(Path(app.srcdir), path.stem))
    notebook.cells.insert(1, banner(run_record(notebook)))
    for cell in notebook.cells:
        if cell.cell_type == "markdown":  # a link for readers of the notebook, on a page a citation of that entry
            cell.source = CITATION.sub(r"{cite:t}`\1`", cell.source)
    source[0] = nbformat.writes(notebook)


def banner(record: dict[str, Any]) -> NotebookNode:
    """A cell that says what the page's numbers were measured on, or that there are none."""
    parameters = record["parameters"]
    settings = ", ".join(f"{name} `{value}`" for name, value in parameters.items() if name != "PROFILE")
    if parameters.get("PROFILE") == "smoke":
        kind, title = "warning", "A smoke run: nothing on this page is a measurement"
        text = f"A tiny random model was used, only to show that every cell runs ({settings})."
    else:
        kind, title = "note", f"This page was run on {record['machine']}, {record['date']}"
        text = f"Profile `{parameters.get('PROFILE')}`: {settings}, Python {record['python']}."
    cell = nbformat.v4.new_markdown_cell(f"```{{admonition}} {title}\n:class: {kind}\n{text}\n```")
    cell["id"] = "what-this-was-run-on"
    return cell


def use_own_mathjax(app: Sphinx, config: Config) -> None:
    """Point every page at the copy that :func:`copy_mathjax` makes."""
    config.mathjax_path = f"mathjax/{MATHJAX}"
    # The menu would fetch parts that are not copied. Assistive MathML stays on for screen readers.
    config.mathjax3_config = {**(config.mathjax3_config or {}), "options": {"enableMenu": False}}


def copy_mathjax(app: Sphinx, error: Exception | None) -> None:
    """Put MathJax 3 and its licence into the site."""
    if error or app.builder.format != "html":
        return
    spec = importlib.util.find_spec("mathjax")
    if spec is None or not spec.submodule_search_locations:
        raise ExtensionError(
            "MathJax is not installed: pip install 'nanoinfer[book]' brings it (django-static-mathjax)"
        )
    package = Path(spec.submodule_search_locations[0]) / "static" / "mathjax"
    target = Path(app.outdir) / "_static" / "mathjax"
    (target / "input" / "tex").mkdir(parents=True, exist_ok=True)
    shutil.copy2(package / "LICENSE", target / "LICENSE")
    shutil.copy2(package / "es5" / MATHJAX, target / MATHJAX)
    extensions = Path("input", "tex", "extensions")
    shutil.copytree(package / "es5" / extensions, target / extensions, dirs_exist_ok=True)

"""Every chapter's source holds to the book's rules, and each rule can be broken."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
import yaml
from nbformat import NotebookNode

from nanoinfer.book.chapter import find_chapters
from nanoinfer.errors import nearest
from tests.book.checks import check
from tests.book.helpers import PARAMETERS, ROOT, chapter

CHAPTERS = find_chapters(ROOT)
NEAREST = inspect.getsource(nearest)


def test_there_are_chapters_and_the_contents_list_each_of_them() -> None:
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text("utf8"))
    files = [page["file"] for part in toc["parts"] for page in part["chapters"]]
    assert [file for file in files if file.startswith("notebooks/")] == [f"notebooks/{name}" for name in CHAPTERS]
    assert CHAPTERS
    assert all((ROOT / f"{file}.md").is_file() for file in files if file.startswith("book/"))


@pytest.mark.parametrize("name", CHAPTERS)
def test_chapter(name: str) -> None:
    assert check(CHAPTERS[name]) == []


def complaints(tmp_path: Path, notebook: NotebookNode) -> list[str]:
    path = tmp_path / "09_made.ipynb"
    nbformat.write(notebook, path)
    return check(path)


def tagged(source: str, module: str = "nanoinfer.errors") -> NotebookNode:
    notebook = chapter([("code", source)])
    notebook.cells[2].metadata = {"tags": [f"defines:{module}"]}
    return notebook


def test_a_good_chapter_has_no_complaints(tmp_path: Path) -> None:
    money = "Costs \\$5 to \\$7, or $5 here.\n\nH100 at $2.50/h, A100 at $1.29/h."
    fine = money + " $2 N d^2$ and $t = \\text{bytes per second}$"
    assert complaints(tmp_path, chapter([("markdown", fine), ("code", "1 + 1\n" * 25)])) == []
    assert complaints(tmp_path, tagged("# a comment more\n" + NEAREST)) == []


def set_metadata(**changes: object) -> Callable[[NotebookNode], None]:
    return lambda notebook: notebook.metadata.update(changes)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda nb: nb.cells[1].update(execution_count=1), "cell 2 carries outputs or an execution count"),
        (
            lambda nb: nb.cells[1].update(outputs=[nbformat.v4.new_output("stream", text="x")]),
            "cell 2 carries outputs",
        ),
        (lambda nb: nb.cells[0].metadata.update(collapsed=True), "cell 1 carries metadata"),
        (set_metadata(widgets={}), "widget state"),
        (
            set_metadata(kernelspec={"display_name": "x", "name": "old-venv-311", "language": "python"}),
            "kernelspec must",
        ),
        (set_metadata(kernelspec={"display_name": "x", "name": "python3"}), "kernelspec must"),
        (set_metadata(language_info={"name": "julia"}), "language_info"),
        (lambda nb: nb.cells[1].metadata.update(tags=[]), "exactly one code cell tagged"),
        (lambda nb: nb.cells[1].update(source=PARAMETERS.replace("SEED", "SEEDS")), "lacks ['SEED']"),
        (lambda nb: nb.cells[1].metadata.update(tags=["parameters", "hide-input"]), "source_hidden' must be true"),
        (lambda nb: nb.cells[1].metadata.update(jupyter={"source_hidden": True}), "source_hidden' must be false"),
        (lambda nb: nb.cells[0].update(source="A title"), "begin with the title"),
        (lambda nb: nb.cells[0].update(id="cell-1"), "not a valid notebook"),
    ],
)
def test_a_spoilt_notebook_is_named(tmp_path: Path, spoil: Callable[[NotebookNode], None], reason: str) -> None:
    notebook = chapter([])
    spoil(notebook)
    path = tmp_path / "09_made.ipynb"
    path.write_text(nbformat.v4.writes(notebook), encoding="utf-8")
    (complaint,) = check(path)
    assert reason in complaint
    assert "09_made.ipynb" in complaint


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("code", "1 + 1\n" * 26, "cell 3 has 26 lines"),
        ("markdown", "It costs $0.20 in and $0.60 out, for $N d^2$ operations.", "reads as mathematics"),
        ("markdown", "$40 and $", "reads as mathematics"),
        ("markdown", "See [it](no_such.md).", "link to 'no_such.md'"),
    ],
)
def test_a_spoilt_cell_is_named(tmp_path: Path, kind: str, text: str, reason: str) -> None:
    (complaint,) = complaints(tmp_path, chapter([(kind, text)]))
    assert reason in complaint


@pytest.mark.parametrize(
    ("source", "module", "reason"),
    [
        (NEAREST.replace("n=count", "n=3"), "nanoinfer.errors", "'nearest' differs from nanoinfer.errors"),
        (NEAREST.replace("count: int = 3", "count=3"), "nanoinfer.errors", "differs"),
        ("def farthest(): ...", "nanoinfer.errors", "nanoinfer.errors has no 'farthest'"),
        (NEAREST, "nanoinfer.mistakes", "nanoinfer.mistakes has no 'nearest'"),
        ("nearest = None", "nanoinfer.errors", "defines nothing"),
    ],
)
def test_a_piece_that_drifted_from_the_library_is_named(tmp_path: Path, source: str, module: str, reason: str) -> None:
    (complaint,) = complaints(tmp_path, tagged(source, module))
    assert reason in complaint


def test_a_chapter_may_leave_the_docstring_to_its_prose(tmp_path: Path) -> None:
    other = NEAREST.replace("near a misspelt", "next to a misspelt")
    assert complaints(tmp_path, tagged(other, "nanoinfer.errors")) == []


def test_a_citation_must_name_an_entry(tmp_path: Path) -> None:
    (tmp_path / "book").mkdir()
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "book" / "bibliography.md").touch()
    (tmp_path / "book" / "references.bib").write_text("@misc{known1900,\n}")
    text = (
        "[A](../book/bibliography.md#known1900), [B](../book/bibliography.md#other1900), [C](../book/bibliography.md)"
    )
    found = complaints(tmp_path / "notebooks", chapter([("markdown", text)]))
    assert [complaint.split("'")[1] for complaint in found] == [
        "../book/bibliography.md#other1900",
        "../book/bibliography.md",
    ]

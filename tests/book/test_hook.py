"""The Sphinx extension without Sphinx: which chapters it refuses, and what it shows in place of a source."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import nbformat
import pytest
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError

from nanoinfer.book.execute import run_chapters
from nanoinfer.book.hook import banner, refuse_what_is_not_fresh, show_executed_copy
from tests.book.helpers import FakeKernel, write


def sphinx(root: Path) -> tuple[Sphinx, BuildEnvironment]:
    pages = {f"notebooks/{path.stem}": str(path) for path in (root / "notebooks").glob("*.ipynb")}
    pages["book/setup"] = str(root / "book" / "setup.md")
    env = cast(BuildEnvironment, SimpleNamespace(found_docs=set(pages), doc2path=pages.__getitem__))
    return cast(Sphinx, SimpleNamespace(srcdir=str(root), env=env)), env


def test_fresh_chapters_are_shown_with_what_they_were_run_on(tmp_path: Path) -> None:
    write(tmp_path, "01_small", [("code", "1 + 1")])
    run_chapters(tmp_path, None, "smoke", execute=FakeKernel())
    app, env = sphinx(tmp_path)
    docnames: list[str] = []
    refuse_what_is_not_fresh(app, env, docnames)
    assert docnames == ["notebooks/01_small"], "an executed copy may have changed where its source has not"
    source = ["the stripped source"]
    show_executed_copy(app, "notebooks/01_small", source)
    cells = nbformat.reads(source[0], as_version=4).cells
    assert "A smoke run: nothing on this page is a measurement" in cells[1].source
    assert "MODEL `random:tiny-gpt2`" in cells[1].source
    assert cells[-1].source == "1 + 1"
    show_executed_copy(app, "book/setup", source)
    assert "nothing on this page" in source[0], "other pages stay as they are"


def test_a_link_to_the_bibliography_lands_on_its_entry(tmp_path: Path) -> None:
    said = "By [Yu et al. (2022)](../book/bibliography.md#yu2022orca), see [setup](../book/setup.md)."
    write(tmp_path, "01_small", [("markdown", said)])
    run_chapters(tmp_path, None, "smoke", execute=FakeKernel())
    app, _ = sphinx(tmp_path)
    source = [""]
    show_executed_copy(app, "notebooks/01_small", source)
    cells = nbformat.reads(source[0], as_version=4).cells
    assert cells[-1].source == "By {cite:t}`yu2022orca`, see [setup](../book/setup.md)."


def test_missing_and_changed_chapters_are_named_together(tmp_path: Path) -> None:
    write(tmp_path, "01_small", [])
    run_chapters(tmp_path, None, "smoke", execute=FakeKernel())
    write(tmp_path, "01_small", [("markdown", "changed since")])
    write(tmp_path, "02_never", [])
    (tmp_path / "notebooks" / "03_broken.ipynb").write_text("{")
    with pytest.raises(ExtensionError) as caught:
        refuse_what_is_not_fresh(*sphinx(tmp_path), [])
    message = str(caught.value)
    assert "`nanoinfer run`" in message
    assert "notebooks/01_small: the chapter or the library has changed since it was run" in message
    assert "notebooks/02_never: it was never run" in message
    assert "03_broken" in message


def test_a_measured_page_names_its_machine() -> None:
    record: dict[str, Any] = {
        "parameters": {"PROFILE": "laptop", "MODEL": "smollm2-135m"},
        "machine": "AMD EPYC 7763, 2 cores",
        "date": "2026-01-05",
        "python": "3.11.7",
    }
    text = banner(record).source
    assert "This page was run on AMD EPYC 7763, 2 cores, 2026-01-05" in text
    assert "Profile `laptop`: MODEL `smollm2-135m`, Python 3.11.7." in text

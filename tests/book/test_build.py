"""The book, built once for real from a small chapter; and every way it must refuse."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nanoinfer.book.build import JUPYTER_BOOK, build_book
from nanoinfer.book.execute import run_chapters
from nanoinfer.errors import ChapterError
from tests.book.helpers import copy_book, write

PROSE = """It costs $0.20 in and $0.60 out.

That buys $N d^2$ operations. See {doc}`/book/setup` and {cite}`pope2023scaling`.

$$
\\begin{aligned} a &= b \\\\ c &= \\cancel{d} + \\boldsymbol{e} \\end{aligned}
$$
"""
CODE = """
from IPython.display import Markdown, display
widget = {"model_id": "abc", "version_major": 2, "version_minor": 0}
html = '<p id="figure">the static figure</p>'
display({"text/html": html, "application/vnd.jupyter.widget-view+json": widget, "text/plain": "w"}, raw=True)
display(Markdown(r"It ran at **12 tok/s**: \\$0.20 in and \\$0.60 out."))
"""


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("book")
    copy_book(root, ["01_small"])
    write(root, "01_small", [("markdown", PROSE), ("code", CODE)])
    run_chapters(root, None, "smoke")
    build_book(root)
    return root


@pytest.mark.slow
def test_the_page_shows_what_ran_and_loads_nothing_from_elsewhere(book: Path) -> None:
    site = book / "_build" / "html"
    page = (site / "notebooks" / "01_small.html").read_text("utf8")
    text = re.sub(r"<[^>]+>", "", page)
    assert "It costs $0.20 in and $0.60 out" in text
    assert "It ran at 12 tok/s: $0.20 in and $0.60 out." in text
    maths = re.findall(r'class="math notranslate nohighlight">(.*?)</', page, re.DOTALL)
    assert [m.strip(r"\()") for m in maths][:1] == ["N d^2"]
    assert '<p id="figure">the static figure</p>' in page
    assert "A smoke run: nothing on this page is a measurement" in text
    assert "random:tiny-gpt2" in text
    for html in site.rglob("*.html"):
        loads = re.findall(
            r'<(?:script|link|img|iframe|source)\b[^>]*(?:src|href)="(?:https?:)?//', html.read_text("utf8")
        )
        assert not loads, html
        assert not re.search(r"require\.min|html-manager|unpkg|thebe", html.read_text("utf8"), re.IGNORECASE), html
    assert "Apache License" in (site / "_static" / "mathjax" / "LICENSE").read_text("utf8")
    assert (site / "_static" / "mathjax" / "tex-svg.js").is_file()


def jupyter_book(root: Path) -> subprocess.CompletedProcess[str]:
    """What a person types: plain ``jupyter-book build .``."""
    command = [sys.executable, "-c", JUPYTER_BOOK, "build", "."]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_plain_jupyter_book_refuses_missing_failed_and_stale_chapters(book: Path, tmp_path: Path) -> None:
    copy_book(tmp_path, ["01_small", "02_bad", "03_never"])
    for name in ("notebooks", "_build/executed"):
        shutil.copytree(book / name, tmp_path / name)
    write(tmp_path, "01_small", [("markdown", "changed since")])
    write(tmp_path, "02_bad", [("code", "raise RuntimeError('made to fail')")])
    write(tmp_path, "03_never", [])
    with pytest.raises(ChapterError, match="02_bad, cell 3 of 3: RuntimeError: made to fail"):
        run_chapters(tmp_path, ["2"], "smoke")

    done = jupyter_book(tmp_path)
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "notebooks/01_small: the chapter or the library has changed since it was run" in said
    assert "notebooks/02_bad: its last run failed" in said
    assert "notebooks/03_never: it was never run" in said
    assert "`nanoinfer run`" in said
    assert not list((tmp_path / "_build").rglob("*.html"))


@pytest.mark.slow
def test_a_warning_fails_the_build_and_leaves_no_pages(
    book: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy_book(tmp_path, [])
    with (tmp_path / "book" / "setup.md").open("a", encoding="utf-8") as page:
        page.write("\n[nowhere](no_such_page.md)\n")
    with pytest.raises(ChapterError, match="the book was not built"):
        build_book(tmp_path)
    assert "no_such_page" in capfd.readouterr().err
    assert not (tmp_path / "_build" / "html").exists()


def test_a_folder_that_is_no_book_is_named(tmp_path: Path) -> None:
    with pytest.raises(ChapterError, match=r"holds no _config\.yml"):
        build_book(tmp_path)

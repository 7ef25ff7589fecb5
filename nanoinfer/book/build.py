"""Build the book's pages from executed chapters; a warning is a failure."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from nanoinfer.errors import ChapterError

JUPYTER_BOOK = "from jupyter_book.cli.main import main; main()"


def build_book(root: Path) -> Path:
    """Run Jupyter Book over ``root`` and return the path of the first page.

    :mod:`nanoinfer.book.hook` refuses chapters that are missing, failed or stale. Raises :class:`ChapterError` for an
    error or a warning, after which no half-built pages stay.
    """
    root = root.resolve()
    if not (root / "_config.yml").is_file():
        raise ChapterError(f"{root} holds no _config.yml: run this in the folder that holds the book")
    pages = root / "_build" / "html"
    shutil.rmtree(pages, ignore_errors=True)  # a page of a chapter that is gone must not stay
    print("building the pages", flush=True)
    # A process of its own: Sphinx changes docutils' globals. -q keeps warnings and errors, which come on stderr.
    done = subprocess.run(
        [sys.executable, "-c", JUPYTER_BOOK, "build", str(root), "-W", "--keep-going", "-q", "--all"],
        cwd=root,
        env={**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONUTF8": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    first = pages / "index.html"
    if done.returncode or not first.is_file():
        print(done.stdout, file=sys.stderr, flush=True)
        shutil.rmtree(pages, ignore_errors=True)
        raise ChapterError("the book was not built: the reason is above")
    print(f"the book is built: {first}", flush=True)
    return first

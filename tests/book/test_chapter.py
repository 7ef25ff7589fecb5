"""Finding, reading and judging chapters: cases F1 and S8, and what counts as fresh."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest

from nanoinfer.book.chapter import (
    choose_chapters,
    executed_path,
    fit_parameter,
    read_notebook,
    read_parameters,
    source_hash,
    why_not_fresh,
)
from nanoinfer.errors import ChapterError
from tests.book.helpers import chapter, write


def test_chapters_are_chosen_by_name_or_number_in_reading_order(tmp_path: Path) -> None:
    for name in ("05_the_kv_cache", "01_naive_baseline"):
        write(tmp_path, name, [])
    assert list(choose_chapters(tmp_path, None)) == ["01_naive_baseline", "05_the_kv_cache"]
    assert list(choose_chapters(tmp_path, ["5", "01_naive_baseline.ipynb"])) == ["01_naive_baseline", "05_the_kv_cache"]
    with pytest.raises(ChapterError, match="no chapter '05_kv_cache': did you mean '05_the_kv_cache'"):
        choose_chapters(tmp_path, ["05_kv_cache"])
    with pytest.raises(ChapterError, match="no chapter '²'"):
        choose_chapters(tmp_path, ["²"])
    with pytest.raises(ChapterError, match="no chapters in"):
        choose_chapters(tmp_path / "book", None)


@pytest.mark.parametrize(
    ("value", "default", "right"),
    [
        ("007", "smollm2-135m", "007"),
        ("[1,2]", [8], [1, 2]),
        ("(1, 2)", [8], [1, 2]),
        ("1,2", [8], [1, 2]),
        ((1, 2), [8], [1, 2]),
        ("1e3", 10, 1000),
        (1000.0, 10, 1000),
        ("1_000", 10, 1000),
        (" 8 ", 10, 8),
        ("3", 0.5, 3),
        ("True", False, True),
        ("2026-01-05", "", "2026-01-05"),
        ("None", None, None),
        ("anything", None, "anything"),
    ],
)
def test_a_parameter_takes_the_type_of_its_default(value: object, default: object, right: object) -> None:
    got = fit_parameter("05", "X", value, default)
    assert (got, type(got)) == (right, type(right))


@pytest.mark.parametrize(
    ("value", "default"),
    [
        ("abc", [8]),
        ("007", 10),
        ("1.5", 10),
        ("abc", 10),
        ("true", False),
        (1, False),
        (True, 1),
        (7, "gpt2"),
    ],
)
def test_a_parameter_of_another_type_is_refused(value: object, default: object) -> None:
    with pytest.raises(ChapterError, match=r"05: parameter X takes .* such as"):
        fit_parameter("05", "X", value, default)


def test_the_parameters_cell_must_be_one_and_plain() -> None:
    assert read_parameters(chapter([], "MODEL = 'a'\nSEED: int = 1"), "01") == {"MODEL": "a", "SEED": 1}
    notebook = chapter([])
    notebook.cells[1].metadata = {}
    with pytest.raises(ChapterError, match="exactly one code cell tagged 'parameters', has 0"):
        read_parameters(notebook, "01")
    for bad in ("MODEL = choose()", "import os", "A = B = 1", "A: int", "A ="):
        with pytest.raises(ChapterError, match="must hold plain values only"):
            read_parameters(chapter([], bad), "01")


def test_cell_ids_are_needed_and_unique_and_fit_the_version(tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"
    good = json.loads(nbformat.writes(chapter([("markdown", "x")])))
    for break_it, reason in (
        (lambda nb: nb["cells"][2].update(id="cell-0"), "Non-unique cell id"),
        (lambda nb: nb["cells"][2].pop("id"), "missing an id"),
        (lambda nb: nb.update(nbformat_minor=4), "'id' was unexpected"),
    ):
        notebook = json.loads(json.dumps(good))
        break_it(notebook)
        path.write_text(json.dumps(notebook), encoding="utf-8")
        with pytest.raises(ChapterError, match=reason):
            read_notebook(path)
    for text in ("", "{", "[]", '{"cells": []}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ChapterError, match=r"a\.ipynb: not a valid notebook"):
            read_notebook(path)


def test_fresh_means_same_cells_same_library_no_error(tmp_path: Path) -> None:
    path = write(tmp_path, "01_a", [("code", "1 + 1")])
    source = read_notebook(path)
    done = executed_path(tmp_path, "01_a")
    done.parent.mkdir(parents=True)
    assert why_not_fresh(tmp_path, "01_a", path) == "it was never run"
    run = chapter([("code", "1 + 1")])
    run.metadata["nanoinfer"] = {"run": {"source": source_hash(tmp_path, source)}}
    nbformat.write(run, done)
    assert why_not_fresh(tmp_path, "01_a", path) == ""

    with_output = chapter([("code", "1 + 1")])  # saved in JupyterLab: same code
    with_output.cells[2].outputs = [nbformat.v4.new_output("stream", text="2")]
    nbformat.write(with_output, path)
    assert why_not_fresh(tmp_path, "01_a", path) == ""

    (tmp_path / "requirements.lock").write_text("torch==1\n", encoding="utf-8")
    assert "has changed" in why_not_fresh(tmp_path, "01_a", path)
    (tmp_path / "requirements.lock").unlink()
    write(tmp_path, "01_a", [("code", "1 + 2")])
    assert "has changed" in why_not_fresh(tmp_path, "01_a", path)

    run.cells[2].outputs = [nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])]
    nbformat.write(run, done)
    assert why_not_fresh(tmp_path, "01_a", path) == "its last run failed"
    run.cells[2].outputs = []
    run.metadata["papermill"] = {"exception": True}
    nbformat.write(run, done)
    assert why_not_fresh(tmp_path, "01_a", path) == "its last run failed"
    done.write_text("{", encoding="utf-8")
    assert why_not_fresh(tmp_path, "01_a", path) == "its executed copy is damaged"

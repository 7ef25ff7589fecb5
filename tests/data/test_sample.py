"""The shipped text is there, plain, of the promised length, and inside the wheel."""

from __future__ import annotations

from pathlib import Path

from hatchling.builders.wheel import WheelBuilder

from nanoinfer.data import sample_text

ROOT = Path(__file__).resolve().parents[2]


def test_the_text_is_prose_of_known_size() -> None:
    text = sample_text()
    assert 1500 <= len(text.split()) <= 2500
    assert text.isascii() and text.endswith("\n") and "\r" not in text


def test_the_wheel_holds_it() -> None:
    files = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert "nanoinfer/data/sample.txt" in files

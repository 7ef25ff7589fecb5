"""A text to measure with that ships with the library: the same for everybody, and no download."""

from __future__ import annotations

from importlib.resources import files


def sample_text() -> str:
    """Five short essays in plain English, written for this project: about 2,100 words."""
    return files("nanoinfer.data").joinpath("sample.txt").read_text(encoding="utf-8")

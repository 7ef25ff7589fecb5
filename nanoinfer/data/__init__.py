"""What ships with the library, so that nothing is downloaded: datasheets, published models, a text to measure with."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any


def read_toml(name: str) -> dict[str, Any]:
    """The tables of ``name.toml``, one of this folder's files."""
    return tomllib.loads(files("nanoinfer.data").joinpath(f"{name}.toml").read_text(encoding="utf-8"))


def sample_text() -> str:
    """Five short essays in plain English, written for this project: about 2,100 words."""
    return files("nanoinfer.data").joinpath("sample.txt").read_text(encoding="utf-8")

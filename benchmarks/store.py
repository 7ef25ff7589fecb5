"""What all benchmarks share: their options, and a result on the disk that is whole or not there."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoinfer.store import write_whole


def options(doc: str | None, out: str, **defaults: Any) -> argparse.Namespace:
    """The command line of a benchmark: ``--out``, and an option for each default, of its type.

    A list takes several values, and a pair is a default and its help. ``doc`` is the module's docstring.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    for name, default in defaults.items():
        value, text = default if isinstance(default, tuple) else (default, None)
        nargs, example = ("+", value[0]) if isinstance(value, list) else (None, value)
        parser.add_argument(f"--{name}", nargs=nargs, type=type(example), default=value, help=text)
    parser.add_argument("--out", type=Path, default=Path(out))
    return parser.parse_args()


def store(path: Path, record: Mapping[str, Any]) -> None:
    """Write the record as JSON, in place of what was there."""
    write_whole(path, json.dumps(record, indent=1) + "\n")

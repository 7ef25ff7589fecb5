"""A benchmark's result on the disk: whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def store(path: Path, record: Mapping[str, Any]) -> None:
    """Write the record as JSON, in place of what was there."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    part.replace(path)

"""A benchmark's result on the disk: whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoinfer.store import write_whole


def store(path: Path, record: Mapping[str, Any]) -> None:
    """Write the record as JSON, in place of what was there."""
    write_whole(path, json.dumps(record, indent=1) + "\n")

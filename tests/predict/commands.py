"""The commands of the room, run in this process."""

from __future__ import annotations

import json
import re
from typing import Any

from typer.testing import CliRunner

from nanoinfer.cli import app as cli


def run(*args: str) -> Any:
    return CliRunner().invoke(cli.app, list(args))


def record(*args: str) -> Any:
    result = run(*args, "--json")
    assert result.exit_code == 0 and result.stderr == "", result.output
    return json.loads(result.stdout)


def lines(*args: str) -> dict[str, str]:
    """Each line of the tables by its first column; the last of several of one name."""
    result = run(*args)
    assert result.exit_code == 0, result.output
    cells = (re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in result.stdout.splitlines())
    return {row[0]: row[1] for row in cells if len(row) == 2}


def one_line(result: Any, says: str) -> None:
    assert result.exit_code == 1, result.output
    assert result.stdout == "" and result.stderr.count("\n") == 1
    assert result.stderr.startswith("nanoinfer: ") and says in result.stderr

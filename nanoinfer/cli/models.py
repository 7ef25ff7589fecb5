"""``nanoinfer models``."""

from __future__ import annotations

import typer

from nanoinfer.cli.options import Json
from nanoinfer.show.text import as_table, console, emit

commands = typer.Typer()


@commands.command()
def models(as_json: Json = False) -> None:
    """List the models that have a name here, and how to get them."""
    from dataclasses import asdict

    from nanoinfer.models.registry import known_models

    rows = [asdict(row) for row in known_models()]
    if as_json:
        emit(rows)
        return
    header = [key.replace("_", " ") for key in rows[0]]
    console().print(as_table((header, ([_cell(v) for v in row.values()] for row in rows))))


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)

"""``nanoinfer run`` and ``nanoinfer book``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

commands = typer.Typer()


class PairCommand(TyperCommand):
    """Lets ``-p NAME VALUE`` be written as papermill has it, as well as ``-p NAME=VALUE``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Join each pair to one argument before the options are read."""
        joined, words = [], iter(args)
        for word in words:
            joined.append(word)
            if word in ("-p", "--parameter") and (name := next(words, None)) is not None:
                value = None if "=" in name else next(words, None)
                joined.append(name if value is None else f"{name}={value}")
        return super().parse_args(ctx, joined)


Profile = Annotated[str, typer.Option(help="smoke, laptop or gpu.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Run again what has run already.")]


@commands.command(cls=PairCommand)
def run(
    chapters: Annotated[list[str] | None, typer.Argument(help="Chapters, by number or name; all if none.")] = None,
    profile: Profile = "laptop",
    parameter: Annotated[
        list[str] | None, typer.Option("--parameter", "-p", metavar="NAME VALUE", help="Set a parameter; repeatable.")
    ] = None,
    fresh: Fresh = False,
) -> None:
    """Run chapters of the book on this machine, through papermill."""
    parameters = {}
    for pair in parameter or ():
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise typer.BadParameter(f"-p {pair}: give a name and a value, as in -p SEED 1")
        parameters[name] = value
    from nanoinfer.book.execute import run_chapters

    run_chapters(Path.cwd(), chapters or None, profile, parameters, fresh)


@commands.command()
def book(profile: Profile = "laptop", fresh: Fresh = False) -> None:
    """Run every chapter that has no fresh result, then build the book."""
    from nanoinfer.book.build import build_book
    from nanoinfer.book.execute import run_chapters

    run_chapters(Path.cwd(), None, profile, {}, fresh)
    build_book(Path.cwd())

"""``nanoinfer serve``."""

from __future__ import annotations

import typer

from nanoinfer.cli.options import command
from nanoinfer.serve.options import ServeOptions

commands = typer.Typer()


@command(commands, ServeOptions)
def serve(options: ServeOptions) -> None:
    """Serve a model over an OpenAI-compatible API until Ctrl-C."""
    from nanoinfer.serve import run

    run.serve(options)

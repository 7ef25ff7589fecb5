"""The command line: thin commands over the library. Read `app` first."""

from __future__ import annotations


def main() -> None:
    """Entry point of the command ``nanoinfer``."""
    from nanoinfer.cli.app import main as run

    run()

"""The command line: thin commands over the library, quick to answer.

Text goes to standard output and everything else to standard error, so that output can be piped. What only one command
needs (torch above all) is imported inside it, so that ``--help`` answers at once. A user's mistake is one line and
exit code 1; a traceback is left for our own.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from nanoinfer.cli import bench, book, doctor, generate, predict, serve
from nanoinfer.errors import NanoinferError
from nanoinfer.log import say

#: Which extra brings a package that the commands need.
EXTRAS: Final = {
    "aiohttp": "bench",
    "matplotlib": "bench",
    "fastapi": "serve",
    "prometheus_client": "serve",
    "pydantic": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
}


def _reason(error: Exception) -> str | None:
    """The one line for an error that the user can act on; ``None`` for one that is ours."""
    if isinstance(error, NanoinferError):
        return " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError) and (package := (error.name or "").partition(".")[0]) in EXTRAS:
        return f'this needs {package}: pip install "nanoinfer[{EXTRAS[package]}]"'
    if isinstance(error, OSError):  # a full disk, a file that may not be read
        return (error.strerror or str(error)) + (f": {error.filename}" if error.filename else "")
    # torch's allocator for the CPU raises a plain RuntimeError.
    if isinstance(error, MemoryError) or "OutOfMemoryError" in type(error).__name__ or "can't allocate" in str(error):
        return "out of memory: take a smaller model, a shorter prompt, or --dtype bfloat16"
    return None


class Group(TyperGroup):
    """Turns errors into exit codes for every command."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; 1 and one line for a user's mistake, 130 for Ctrl-C, 141 for a closed pipe."""
        with contextlib.suppress(AttributeError, ValueError):  # any text must print, whatever the locale
            sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:
            # The reader has closed the pipe. Without this Python complains once more while it exits.
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
            raise typer.Exit(141) from None
        except Exception as error:
            if (reason := _reason(error)) is None:
                raise
            say(f"nanoinfer: {reason}")
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=Group,
    name="nanoinfer",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from nanoinfer import __version__

        print(f"nanoinfer {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """LLM inference from first principles: generate, measure, and run the book."""


for module in (generate, doctor, predict, serve, bench, book):
    app.add_typer(module.commands)


def main() -> None:
    """Entry point of the command ``nanoinfer``."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {' '.join(str(message).split())}\n"
    app(prog_name="nanoinfer")

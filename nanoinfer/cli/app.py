"""The command line: thin commands over the library, quick to answer.

Text goes to standard output and everything else to standard error, so that output
can be piped. What only one command needs (torch above all) is imported inside it,
so that ``--help`` answers at once. A user's mistake is one line and exit code 1;
a traceback is left for our own.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from nanoinfer.cli import cluster as cli_cluster
from nanoinfer.cli import predict as cli_predict
from nanoinfer.cli import serving as cli_serving
from nanoinfer.cli import talk
from nanoinfer.errors import NanoinferError
from nanoinfer.log import say
from nanoinfer.show.text import as_table, console, emit

if TYPE_CHECKING:
    from nanoinfer.sampling.params import SamplingParams


# --- errors, in one place -------------------------------------------------------


def _reason(error: Exception) -> str | None:
    """The one line for an error that the user can act on; ``None`` for one that is ours."""
    if isinstance(error, NanoinferError):
        return " ".join(str(error).split())
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
            # Whoever read us has left. Without this Python complains once more while it exits.
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


# --- generate and chat ------------------------------------------------------------

Model = Annotated[str, typer.Argument(help="A name (see `nanoinfer models`), folder, .gguf file or hub id.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 is off.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass; 1 is off.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest; 0 is off.")]
Seed = Annotated[int | None, typer.Option(help="Of sampling, and of random weights.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeatable.")]
EngineName = Annotated[str, typer.Option("--engine", help="naive, cached, batched, continuous, speculative or auto.")]
SpeedWords = Annotated[
    str | None, typer.Option("--speed", help="Such as kernel,int8 or fuse,pack (see `Optimizations`).")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]


def _params(
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int | None,
    stop: list[str] | None,
) -> SamplingParams:
    from nanoinfer import SamplingParams

    return SamplingParams(max_tokens, temperature, top_k, top_p, min_p, seed=seed, stop=tuple(stop or ()))


def _speed(words: str | None) -> dict[str, Any]:
    """An engine's option, where it was asked for."""
    from nanoinfer.optimize.options import Optimizations

    return {} if words is None else {"speed": Optimizations.parse(words)}


@app.command()
def generate(
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to go on from; - reads standard input.")],
    model: Model = "smollm2-135m",
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    engine: EngineName = "cached",
    speed: SpeedWords = None,
    tp: Annotated[int, typer.Option(help="Processes that share every layer (tensor parallel).")] = 1,
    pp: Annotated[int, typer.Option(help="Processes that have some of the layers each (pipeline parallel).")] = 1,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    as_json: Json = False,
) -> None:
    """Continue a text: the continuation to standard output, its figures to standard error."""
    text = talk.read_prompt(prompt)
    params = _params(max_tokens, temperature, top_k, top_p, min_p, seed, stop)
    if (tp, pp) != (1, 1):
        from nanoinfer.parallel import generate as ranks

        record = ranks.generate(
            model,
            text,
            params,
            tp=tp,
            pp=pp,
            engine=engine,
            speed=speed,
            device=device,
            dtype=dtype,
            seed=seed or 0,
            prints=not as_json,
        )
        if as_json:
            emit(record)
        else:
            say(ranks.figures_line(record))
        return
    from nanoinfer import load

    ready = load(model, engine, device=device, dtype=dtype, seed=seed or 0, **_speed(speed))
    if as_json:
        emit(talk.record(ready, text, params))
    else:
        talk.stream(ready, text, params)


@app.command()
def chat(
    model: Model = "smollm2-135m",
    system: Annotated[str | None, typer.Option(help="What the model is told about itself first.")] = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 0.9,
    min_p: MinP = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    engine: EngineName = "cached",
    speed: SpeedWords = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """Talk with a model. One message a line; Ctrl-D or Ctrl-C ends it."""
    from nanoinfer import load

    params = _params(max_tokens, temperature, top_k, top_p, min_p, seed, stop)
    ready = load(model, engine, device=device, dtype=dtype, seed=seed or 0, **_speed(speed))
    talk.converse(ready, params, system)


# --- models and doctor ------------------------------------------------------------


@app.command()
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


@app.command()
def doctor(as_json: Json = False) -> None:
    """Look at this machine: what is here, what is missing, and how to get it."""
    from nanoinfer.cli import doctor as checks

    report = checks.examine()
    if as_json:
        emit(report.as_dict())
    else:
        for line in report.lines():
            print(line)
    if not report.ok:
        raise typer.Exit(1)


cli_predict.register(app)
cli_serving.register(app)
cli_cluster.register(app)


# --- the book ---------------------------------------------------------------------


class PairCommand(TyperCommand):
    """Lets ``-p NAME VALUE`` be written as papermill has it, beside ``-p NAME=VALUE``."""

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


@app.command(cls=PairCommand)
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
    from nanoinfer.book.run import run_chapters

    run_chapters(Path.cwd(), chapters or None, profile, parameters, fresh)


@app.command()
def book(profile: Profile = "laptop", fresh: Fresh = False) -> None:
    """Run every chapter that has no fresh result, then build the book."""
    from nanoinfer.book.build import build_book
    from nanoinfer.book.run import run_chapters

    run_chapters(Path.cwd(), None, profile, {}, fresh)
    build_book(Path.cwd())


def main() -> None:
    """Entry point of the command ``nanoinfer``."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {' '.join(str(message).split())}\n"
    app(prog_name="nanoinfer")

"""``nanoinfer bench`` and ``nanoinfer lens``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from nanoinfer.bench.options import BenchConfig
from nanoinfer.cli.options import Json, command
from nanoinfer.show.text import console, emit

commands = typer.Typer()


@command(commands, BenchConfig)
def bench(config: BenchConfig, as_json: Json = False) -> None:
    """Load a server, or a model in this process, and say what its users would feel.

    Without a load: one user, 32 requests. Ctrl-C ends the load and keeps what was measured. Exit code 1 where
    nothing succeeded, or the client was too slow for its figures to be the server's.
    """
    from nanoinfer.bench import tables
    from nanoinfer.bench.command import bench as measure

    record = measure(config)
    if as_json:
        emit(record)
    elif config.sweep:
        tables.show_sweep(console(), record)
    else:
        tables.show(console(), record)
    levels = [point["summary"] for point in record["points"]] if config.sweep else [record]
    if record["beyond_budget"] or not any(level["requests"]["ok"] for level in levels):
        raise typer.Exit(1)


@commands.command()
def lens(
    file: Annotated[Path, typer.Argument(help="traces.jsonl, or a folder of `bench` (then without the warm-up).")],
    as_json: Json = False,
) -> None:
    """Score the same traces by the rules of other tools, side by side."""
    from nanoinfer.bench.lens import lens as look
    from nanoinfer.bench.lens import show_lens
    from nanoinfer.bench.loadgen import load_run
    from nanoinfer.measure.trace import load_traces

    table = look(load_run(file).measured() if file.is_dir() else list(load_traces(file)))
    if as_json:
        emit(asdict(table))
    else:
        show_lens(console(), table)

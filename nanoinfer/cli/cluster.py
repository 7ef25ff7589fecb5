"""``nanoinfer cluster``: serve a model from several replicas, and answer a file of prompts."""

from __future__ import annotations

import typer

from nanoinfer.cli.options import command
from nanoinfer.cluster import BatchOptions, ClusterServeOptions
from nanoinfer.log import say

commands = typer.Typer(
    name="cluster", no_args_is_help=True, help="Serve from, or run a batch on, several machines (needs Ray)."
)


@command(commands, ClusterServeOptions)
def serve(options: ClusterServeOptions) -> None:
    """Serve a model from several replicas over one OpenAI-compatible address, until Ctrl-C."""
    from nanoinfer.cluster.replicas import serve_cluster

    serve_cluster(options)


@command(commands, BatchOptions)
def batch(options: BatchOptions) -> None:
    """Answer a file of prompts. Killed, it goes on where it was: run the same command again."""
    from nanoinfer.cluster.batch import run_batch

    result = run_batch(options)
    answers = f"{result.rows} answers in {options.out}, {result.errors} of them errors"
    say(f"{answers}; {result.found} shards were done before, {result.again} handed out again")
    if result.errors:
        raise typer.Exit(1)

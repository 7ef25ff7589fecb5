"""``nanoinfer serve`` and ``nanoinfer cluster``: a server on this machine, replicas and batches on several."""

from __future__ import annotations

import typer

from nanoinfer.cli.options import command
from nanoinfer.cluster import BatchOptions, ClusterServeOptions
from nanoinfer.log import say
from nanoinfer.serve.options import ServeOptions

commands = typer.Typer()
cluster = typer.Typer(no_args_is_help=True, help="Serve from, or run a batch on, several machines (needs Ray).")
commands.add_typer(cluster, name="cluster")


@command(commands, ServeOptions)
def serve(options: ServeOptions) -> None:
    """Serve a model over an OpenAI-compatible API until Ctrl-C."""
    from nanoinfer.serve import run

    run.serve(options)


@command(cluster, ClusterServeOptions, "serve")
def cluster_serve(options: ClusterServeOptions) -> None:
    """Serve a model from several replicas over one OpenAI-compatible address, until Ctrl-C."""
    from nanoinfer.cluster.replicas import serve_cluster

    serve_cluster(options)


@command(cluster, BatchOptions)
def batch(options: BatchOptions) -> None:
    """Answer a file of prompts. Killed, it goes on where it was: run the same command again."""
    from nanoinfer.cluster.batch import run_batch

    result = run_batch(options)
    answers = f"{result.rows} answers in {options.out}, {result.errors} of them errors"
    say(f"{answers}; {result.found} shards were done before, {result.again} handed out again")
    if result.errors:
        raise typer.Exit(1)

"""``nanoinfer cluster``: serve a model from several replicas, and answer a file of prompts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from nanoinfer.option_types import Device, Dtype, Model

Address = Annotated[
    str | None, typer.Option(help="HOST:PORT of a Ray cluster, or auto; without, a Ray on this machine alone.")
]
Cpus = Annotated[int, typer.Option(help="Cores of each.")]
Gpus = Annotated[float, typer.Option(help="GPUs of each.")]
Seed = Annotated[int, typer.Option(help="Of random weights.")]

commands = typer.Typer(
    name="cluster", no_args_is_help=True, help="Serve from, or run a batch on, several machines (needs Ray)."
)


@commands.command()
def serve(
    model: Model,
    replicas: Annotated[int, typer.Option(help="How many, spread over the machines.")] = 2,
    address: Address = None,
    cpus: Cpus = 1,
    gpus: Gpus = 0,
    host: Annotated[str, typer.Option(help="Where to listen; only loopback keeps other machines out.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes one that is free.")] = 8000,
    name: Annotated[str | None, typer.Option(help="What clients call the model; its own name if not given.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="NANOINFER_API_KEY", help="That clients must give; none is asked if not set.")
    ] = None,
    speed: Annotated[
        str,
        typer.Option(
            help="Such as kernel,int8 (see `Optimizations`), plain, or auto: each replica tries what is best."
        ),
    ] = "plain",
    device: Device = "cpu",
    dtype: Dtype = "bfloat16",
    max_running: Annotated[int, typer.Option(help="Sequences in a replica's step at most.")] = 32,
    cache_tokens: Annotated[int | None, typer.Option(help="Tokens in a replica's KV cache.")] = None,
    queue: Annotated[int, typer.Option(help="Requests that a replica takes; more wait, then are answered 429.")] = 256,
    timeout: Annotated[float, typer.Option(help="Seconds that an answer may take.")] = 600.0,
    drain: Annotated[float, typer.Option(help="Seconds for what is under way, after SIGTERM or Ctrl-C.")] = 30.0,
    by_prefix: Annotated[
        bool, typer.Option("--by-prefix/--by-load", help="Send a prompt where its beginning is cached, or spread all.")
    ] = True,
    seed: Seed = 0,
) -> None:
    """Serve a model from several replicas over one OpenAI-compatible address, until Ctrl-C."""
    from nanoinfer.cluster import run
    from nanoinfer.serve.service import Limits

    run.serve_cluster(
        model,
        replicas=replicas,
        address=address,
        cpus=cpus,
        gpus=gpus,
        host=host,
        port=port,
        name=name,
        api_key=api_key,
        limits=Limits(outstanding=queue, seconds=timeout),
        drain_s=drain,
        by_prefix=by_prefix,
        options={
            "speed": None if speed == "auto" else speed,
            "device": device,
            "dtype": dtype,
            "max_running": max_running,
            "cache_tokens": cache_tokens,
            "seed": seed,
        },
    )


@commands.command()
def batch(
    model: Model,
    prompts: Annotated[Path, typer.Argument(help='File of prompts, one {"prompt": ...} a line; also id, max_tokens.')],
    out: Annotated[Path, typer.Argument(help="File for the answers, one a line in the order of the prompts.")],
    workers: Annotated[int, typer.Option(help="How many, spread over the machines.")] = 2,
    address: Address = None,
    cpus: Cpus = 1,
    gpus: Gpus = 0,
    shard: Annotated[int, typer.Option(help="Prompts that are dealt out, and written, together.")] = 64,
    max_tokens: Annotated[int, typer.Option(help="To generate for each prompt.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    sampling_seed: Annotated[int, typer.Option(help="Each prompt draws with this plus its place in the file.")] = 0,
    device: Device = "cpu",
    dtype: Dtype = "bfloat16",
    max_running: Annotated[int, typer.Option(help="Sequences in a worker's step at most.")] = 32,
    cache_tokens: Annotated[int | None, typer.Option(help="Tokens in a worker's KV cache.")] = None,
    seed: Seed = 0,
) -> None:
    """Answer a file of prompts. Killed, it goes on where it was: run the same command again."""
    from nanoinfer.cluster.batch import run_batch
    from nanoinfer.sampling.params import SamplingParams

    done = run_batch(
        model,
        prompts,
        out,
        params=SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=sampling_seed),
        workers=workers,
        address=address,
        cpus=cpus,
        gpus=gpus,
        shard=shard,
        options={
            "device": device,
            "dtype": dtype,
            "max_running": max_running,
            "cache_tokens": cache_tokens,
            "seed": seed,
        },
    )
    told = f"{done.rows} answers in {out}, {done.errors} of them errors"
    print(f"{told}; {done.found} shards were there, {done.again} dealt again", file=sys.stderr)
    if done.errors:
        raise typer.Exit(1)

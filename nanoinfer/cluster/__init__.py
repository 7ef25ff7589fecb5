"""Several machines: replicas of a model behind one address, and offline batches, on Ray (the extra ``ray``).

A request passes :mod:`~nanoinfer.cluster.gateway` (HTTP, retries, errors), :mod:`~nanoinfer.cluster.router` (which
replica: :mod:`~nanoinfer.cluster.prefix`) and :mod:`~nanoinfer.cluster.replicas` (the app that ``nanoinfer serve``
runs). A batch does not: :mod:`~nanoinfer.cluster.batch` hands the shards of :mod:`~nanoinfer.cluster.shards` to
workers. The options of both stand here, and bring neither Ray nor torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from nanoinfer.option_types import Device, Dtype, Model, Temperature, WeightsSeed
from nanoinfer.serve.options import ServeOptions


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The Ray cluster, and what each replica or worker takes of it."""

    address: Annotated[
        str | None, typer.Option(help="HOST:PORT of a Ray cluster, or auto; without, a Ray on this machine alone.")
    ] = None
    cpus: Annotated[int, typer.Option(help="Cores of each.")] = 1
    gpus: Annotated[float, typer.Option(help="GPUs of each.")] = 0


@dataclass(frozen=True, kw_only=True)
class ClusterServeOptions(ClusterOptions, ServeOptions):
    """Of ``nanoinfer cluster serve``: one server's, for each replica, but ``host``, ``port`` and ``api_key``."""

    replicas: Annotated[int, typer.Option(help="How many, spread over the machines.")] = 2
    speed: Annotated[
        str | None,
        typer.Option(
            help="Such as kernel,int8 (see `Optimizations`), plain, or auto: each replica tries what is best."
        ),
    ] = "plain"
    queue: Annotated[int, typer.Option(help="Requests that a replica takes; more wait, then are answered 429.")] = 256
    by_prefix: Annotated[
        bool, typer.Option("--by-prefix/--by-load", help="Send a prompt where its beginning is cached, or spread all.")
    ] = True


@dataclass(frozen=True, kw_only=True)
class BatchOptions(ClusterOptions):
    """Of ``nanoinfer cluster batch``."""

    model: Model
    prompts: Annotated[Path, typer.Argument(help='File of prompts, one {"prompt": ...} a line; also id, max_tokens.')]
    out: Annotated[Path, typer.Argument(help="File for the answers, one a line in the order of the prompts.")]
    workers: Annotated[int, typer.Option(help="How many, spread over the machines.")] = 2
    shard: Annotated[int, typer.Option(help="Prompts that are handed out, and written, together.")] = 64
    max_tokens: Annotated[int, typer.Option(help="To generate for each prompt.")] = 64
    temperature: Temperature = 0.0
    sampling_seed: Annotated[int, typer.Option(help="Each prompt draws with this plus its place in the file.")] = 0
    device: Device = "cpu"
    dtype: Dtype = "bfloat16"
    max_running: Annotated[int, typer.Option(help="Sequences in a worker's step at most.")] = 32
    cache_tokens: Annotated[int | None, typer.Option(help="Tokens in a worker's KV cache.")] = None
    seed: WeightsSeed = 0

    def engine_options(self) -> dict[str, Any]:
        """What each engine is made with."""
        names = ("device", "dtype", "max_running", "cache_tokens", "seed")
        return {name: getattr(self, name) for name in names}

"""The options of ``nanoinfer serve``, and what a replica of a cluster is started with. Imports no web framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from nanoinfer.option_types import Device, Dtype, Model, WeightsSeed


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """A model, how it is run, who may use it, and how much of it."""

    model: Model
    host: Annotated[str, typer.Option(help="Where to listen; only loopback keeps other machines out.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="0 takes one that is free.")] = 8000
    name: Annotated[str | None, typer.Option(help="What clients call the model; its own name if not given.")] = None
    api_key: Annotated[
        str | None, typer.Option(envvar="NANOINFER_API_KEY", help="That clients must give; none is asked if not set.")
    ] = None
    speed: Annotated[
        str | None,
        typer.Option(help="Such as kernel,int8 (see `Optimizations`), or plain; if not given, a short trial finds it."),
    ] = None
    device: Device = "cpu"
    dtype: Dtype = "bfloat16"
    max_running: Annotated[int, typer.Option(help="Sequences in a step at most.")] = 32
    cache_tokens: Annotated[int | None, typer.Option(help="Tokens in the KV cache; as many as is reasonable.")] = None
    queue: Annotated[int, typer.Option(help="Prompts that run or wait; more are answered 429.")] = 256
    timeout: Annotated[float, typer.Option(help="Seconds that an answer may take.")] = 600.0
    drain: Annotated[float, typer.Option(help="Seconds for what is under way, after SIGTERM or Ctrl-C.")] = 30.0
    seed: WeightsSeed = 0

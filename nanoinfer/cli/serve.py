"""``nanoinfer serve``."""

from __future__ import annotations

from typing import Annotated

import typer

from nanoinfer.option_types import Device, Dtype, Model

commands = typer.Typer()


@commands.command()
def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Where to listen; only loopback keeps other machines out.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes one that is free.")] = 8000,
    name: Annotated[str | None, typer.Option(help="What clients call the model; its own name if not given.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="NANOINFER_API_KEY", help="That clients must give; none is asked if not set.")
    ] = None,
    speed: Annotated[
        str | None,
        typer.Option(help="Such as kernel,int8 (see `Optimizations`), or plain; if not given, a short trial finds it."),
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = "bfloat16",
    max_running: Annotated[int, typer.Option(help="Sequences in a step at most.")] = 32,
    cache_tokens: Annotated[int | None, typer.Option(help="Tokens in the KV cache; as many as is reasonable.")] = None,
    queue: Annotated[int, typer.Option(help="Prompts that run or wait; more are answered 429.")] = 256,
    timeout: Annotated[float, typer.Option(help="Seconds that an answer may take.")] = 600.0,
    drain: Annotated[float, typer.Option(help="Seconds for what is under way, after SIGTERM or Ctrl-C.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Of random weights.")] = 0,
) -> None:
    """Serve a model over an OpenAI-compatible API until Ctrl-C."""
    from nanoinfer.serve import run
    from nanoinfer.serve.service import Limits

    run.serve(
        model,
        host=host,
        port=port,
        name=name,
        api_key=api_key,
        device=device,
        dtype=dtype,
        speed=speed,
        max_running=max_running,
        cache_tokens=cache_tokens,
        limits=Limits(outstanding=queue, seconds=timeout),
        drain_s=drain,
        seed=seed,
    )

"""The commands about services: serve one, load one, read its traces, simulate one.

As in :mod:`nanoinfer.cli.app`, what only one command needs is imported inside it.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from nanoinfer.errors import NanoinferError

if TYPE_CHECKING:
    from rich.console import Console

    from nanoinfer.bench.run import Run
    from nanoinfer.bench.sweep import Sweep

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

Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")]
Slo = Annotated[str | None, typer.Option(help="Limits of a good request, as in ttft=200ms,tpot=50ms.")]
Share = Annotated[float, typer.Option(help="Share of good requests at which a load still meets the SLO.")]


def register(app: typer.Typer) -> None:
    """Add the commands to an app."""
    for command in (serve, bench, lens, simulate):
        app.command()(command)


@contextlib.contextmanager
def extras() -> Iterator[None]:
    """One line for a package that is not installed, and how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise NanoinferError(f'this needs {package}: pip install "nanoinfer[{EXTRAS[package]}]"') from None


def _emit(record: object) -> None:
    print(json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False))


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 200)


# --- serve ------------------------------------------------------------------------------


def serve(
    model: Annotated[str, typer.Argument(help="A name (see `nanoinfer models`), folder, .gguf file or hub id.")],
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
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    max_running: Annotated[int, typer.Option(help="Sequences in a step at most.")] = 32,
    cache_tokens: Annotated[int | None, typer.Option(help="Tokens in the KV cache; as many as is reasonable.")] = None,
    queue: Annotated[int, typer.Option(help="Prompts that run or wait; more are answered 429.")] = 256,
    timeout: Annotated[float, typer.Option(help="Seconds that an answer may take.")] = 600.0,
    drain: Annotated[float, typer.Option(help="Seconds for what is under way, after SIGTERM or Ctrl-C.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Of random weights.")] = 0,
) -> None:
    """Serve a model over an OpenAI-compatible API until Ctrl-C."""
    with extras():
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


# --- bench ------------------------------------------------------------------------------


def bench(
    target: Annotated[str, typer.Argument(help="A server (http://host:port), or a model to run in this process.")],
    model: Annotated[str | None, typer.Option(help="Its name there; the first one that the server lists.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="completions or chat.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="For the server.")] = None,
    rate: Annotated[float | None, typer.Option(help="Open loop: requests a second, whatever becomes of them.")] = None,
    arrivals: Annotated[str, typer.Option(help="Of the open loop: constant, poisson, gamma or ramp.")] = "poisson",
    burstiness: Annotated[
        float | None, typer.Option(help="Of gamma: below 1 in bursts, 1 poisson, above even.")
    ] = None,
    to: Annotated[float | None, typer.Option(help="Rate at which a ramp ends, after --seconds.")] = None,
    users: Annotated[
        int | None, typer.Option(help="Closed loop: each waits for an answer before it asks again.")
    ] = None,
    think: Annotated[float | None, typer.Option(help="Seconds from an answer to a user's next request.")] = None,
    replay: Annotated[Path | None, typer.Option(help="A recorded trace: our .jsonl or Azure's .csv.")] = None,
    speedup: Annotated[float | None, typer.Option(help="Times that the replay runs faster than it was.")] = None,
    sweep: Annotated[str | None, typer.Option(help="Rates 1,2,4 or 1..16 (doublings), or users:1..16.")] = None,
    requests: Annotated[int | None, typer.Option(help="How many (at each level); 32 if not for --seconds.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Length of the measured window (at each level).")] = None,
    prompt_tokens: Annotated[str, typer.Option(help="128, uniform:10-200 or lognormal:10-200.")] = "128",
    output_tokens: Annotated[str, typer.Option(help="Likewise, of the answers.")] = "64",
    lengths: Annotated[Path | None, typer.Option(help="File of prompt and output lengths: .csv or .jsonl.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="File of real prompts: one a line, or .jsonl.")] = None,
    warmup: Annotated[
        int | None, typer.Option(help="Requests before the window; one for each user, or 4 of an open loop.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals, lengths and prompts.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds after which a request is given up.")] = 600.0,
    slo: Slo = None,
    share: Share = 0.99,
    out: Annotated[
        Path | None, typer.Option(help="Folder for traces.jsonl, run.json, summary.json and report.html.")
    ] = None,
    no_floor: Annotated[bool, typer.Option("--no-floor", help="Do not measure what the client itself adds.")] = False,
    speed: Annotated[str | None, typer.Option(help="Of a model in this process: see `nanoinfer serve`.")] = None,
    device: Annotated[str | None, typer.Option(help="Of a model in this process; cpu.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of a model in this process; bfloat16.")] = None,
    as_json: Json = False,
) -> None:
    """Load a server, or a model in this process, and say what its users would feel.

    Without a load: one user, 32 requests. Ctrl-C ends the load and keeps what was measured. Exit code 1 where
    nothing succeeded, or the client was too slow for its figures to be the server's.
    """
    with extras():
        from nanoinfer.bench import command
        from nanoinfer.bench.options import Options

        found, record = command.bench(
            Options(
                target=target,
                model=model,
                endpoint=endpoint,
                api_key=api_key,
                rate=rate,
                arrivals=arrivals,
                burstiness=burstiness,
                to=to,
                users=users,
                think=think,
                replay=replay,
                speedup=speedup,
                sweep=sweep,
                requests=requests,
                seconds=seconds,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                lengths=lengths,
                prompts=prompts,
                warmup=warmup,
                seed=seed,
                timeout=timeout,
                slo=slo,
                share=share,
                out=out,
                floor=not no_floor,
                speed=speed,
                device=device,
                dtype=dtype,
            )
        )
    if as_json:
        _emit(record)
    else:
        _show(found, record)
    points = [point["summary"] for point in record["points"]] if "points" in record else [record]
    if record["beyond_budget"] or not any(point["requests"]["ok"] for point in points):
        raise typer.Exit(1)


def _show(found: Run | Sweep, record: dict[str, Any]) -> None:
    from nanoinfer.bench import tables

    if "points" in record:
        tables.show_sweep(_console(), record)
    else:
        tables.show(_console(), record)


# --- lens and simulate --------------------------------------------------------------------


def lens(
    file: Annotated[Path, typer.Argument(help="traces.jsonl, or a folder of `bench` (then without the warm-up).")],
    as_json: Json = False,
) -> None:
    """Score the same traces by the rules of other tools, side by side."""
    from nanoinfer.bench.lens import lens as look
    from nanoinfer.bench.lens import show_lens
    from nanoinfer.bench.run import load_run
    from nanoinfer.measure.trace import load_traces

    table = look(load_run(file).measured() if file.is_dir() else list(load_traces(file)))
    if as_json:
        _emit(table.as_json())
    else:
        show_lens(_console(), table)


def simulate(
    model: Annotated[str, typer.Option(help="A model's name, or a folder, config.json or .gguf on this disk.")],
    gpu: Annotated[str, typer.Option(help="A device of `nanoinfer gpus`, or `here` for this machine, measured.")],
    rate: Annotated[float, typer.Option(help="Requests a second.")],
    requests: Annotated[int, typer.Option(help="How many come; the first tenth of their time warms up.")] = 2000,
    slo: Slo = None,
    find: Annotated[bool, typer.Option("--find", help="Search for the highest rate that meets the SLO.")] = False,
    share: Share = 0.99,
    prompt_tokens: Annotated[str, typer.Option(help="128, uniform:10-200 or lognormal:10-200.")] = "lognormal:64-1024",
    output_tokens: Annotated[str, typer.Option(help="Likewise, of the answers.")] = "lognormal:16-512",
    burstiness: Annotated[float, typer.Option(help="Of the arrivals: below 1 in bursts, 1 poisson, above even.")] = 1.0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, fp8 or int8.")] = "bfloat16",
    tp: Annotated[int, typer.Option(help="Devices that share the model (tensor parallel).")] = 1,
    replicas: Annotated[int, typer.Option(help="Services of --tp devices each that take turns.")] = 1,
    max_running: Annotated[int, typer.Option(help="Sequences in a step at most.")] = 256,
    token_budget: Annotated[int, typer.Option(help="Tokens in a step at most.")] = 2048,
    block: Annotated[int, typer.Option(help="Tokens in a block of the cache.")] = 16,
    utilisation: Annotated[float, typer.Option(help="Share of the memory that may be used.")] = 0.9,
    launch_us: Annotated[float, typer.Option(help="Microseconds to start an operator; eager PyTorch: about 4.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of arrivals and lengths.")] = 0,
    as_json: Json = False,
) -> None:
    """Say what a load would feel on a service that is not there: the real scheduler on a computed clock."""
    from nanoinfer.bench.slo import parse_slo
    from nanoinfer.predict.serving import simulate_serving

    record = simulate_serving(
        model,
        gpu,
        rate=rate,
        requests=requests,
        seed=seed,
        slo=None if slo is None else parse_slo(slo),
        find=find,
        needed=share,
        prompts=prompt_tokens,
        outputs=output_tokens,
        burstiness=burstiness,
        dtype=dtype,
        tp=tp,
        replicas=replicas,
        max_running=max_running,
        token_budget=token_budget,
        block=block,
        utilisation=utilisation,
        launch_us=launch_us,
    )
    if as_json:
        _emit(record)
        return
    from nanoinfer.predict.serving_tables import show_simulate

    show_simulate(_console(), record)

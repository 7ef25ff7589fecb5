"""``nanoinfer bench`` and ``nanoinfer lens``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanoinfer.cli.options import Json, Share, Slo
from nanoinfer.show.text import console, emit

if TYPE_CHECKING:
    from nanoinfer.bench.run import Run
    from nanoinfer.bench.sweep import Sweep

commands = typer.Typer()


@commands.command()
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
        emit(record)
    else:
        _show(found, record)
    points = [point["summary"] for point in record["points"]] if "points" in record else [record]
    if record["beyond_budget"] or not any(point["requests"]["ok"] for point in points):
        raise typer.Exit(1)


def _show(found: Run | Sweep, record: dict[str, Any]) -> None:
    from nanoinfer.bench import tables

    if "points" in record:
        tables.show_sweep(console(), record)
    else:
        tables.show(console(), record)


@commands.command()
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
        emit(table.as_json())
    else:
        show_lens(console(), table)

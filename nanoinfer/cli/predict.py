"""The commands that compute what would be: predict, fit, gpus, plan and simulate. None loads weights."""

from __future__ import annotations

from typing import Annotated

import typer

from nanoinfer.cli.options import Json
from nanoinfer.option_types import Share, Slo
from nanoinfer.show.text import console, emit

commands = typer.Typer()

Shape = Annotated[str, typer.Argument(help="A model's name, or a folder, config.json or .gguf on this disk.")]
Gpu = Annotated[str, typer.Option(help="A device of `nanoinfer gpus`, or `here` for this machine, measured.")]
Context = Annotated[int, typer.Option(help="Tokens that each row holds.")]
Tp = Annotated[int, typer.Option(help="Devices that share every layer (tensor parallel).")]
Counted = Annotated[str, typer.Option(help="Of weights, cache and arithmetic: float32, bfloat16, float16, fp8, int8.")]
Launch = Annotated[float, typer.Option(help="Microseconds to start an operator; eager PyTorch: about 4.")]
Utilisation = Annotated[float, typer.Option(help="Share of the memory that may be used.")]
Block = Annotated[int, typer.Option(help="Tokens in a block of the cache.")]


@commands.command()
def predict(
    model: Shape,
    gpu: Gpu,
    batch: Annotated[int, typer.Option(help="Rows that run together, on each replica.")] = 1,
    context: Context = 1024,
    dtype: Counted = "bfloat16",
    tp: Tp = 1,
    pp: Annotated[int, typer.Option(help="Stages of whole layers (pipeline parallel).")] = 1,
    cp: Annotated[int, typer.Option(help="Parts of each prompt and its cache (context parallel).")] = 1,
    ep: Annotated[int, typer.Option(help="Parts of a mixture of experts (expert parallel).")] = 1,
    replicas: Annotated[int, typer.Option(help="Copies of all that, side by side.")] = 1,
    link: Annotated[str | None, typer.Option(help="Inside a server: nvlink5, pcie5, ...; the device's own.")] = None,
    nodes_link: Annotated[str | None, typer.Option(help="Between servers: ib-ndr, ethernet-100g, ...")] = None,
    gpus_per_node: Annotated[int, typer.Option(help="Devices in a server.")] = 8,
    alpha_us: Annotated[float | None, typer.Option(help="Microseconds of one call, however small.")] = None,
    nodes_alpha_us: Annotated[float | None, typer.Option(help="The same between two servers.")] = None,
    micro_batches: Annotated[int | None, typer.Option(help="Of a pipeline; as many as stages.")] = None,
    imbalance: Annotated[float, typer.Option(help="Load of the busiest device's experts over the mean.")] = 1.0,
    new: Annotated[int | None, typer.Option(help="Also time a whole answer of so many tokens.")] = None,
    launch_us: Launch = 0.0,
    usd_per_hour: Annotated[float | None, typer.Option(help="Price of one device, for the price of a token.")] = None,
    want: Annotated[str | None, typer.Option(help="What matters: latency, throughput or both.")] = None,
    shared_prefix: Annotated[int | None, typer.Option(help="Tokens with which all prompts begin.")] = None,
    models: Annotated[int | None, typer.Option(help="How many models of this size are to be served.")] = None,
    as_json: Json = False,
) -> None:
    """Say how fast a model will be on devices that need not be there, why, and what decides how to share it."""
    from nanoinfer.predict import latency as speed
    from nanoinfer.predict.links import Links
    from nanoinfer.predict.questions import Asked

    record = speed.predict(
        model,
        gpu,
        batch=batch,
        context=context,
        dtype=dtype,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        replicas=replicas,
        links=Links(link, nodes_link, gpus_per_node, alpha_us, nodes_alpha_us),
        micro_batches=micro_batches,
        imbalance=imbalance,
        new=new,
        launch_us=launch_us,
        usd_per_hour=usd_per_hour,
        asked=Asked(want, shared_prefix, models),
    )
    if as_json:
        emit(record)
        return
    from nanoinfer.predict.tables import show_predict

    show_predict(console(), record)


@commands.command()
def fit(
    model: Shape,
    gpu: Gpu,
    context: Context = 1024,
    dtype: Counted = "bfloat16",
    tp: Tp = 1,
    utilisation: Utilisation = 0.9,
    block: Block = 16,
    as_json: Json = False,
) -> None:
    """Say what fits in a device's memory, where each byte goes, and what would change it. Loads no weights."""
    from nanoinfer.predict import memory as size

    record = size.fit(model, gpu, context=context, dtype=dtype, tp=tp, utilisation=utilisation, block=block)
    if as_json:
        emit(record)
        return
    from nanoinfer.predict.tables import show_fit

    show_fit(console(), record)


@commands.command()
def gpus(as_json: Json = False) -> None:
    """List the devices whose datasheets are known."""
    from nanoinfer.predict import target

    if as_json:
        emit(target.gpus())
        return
    from nanoinfer.predict.tables import show_gpus

    show_gpus(console(), target.gpus())


@commands.command()
def plan(
    model: Shape,
    gpu: Gpu,
    users: Annotated[list[int], typer.Option(help="How many there are; repeatable.")],
    per_user: Annotated[float, typer.Option(help="Requests an hour that each of them makes.")],
    slo: Slo = "ttft=1s,tpot=50ms",
    share: Share = 0.99,
    prompt_tokens: Annotated[str, typer.Option(help="128, uniform:10-200 or lognormal:10-200.")] = "lognormal:64-1024",
    output_tokens: Annotated[str, typer.Option(help="Likewise, of the answers.")] = "lognormal:16-512",
    dtype: Counted = "bfloat16",
    tp: Tp = 1,
    headroom: Annotated[float, typer.Option(help="Share of a replica's highest rate that is left free.")] = 0.2,
    spares: Annotated[int, typer.Option(help="Replicas more than are needed, for those that fail.")] = 1,
    usd_per_hour: Annotated[float | None, typer.Option(help="Price of one device.")] = None,
    requests: Annotated[int, typer.Option(help="How many come in each simulated run.")] = 2000,
    seed: Annotated[int, typer.Option(help="Of arrivals and lengths.")] = 0,
    as_json: Json = False,
) -> None:
    """Say how many replicas so many users need, what they cost, and what they draw; by simulation."""
    from nanoinfer.bench.slo import parse_slo
    from nanoinfer.predict import fleet as planning

    record = planning.plan(
        model,
        gpu,
        users=users,
        per_user_hour=per_user,
        slo=parse_slo(slo or ""),
        needed=share,
        prompts=prompt_tokens,
        outputs=output_tokens,
        dtype=dtype,
        tp=tp,
        headroom=headroom,
        spares=spares,
        usd_per_hour=usd_per_hour,
        requests=requests,
        seed=seed,
    )
    if as_json:
        emit(record)
        return
    planning.show_plan(console(), record)


@commands.command()
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
        emit(record)
        return
    from nanoinfer.predict.serving_tables import show_simulate

    show_simulate(console(), record)

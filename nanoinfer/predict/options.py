"""The options of predict, fit, simulate and plan: each dataclass is a command line and the library's argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

import typer

from nanoinfer.option_types import Share, Slo

SHAPE_HELP: Final = "A model's name, or a folder, config.json or .gguf on this disk."
Shape = Annotated[str, typer.Argument(help=SHAPE_HELP)]
Gpu = Annotated[str, typer.Option(help="A device of `nanoinfer gpus`, or `here` for this machine, measured.")]
Context = Annotated[int, typer.Option(help="Tokens that each row holds.")]
Tp = Annotated[int, typer.Option(help="Devices that share every layer (tensor parallel).")]
CountedDtype = Annotated[
    str, typer.Option(help="Of weights, cache and arithmetic: float32, bfloat16, float16, fp8, int8.")
]
LaunchUs = Annotated[float, typer.Option(help="Microseconds to start an operator; eager PyTorch: about 4.")]
Utilisation = Annotated[float, typer.Option(help="Share of the memory that may be used.")]
Block = Annotated[int, typer.Option(help="Tokens in a block of the cache.")]
PromptTokens = Annotated[str, typer.Option(help="128, uniform:10-200 or lognormal:10-200.")]
OutputTokens = Annotated[str, typer.Option(help="Likewise, of the answers.")]
Window = Annotated[float, typer.Option(help="Seconds of load with which the search tries a rate, at least.")]
Mfu = Annotated[float, typer.Option(help="Share of the FLOP/s that kernels reach; on GPUs often 0.5 to 0.8.")]
Mbu = Annotated[float, typer.Option(help="Likewise, of the memory bandwidth.")]
ArrivalSeed = Annotated[int, typer.Option(help="Of arrivals and lengths.")]


@dataclass(frozen=True)
class PredictOptions:
    """The options of ``nanoinfer predict``: ``batch`` rows with prompts of ``context`` tokens on each replica."""

    model: Shape
    gpu: Gpu
    batch: Annotated[int, typer.Option(help="Rows that run together, on each replica.")] = 1
    context: Context = 1024
    dtype: CountedDtype = "bfloat16"
    tp: Tp = 1
    pp: Annotated[int, typer.Option(help="Stages of whole layers (pipeline parallel).")] = 1
    cp: Annotated[int, typer.Option(help="Parts of each prompt and its cache (context parallel).")] = 1
    ep: Annotated[int, typer.Option(help="Parts of a mixture of experts (expert parallel).")] = 1
    replicas: Annotated[int, typer.Option(help="Copies of all that, side by side.")] = 1
    link: Annotated[str | None, typer.Option(help="Inside a server: nvlink5, pcie5, ...; the device's own.")] = None
    nodes_link: Annotated[str | None, typer.Option(help="Between servers: ib-ndr, ethernet-100g, ...")] = None
    gpus_per_node: Annotated[int, typer.Option(help="Devices in a server.")] = 8
    alpha_us: Annotated[float | None, typer.Option(help="Microseconds of one call, however small.")] = None
    nodes_alpha_us: Annotated[float | None, typer.Option(help="The same between two servers.")] = None
    micro_batches: Annotated[int | None, typer.Option(help="Of a pipeline; as many as stages.")] = None
    imbalance: Annotated[float, typer.Option(help="Load of the busiest device's experts over the mean.")] = 1.0
    new: Annotated[int | None, typer.Option(help="Also time a whole answer of so many tokens.")] = None
    launch_us: LaunchUs = 0.0
    usd_per_hour: Annotated[float | None, typer.Option(help="Price of one device, for the price of a token.")] = None
    want: Annotated[str | None, typer.Option(help="What matters: latency, throughput or both.")] = None
    shared_prefix: Annotated[int | None, typer.Option(help="Tokens with which all prompts begin.")] = None
    models: Annotated[int | None, typer.Option(help="How many models of this size are to be served.")] = None


@dataclass(frozen=True)
class FitOptions:
    """The options of ``nanoinfer fit``."""

    model: Shape
    gpu: Gpu
    context: Context = 1024
    dtype: CountedDtype = "bfloat16"
    tp: Tp = 1
    utilisation: Utilisation = 0.9
    block: Block = 16


@dataclass(frozen=True)
class SimulateOptions:
    """The options of ``nanoinfer simulate``: ``replicas`` services of ``tp`` devices each."""

    model: Annotated[str, typer.Option(help=SHAPE_HELP)]
    gpu: Gpu
    rate: Annotated[float, typer.Option(help="Requests a second.")]
    requests: Annotated[int, typer.Option(help="How many come; the first tenth of their time warms up.")] = 2000
    slo: Slo = None
    find: Annotated[bool, typer.Option("--find", help="Search for the highest rate that meets the SLO.")] = False
    share: Share = 0.99
    window: Window = 60.0
    prompt_tokens: PromptTokens = "lognormal:64-1024"
    output_tokens: OutputTokens = "lognormal:16-512"
    burstiness: Annotated[float, typer.Option(help="Of the arrivals: below 1 in bursts, 1 poisson, above even.")] = 1.0
    dtype: CountedDtype = "bfloat16"
    tp: Tp = 1
    replicas: Annotated[int, typer.Option(help="Services of --tp devices each that take turns.")] = 1
    max_running: Annotated[int, typer.Option(help="Sequences in a step at most.")] = 256
    token_budget: Annotated[int, typer.Option(help="Tokens in a step at most.")] = 2048
    block: Block = 16
    utilisation: Utilisation = 0.9
    launch_us: LaunchUs = 0.0
    mfu: Mfu = 1.0
    mbu: Mbu = 1.0
    seed: ArrivalSeed = 0


@dataclass(frozen=True)
class PlanOptions:
    """The options of ``nanoinfer plan``."""

    model: Shape
    gpu: Gpu
    users: Annotated[list[int], typer.Option(help="How many there are; repeatable.")]
    per_user: Annotated[float, typer.Option(help="Requests an hour that each of them makes.")]
    slo: Slo = "ttft=1s,tpot=50ms"
    share: Share = 0.99
    window: Window = 60.0
    prompt_tokens: PromptTokens = "lognormal:64-1024"
    output_tokens: OutputTokens = "lognormal:16-512"
    dtype: CountedDtype = "bfloat16"
    tp: Tp = 1
    headroom: Annotated[float, typer.Option(help="Share of a replica's highest rate that is left free.")] = 0.2
    spares: Annotated[int, typer.Option(help="Replicas more than are needed, for those that fail.")] = 1
    usd_per_hour: Annotated[float | None, typer.Option(help="Price of one device.")] = None
    requests: Annotated[int, typer.Option(help="How many come in each simulated run, at least.")] = 2000
    mfu: Mfu = 1.0
    mbu: Mbu = 1.0
    seed: ArrivalSeed = 0

"""Types of the options that several commands share, each with its help."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(help="A name (see `nanoinfer models`), folder, .gguf file or hub id.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Slo = Annotated[str | None, typer.Option(help="Limits of a good request, as in ttft=200ms,tpot=50ms.")]
Share = Annotated[float, typer.Option(help="Share of good requests at which a load still meets the SLO.")]
WeightsSeed = Annotated[int, typer.Option("--seed", help="Of random weights.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]

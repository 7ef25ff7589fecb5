"""The options of ``nanoinfer generate``, for one process and for several ranks. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanoinfer.option_types import Device, Dtype, MaxTokens, Model, Temperature

if TYPE_CHECKING:
    from nanoinfer.engines.engine import Engine
    from nanoinfer.sampling.params import SamplingParams

TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass; 1 is off.")]


@dataclass(frozen=True, kw_only=True)
class ReplyOptions:
    """A model, its engine, and how it chooses tokens."""

    model: Model = "smollm2-135m"
    max_tokens: MaxTokens = 64
    temperature: Temperature = 0.0
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 is off.")] = 0
    top_p: TopP = 1.0
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest; 0 is off.")] = 0.0
    seed: Annotated[int | None, typer.Option(help="Of sampling, and of random weights.")] = None
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeatable.")] = None
    engine: Annotated[str, typer.Option(help="naive, cached, batched, continuous, speculative or auto.")] = "cached"
    speed: Annotated[
        str | None, typer.Option(help="Such as kernel,int8 or fuse,pack (see `Optimizations`), or plain.")
    ] = None
    device: Device = "cpu"
    dtype: Dtype = "float32"

    def sampling_params(self) -> SamplingParams:
        """Raises :class:`~nanoinfer.errors.RequestError` for a value out of its range."""
        from nanoinfer.sampling.params import SamplingParams

        return SamplingParams(
            self.max_tokens,
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            seed=self.seed,
            stop=tuple(self.stop or ()),
        )

    def load(self) -> Engine:
        """The engine with its model. Raises :class:`~nanoinfer.errors.NanoinferError` as :func:`nanoinfer.load`."""
        import nanoinfer
        from nanoinfer.optimize.options import Optimizations

        speed = None if self.speed is None else Optimizations.parse(self.speed)
        # Every engine runs without optimizations, those too that have no such option.
        needless = speed is None or (speed == Optimizations() and self.engine != "auto")
        options: dict[str, Any] = {} if needless else {"speed": speed}
        return nanoinfer.load(
            self.model, self.engine, device=self.device, dtype=self.dtype, seed=self.seed or 0, **options
        )


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(ReplyOptions):
    """One reply, by this process or shared among several."""

    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to go on from; - reads standard input.")]
    tp: Annotated[int, typer.Option(help="Processes that share every layer (tensor parallel).")] = 1
    pp: Annotated[int, typer.Option(help="Processes that have some of the layers each (pipeline parallel).")] = 1

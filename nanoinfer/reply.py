"""A reply on the command line: the options of ``nanoinfer generate``, and a finished request in a line and as data.

For one process and for several ranks. Imports no torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanoinfer.measure import environment, metrics
from nanoinfer.measure.trace import Trace
from nanoinfer.option_types import Device, Dtype, MaxTokens, Model, Temperature

if TYPE_CHECKING:
    from nanoinfer.engines.engine import Engine
    from nanoinfer.engines.request import Completion
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

        names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
        settings: dict[str, Any] = {name: getattr(self, name) for name in names}
        return SamplingParams(**settings, stop=tuple(self.stop or ()))

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


def summary_line(trace: Trace, finish_reason: str) -> str:
    """The figures of one request in one line; ``n/a`` where a figure does not exist."""
    first, per_token, total = metrics.ttft(trace), metrics.tpot(trace), metrics.e2e(trace)
    return (
        f"{trace.prompt_tokens} prompt + {metrics.output_tokens(trace)} new tokens"
        f" | TTFT {f'{first * 1000:.1f} ms' if first is not None else 'n/a'}"
        f" | decode {f'{1 / per_token:.1f} tok/s (1/TPOT)' if per_token else 'n/a'}"
        f" | {f'{total:.2f} s' if total is not None else 'n/a'} in all | finish: {finish_reason}"
    )


def completion_record(engine: Engine, done: Completion, params: SamplingParams) -> dict[str, Any]:
    """Text, token ids, times by definition, and what it ran on."""
    return {
        "model": engine.loaded.name,
        "source": engine.loaded.source,
        "engine": engine.name,
        "device": str(engine.device),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "params": asdict(params),
        "text": done.text,
        "token_ids": done.token_ids,
        "finish_reason": done.finish_reason,
        "prompt_tokens": done.trace.prompt_tokens,
        "output_tokens": metrics.output_tokens(done.trace),
        "seconds": {name: metrics.metric_named(name)(done.trace) for name in ("ttft", "tpot", "e2e")},
        "definitions": {name: metrics.DEFINITIONS[name] for name in ("ttft", "tpot", "e2e")},
        "trace": asdict(done.trace),
        "versions": environment.versions(),
    }

"""A finished request as one line for people and as data."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nanoinfer.measure import environment, metrics
from nanoinfer.measure.trace import Trace

if TYPE_CHECKING:
    from nanoinfer.engines.engine import Engine
    from nanoinfer.engines.request import Completion
    from nanoinfer.sampling.params import SamplingParams


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

"""The settings of one request: how its tokens are chosen and when it stops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

from nanoinfer.errors import RequestError

WHOLE = ("max_tokens", "n", "top_k", "seed", "logprobs")
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
Kind = tuple[type, Callable[[Any], int | float], str]
WHOLE_NUMBER: Kind = (Integral, int, "whole number")
NUMBER: Kind = (Real, float, "number")


def _several(value: Any) -> tuple[Any, ...]:
    """Callers pass nothing, one, or a list of any kind."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return () if value is None else (value,)
    return tuple(value)


@dataclass(frozen=True)
class SamplingParams:
    """How one request chooses its tokens and when it stops.

    Args:
        max_tokens: most tokens to generate; 0 generates none.
        temperature: 0 is greedy; 1 is the model's own distribution.
        top_k: keep the k most likely tokens; 0 is off.
        top_p: keep the smallest set of most likely tokens whose mass reaches p; 1 is off.
        min_p: drop tokens less likely than ``min_p`` times the most likely one; 0 is off.
        repetition_penalty: over prompt and output: positive logits divided, negative multiplied; 1 is off.
        frequency_penalty: subtracted once for each time a token was generated; 0 is off.
        presence_penalty: subtracted once from every token that was generated; 0 is off.
        seed: None draws a fresh one. Of ``n`` samples the first has this seed, the next the number after it.
        stop: texts that end the request; they are not delivered.
        stop_ids: token ids that end the request, beside the model's own end-of-sequence ids.
        logprobs: None, or how many alternatives to report beside each chosen token.
        ignore_eos: generate on through end-of-sequence ids (for benchmarks).
        on_full: what to do when the context is full: ``stop`` with reason "length", or ``crop``
            to the last ``context`` tokens at every step, as NanoGPT does.
        n: how many independent samples of the prompt.

    Raises:
        RequestError: for a value out of its range.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False
    on_full: Literal["stop", "crop"] = "stop"
    n: int = 1

    def __post_init__(self) -> None:
        for name in ("stop", "stop_ids"):
            object.__setattr__(self, name, _several(getattr(self, name)))
        for name in (*WHOLE, *NUMBERS):
            value = getattr(self, name)
            if value is None and name in ("seed", "logprobs"):
                continue
            kind, plain, wanted = NUMBER if name in NUMBERS else WHOLE_NUMBER
            if isinstance(value, bool) or not isinstance(value, kind):
                raise RequestError(f"{name} must be a {wanted}, got {value!r}")
            object.__setattr__(self, name, plain(value))  # numpy's numbers too
        checks: tuple[tuple[str, bool, str], ...] = (
            ("max_tokens", self.max_tokens >= 0, "at least 0"),
            ("temperature", 0.0 <= self.temperature < math.inf, "at least 0 and finite"),
            ("n", self.n >= 1, "at least 1"),
            ("top_k", self.top_k >= 0, "at least 0 (0 is off)"),
            ("top_p", 0.0 <= self.top_p <= 1.0, "between 0 and 1 (1 is off)"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1 (0 is off)"),
            ("repetition_penalty", 1e-3 <= self.repetition_penalty <= 1e3, "between 0.001 and 1000 (1 is off)"),
            ("frequency_penalty", abs(self.frequency_penalty) <= 1e3, "between -1000 and 1000 (0 is off)"),
            ("presence_penalty", abs(self.presence_penalty) <= 1e3, "between -1000 and 1000 (0 is off)"),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "at least 0"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit number"),
            ("on_full", self.on_full in ("stop", "crop"), "'stop' or 'crop'"),
            ("stop", all(isinstance(s, str) and s for s in self.stop), "non-empty texts"),
            ("stop_ids", all(isinstance(i, Integral) for i in self.stop_ids), "token ids"),
        )
        for name, ok, wanted in checks:
            if not ok:
                raise RequestError(f"{name} must be {wanted}, got {getattr(self, name)!r}")

    @property
    def penalises(self) -> bool:
        """Whether what was said before bears on what is said next."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

"""The settings of one request: how its tokens are chosen and when it stops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

from nanoinfer.errors import RequestError, check

LIMITS: Mapping[str, Mapping[str, Any]] = {
    "max_tokens": {"at_least": 0, "whole": True},
    "temperature": {"at_least": 0.0},
    "top_k": {"at_least": 0, "whole": True},
    "top_p": {"at_least": 0.0, "at_most": 1.0},
    "min_p": {"at_least": 0.0, "at_most": 1.0},
    "repetition_penalty": {"at_least": 1e-3, "at_most": 1e3},
    "frequency_penalty": {"at_least": -1e3, "at_most": 1e3},
    "presence_penalty": {"at_least": -1e3, "at_most": 1e3},
    "logprobs": {"at_least": 0, "whole": True},
    "n": {"at_least": 1, "whole": True},
}


@dataclass(frozen=True)
class SamplingParams:
    """How one request chooses its tokens and when it stops; a value out of its range is refused."""

    max_tokens: int = 64  # 0 generates none
    temperature: float = 0.0  # 0 is greedy; 1 is the model's own distribution
    top_k: int = 0  # keep the k most likely tokens; 0 is off
    top_p: float = 1.0  # keep the smallest set of most likely tokens whose mass reaches p; 1 is off
    min_p: float = 0.0  # drop tokens less likely than min_p times the most likely one; 0 is off
    repetition_penalty: float = 1.0  # over prompt and output: positive logits divided, negative multiplied; 1 is off
    frequency_penalty: float = 0.0  # subtracted once for each time a token was generated; 0 is off
    presence_penalty: float = 0.0  # subtracted once from every token that was generated; 0 is off
    seed: int | None = None  # None draws a fresh one; of n samples the first has it, the next the number after it
    stop: tuple[str, ...] = ()  # texts that end the request; they are not delivered
    stop_ids: tuple[int, ...] = ()  # token ids that end it, in addition to the model's own end-of-sequence ids
    logprobs: int | None = None  # how many alternatives to report with each chosen token
    ignore_eos: bool = False  # generate on through end-of-sequence ids (for benchmarks)
    #: When the context is full: end with reason "length", or go on with its last tokens at every step, as NanoGPT does.
    on_full: Literal["stop", "crop"] = "stop"
    n: int = 1  # independent samples of the prompt

    def __post_init__(self) -> None:
        for name, limits in LIMITS.items():
            if (value := getattr(self, name)) is None and name == "logprobs":
                continue
            check(name, value, **limits)
            object.__setattr__(self, name, int(value) if "whole" in limits else float(value))  # of NumPy's numbers too
        if self.seed is not None:
            object.__setattr__(self, "seed", check_seed(self.seed))
        for name, kind, wanted in (("stop", str, "non-empty texts"), ("stop_ids", Integral, "token ids")):
            values = _as_tuple(getattr(self, name))
            if not all(isinstance(value, kind) and value != "" for value in values):
                raise RequestError(f"{name} must be {wanted}, got {values!r}")
            object.__setattr__(self, name, values)
        if self.on_full not in ("stop", "crop"):
            raise RequestError(f"on_full must be 'stop' or 'crop', got {self.on_full!r}")

    @property
    def penalises(self) -> bool:
        """Whether the logits depend on the tokens of the prompt or those generated before."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


def check_seed(seed: object) -> int:
    """The seed as an int. Raises :class:`RequestError` for what no random generator takes."""
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not -(2**63) <= int(seed) < 2**63:
        raise RequestError(f"seed must be a 64-bit whole number, got {seed!r}")
    return int(seed)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    """Callers pass None, a single value, or a list of any kind."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return () if value is None else (value,)
    return tuple(value)

"""From logits to a token, for a batch whose rows each have settings of their own.

The order is fixed: repetition penalty, frequency and presence penalty, temperature,
top-k, top-p, min-p, each on what the one before left. Temperature 0 is greedy (the
lowest id on a tie). Each row draws one uniform number from a generator of its own,
so what a seeded request says never depends on its neighbours in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor

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


@dataclass
class SamplerState:
    """What sampling remembers of one request: its settings, its history, its dice."""

    params: SamplingParams
    prompt_ids: Sequence[int]
    generated: list[int] = field(default_factory=list)
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        # The dice live on the CPU whatever the model's device, so that a seed means the same everywhere.
        self.generator = torch.Generator()
        if self.params.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(self.params.seed)

    def draw(self) -> float:
        """The next uniform number in [0, 1)."""
        return float(torch.rand((), generator=self.generator, dtype=torch.float64))


def sample(logits: Tensor, states: Sequence[SamplerState]) -> Tensor:
    """Choose one token a row: ``[B, V]`` logits in, ``[B]`` int64 ids out, on the logits' device.

    Does not record the tokens: the caller appends them to ``state.generated``.
    """
    logits = penalise(logits.float(), states)
    greedy = logits.argmax(dim=-1)
    rows = [i for i, s in enumerate(states) if s.params.temperature > 0]
    if not rows:
        return greedy
    index = torch.tensor(rows, device=logits.device)
    params = [states[i].params for i in rows]
    probs = distribution(logits[index], params)
    if probs.device.type == "mps":  # has no fp64
        probs = probs.cpu()
    draws = torch.tensor([states[i].draw() for i in rows], dtype=torch.float64, device=probs.device)
    mass = probs.double().cumsum(dim=-1)  # [R, V]; fp64, or the tail of a large vocabulary is lost
    # Scale to the mass that is really there, and stay below it: rounding must not point past the last kept id.
    total = mass[:, -1]
    point = torch.minimum(draws * total, torch.nextafter(total, torch.zeros_like(total)))
    greedy[index] = torch.searchsorted(mass, point[:, None], right=True).squeeze(-1).to(greedy.device)
    return greedy


def penalise(logits: Tensor, states: Sequence[SamplerState]) -> Tensor:
    """Apply repetition, frequency and presence penalties, ``[B, V]``; rows without any are untouched."""
    for row, state in enumerate(states):
        p = state.params
        if p.repetition_penalty != 1.0:
            seen = torch.tensor(sorted({*state.prompt_ids, *state.generated}), device=logits.device)
            value = logits[row, seen]
            scaled = torch.where(value > 0, value / p.repetition_penalty, value * p.repetition_penalty)
            logits = logits.index_put((torch.tensor(row, device=logits.device), seen), scaled)
        if (p.frequency_penalty or p.presence_penalty) and state.generated:
            counts = torch.bincount(torch.tensor(state.generated), minlength=logits.shape[-1]).to(logits)
            less = p.frequency_penalty * counts + p.presence_penalty * (counts > 0)
            logits = torch.cat((logits[:row], (logits[row] - less)[None], logits[row + 1 :]))
    return logits


def distribution(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Probabilities after temperature and filters, ``[R, V]`` in id order; dropped ids have 0, each row sums to 1.

    All temperatures must be above 0. Only rows that filter are sorted; what a row gets does not
    depend on the others.
    """
    # The largest logit is taken off first, or a tiny temperature would overflow to inf - inf; and one that
    # fp32 cannot hold would be 0.
    least = torch.finfo(torch.float32).tiny
    temperature = torch.tensor([max(p.temperature, least) for p in params], device=logits.device)[:, None]
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    rows = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1.0 or p.min_p]
    probs = scaled.softmax(dim=-1)
    if not rows:
        return probs
    vocab = logits.shape[-1]
    index = torch.tensor(rows, device=logits.device)
    column = [[min(params[i].top_k or vocab, vocab), params[i].top_p, params[i].min_p] for i in rows]
    top_k, top_p, min_p = torch.tensor(column, dtype=torch.float32, device=logits.device).T[:, :, None]
    ordered, ids = scaled[index].sort(dim=-1, descending=True, stable=True)  # stable: ties go to the lowest id
    ordered = ordered.masked_fill(torch.arange(vocab, device=logits.device) >= top_k, -math.inf)
    kept = filter_min_p(filter_top_p(ordered.softmax(dim=-1), top_p), min_p)
    probs[index] = torch.zeros_like(kept).scatter_(-1, ids, kept)
    return probs


def filter_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    """Keep the smallest set of most likely ids whose mass reaches ``top_p``, renormalised.

    ``probs`` is ``[R, V]``, each row sorted from most likely to least; ``top_p`` is ``[R, 1]``.
    An id stays when the mass *before* it is below p, so the one that crosses p is kept,
    and so is the first whatever p is. A row with p = 1 comes back unchanged.
    """
    before = probs.cumsum(dim=-1) - probs
    keep = (before < top_p) | (top_p >= 1.0)
    keep[:, 0] = True
    kept = probs * keep
    return torch.where(top_p >= 1.0, probs, kept / kept.sum(dim=-1, keepdim=True))


def filter_min_p(probs: Tensor, min_p: Tensor) -> Tensor:
    """Drop ids less likely than ``min_p`` times the most likely, renormalised. ``[R, V]`` and ``[R, 1]``."""
    kept = probs * (probs >= min_p * probs.amax(dim=-1, keepdim=True))
    return torch.where(min_p > 0.0, kept / kept.sum(dim=-1, keepdim=True), probs)


def top_logprobs(logits: Tensor, chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The model's own log-probabilities, before penalties, temperature and filters.

    Args:
        logits: raw, ``[B, V]``.
        chosen: ``[B]`` ids.
        count: how many most likely ids to report.

    Returns:
        of the chosen ids ``[B]``; of the ``count`` best ``[B, count]``; their ids ``[B, count]``.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    best, ids = logprobs.topk(min(count, logits.shape[-1]), dim=-1)
    return logprobs.gather(-1, chosen[:, None]).squeeze(-1), best, ids

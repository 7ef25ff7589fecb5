"""From logits to a token, for a batch whose rows each have settings of their own.

The order is fixed: repetition penalty, frequency and presence penalty, temperature,
top-k, top-p, min-p, each on what the one before left. Temperature 0 is greedy (the
lowest id on a tie). Each row draws one uniform number from a generator of its own,
so what a seeded request says never depends on its neighbours in the batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor

from nanoinfer.errors import RequestError
from nanoinfer.filters import Limits, best_few, keep_by_counting, keep_by_sorting, keep_ids, mass

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
    ways: dict[Way, list[int]] = {}
    for row, state in enumerate(states):
        ways.setdefault(way_of(state.params), []).append(row)
    if len(ways) == 1:
        (way,) = ways
        return way(logits, states).to(logits.device)
    tokens = torch.empty(len(states), dtype=torch.int64, device=logits.device)
    for way, rows in ways.items():
        index = torch.tensor(rows, device=logits.device)
        tokens[index] = way(logits[index], [states[i] for i in rows]).to(tokens.device)
    return tokens


Way = Callable[[Tensor, Sequence[SamplerState]], Tensor]


def way_of(params: SamplingParams) -> Way:
    """How a row's token is chosen: rows of one way go together."""
    if params.temperature == 0:
        return take_best
    return draw_kept if params.top_k or params.top_p < 1.0 or params.min_p else draw_any


def take_best(logits: Tensor, states: Sequence[SamplerState]) -> Tensor:
    """The most likely id of each row, ``[R]``; the lowest on a tie."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.float().numpy().argmax(axis=-1))  # several times as fast as PyTorch's there
    return logits.argmax(dim=-1)


def draw_any(logits: Tensor, states: Sequence[SamplerState]) -> Tensor:
    """One id a row, ``[R]``, from the whole vocabulary."""
    probs = tempered(logits, [s.params for s in states])
    return pick(probs, roll(states, probs.device))


def draw_kept(logits: Tensor, states: Sequence[SamplerState]) -> Tensor:
    """One id a row, ``[R]``, from what the row's filters keep; they need not be the same for all rows."""
    params = [s.params for s in states]
    probs = tempered(logits, params)
    draws = roll(states, probs.device)
    limits = Limits.of(params, probs.shape[-1], probs.device)
    ids, kept, enough = best_few(probs, limits)
    tokens = ids.gather(-1, pick(kept, draws)[:, None])[:, 0]
    more = (~enough).nonzero()[:, 0]
    if len(more):
        kept = probs[more] * keep_by_counting(probs[more], limits.rows(more))
        tokens[more] = pick(kept, draws[more])
    return tokens


def draw_by_sorting(logits: Tensor, states: Sequence[SamplerState]) -> Tensor:
    """The same tokens as :func:`draw_kept`, with every row sorted whole: the reference, and slow."""
    params = [s.params for s in states]
    probs = tempered(logits, params)
    keep = keep_by_sorting(probs, Limits.of(params, probs.shape[-1], probs.device))
    return pick(probs * keep, roll(states, probs.device))


def roll(states: Sequence[SamplerState], device: torch.device) -> Tensor:
    """Each row's own dice, once: ``[R, 1]`` fp64."""
    return torch.tensor([[s.draw()] for s in states], dtype=torch.float64, device=device)


def tempered(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Probabilities after temperature, before filters, ``[R, V]`` fp32; all temperatures above 0."""
    if logits.device.type == "mps":  # has no fp64, which the filters and the draw count in
        logits = logits.cpu()
    # The largest logit is taken off first, or a tiny temperature would overflow to inf - inf; and one that
    # fp32 cannot hold would be 0.
    least = torch.finfo(torch.float32).tiny
    temperature = torch.tensor([[max(p.temperature, least)] for p in params], device=logits.device)
    return (logits.float() - logits.amax(dim=-1, keepdim=True)).div_(temperature).softmax(dim=-1)


def pick(probs: Tensor, draws: Tensor) -> Tensor:
    """The first column of each row, ``[R]``, at which the running mass exceeds the draw.

    ``probs`` is ``[R, N]``, whose rows need not sum to 1; ``draws`` is ``[R, 1]`` fp64 in [0, 1).
    A column of probability 0 is never picked.
    """
    running = mass(probs).cumsum(dim=-1)
    total = running[:, -1:]
    point = torch.minimum(draws * total, total - 1.0)  # rounding must not point past the last column
    return torch.searchsorted(running, point, right=True)[:, 0]


def penalise(logits: Tensor, states: Sequence[SamplerState]) -> Tensor:
    """Apply repetition, then frequency and presence penalties, ``[B, V]``; rows without any are untouched."""
    params = [s.params for s in states]
    if not any(p.penalises for p in params):
        return logits
    seen = [{*s.prompt_ids, *s.generated} if s.params.repetition_penalty != 1.0 else set() for s in states]
    if any(seen):
        rows, ids = _rows_and_ids(seen, logits.device)
        penalty = torch.tensor([p.repetition_penalty for p in params], device=logits.device)[rows]
        value = logits[rows, ids]
        logits = logits.index_put((rows, ids), torch.where(value > 0, value / penalty, value * penalty))
    subtract = [p.frequency_penalty != 0.0 or p.presence_penalty != 0.0 for p in params]
    counts = [Counter(s.generated if on else ()) for s, on in zip(states, subtract, strict=True)]
    if any(counts):
        rows, ids = _rows_and_ids(counts, logits.device)
        times = torch.tensor([n for count in counts for n in count.values()], device=logits.device)
        setting = torch.tensor([[p.frequency_penalty, p.presence_penalty] for p in params], device=logits.device)
        frequency, presence = setting[rows].T
        logits = logits.index_put((rows, ids), logits[rows, ids] - (frequency * times + presence))
    return logits


def _rows_and_ids(groups: Sequence[Collection[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """The distinct ids of every row, one after the other, and the row of each."""
    lengths = torch.tensor([len(group) for group in groups])
    rows = torch.arange(len(groups)).repeat_interleave(lengths).to(device)
    return rows, torch.tensor([i for group in groups for i in group], device=device)


def distribution(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """What :func:`sample` draws from: ``[R, V]`` in id order; dropped ids have 0, each row sums to 1.

    After temperature and filters, without penalties. All temperatures must be above 0.
    """
    probs = tempered(logits, params)
    kept = probs * keep_ids(probs, Limits.of(params, probs.shape[-1], probs.device))
    return kept / kept.sum(dim=-1, keepdim=True)


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

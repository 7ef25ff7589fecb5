"""From logits to a token, for a batch in which each row has its own settings.

The order is fixed: repetition penalty, frequency and presence penalty, temperature, top-k, top-p, min-p, each on what
the one before left. Temperature 0 is greedy (the lowest id on a tie). Each row draws one uniform number from its own
generator, so what a seeded request says never depends on its neighbours in the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanoinfer.sampling.filters import Limits, best_few, keep_by_counting, keep_by_sorting, keep_ids, mass
from nanoinfer.sampling.params import SamplingParams


@dataclass
class SamplerState:
    """What sampling remembers of one request: its settings, its history, its random generator."""

    params: SamplingParams
    prompt_ids: Sequence[int]
    generated: list[int] = field(default_factory=list)
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        # On the CPU whatever the model's device, so that a seed means the same everywhere.
        self.generator = torch.Generator()
        if self.params.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(self.params.seed)

    def draw(self) -> float:
        """The next uniform number in [0, 1)."""
        return float(torch.rand((), generator=self.generator, dtype=torch.float64))


Sampler = Callable[[Tensor, Sequence[SamplerState]], Tensor]


def sample(logits: Tensor, states: Sequence[SamplerState]) -> Tensor:
    """Choose one token a row: ``[B, V]`` logits in, ``[B]`` int64 ids out, on the logits' device.

    Does not record the tokens: the caller appends them to ``state.generated``.
    """
    logits = penalise(logits.float(), states)
    groups: dict[Sampler, list[int]] = {}
    for row, state in enumerate(states):
        groups.setdefault(sampler_for(state.params), []).append(row)
    if len(groups) == 1:
        (sampler,) = groups
        return sampler(logits, states).to(logits.device)
    tokens = torch.empty(len(states), dtype=torch.int64, device=logits.device)
    for sampler, rows in groups.items():
        index = torch.tensor(rows, device=logits.device)
        tokens[index] = sampler(logits[index], [states[i] for i in rows]).to(tokens.device)
    return tokens


def sampler_for(params: SamplingParams) -> Sampler:
    """The function that chooses tokens under these settings; rows that share it are computed together."""
    if params.temperature == 0:
        return sample_greedy
    return sample_filtered if params.top_k or params.top_p < 1.0 or params.min_p else sample_unfiltered


def sample_greedy(logits: Tensor, states: Sequence[SamplerState]) -> Tensor:
    """The most likely id of each row, ``[R]``; the lowest on a tie."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.float().numpy().argmax(axis=-1))  # several times as fast as PyTorch's there
    return logits.argmax(dim=-1)


def sample_unfiltered(logits: Tensor, states: Sequence[SamplerState]) -> Tensor:
    """One id a row, ``[R]``, from the whole vocabulary."""
    probs = softmax_with_temperature(logits, [s.params for s in states])
    return sample_inverse_cdf(probs, uniform_draws(states, probs.device))


def sample_filtered(logits: Tensor, states: Sequence[SamplerState]) -> Tensor:
    """One id a row, ``[R]``, from what the row's filters keep; rows may have different filters."""
    params = [s.params for s in states]
    probs = softmax_with_temperature(logits, params)
    draws = uniform_draws(states, probs.device)
    limits = Limits.of(params, probs.shape[-1], probs.device)
    ids, kept, complete = best_few(probs, limits)
    tokens = ids.gather(-1, sample_inverse_cdf(kept, draws)[:, None])[:, 0]
    rest = (~complete).nonzero()[:, 0]
    if len(rest):
        kept = probs[rest] * keep_by_counting(probs[rest], limits.rows(rest))
        tokens[rest] = sample_inverse_cdf(kept, draws[rest])
    return tokens


def sample_by_sorting(logits: Tensor, states: Sequence[SamplerState]) -> Tensor:
    """The same tokens as :func:`sample_filtered`, with every row sorted whole: the reference, and slow."""
    params = [s.params for s in states]
    probs = softmax_with_temperature(logits, params)
    keep = keep_by_sorting(probs, Limits.of(params, probs.shape[-1], probs.device))
    return sample_inverse_cdf(probs * keep, uniform_draws(states, probs.device))


def uniform_draws(states: Sequence[SamplerState], device: torch.device) -> Tensor:
    """The next number of each row's generator, ``[R, 1]`` fp64 in [0, 1)."""
    return torch.tensor([[s.draw()] for s in states], dtype=torch.float64, device=device)


def softmax_with_temperature(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Probabilities before filters, ``[R, V]`` fp32; all temperatures must be above 0."""
    if logits.device.type == "mps":  # has no fp64, in which the filters and the draws are computed
        logits = logits.cpu()
    # The largest logit is subtracted first, or a tiny temperature would overflow to inf - inf; and one that
    # fp32 cannot hold would be 0.
    least = torch.finfo(torch.float32).tiny
    temperature = torch.tensor([[max(p.temperature, least)] for p in params], device=logits.device)
    return (logits.float() - logits.amax(dim=-1, keepdim=True)).div_(temperature).softmax(dim=-1)


def sample_inverse_cdf(probs: Tensor, draws: Tensor) -> Tensor:
    """The first column of each row, ``[R]``, at which the cumulative mass exceeds the draw; none of probability 0.

    ``probs`` is ``[R, N]``, whose rows need not sum to 1; ``draws`` is ``[R, 1]`` fp64 in [0, 1).
    """
    cumulative = mass(probs).cumsum(dim=-1)
    total = cumulative[:, -1:]
    point = torch.minimum(draws * total, total - 1.0)  # rounding must not point past the last column
    return torch.searchsorted(cumulative, point, right=True)[:, 0]


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
        penalties = torch.tensor([[p.frequency_penalty, p.presence_penalty] for p in params], device=logits.device)
        frequency, presence = penalties[rows].T
        logits = logits.index_put((rows, ids), logits[rows, ids] - (frequency * times + presence))
    return logits


def _rows_and_ids(groups: Sequence[Collection[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """The distinct ids of every row, one row after the other, and the row of each id."""
    lengths = torch.tensor([len(group) for group in groups])
    rows = torch.arange(len(groups)).repeat_interleave(lengths).to(device)
    return rows, torch.tensor([i for group in groups for i in group], device=device)


def distribution(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """What :func:`sample` draws from: ``[R, V]`` in id order; dropped ids have 0, each row sums to 1.

    After temperature and filters, without penalties. All temperatures must be above 0.
    """
    probs = softmax_with_temperature(logits, params)
    kept = probs * keep_ids(probs, Limits.of(params, probs.shape[-1], probs.device))
    return kept / kept.sum(dim=-1, keepdim=True)


def top_logprobs(logits: Tensor, chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The model's own log-probabilities of raw logits ``[B, V]``: before penalties, temperature and filters.

    Returns those of the chosen ids ``[B]``, those of the ``count`` most likely ids ``[B, count]``, and these ids.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    best, ids = logprobs.topk(min(count, logits.shape[-1]), dim=-1)
    return logprobs.gather(-1, chosen[:, None]).squeeze(-1), best, ids

"""Which ids top-k, top-p and min-p keep: once by sorting, as the reference, and once without.

A sort puts the whole vocabulary in order to find a boundary that most often lies among the first few dozen ids. So:
take the few best of each row, and filter those. A row whose boundary lies further down is counted into buckets instead,
by the leading bits of its probabilities.

All three keep the same ids, to the last tie. Sums decide which ids stay, and a sum of floats depends on its order; so
masses are whole numbers of 2**-48, whose sums are exact in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.sampling.params import SamplingParams

FEW = 512  # ids of a row that are filtered before it is counted: most nuclei are smaller


class Limits(NamedTuple):
    """The filters of R rows, each ``[R, 1]`` fp64. Off is: ``top_k`` inf, ``top_p`` 1, ``min_p`` 0."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab: int, device: torch.device) -> Limits:
        """Of one request a row; a ``top_k`` that the vocabulary does not exceed is off."""
        rows = [[p.top_k if 0 < p.top_k < vocab else math.inf, p.top_p, p.min_p] for p in params]
        return cls(*torch.tensor(rows, dtype=torch.float64, device=device).T[:, :, None])

    def rows(self, index: Tensor) -> Limits:
        """Those of some rows."""
        return Limits(*(limit[index] for limit in self))


def mass(probs: Tensor) -> Tensor:
    """Probabilities as whole numbers of 2**-48, in fp64: their sums are exact, in whatever order."""
    return (probs.double() * 2.0**48).round_()


def keep_ordered(ordered: Tensor, limits: Limits) -> Tensor:
    """Which columns stay, ``[R, N]`` bool, of probabilities that fall from left to right.

    Top-k, then top-p, then min-p, each on what the one before left. Top-p keeps an id when the mass *before* it is
    below p of what top-k left: so the id that crosses p stays, and so does the first whatever p is. The columns may be
    the N best of more, if some of them are dropped: see :func:`best_few`.
    """
    keep = (torch.arange(ordered.shape[-1], device=ordered.device) < limits.top_k) & (ordered > 0)
    masses = mass(ordered) * keep
    before = masses.cumsum(dim=-1) - masses
    keep &= (before < top_p_reach(masses, limits)) | (limits.top_p >= 1.0)
    return keep & (ordered >= limits.min_p * ordered[:, :1])


def top_p_reach(masses: Tensor, limits: Limits) -> Tensor:
    """The mass ``[R, 1]`` that top-p has to reach: p of the ``masses`` ``[R, N]`` that top-k left."""
    total = torch.where(limits.top_k.isinf(), 2.0**48, masses.sum(dim=-1, keepdim=True))
    return (limits.top_p * total).clamp_(min=1.0)


def keep_by_sorting(probs: Tensor, limits: Limits) -> Tensor:
    """Which ids stay, ``[R, V]`` bool in id order. The reference: every row sorted whole."""
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)  # stable: ties go to the lowest id
    return torch.zeros_like(probs, dtype=torch.bool).scatter_(-1, ids, keep_ordered(ordered, limits))


def best_few(probs: Tensor, limits: Limits, few: int = FEW) -> tuple[Tensor, Tensor, Tensor]:
    """Filter the ``few`` best ids of each row, which is all that most rows need.

    Returns ids ``[R, few]``, ascending; their probabilities ``[R, few]``, 0 for dropped ones; and ``[R]`` bool, whether
    that is all the row keeps. Where it is False the row's other columns mean nothing.
    """
    few = min(few, probs.shape[-1])
    ids = probs.topk(few, dim=-1, sorted=False).indices.sort(dim=-1).values
    best = probs.gather(-1, ids)
    ordered, order = best.sort(dim=-1, descending=True, stable=True)
    keep = keep_ordered(ordered, limits)
    # An id as likely as the last of the few may have equals outside of them, with lower ids.
    at_edge = (keep & (ordered == ordered[:, -1:])).any(dim=-1)
    complete = ~at_edge & ((limits.top_k <= few) | limits.top_k.isinf())[:, 0]
    kept = best * torch.zeros_like(keep).scatter_(-1, order, keep)
    return ids, kept, complete if few < probs.shape[-1] else torch.ones_like(complete)


def keep_ids(probs: Tensor, limits: Limits, few: int = FEW) -> Tensor:
    """Which ids stay, ``[R, V]`` bool in id order: among the few best where that is complete, else by counting."""
    ids, kept, complete = best_few(probs, limits, few)
    keep = torch.zeros_like(probs, dtype=torch.bool).scatter_(-1, ids, kept > 0)
    rest = (~complete).nonzero()[:, 0]
    if len(rest):
        keep[rest] = keep_by_counting(probs[rest], limits.rows(rest))
    return keep


def keep_by_counting(probs: Tensor, limits: Limits) -> Tensor:
    """Which ids stay, ``[R, V]`` bool in id order, without a sort however many they are."""
    keep = probs > 0
    masses = mass(probs)
    if not limits.top_k.isinf().all():
        keep &= top_by_counting(probs, torch.ones_like(masses), limits.top_k)
    if (limits.top_p < 1.0).any():
        keep &= top_by_counting(probs, masses, top_p_reach(masses * keep, limits)) | (limits.top_p >= 1.0)
    return keep & (probs >= limits.min_p * probs.amax(dim=-1, keepdim=True))


def top_by_counting(probs: Tensor, weight: Tensor, reach: Tensor) -> Tensor:
    """The most likely ids, lowest first among equals, each of which stays if the weight before it is below ``reach``.

    ``[R, V]`` bool of ``probs`` ``[R, V]`` fp32, none negative. ``weight`` is ``[R, V]`` fp64 whole numbers, the same
    for equals: ones count ids, masses add up mass. ``reach`` is ``[R, 1]`` fp64.
    """
    bits = probs.view(torch.int32)  # floats that are not negative have the order of their bits
    edge = torch.zeros_like(reach, dtype=torch.int32)  # the least probability that stays, ten bits at a time
    above = torch.zeros_like(reach)
    for shift in (20, 10, 0):
        digit = (bits >> shift) - (edge << 10)
        digit.masked_fill_((digit < 0) | (digit > 1023), 1024)  # 1024 holds those with other leading bits
        bucket = weight.new_zeros(len(probs), 1025).scatter_add_(-1, digit.long(), weight)[:, :1024]
        so_far = above + bucket.flip(-1).cumsum(dim=-1).flip(-1)  # of ids with this digit or a higher one
        crossing = ((so_far >= reach).sum(dim=-1, keepdim=True) - 1).clamp_(min=0)
        above = (so_far - bucket).gather(-1, crossing)
        edge = (edge << 10) + crossing.int()
    equal = bits == edge
    earlier = equal.cumsum(dim=-1) - 1  # equals with a lower id
    return (bits > edge) | (equal & (above + earlier * weight < reach))

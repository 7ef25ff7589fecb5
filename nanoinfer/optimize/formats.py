"""Number formats of quantised weights: int8 with a scale a row, int4 in groups, fp8 with a scale a row.

Scales are rounded to their own dtype first and the codes are chosen for the rounded scales, so that storing them in
16 bits adds no error. The ``fit_*`` functions choose scales for the inputs that a weight meets (activation-aware).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.errors import RequestError

FP8 = torch.float8_e4m3fn  # 4 bits of exponent, 3 of mantissa, no infinity
MOST_FP8 = torch.finfo(FP8).max  # 448
TINY = torch.finfo(torch.float32).tiny  # least divisor: a row or group of zeros has scale 0

SCALES = tuple(1 - i / 50 for i in range(1, 11))  # fit_int8_rows: shares of a row's scale that are tried
SPANS = (1.0, 0.8)  # fit_int4_groups: shares of a group's span from which the search starts,
TURNS = 4  # and its turns


class Int4Groups(NamedTuple):
    """A weight ``[N, K]`` as codes 0 to 15 in groups of ``K / G`` neighbours of a row."""

    codes: Tensor  # [N, K] uint8; 8 stands for the group's middle
    steps: Tensor  # [N, G] bfloat16, from one code to the next
    middles: Tensor  # [N, G] bfloat16


def to_int8_rows(weight: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Integers -127 to 127 ``[N, K]`` and a scale a row ``[N]``; ``weight ≈ whole * scale``, within half a scale."""
    return int8_codes(weight, (weight.float().abs().amax(1) / 127).to(dtype))


def int8_codes(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest int8 codes of a weight ``[N, K]`` for these scales ``[N]``, and the scales."""
    whole = (weight.float() / scales.float().clamp(min=TINY)[:, None]).round().clamp(-127, 127)
    return whole.to(torch.int8), scales


def from_int8_rows(whole: Tensor, scales: Tensor) -> Tensor:
    """Dequantise :func:`to_int8_rows`: ``[N, K]`` float32."""
    return whole.float() * scales.float()[:, None]


def to_int4_groups(weight: Tensor, group: int) -> Int4Groups:
    """Codes that span each group of ``group`` numbers from its lowest to its highest.

    The error is at most half a step, plus what rounding step and middle to bfloat16 moves the ends of the span by.
    """
    groups = in_groups(weight, group)
    low, high = groups.amin(-1), groups.amax(-1)
    step = (high - low) / 15
    return int4_codes(groups, step, low + 8 * step)


def int4_codes(groups: Tensor, steps: Tensor, middles: Tensor) -> Int4Groups:
    """The nearest codes of groups ``[N, G, K / G]`` for steps and middles ``[N, G]`` rounded to bfloat16."""
    steps, middles = steps.bfloat16(), middles.bfloat16()
    from_middle = (groups - middles.float()[..., None]) / steps.float().clamp(min=TINY)[..., None]
    codes = from_middle.round().clamp(-8, 7) + 8
    return Int4Groups(codes.flatten(1).to(torch.uint8), steps, middles)


def from_int4_groups(codes: Tensor, steps: Tensor, middles: Tensor) -> Tensor:
    """Dequantise :func:`to_int4_groups`: ``[N, K]`` float32."""
    from_middle = codes.view(*steps.shape, -1).float() - 8
    return (from_middle * steps.float()[..., None] + middles.float()[..., None]).flatten(1)


def in_groups(weight: Tensor, group: int) -> Tensor:
    """``[N, K]`` as ``[N, K / group, group]`` float32; :class:`RequestError` if K is no multiple of the group."""
    if weight.shape[1] % group:
        raise RequestError(f"rows of {weight.shape[1]} numbers do not divide into groups of {group}: pad them")
    return weight.float().reshape(len(weight), -1, group)


def to_fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """``[N, K]`` in e4m3 and a scale a row ``[N]``: at most 1/16 of a number off, or half of 2^-9 scales near zero."""
    wide = x.float()
    scales = wide.abs().amax(1) / MOST_FP8
    narrow = (wide / scales.clamp(min=TINY)[:, None]).clamp(-MOST_FP8, MOST_FP8)
    return narrow.to(FP8), scales


def from_fp8_rows(narrow: Tensor, scales: Tensor) -> Tensor:
    """Dequantise :func:`to_fp8_rows`: ``[N, K]`` float32."""
    return narrow.float() * scales[:, None]


def to_nibbles(codes: Tensor) -> Tensor:
    """Two codes 0 to 15 a byte: ``[N, K]`` uint8 to ``[N, K / 2]``, K even; the first of two in the low bits."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def from_nibbles(packed: Tensor) -> Tensor:
    """``[N, K / 2]`` uint8 to ``[N, K]``; undoes :func:`to_nibbles`."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)


# --- activation-aware -------------------------------------------------------------------
#
# A product's error is the sum over input channels of (weight error * input). With independent channels its mean square
# is sum_k (w_k - ŵ_k)^2 * mean(x_k^2): an error costs in proportion to its channel's energy, and a few channels have
# most of it. To measure energies on a text and to search for the clipping of a span is from AWQ (Lin et al. 2024,
# https://arxiv.org/abs/2306.00978); no channel is rescaled here. The int4 search goes on from each clipping by turns of
# nearest codes and least squares (Lloyd 1982, "Least squares quantization in PCM").


def fit_int8_rows(weight: Tensor, energy: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """:func:`to_int8_rows` with the least product error found, for input channels of mean square ``energy`` ``[K]``."""
    x, e = weight.float(), _floored(energy)
    best, scales = to_int8_rows(weight, dtype)
    full, least = scales.float(), ((from_int8_rows(best, scales) - x).square() * e).sum(1)
    for share in SCALES:
        codes, candidate = int8_codes(x, (share * full).to(dtype))
        error = ((from_int8_rows(codes, candidate) - x).square() * e).sum(1)
        better = error < least
        least, scales = torch.where(better, error, least), torch.where(better, candidate, scales)
        best = torch.where(better[:, None], codes, best)
    return best, scales


def fit_int4_groups(weight: Tensor, energy: Tensor, group: int) -> Int4Groups:
    """:func:`to_int4_groups` with the least product error found, for input channels of mean square ``energy``."""
    x = in_groups(weight, group)  # [N, G, group]
    e = _floored(energy).view(1, -1, group)
    share = e / e.sum(-1, keepdim=True)
    low, high, mean = x.amin(-1), x.amax(-1), (share * x).sum(-1)

    def error_of(fit: Int4Groups) -> Tensor:
        return ((from_int4_groups(*fit).view_as(x) - x).square() * e).sum(-1)  # [N, G]

    best = to_int4_groups(weight, group)
    least = error_of(best)
    for span in SPANS:
        step = span * (high - low) / 15
        middle = span * low + 8 * step
        for _ in range(TURNS):
            codes = int4_codes(x, step, middle).codes.view_as(x).float() - 8
            center = (share * codes).sum(-1)
            off = share * (codes - center[..., None])
            step = (off * x).sum(-1) / (off * codes).sum(-1).clamp(min=TINY)
            middle = mean - center * step
        fit = int4_codes(x, step, middle)
        error = error_of(fit)
        better = error < least
        least = torch.where(better, error, least)
        masks = (better.repeat_interleave(group, 1), better, better)  # of codes, steps and middles
        best = Int4Groups(*(torch.where(*choice) for choice in zip(masks, fit, best, strict=True)))
    return best


def _floored(energy: Tensor) -> Tensor:
    """Energies with a floor of 1% of their mean: a channel that is zero in this text may not be in the next."""
    return (energy.float() + 0.01 * energy.float().mean()).clamp(min=TINY)

"""Numbers of eight and four bits: what a weight becomes, and what it is read back as.

In each format neighbours share a scale. What is shared is rounded to its own dtype first and the codes are chosen for
the rounded one, so that storing it costs nothing more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.errors import RequestError

FP8 = torch.float8_e4m3fn  # 4 bits of exponent, 3 of mantissa, no infinity
MOST_FP8 = torch.finfo(FP8).max  # 448
TINY = torch.finfo(torch.float32).tiny  # what a scale of nothing but zeros is divided by


class Int4Groups(NamedTuple):
    """A weight ``[N, K]`` as codes 0 to 15 in groups of ``K / G`` neighbours of a row.

    Attributes:
        codes: ``[N, K]`` uint8; 8 stands for the group's middle.
        steps: ``[N, G]`` bfloat16, from one code to the next.
        middles: ``[N, G]`` bfloat16.
    """

    codes: Tensor
    steps: Tensor
    middles: Tensor


def to_int8_rows(weight: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Whole numbers -127 to 127 and a scale a row: ``weight ≈ whole * scale``, at most half a scale away.

    Args:
        weight: ``[N, K]``.
        dtype: of the scales; float32 or bfloat16.

    Returns:
        ``[N, K]`` int8 and ``[N]``. A row of zeros has scale 0.
    """
    return int8_codes(weight, (weight.float().abs().amax(1) / 127).to(dtype))


def int8_codes(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The whole numbers nearest to a weight ``[N, K]`` with these scales ``[N]``, and the scales."""
    whole = (weight.float() / scales.float().clamp(min=TINY)[:, None]).round().clamp(-127, 127)
    return whole.to(torch.int8), scales


def from_int8_rows(whole: Tensor, scales: Tensor) -> Tensor:
    """``[N, K]`` float32 out of what :func:`to_int8_rows` gives."""
    return whole.float() * scales.float()[:, None]


def to_int4_groups(weight: Tensor, group: int) -> Int4Groups:
    """Codes 0 to 15 that span each group from its lowest to its highest number.

    A number is at most half a step away from its own, and what rounding step and middle to bfloat16 moves the
    ends of the span by.

    Args:
        weight: ``[N, K]``.
        group: numbers that share a step and a middle.

    Raises:
        RequestError: K is no multiple of the group.
    """
    groups = in_groups(weight, group)
    low, high = groups.amin(-1), groups.amax(-1)
    step = (high - low) / 15
    return int4_codes(groups, step, low + 8 * step)


def int4_codes(groups: Tensor, steps: Tensor, middles: Tensor) -> Int4Groups:
    """The codes nearest to groups ``[N, G, K / G]`` with these steps and middles ``[N, G]``, once they are bfloat16."""
    steps, middles = steps.bfloat16(), middles.bfloat16()
    from_middle = (groups - middles.float()[..., None]) / steps.float().clamp(min=TINY)[..., None]
    codes = from_middle.round().clamp(-8, 7) + 8
    return Int4Groups(codes.flatten(1).to(torch.uint8), steps, middles)


def from_int4_groups(codes: Tensor, steps: Tensor, middles: Tensor) -> Tensor:
    """``[N, K]`` float32 out of what :func:`to_int4_groups` gives."""
    from_middle = codes.view(*steps.shape, -1).float() - 8
    return (from_middle * steps.float()[..., None] + middles.float()[..., None]).flatten(1)


def in_groups(weight: Tensor, group: int) -> Tensor:
    """``[N, K]`` as ``[N, K / group, group]`` float32. Raises :class:`RequestError` where it does not come out even."""
    if weight.shape[1] % group:
        raise RequestError(f"rows of {weight.shape[1]} numbers do not divide into groups of {group}: pad them")
    return weight.float().reshape(len(weight), -1, group)


def to_fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of eight bits (e4m3) and a scale a row, the largest of which becomes 448; of weights or activations.

    A number is at most 1/16 of itself away from its own, or half of 2^-9 scales where it is close to zero.

    Args:
        x: ``[N, K]``.

    Returns:
        ``[N, K]`` float8_e4m3fn and ``[N]`` float32. A row of zeros has scale 0.
    """
    wide = x.float()
    scales = wide.abs().amax(1) / MOST_FP8
    narrow = (wide / scales.clamp(min=TINY)[:, None]).clamp(-MOST_FP8, MOST_FP8)
    return narrow.to(FP8), scales


def from_fp8_rows(narrow: Tensor, scales: Tensor) -> Tensor:
    """``[N, K]`` float32 out of what :func:`to_fp8_rows` gives."""
    return narrow.float() * scales[:, None]


def to_nibbles(codes: Tensor) -> Tensor:
    """Two codes 0 to 15 a byte: ``[N, K]`` uint8 to ``[N, K / 2]``, K even; the first of two in the lower half."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def from_nibbles(packed: Tensor) -> Tensor:
    """``[N, K / 2]`` uint8 to ``[N, K]``; undoes :func:`to_nibbles`."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)

"""Every format keeps what its docstring says, whatever the numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nanoinfer.errors import RequestError
from nanoinfer.optimize.formats import (
    FP8,
    from_fp8_rows,
    from_int4_groups,
    from_int8_rows,
    from_nibbles,
    to_fp8_rows,
    to_int4_groups,
    to_int8_rows,
    to_nibbles,
)
from tests.examples import examples

EPS = 2.0**-22  # what float32 loses in a handful of operations
BF16 = 2.0**-8  # the most that rounding to bfloat16 moves a number by, as a share of it


@st.composite
def weights(draw: st.DrawFn, group: int = 1, centred: bool = False) -> Tensor:
    """Rows of several sizes, some with one number far out, some all zero, some (unless centred) far from zero."""
    n, k = draw(st.integers(1, 5)), group * draw(st.integers(1, 4 if group > 1 else 70))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    weight = torch.randn(n, k, generator=generator)
    for row in weight:
        if draw(st.booleans()):
            row[draw(st.integers(0, k - 1))] *= draw(st.sampled_from([0.0, 30.0, -3000.0]))
        if not centred:
            row += draw(st.sampled_from([0.0, 5.0, -200.0]))
        row *= draw(st.sampled_from([1.0, 0.0, 1e-12, 1e6]))
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@examples(60)
@given(weight=weights())
def test_int8_is_half_a_scale_away_at_most_and_uses_the_whole_range(weight: Tensor, dtype: torch.dtype) -> None:
    whole, scales = to_int8_rows(weight, dtype)
    assert (whole.dtype, whole.shape, scales.dtype, scales.shape) == (torch.int8, weight.shape, dtype, weight.shape[:1])
    most = weight.abs().amax(1, keepdim=True)
    assert ((from_int8_rows(whole, scales) - weight).abs() <= scales.float()[:, None] / 2 + EPS * most).all()
    assert (whole[weight == 0] == 0).all()
    at_most = (weight.abs() == most) & (most > 0)
    assert (whole[at_most] == 127 * weight[at_most].sign()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@examples(60)
@given(weight=weights())
def test_int8_of_what_int8_gave_is_the_same(weight: Tensor, dtype: torch.dtype) -> None:
    whole, scales = to_int8_rows(weight, dtype)
    again, scales_again = to_int8_rows(from_int8_rows(whole, scales), dtype)
    assert torch.equal(again, whole)
    torch.testing.assert_close(scales_again, scales, rtol=1e-6, atol=0)


@pytest.mark.parametrize("group", [4, 32])
@examples(60)
@given(data=st.data())
def test_int4_is_half_a_step_away_at_most_but_for_rounded_ends(data: st.DataObject, group: int) -> None:
    weight = data.draw(weights(group))
    codes, steps, middles = to_int4_groups(weight, group)
    assert codes.dtype == torch.uint8 and codes.shape == weight.shape and codes.max() <= 15
    assert steps.shape == middles.shape == (len(weight), weight.shape[1] // group)
    off = (from_int4_groups(codes, steps, middles) - weight).abs().view(*steps.shape, group)
    step, middle = steps.float()[..., None], middles.float().abs()[..., None]
    assert (off <= step / 2 + 1.01 * BF16 * (8 * step + middle) + EPS * middle).all()
    nothing = (weight.view(*steps.shape, group) == 0).all(-1)
    assert (off[nothing] == 0).all()


@pytest.mark.parametrize("group", [4, 32])
@examples(60)
@given(data=st.data())
def test_int4_reaches_both_ends_and_of_what_int4_gave_is_the_same(data: st.DataObject, group: int) -> None:
    weight = data.draw(weights(group, centred=True))
    first = to_int4_groups(weight, group)
    groups, codes = weight.view(*first.steps.shape, group), first.codes.view(*first.steps.shape, group)
    spread = groups.amin(-1) < groups.amax(-1)
    straddles = spread & (groups.amin(-1) <= 0) & (groups.amax(-1) >= 0)
    assert (codes.amin(-1)[straddles] == 0).all() and (codes.amax(-1)[straddles] == 15).all()
    again = to_int4_groups(from_int4_groups(*first), group)
    for before, after in zip(first, again, strict=True):
        shape = first.steps.shape
        assert torch.equal(before.view(*shape, -1)[straddles], after.view(*shape, -1)[straddles])


def test_int4_finds_a_grid_that_the_weights_lie_on() -> None:
    codes = torch.arange(16).repeat(2, 4)  # a group of 32 holds each code twice
    weight = codes * 0.125 - 0.75
    assert torch.equal(from_int4_groups(*to_int4_groups(weight, 32)), weight)


@examples(60)
@given(weight=weights())
def test_fp8_is_a_sixteenth_away_at_most_and_uses_the_whole_range(weight: Tensor) -> None:
    narrow, scales = to_fp8_rows(weight)
    assert (narrow.dtype, narrow.shape, scales.shape) == (FP8, weight.shape, weight.shape[:1])
    off = (from_fp8_rows(narrow, scales) - weight).abs()
    assert (off <= torch.maximum(weight.abs() / 16, scales[:, None] * 2**-10) + EPS * weight.abs()).all()
    assert (narrow.float()[weight == 0] == 0).all()
    most = weight.abs().amax(1, keepdim=True)
    at_most = (weight.abs() == most) & (most > 0)
    assert (narrow.float()[at_most] == 448 * weight[at_most].sign()).all()


@examples(60)
@given(weight=weights())
def test_fp8_of_what_fp8_gave_is_the_same(weight: Tensor) -> None:
    narrow, scales = to_fp8_rows(weight)
    again, scales_again = to_fp8_rows(from_fp8_rows(narrow, scales))
    assert torch.equal(again.float(), narrow.float())
    torch.testing.assert_close(scales_again, scales, rtol=1e-6, atol=0)


def test_two_codes_lie_in_a_byte_the_first_in_its_lower_half() -> None:
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert to_nibbles(codes).tolist() == [[0x21, 0x0F]]
    every = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8)
    assert torch.equal(from_nibbles(to_nibbles(every)), every)


def test_rows_that_are_no_whole_groups_are_refused() -> None:
    with pytest.raises(RequestError, match="rows of 40 numbers do not divide into groups of 32"):
        to_int4_groups(torch.zeros(2, 40), 32)

"""Zeros to begin with, and zeros again where a block is begun."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch

from nanoinfer.cache.memory import clear, zeros

SHAPE = (2, 5, 4, 3, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_are_a_plain_tensor_that_outlives_who_made_it(dtype: torch.dtype) -> None:
    x = zeros(SHAPE, "cpu", dtype)
    gc.collect()
    assert x.shape == SHAPE and x.dtype == dtype and x.is_contiguous() and not x.any()
    x += 1
    assert float(x.float().sum()) == 2 * 5 * 4 * 3 * 8


def test_no_zeros_and_a_system_without_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert zeros((2, 0, 4), "cpu", torch.float32).numel() == 0
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert not zeros(SHAPE, "cpu", torch.float32).any()


def test_clear_takes_the_named_blocks_of_every_layer_and_no_others() -> None:
    store = torch.full(SHAPE, float("nan"), dtype=torch.bfloat16)
    clear(store, [1, 4])
    assert [int(store[:, block].isnan().sum()) for block in range(5)] == [192, 0, 192, 192, 0]

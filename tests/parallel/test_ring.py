"""The all-reduce by hand: the same sum, and no byte more than a ring needs."""

from __future__ import annotations

import pytest

from tests.parallel.slice_ranks import RING_LENGTHS
from tests.parallel.together import answers


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("length", RING_LENGTHS)
def test_the_sum_and_its_bytes(n: int, length: int) -> None:
    for answer in answers(n, "slice"):
        off, only_exchanges, sent = answer["ring"][str(length)]
        assert len(off) == 3 and max(off) < 2e-6  # PyTorch's, gathered and summed, and ours
        assert only_exchanges
        whole = 4 * n * -(-length // n)  # bytes, filled up to chunks of one length
        assert sent == 2 * (n - 1) / n * whole
        if length % n == 0:
            assert sent == 2 * (n - 1) / n * 4 * length

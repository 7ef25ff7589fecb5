"""Each collective returns what it should and logs what it sent; the all-reduce written out as a ring does too."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.rank_results import answers
from tests.parallel.slice_ranks import RING_LENGTHS

MESSAGE = 16  # bytes of a 2 x 2 tensor in float32


def x(rank: int) -> list[list[float]]:
    return [[rank, 10.0], [20.0, rank]]


@pytest.mark.parametrize("n", [2, 4])
def test_what_comes_out(n: int) -> None:
    for rank, answer in enumerate(answers(n, "slice")):
        found = answer["comm"]
        total = sum(range(n))
        assert found["all-reduce"] == [[total, 10.0 * n], [20.0 * n, total]]
        gathered = zip(*map(x, range(n)), strict=True)
        assert found["all-gather"] == [[value for part in row for value in part] for row in gathered]
        assert found["exchange"] == x((rank - 1) % n)
        assert found["broadcast"] == x(1)
        assert found["all-to-all"] == [[10.0 * source + rank] * (source + rank) for source in range(n)]
    assert answers(n, "slice")[1]["comm"]["receive"] == x(0)


@pytest.mark.parametrize("n", [2, 4])
def test_what_is_noted(n: int) -> None:
    for rank, answer in enumerate(answers(n, "slice")):
        parts = [4 * (rank + i) for i in range(n)]
        expected: list[list[Any]] = [
            ["all-reduce", MESSAGE, 2 * (n - 1) / n * MESSAGE],
            ["all-gather", MESSAGE, (n - 1) * MESSAGE],
            ["exchange", MESSAGE, MESSAGE],
            ["broadcast", MESSAGE, MESSAGE if rank == 1 else 0],
            ["all-to-all", sum(parts), sum(parts) - parts[rank]],
            *([["send", MESSAGE, MESSAGE]] if rank == 0 else []),
            *([["receive", MESSAGE, 0]] if rank == 1 else []),
        ]
        assert answer["comm"]["log"] == [[*call, True] for call in expected]


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("length", RING_LENGTHS)
def test_the_ring_all_reduce_gives_the_sum_and_sends_its_bytes(n: int, length: int) -> None:
    for answer in answers(n, "slice"):
        off, only_exchanges, sent = answer["ring"][str(length)]
        assert len(off) == 3 and max(off) < 2e-6  # PyTorch's, gathered and summed, and ours
        assert only_exchanges
        whole = 4 * n * -(-length // n)  # bytes, filled up to chunks of one length
        assert sent == 2 * (n - 1) / n * whole
        if length % n == 0:
            assert sent == 2 * (n - 1) / n * 4 * length

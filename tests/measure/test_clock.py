from __future__ import annotations

import time

import pytest
import torch

from nanoinfer.errors import DeviceError, NanoinferError
from nanoinfer.measure import clock


def test_timed_returns_result_and_seconds() -> None:
    result, seconds = clock.timed(lambda: (time.sleep(0.02), "done")[1])
    assert result == "done"
    assert 0.02 <= seconds < 1
    assert clock.now() <= clock.now()


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without CUDA")
def test_without_cuda_it_is_said() -> None:
    with pytest.raises(DeviceError, match="no CUDA GPU"):
        clock.synchronize("cuda:0")
    with pytest.raises(DeviceError, match="no CUDA GPU"):
        clock.CudaTimer()


def test_unknown_device() -> None:
    with pytest.raises(DeviceError, match="abacus"):
        clock.synchronize("abacus")


@pytest.mark.gpu
def test_cuda_timing_waits_for_the_work() -> None:
    x = torch.randn(8192, 8192, device="cuda")
    x @ x
    torch.cuda.synchronize()
    start = clock.now()
    x @ x
    launch = clock.now() - start
    _, seconds = clock.timed(lambda: x @ x, "cuda")
    with clock.CudaTimer() as timer:
        x @ x
    assert launch < seconds
    assert timer.seconds == pytest.approx(seconds, rel=0.5)


def test_repeat_keeps_warmup_apart_and_setup_untimed() -> None:
    calls: list[str] = []

    def work() -> None:
        calls.append("work")
        time.sleep(0.03 if calls.count("work") <= 2 else 0.001)  # two slow first calls

    def setup() -> None:
        calls.append("setup")
        time.sleep(0.02)  # a cache flush must not be in the figure

    timing = clock.repeat(work, warmup=2, repeats=5, setup=setup)
    assert calls == ["setup", "work"] * 7
    assert (len(timing.warmup_samples), len(timing.samples), timing.summary.n) == (2, 5, 5)
    assert min(timing.warmup_samples) >= 0.03
    assert timing.summary.median is not None and timing.summary.median < 0.015


@pytest.mark.parametrize(("warmup", "repeats"), [(-1, 1), (0, 0)])
def test_repeat_refuses_senseless_counts(warmup: int, repeats: int) -> None:
    with pytest.raises(NanoinferError, match="must be a whole number at least"):
        clock.repeat(lambda: None, warmup=warmup, repeats=repeats)


def test_paired_takes_turns_and_swaps_the_order() -> None:
    order: list[str] = []
    result = clock.paired(lambda: order.append("a"), lambda: order.append("b"), warmup=1, repeats=3)
    assert "".join(order) == "abbaabba"
    assert (len(result.a.samples), len(result.b.samples), len(result.a.warmup_samples)) == (3, 3, 1)


def test_paired_finds_a_known_ratio() -> None:
    result = clock.paired(lambda: time.sleep(0.012), lambda: time.sleep(0.004), warmup=0, repeats=9)
    assert 1.8 < result.ratio.value < 4
    assert result.ratio.low is not None and result.ratio.low > 1

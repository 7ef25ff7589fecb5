from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nanoinfer.calibrate import machine as module
from nanoinfer.calibrate.machine import Calibration, Product, Reading, cache_path, calibrate
from nanoinfer.errors import DeviceError, NanoinferError
from nanoinfer.measure import clock
from nanoinfer.store import read_cached, restored

BUFFER = 1 << 20
WIDTH = 64
ROWS = (1, 4, 16)
BUDGET = 0.5


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Small tensors and a cache of its own: what is tested is the arithmetic, not the machine."""
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "BUFFER_BYTES", BUFFER)
    monkeypatch.setitem(module.WIDTH, "cpu", WIDTH)
    monkeypatch.setitem(module.ROWS, "cpu", ROWS)
    monkeypatch.setattr(module, "MAX_ROUNDS", 5)
    monkeypatch.setattr(module, "schedstat", lambda: None)


class Ticks:
    """A clock on which everything timed takes exactly ``step`` seconds."""

    def __init__(self, step: float) -> None:
        self.step, self.time, self.reads = step, 0.0, 0

    def __call__(self) -> float:
        self.reads += 1
        self.time += self.step
        return self.time


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    scripted = Ticks(2.0**-7)  # a power of two: sums and quotients are exact
    monkeypatch.setattr(clock, "now", scripted)
    return scripted


def exactly(value: float, n: int) -> Reading:
    return Reading(value, value, value, n)


def test_bytes_and_flops_over_seconds(ticks: Ticks) -> None:
    found = calibrate("cpu", budget_s=100.0)
    assert found.rounds == module.MAX_ROUNDS == found.copy.n
    # Half of the buffer is read and half written, in one tick.
    assert found.copy == exactly(BUFFER * 128, 5)
    ways = ["torch.dot float32", "torch.sum float32", "torch.sum bfloat16"]
    ways += [f"matrix-vector product {dtype}" for dtype in found.dtypes]
    assert found.reads == dict.fromkeys(ways, exactly(BUFFER * 128, 5))
    assert found.read_bandwidth == found.read_ceiling == BUFFER * 128
    assert found.dtypes == ("float32", "bfloat16", "float16")
    assert [(point.dtype, point.rows, point.streamed) for point in found.products] == [
        (dtype, rows, streamed) for dtype in found.dtypes for streamed in (True, False) for rows in ROWS
    ]
    for point in found.products:
        assert point.width == WIDTH
        assert point.rate == exactly(2 * point.rows * WIDTH * WIDTH * 128, 5)
    assert found.peak("bfloat16") == 2 * 16 * WIDTH * WIDTH * 128
    # 200 operators in one tick; 100 of the linear ones.
    assert found.launch == found.launch_synced == exactly(2.0**-7 / 200, 5)
    assert found.launch_linear == dict.fromkeys(found.dtypes, exactly(2.0**-7 / 100, 5))
    assert found.skipped == ()
    assert (found.device, found.threads) == ("cpu", torch.get_num_threads())
    assert found.provenance["machine"]["cpu"] == found.device_name


def test_short_things_are_repeated_until_a_sample_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "now", Ticks(2.0**-13))  # 0.12 ms; a sample is to last 1 ms
    found = calibrate("cpu", budget_s=100.0)
    assert found.copy == exactly(BUFFER * 9 * 2**13, 5)


def test_rounds_stop_at_the_budget(ticks: Ticks) -> None:
    full = calibrate("cpu", budget_s=100.0)
    assert calibrate("cpu", budget_s=4.0, fresh=True).rounds < full.rounds
    little = calibrate("cpu", budget_s=2.0**-9, fresh=True)
    assert little.rounds == 1
    assert little.skipped[0] == "float32 product of 4 rows, streamed: too slow for the budget"
    assert [point.rows for point in little.products] == [1] * 6
    assert len(little.skipped) == 12, "nothing is left out without being named"


def test_an_unsupported_dtype_is_named(ticks: Ticks, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_half(device: str, dtype: str) -> torch.dtype:
        if dtype == "float16":
            raise DeviceError("device 'cpu' cannot compute in float16 (not implemented)")
        return getattr(torch, dtype)  # type: ignore[no-any-return]

    monkeypatch.setattr("nanoinfer.models.registry.check_dtype", no_half)
    found = calibrate("cpu", budget_s=100.0)
    assert found.dtypes == ("float32", "bfloat16")
    assert found.skipped == ("device 'cpu' cannot compute in float16 (not implemented)",)
    with pytest.raises(DeviceError, match=r"^'float16' was not calibrated on cpu; did you mean 'bfloat16'"):
        found.peak("float16")


def test_on_the_true_clock() -> None:
    found = calibrate("cpu", budget_s=BUDGET)
    readings = [found.copy, found.launch, found.launch_synced, *found.reads.values(), *found.launch_linear.values()]
    for reading in [*readings, *(point.rate for point in found.products)]:
        assert 0 < reading.low <= reading.median <= reading.high < math.inf
        assert reading.n == found.rounds
    assert found.read_bandwidth <= found.read_ceiling
    assert found.budget_s == BUDGET


def test_json_round_trip(ticks: Ticks) -> None:
    found = calibrate("cpu", budget_s=100.0)
    back = restored(Calibration, json.loads(json.dumps(dataclasses.asdict(found))))
    assert back == found and back.provenance == found.provenance


def test_the_cache_is_used_and_kept_apart(ticks: Ticks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = calibrate("cpu", budget_s=100.0)
    assert [path.name for path in (tmp_path / "calibration").iterdir()] == [cache_path("cpu").name]
    reads = ticks.reads
    assert calibrate("cpu", budget_s=100.0) == first
    assert calibrate("cpu", budget_s=50.0) == first, "a larger budget's result serves a smaller one"
    assert ticks.reads == reads, "a hit reads no clock"
    calibrate("cpu", budget_s=200.0)
    assert ticks.reads > reads, "a result of a smaller budget does not serve a larger one"
    reads = ticks.reads
    calibrate("cpu", budget_s=100.0, fresh=True)
    assert ticks.reads > reads

    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    reads = ticks.reads
    calibrate("cpu", budget_s=100.0)
    assert ticks.reads > reads, "another number of threads is another machine"
    assert len(list((tmp_path / "calibration").iterdir())) == 2


def test_a_disturbed_result_says_so_and_is_not_kept(ticks: Ticks, monkeypatch: pytest.MonkeyPatch) -> None:
    for queued, share in ((100, 0.1), (300, 0.25)):
        times = iter([(5_000, 70), (5_900, 70 + queued)])
        monkeypatch.setattr(module, "schedstat", lambda times=times: next(times))
        found = calibrate("cpu", budget_s=100.0, fresh=True)
        assert found.waited == share
        assert found.disturbed == (share > 0.1)
        assert cache_path("cpu").exists() != found.disturbed
        cache_path("cpu").unlink(missing_ok=True)
    monkeypatch.setattr(module, "schedstat", lambda: None)
    assert calibrate("cpu", budget_s=100.0).waited is None


def test_time_spent_queueing_is_read_where_the_system_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    stat = module.schedstat()
    assert (stat is not None) == Path("/proc/self/schedstat").exists()
    assert stat is None or min(stat) >= 0
    for stat in (None, (1, 1)):
        monkeypatch.setattr(module, "schedstat", lambda stat=stat: stat)
        assert module.queued(lambda: 7) == (7, None)


def damaged(text: str) -> Iterator[str]:
    yield from ("", "{", "[]", "null", "{}", text[: len(text) // 2])
    data = json.loads(text)
    yield json.dumps({**data, "copy": None})
    yield json.dumps({**data, "more": 1})
    negative = {"median": -1.0, "low": -1.0, "high": -1.0, "n": 3}
    yield json.dumps({**data, "copy": negative})


def test_a_damaged_cache_is_measured_again(ticks: Ticks) -> None:
    first = calibrate("cpu", budget_s=100.0)
    path = cache_path("cpu")
    for text in damaged(path.read_text(encoding="utf-8")):
        path.write_text(text, encoding="utf-8")
        reads = ticks.reads
        again = calibrate("cpu", budget_s=100.0)
        assert ticks.reads > reads, text[:80]
        assert (again.copy, again.products) == (first.copy, first.products)
        assert read_cached(path, Calibration) == again
    path.write_bytes(b"\xff\xfe")
    assert calibrate("cpu", budget_s=100.0).copy == first.copy


def test_rates_between_the_measured_rows(ticks: Ticks) -> None:
    found = calibrate("cpu", budget_s=100.0)
    points = tuple(Product("float32", rows, 64, False, exactly(rate, 3)) for rows, rate in ((16, 800.0), (1, 100.0)))
    streamed = (Product("float32", 1, 64, True, exactly(5.0, 3)),)
    found = dataclasses.replace(found, products=points + streamed)
    assert [found.flops_at("float32", rows) for rows in (1, 16, 99)] == [100.0, 800.0, 800.0]
    assert found.flops_at("float32", 4) == pytest.approx(math.sqrt(100 * 800))
    assert found.flops_at("float32", 4, streamed=True) == 5.0
    with pytest.raises(NanoinferError, match="rows must be at least 1, got 0"):
        found.flops_at("float32", 0)


def test_mistakes() -> None:
    with pytest.raises(DeviceError, match="unknown device 'tpu'"):
        calibrate("tpu")
    for budget in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(NanoinferError, match="budget_s must be above 0"):
            calibrate("cpu", budget_s=budget)
    for values in ((1.0, 2.0, 3.0, 1), (0.0, 0.0, 0.0, 1), (1.0, 1.0, 1.0, 0), (math.nan, 1.0, 2.0, 1)):
        with pytest.raises(ValueError, match="not a reading"):
            Reading(*values)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA GPU")
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUFFER_BYTES", 512 << 20)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = calibrate("cuda", budget_s=15.0)
    assert found.seconds < 15
    assert torch.cuda.max_memory_allocated() - before < 1e9
    assert found.launch.median < found.launch_synced.median
    assert found.peak("bfloat16") > found.peak("float32")

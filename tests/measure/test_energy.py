"""Energy from a made-up powercap folder, from given watts, from datasheets, and from nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoinfer.errors import NanoinferError
from nanoinfer.measure import energy
from nanoinfer.measure.energy import EnergyMeter, RaplCounter
from nanoinfer.theory import hardware


def zone(folder: Path, name: str, label: str, microjoules: int, wrap: int = 1_000_000) -> Path:
    path = folder / name
    path.mkdir()
    (path / "name").write_text(f"{label}\n")
    (path / "max_energy_range_uj").write_text(f"{wrap}\n")
    (path / "energy_uj").write_text(f"{microjoules}\n")
    return path / "energy_uj"


def test_packages_add_up_and_their_parts_do_not(tmp_path: Path) -> None:
    first, second = zone(tmp_path, "intel-rapl:0", "package-0", 100), zone(tmp_path, "intel-rapl:1", "package-1", 5)
    core = zone(tmp_path, "intel-rapl:0:0", "core", 0)
    board = zone(tmp_path, "intel-rapl:2", "psys", 0)
    with EnergyMeter("cpu", powercap=tmp_path, watts=10) as meter:
        for file, value in ((first, 300_100), (second, 200_005), (core, 999), (board, 999_999)):
            file.write_text(str(value))
    assert meter.use.joules == pytest.approx(0.5)
    assert meter.use.source == "RAPL, 2 package(s), whole processor"
    assert meter.use.measured
    assert meter.use.watts == pytest.approx(0.5 / meter.use.seconds)


def test_a_counter_that_starts_again_is_followed(tmp_path: Path) -> None:
    file = zone(tmp_path, "intel-rapl:0", "package-0", 900_000)
    counter = RaplCounter(tmp_path)
    file.write_text("100000")
    assert counter.joules() == pytest.approx(0.2)
    file.write_text("50000")  # a second wrap, seen because it was read in between
    assert counter.joules() == pytest.approx(1.15)


def test_a_long_region_is_read_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "POLL_EVERY_S", 0.001)
    file = zone(tmp_path, "intel-rapl:0", "package-0", 900_000)
    readings: list[float] = []
    plain = RaplCounter.joules
    monkeypatch.setattr(RaplCounter, "joules", lambda self: readings.append(plain(self)) or readings[-1])
    with EnergyMeter("cpu", powercap=tmp_path) as meter:
        for value in (800_000, 700_000):
            file.with_name("new").write_text(str(value))
            file.with_name("new").replace(file)
            before = len(readings)
            while len(readings) < before + 2:
                pass
    assert meter.use.joules == pytest.approx(1.8)


def test_a_counter_that_may_not_be_read_gives_way_to_given_watts(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 1).unlink()
    with EnergyMeter("cpu", powercap=tmp_path, watts=20) as meter:
        pass
    assert meter.use.joules == pytest.approx(20 * meter.use.seconds)
    assert meter.use.source == "20 W, as given, times seconds"
    assert not meter.use.measured


def test_a_counter_that_vanishes_gives_way_too(tmp_path: Path) -> None:
    file = zone(tmp_path, "intel-rapl:0", "package-0", 1)
    with EnergyMeter("cpu", powercap=tmp_path, watts=20) as meter:
        file.write_text("gone")
    assert not meter.use.measured


def test_a_datasheet_then_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(row for row in hardware.DEVICES.values() if row.kind == "cpu" and row.watts)
    monkeypatch.setattr(energy, "cpu_model", lambda: row.name)
    with EnergyMeter("cpu", powercap=tmp_path) as meter:
        pass
    assert meter.use.joules == pytest.approx((row.watts or 0) * meter.use.seconds)
    assert row.name in meter.use.source and "datasheet" in meter.use.source
    monkeypatch.setattr(energy, "cpu_model", lambda: "an unknown processor")
    with EnergyMeter("cpu", powercap=tmp_path) as meter:
        pass
    assert meter.use.joules is None and meter.use.watts is None
    assert meter.use.source.startswith("unknown")


def test_mistakes() -> None:
    with pytest.raises(NanoinferError, match="above 0"):
        EnergyMeter("cpu", watts=0)
    with pytest.raises(NanoinferError, match="after the 'with'"):
        _ = EnergyMeter("cpu").use


@pytest.mark.gpu
def test_a_gpu_counts_its_own_joules() -> None:
    import torch

    pytest.importorskip("pynvml")
    x = torch.randn(4096, 4096, device="cuda")
    with EnergyMeter("cuda") as meter:
        for _ in range(500):
            x @ x
    assert meter.use.measured and meter.use.joules is not None and meter.use.joules > 1

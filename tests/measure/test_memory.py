from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from nanoinfer.errors import DeviceError, NanoinferError
from nanoinfer.measure import memory

MIB = 1 << 20


def module_bytes(module: nn.Module) -> int:
    return memory.tensors_bytes([*module.parameters(), *module.buffers()])


def test_module_bytes_counts_a_tied_matrix_once() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
    assert module_bytes(model) == 2 * 40 * 4
    model["head"].weight = model["embed"].weight
    assert module_bytes(model) == 40 * 4
    # Tied by storage, two Parameters: still the same bytes.
    model["head"].weight = nn.Parameter(model["embed"].weight.data)
    assert module_bytes(model) == 40 * 4


def test_buffers_and_dtypes_count() -> None:
    norm = nn.BatchNorm1d(8)  # weight, bias, two fp32 statistics, one int64 counter
    assert module_bytes(norm) == 4 * 8 * 4 + 8
    assert module_bytes(norm.to(torch.bfloat16)) == 4 * 8 * 2 + 8


def test_views_and_expansions_count_their_bytes_once() -> None:
    base = torch.zeros(4, 10)
    assert memory.tensors_bytes([base, base[1], base.T, base[:, 3:]]) == 160
    assert memory.tensors_bytes([base[0], base[2]]) == 80
    assert memory.tensors_bytes([base[0, :6], base[0, 4:]]) == 40
    assert memory.tensors_bytes([torch.zeros(5).expand(100, 5)]) == 20
    assert memory.tensors_bytes([torch.zeros(0), torch.zeros(())]) == 4
    assert memory.tensors_bytes([]) == 0


def test_meta_tensors_count_by_shape() -> None:
    with torch.device("meta"):
        layer = nn.Linear(1000, 1000)
    assert module_bytes(layer) == 1_001_000 * 4


@pytest.mark.parametrize("method", ["auto", "sample"])
def test_meter_sees_a_peak_that_is_gone_again(method: Literal["auto", "sample"]) -> None:
    with memory.MemoryMeter(method=method) as meter:
        block = torch.ones(64 * MIB // 4)
        block.sum()
        for _ in range(5):
            block.add_(1)
        del block
    assert 60 * MIB < meter.use.above_start < 90 * MIB
    assert meter.use.end - meter.use.start < 30 * MIB
    assert meter.use.method.startswith("RSS sampled" if method == "sample" else ("VmHWM", "RSS sampled"))


def test_second_region_does_not_inherit_the_first_ones_peak() -> None:
    with memory.MemoryMeter() as first:
        torch.ones(64 * MIB // 4).sum()
    with memory.MemoryMeter() as second:
        torch.ones(8 * MIB // 4).sum()
    assert first.use.above_start > 50 * MIB
    assert second.use.above_start < 30 * MIB


def test_falls_back_where_the_kernel_will_not_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: object, **more: object) -> int:
        raise PermissionError(self)

    monkeypatch.setattr(Path, "write_text", refuse)
    with memory.MemoryMeter() as meter:
        pass
    assert meter.use.method == "RSS sampled every 2 ms"


def test_meters_do_not_nest_and_recover() -> None:
    with memory.MemoryMeter(), pytest.raises(NanoinferError, match="nest"), memory.MemoryMeter():
        pass
    meter = memory.MemoryMeter()
    with pytest.raises(NanoinferError, match="nothing measured yet"):
        _ = meter.use
    with pytest.raises(ZeroDivisionError), meter:
        _ = 1 / 0
    assert meter.use.peak >= meter.use.start


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without CUDA")
def test_no_cuda_is_said() -> None:
    with pytest.raises(DeviceError, match="no CUDA GPU"):
        memory.MemoryMeter("cuda")


@pytest.mark.gpu
def test_cuda_figures() -> None:
    torch.ones(256 * MIB // 4, device="cuda")
    with memory.MemoryMeter("cuda") as meter:
        block = torch.ones(64 * MIB // 4, device="cuda")
        del block
    assert meter.use.above_start == 64 * MIB
    assert meter.use.end == meter.use.start
    assert meter.use.reserved_peak is not None and meter.use.reserved_peak >= meter.use.peak

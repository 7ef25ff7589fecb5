from __future__ import annotations

import os
import warnings

import pytest
import torch

from nanoinfer.errors import DeviceError, NanoinferError
from nanoinfer.measure.profile import profile_phases


def test_phases_and_shares(capfd: pytest.CaptureFixture[str]) -> None:
    x, w = torch.randn(64, 256), torch.randn(256, 256)
    calls: list[str] = []

    def prefill() -> None:
        calls.append("prefill")
        (x @ w).softmax(-1)

    def decode() -> None:
        calls.append("decode")
        for _ in range(3):
            x[:1] @ w

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = profile_phases({"prefill": prefill, "decode": decode}, top=2)
    assert calls == ["prefill", "prefill", "decode", "decode"]  # once to warm up, once profiled
    assert [row.phase for row in rows] == ["prefill"] * 3 + ["decode"] * 3
    for phase in ("prefill", "decode"):
        mine = [row for row in rows if row.phase == phase]
        assert sum(row.share for row in mine) == pytest.approx(1)
        assert mine[0].share >= mine[1].share
        assert mine[-1].operator == "(other)"
    product = next(row for row in rows if row.phase == "decode" and row.operator == "aten::mm")
    assert product.calls == 3
    assert product.self_ms > 0
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")  # nothing may land in a notebook


def test_an_error_in_a_phase_comes_through_and_stderr_survives(capfd: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        profile_phases({"broken": broken}, warmup=0)
    assert profile_phases({"fine": lambda: torch.ones(3) + 1})
    os.write(2, b"still here")
    assert capfd.readouterr().err == "still here"


def test_profile_refuses_what_it_cannot_do() -> None:
    with pytest.raises(NanoinferError, match="top must be"):
        profile_phases({}, top=0)
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="no CUDA GPU"):
            profile_phases({}, "cuda")


@pytest.mark.gpu
def test_profile_on_cuda_shares_add_up() -> None:
    x = torch.randn(1024, 1024, device="cuda")
    rows = profile_phases({"matmul": lambda: x @ x}, "cuda")
    assert rows[0].operator == "aten::mm"
    assert sum(row.share for row in rows) == pytest.approx(1)

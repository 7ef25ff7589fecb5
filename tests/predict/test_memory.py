"""``fit`` against figures worked out by hand."""

from __future__ import annotations

import pytest

from nanoinfer.configs.config import SHAPES
from nanoinfer.theory import arithmetic
from tests.predict.commands import lines, record, run

LLAMA = SHAPES["llama-3.1-8b"]
FIT = ("fit", "llama-3.1-8b", "--gpu", "H100", "--context", "2048")


def test_what_fits_an_h100_by_hand() -> None:
    found, shown = record(*FIT), lines(*FIT)
    room, activations = 72e9 - 2 * 8_030_261_248, arithmetic.activation_bytes(LLAMA, 1, 1, dtype="bfloat16")
    row = 2048 * 131_072 + activations
    most = int(room // row)
    assert (found["max_batch_rows"], found["max_context_tokens"]) == (most, 131_072)
    assert found["kv_blocks"] == int(room // (16 * 131_072)) == 26_674
    used = found["used_per_device_bytes"]
    assert sum(used.values()) == pytest.approx(80e9)
    assert used["weights"] == 2 * 8_030_261_248 and used["kv"] == most * 2048 * 131_072
    assert 0 <= used["free"] < row and used["kept_back"] == pytest.approx(8e9)
    by = {change["change"]: change["max_batch_rows"] for change in found["changes"]}
    assert by["KV cache in 8 bits"] == int(room // (1024 * 131_072 + activations))
    assert by["weights in 8 bits"] == int((room + 8_030_261_248) // row)
    assert by["half the context (1024)"] == int(room // (1024 * 131_072 + activations))
    assert by["twice the devices (--tp 2)"] == record(*FIT, "--tp", "2")["max_batch_rows"]
    assert shown["largest batch at 2,048 tokens a row"] == f"{most:,}" == shown["as asked"]
    assert shown["KV blocks of 16 tokens"] == "26,674" and shown["kept back"] == "8 GB   10.0%"
    assert "55.94 GB are left" in found["why"] and "the model's own context" in found["why"]


def test_a_row_too_long_for_the_memory() -> None:
    args = ("fit", "llama-3.1-8b", "--gpu", "L4", "--context", "131072")
    found = record(*args)
    assert found["max_batch_rows"] == 0 and 0 < found["max_context_tokens"] < 131_072
    assert "limited by memory" in found["why"] and found["used_per_device_bytes"]["kv"] == 0
    assert "not one row of 131,072 tokens fits" in run(*args).stdout

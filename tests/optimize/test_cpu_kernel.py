"""The native step computes what the model computes, to the bit the same whatever the neighbours."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanoinfer.cache.blocks import BlockPool
from nanoinfer.cache.paged import NewTokens, PagedCache
from nanoinfer.configs.config import ModelConfig
from nanoinfer.errors import DeviceError
from nanoinfer.models.gpt2 import GPT2
from nanoinfer.models.llama import Llama
from nanoinfer.models.weights import build
from nanoinfer.optimize import cpu_kernel as kernel
from nanoinfer.optimize.cpu_kernel import DecodeKernel

# Sizes that fill nothing: heads of 24 and 40, widths that are no multiple of 32 or 64, an odd vocabulary.
GPT2_SHAPE = ModelConfig("gpt2", 2, 72, 3, 3, 24, 200, 307, 64)
LLAMA_SHAPE = ModelConfig("llama", 2, 80, 6, 2, 40, 112, 301, 64, tied=False)
SHAPES = {
    "gpt2": GPT2_SHAPE,
    "llama": LLAMA_SHAPE,
    "llama-mha": replace(LLAMA_SHAPE, n_kv_heads=6, tied=True),
    "llama-5-of-80": replace(LLAMA_SHAPE, n_heads=5, n_kv_heads=1, d_head=80),
}
#: What a compiler targets where the processor has none of the wide instructions.
PORTABLE = () if sys.platform == "darwin" else ("-mno-avx512f",) if os.uname().machine == "x86_64" else ()
TARGETS = [
    pytest.param(("-march=native",), id="native"),
    pytest.param(PORTABLE, id="portable", marks=pytest.mark.slow),  # a second build
]
LENGTHS = (1, 3, 7, 8, 9, 15, 16, 17, 31, 40, 5, 2, 12)  # rows enough for every tile: 8 + 4 + 1


def random_model(config: ModelConfig, dtype: torch.dtype) -> GPT2 | Llama:
    model = build(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.copy_(torch.randn(p.shape, generator=generator) * 0.2 + (1.0 if p.dim() == 1 else 0.0))
    return model.to(dtype)


class Bench:
    """Sequences of several lengths in one paged cache, each with its next token to come."""

    def __init__(self, model: GPT2 | Llama, lengths: Sequence[int] = LENGTHS) -> None:
        dtype = next(model.parameters()).dtype
        self.model, self.config = model, model.config
        self.pool = BlockPool(64, 8, share_prefixes=False)
        self.cache = PagedCache(model.config, 64, 8, "cpu", dtype)
        generator = torch.Generator().manual_seed(2)
        self.texts = [torch.randint(model.config.vocab_size, (n + 1,), generator=generator).tolist() for n in lengths]
        self.tables = [self.pool.open([]) for _ in lengths]
        for table, text, n in zip(self.tables, self.texts, lengths, strict=True):
            self.pool.grow(table, n)
            step = self.cache.step([NewTokens(table, n)])
            model.hidden(torch.tensor([text[:n]]), step.positions, step)
            self.pool.commit(table, text, n)
            self.pool.grow(table, 1)

    def rows(self, which: Sequence[int]) -> tuple[list[NewTokens], list[int]]:
        rows = [NewTokens(self.tables[i], 1) for i in which]
        self.cache.step(rows)  # makes begun blocks ready
        return rows, [self.texts[i][-1] for i in which]

    def by_torch(self, which: Sequence[int]) -> Tensor:
        rows, ids = self.rows(which)
        step = self.cache.step(rows)
        return self.model.head(self.model.hidden(torch.tensor([ids]), step.positions, step)[0]).float()


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("flags", TARGETS)
@pytest.mark.parametrize("name", SHAPES)
def test_fp32_equals_the_model(name: str, flags: tuple[str, ...]) -> None:
    bench = Bench(random_model(SHAPES[name], torch.float32))
    step = DecodeKernel(bench.model, flags=flags)
    rows, ids = bench.rows(range(len(LENGTHS)))
    ours = step(bench.cache, rows, ids)
    written = bench.cache.k.clone(), bench.cache.v.clone()
    torch.testing.assert_close(ours, bench.by_torch(range(len(LENGTHS))), atol=2e-4, rtol=2e-4)
    for mine, theirs in zip(written, (bench.cache.k, bench.cache.v), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("flags", TARGETS)
@pytest.mark.parametrize(("weights", "most"), [("bfloat16", 0.03), ("int8", 0.06)])
@pytest.mark.parametrize("name", SHAPES)
def test_fewer_bits_come_close(name: str, weights: kernel.Weights, most: float, flags: tuple[str, ...]) -> None:
    bench = Bench(random_model(SHAPES[name], torch.bfloat16))
    rows, ids = bench.rows(range(len(LENGTHS)))
    ours = DecodeKernel(bench.model, weights, flags=flags)(bench.cache, rows, ids)
    exact = Bench(random_model(SHAPES[name], torch.bfloat16).float())
    right = exact.by_torch(range(len(LENGTHS)))
    assert (ours - right).norm() / right.norm() < most


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_row_does_not_depend_on_its_neighbours_to_the_bit(name: str, weights: kernel.Weights, threads: int) -> None:
    bench = Bench(random_model(SHAPES[name], torch.bfloat16))
    step = DecodeKernel(bench.model, weights, threads)
    solo = torch.cat([step(bench.cache, *bench.rows([i])) for i in range(len(LENGTHS))])
    for which in (range(len(LENGTHS)), [12, 0], [5, 4, 3], [1, 2, 3, 4, 5, 6, 7, 8], [9, *range(6)]):
        assert torch.equal(step(bench.cache, *bench.rows(which)), solo[list(which)])
    one = DecodeKernel(bench.model, weights, 1)
    assert torch.equal(one(bench.cache, *bench.rows([3])), solo[3:4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_several_tokens_of_a_text_at_once_are_the_same_to_the_bit(name: str, dtype: torch.dtype) -> None:
    one_by_one, together = (Bench(random_model(SHAPES[name], dtype), [3, 9]) for _ in range(2))
    step, more, expected = DecodeKernel(one_by_one.model, threads=2), [11, 12, 13, 14, 15, 16], []
    for i, token in enumerate(more):
        rows, _ = one_by_one.rows([1])
        expected.append(step(one_by_one.cache, rows, [token]))
        one_by_one.texts[1].append(0)
        one_by_one.pool.commit(one_by_one.tables[1], one_by_one.texts[1], 1)
        one_by_one.pool.grow(one_by_one.tables[1], 1)
        assert one_by_one.tables[1].length == 10 + i
    together.pool.grow(together.tables[1], len(more) - 1)
    rows = [NewTokens(together.tables[0], 1), NewTokens(together.tables[1], len(more))]
    together.cache.step(rows)
    found = DecodeKernel(together.model, threads=2)(together.cache, rows, [together.texts[0][-1], *more])
    assert torch.equal(found[1:], torch.cat(expected))
    assert torch.equal(found[:1], step(one_by_one.cache, *one_by_one.rows([0])))


def test_many_threads_next_to_pytorch_and_two_kernels_at_once_do_not_hang() -> None:
    bench, other = (Bench(random_model(LLAMA_SHAPE, torch.float32)) for _ in range(2))
    expected = bench.by_torch([0, 1])
    found: list[Tensor] = []

    def work(b: Bench) -> None:
        with torch.inference_mode():
            step = DecodeKernel(b.model, threads=8)
            for _ in range(50):
                logits = step(b.cache, *b.rows([0, 1]))
                torch.randn(256, 256) @ torch.randn(256, 256)
            found.append(logits)

    threads = [threading.Thread(target=work, args=(b,), daemon=True) for b in (bench, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    for logits in found:
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)


def test_packed_bytes_are_the_formula() -> None:
    config = replace(LLAMA_SHAPE, d_model=64, n_heads=4, n_kv_heads=2, d_head=16, d_ff=128, vocab_size=320)
    numbers = 2 * ((64 + 2 * 32) * 64 + 64 * 64 + 3 * 64 * 128) + 320 * 64
    model = random_model(config, torch.bfloat16)
    assert DecodeKernel(model, "bfloat16").nbytes == 2 * numbers
    assert DecodeKernel(model, "int8").nbytes == numbers + 2 * numbers // 32


def compiled(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
    """Stands in for a compiler."""
    Path(command[command.index("-o") + 1]).write_text("built")
    return subprocess.CompletedProcess(command, 0)


def test_it_is_built_once_and_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path))
    commands: list[list[str]] = []

    def counted(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return compiled(command)

    monkeypatch.setattr(kernel.subprocess, "run", counted)
    first = kernel.build(("-O0",))
    assert "building its CPU kernel" in capsys.readouterr().err
    assert kernel.build(("-O0",)) == first and len(commands) == 1
    assert "-O0" in commands[0] and str(kernel.SOURCE) in commands[0]
    assert capsys.readouterr().err == ""
    assert [p.name for p in (tmp_path / "kernels").iterdir()] == [first.name]


def test_no_compiler_and_one_that_fails_are_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path))
    with pytest.raises(DeviceError, match=r"did not build the kernel: .*error"):
        kernel.build(("-fno-such-flag-at-all",))
    monkeypatch.setattr(kernel, "compiler", lambda: None)
    with pytest.raises(DeviceError, match=r"no C\+\+ compiler"):
        kernel.build()


def test_a_dtype_that_it_does_not_take_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"not on cpu in torch\.float16"):
        DecodeKernel(random_model(GPT2_SHAPE, torch.float16))


def test_another_processor_gets_its_own_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel.subprocess, "run", compiled)
    ours = kernel.build()
    monkeypatch.setattr(kernel, "cpu_features", lambda: "a processor without those")
    theirs = kernel.build()
    assert theirs != ours and theirs.exists() and kernel.build() == theirs

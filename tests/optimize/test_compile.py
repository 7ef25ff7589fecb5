"""One compiled layer serves all of them, any number of tokens and every cache; without a compiler layers run as is."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanoinfer.cache.contiguous import ContiguousCache
from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.engines.static import NaiveEngine
from nanoinfer.errors import RequestError
from nanoinfer.models.gpt2 import GPT2
from nanoinfer.models.registry import LoadedModel, load_model
from nanoinfer.optimize import compile as module
from nanoinfer.optimize.compile import CompiledLayer, compile_layers
from nanoinfer.optimize.linear import fuse, pack, share_weights
from nanoinfer.sampling.params import SamplingParams

SAID = "nanoinfer: compiling the model's layers, once, some seconds\n"
SHAPES = [(1, n) for n in range(1, 41)] + [(2, 1), (3, 1), (2, 7), (4, 8), (1, 64), (1, 100)]


def quick(loaded: LoadedModel, packed: bool = True) -> LoadedModel:
    model = share_weights(loaded.model)
    fuse(model)
    if packed:
        pack(model)
    compile_layers(model)
    layers = model.h if isinstance(model, GPT2) else model.layers
    assert all(isinstance(layer, CompiledLayer) for layer in layers)
    return replace(loaded, model=model)


def graphs() -> int:
    """Graphs compiled in this process so far."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def traced_only(patch: pytest.MonkeyPatch) -> None:
    """No code is generated: what is traced runs as it is. The graphs are the same, and it takes a second."""
    patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def logits(loaded: LoadedModel, batch: int, n_new: int) -> Tensor:
    """Logits of a prompt, ``[B, T, V]``, and after them of one more token."""
    config, dtype = loaded.model.config, next(loaded.model.parameters()).dtype
    ids = torch.arange(batch * (n_new + 1)).view(batch, -1) * 37 % config.vocab_size
    positions = torch.arange(n_new + 1).expand_as(ids)
    cache = ContiguousCache(config, batch, n_new + 1, "cpu", dtype)
    with torch.inference_mode():
        parts = [loaded.model(ids[:, s], positions[:, s], cache) for s in (slice(0, n_new), slice(n_new, None))]
        return torch.cat(parts, dim=1).float()


def continuous(loaded: LoadedModel) -> ContinuousEngine:
    return ContinuousEngine(loaded, max_running=6, token_budget=16, cache_tokens=512)


PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [9, 2], [6], [2, 7, 1, 8, 2, 8], [1, 4, 1, 4, 2], [1, 7] * 12]
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)


@pytest.mark.slow
def test_two_graphs_serve_all_layers_any_number_of_tokens_and_both_caches() -> None:
    plain, before = load_model("random:tiny-llama"), graphs()
    ours = quick(plain)
    assert graphs() - before == 2  # many tokens, and one
    for batch, n_new in SHAPES:
        torch.testing.assert_close(logits(ours, batch, n_new), logits(plain, batch, n_new), atol=1e-5, rtol=1e-4)
    expected = NaiveEngine(plain).generate(PROMPTS, GREEDY)
    found = continuous(ours).generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    full = ContiguousCache(plain.model.config, 1, 2, "cpu", torch.float32)
    with torch.inference_mode(), pytest.raises(RequestError, match="KV cache holds 2 tokens"):
        ours.model(torch.ones(1, 3, dtype=torch.int64), torch.arange(3)[None], full)
    torch.testing.assert_close(logits(ours, 2, 3), logits(plain, 2, 3), atol=1e-5, rtol=1e-4)
    assert graphs() - before == 2


@pytest.mark.parametrize(
    ("name", "dtype", "error"),
    [
        ("tiny-gpt2", "float32", 1e-5),
        pytest.param("tiny-gpt2", "bfloat16", 0.01, marks=pytest.mark.slow),
        ("tiny-llama", "bfloat16", 0.01),
    ],
)
def test_other_models_and_dtypes(name: str, dtype: str, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    traced_only(monkeypatch)
    plain, before = load_model(f"random:{name}", dtype=dtype), graphs()
    ours = quick(plain, packed=dtype == "float32")
    assert graphs() - before == 2
    for batch, n_new in SHAPES[::5]:
        expected = logits(plain, batch, n_new)
        assert (logits(ours, batch, n_new) - expected).norm() < error * expected.norm()
    if dtype == "float32":
        tokens = [[c.token_ids for c in continuous(m).generate(PROMPTS, GREEDY)] for m in (plain, ours)]
        assert tokens[0] == tokens[1]
    assert graphs() - before == 2


def test_it_is_said_when_it_compiles_and_not_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(module, "warm_up", lambda model, layer: None)
    for dtype in ("float32", "bfloat16"):
        loaded = load_model("random:tiny-llama", dtype=dtype)
        for said in (SAID, "", ""):
            compile_layers(share_weights(loaded.model))
            assert capsys.readouterr().err == said


UNCOMPILED = """
from nanoinfer.models.registry import load_model
from nanoinfer.optimize.compile import compile_layers
from nanoinfer.optimize.linear import share_weights
loaded = load_model("random:tiny-llama")
for _ in range(2):
    model = share_weights(loaded.model)
    compile_layers(model)
    assert str(model) == str(loaded.model)
"""


def test_a_compiler_that_fails_leaves_the_model_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("\nno such compiler\nand a traceback")

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(module, "warm_up", fail)
    loaded = load_model("random:tiny-llama")
    for _ in range(2):
        model = share_weights(loaded.model)
        compile_layers(model)
        assert str(model) == str(loaded.model)
    failed = "nanoinfer: layers run uncompiled, the compiler failed: no such compiler\n"
    assert capsys.readouterr().err == SAID + failed + SAID


@pytest.mark.slow
def test_without_a_compiler_layers_run_uncompiled_and_one_line_says_so(tmp_path: Path) -> None:
    env = {**os.environ, "CXX": str(tmp_path / "no-such-compiler"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", UNCOMPILED], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line + "\n" != SAID]
    assert len(lines) == 1
    assert lines[0].startswith("nanoinfer: layers run uncompiled, the compiler failed: ")
    assert "no-such-compiler" in lines[0]

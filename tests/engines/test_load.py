"""``auto`` takes what a trial finds quickest, says so, and remembers it."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoinfer.engines import load as loading
from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.engines.load import load
from nanoinfer.models.registry import LoadedModel, load_model
from nanoinfer.optimize.options import Optimizations


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path))


@pytest.mark.parametrize("best", ["plain", "packed"])
def test_the_quickest_is_taken_said_and_remembered(
    best: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = []

    def trial(loaded: LoadedModel) -> dict[str, float]:
        trials.append(loaded.name)
        return {"plain": 0.2, "packed": 0.1 if best == "packed" else 0.3}

    monkeypatch.setattr(loading, "trial", trial)
    loaded = load_model("random:tiny-llama")
    for _ in range(2):
        engine = load(loaded, "auto", max_running=3)
        assert isinstance(engine, ContinuousEngine)
        assert (engine.model is not loaded.model) == (best == "packed")
        assert engine.scheduler.max_running == 3
    assert trials == ["random:tiny-llama"]
    assert f"packed {'0.10' if best == 'packed' else '0.30'} s: taking '{best}'" in capsys.readouterr().err
    load(load_model("random:tiny-llama", seed=1), "auto")
    assert len(trials) == 2  # other weights are another model


def test_a_speed_that_is_given_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "trial", lambda loaded: pytest.fail("tried"))
    engine = load("random:tiny-llama", "auto", speed=Optimizations())
    assert isinstance(engine, ContinuousEngine) and engine.kernel is None


def test_a_damaged_memory_means_a_new_trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loading, "trial", lambda loaded: {"plain": 1.0, "kernel": 2.0})
    load("random:tiny-llama", "auto")
    (kept,) = (tmp_path / "auto").iterdir()
    for text in ("{", "[]", '{"kernel": true, "weights": "int3"}', '{"wings": 2}'):
        kept.write_text(text)
        engine = load("random:tiny-llama", "auto")
        assert isinstance(engine, ContinuousEngine) and engine.kernel is None


def test_without_a_compiler_it_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    from nanoinfer.optimize import cpu_kernel as kernel

    monkeypatch.setattr(kernel, "compiler", lambda: None)
    found = loading.trial(load_model("random:tiny-gpt2"))
    assert found.keys() == {"plain", "packed"} and min(found.values()) > 0


def test_what_does_not_fit_in_memory_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model("random:tiny-gpt2")
    nbytes = sum(p.nbytes for p in loaded.model.parameters())

    class Memory:
        available = 3 * nbytes  # half of it holds one more copy of the weights, and not two

    monkeypatch.setattr(loading.psutil, "virtual_memory", lambda: Memory)
    tried = {name for name, speed in loading.candidates(loaded).items() if loading.has_memory(loaded, speed)}
    assert tried == {"plain", "packed", "kernel"}

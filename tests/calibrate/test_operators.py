"""Operators are timed for what they are, kept, and timed again when the file is damaged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanoinfer.cache.ragged import RaggedSdpa
from nanoinfer.calibrate import machine, operators
from nanoinfer.calibrate.operators import measure_operators, this_machine
from nanoinfer.models.attention import attend
from nanoinfer.models.registry import load_model
from nanoinfer.theory.arithmetic import head_matrix, layer_matrices
from nanoinfer.theory.roofline import decode_step, prefill_step


@pytest.mark.parametrize("name", ["random:tiny-gpt2", "random:tiny-llama"])
def test_every_product_of_the_table_has_its_curve(name: str) -> None:
    loaded = load_model(name)
    config = loaded.model.config
    curves = measure_operators(loaded, repeats=1)
    assert set(curves.products) == {m.name for m in (*layer_matrices(config, 0), head_matrix(config))}
    assert all(curve.sizes == operators.ROWS for curve in curves.products.values())
    assert set(curves.decode_attention) == set(operators.BATCHES)
    assert curves.paged_attention.keys() == curves.decode_attention.keys()
    assert max(curves.decode_attention[1].sizes) == config.context


@pytest.mark.parametrize(("context", "points"), [(64, (16, 64)), (2048, (16, 256, 2048)), (4096, (16, 256, 2048))])
def test_attention_is_timed_up_to_the_whole_context(
    context: int, points: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model("random:tiny-llama")
    timings = operators._Timings(loaded, 1)
    timings.config = replace(loaded.model.config, context=context)
    monkeypatch.setattr(operators, "BATCHES", (1,))
    for curves in timings.decode_attention():
        assert curves[1].sizes == points


def test_the_paged_timing_computes_the_same_attention() -> None:
    loaded = load_model("random:tiny-llama")
    config = loaded.model.config
    k, v, rows = operators._blocks(*operators._Timings(loaded, 1).cached(3, 32))
    q = torch.randn(3, config.n_heads, 1, config.d_head)
    new = torch.zeros(3, config.n_kv_heads, config.d_head)
    ragged = RaggedSdpa(rows, k)(q[:, :, 0], new, new, k[0], v[0]).flatten(1)
    for row, (blocks, start, n) in enumerate(rows):  # the blocks are shuffled: put each row's together again
        own = [x[0, blocks].flatten(0, 1)[: start + n].transpose(0, 1)[None] for x in (k, v)]
        torch.testing.assert_close(ragged[row : row + 1], attend(q[row : row + 1], *own)[:, 0])
    assert [start + n for _, start, n in rows] == [16, 32, 48]


def test_what_the_engines_own_steps_add_is_timed() -> None:
    loaded = load_model("random:tiny-llama")
    curves = measure_operators(loaded, repeats=3)
    # Scheduling, the paged cache and the choice of a token cost something in every layer's share.
    assert min(curves.paged_rest.seconds + curves.paged_rest_prefill.seconds) > 1e-6


def test_timings_are_kept_and_damage_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path))
    loaded = load_model("random:tiny-llama")
    calls = []

    def counted(*args: object, **more: object) -> object:
        calls.append(args)
        return measure_operators(loaded, repeats=1)

    monkeypatch.setattr(operators, "measure_operators", counted)
    monkeypatch.setattr(machine, "schedstat", lambda: None)  # as on a system without it
    monkeypatch.setattr(operators, "_hold", lambda *_: True)
    first, again = this_machine(loaded), this_machine(loaded)
    assert first == again and len(calls) == 1
    assert this_machine(loaded, fresh=True).curves is not None and len(calls) == 2
    (kept,) = (tmp_path / "operators").iterdir()
    kept.write_text("{")
    this_machine(loaded)
    assert len(calls) == 3
    config = loaded.model.config
    assert prefill_step(config, first, 1, 64).seconds > 0 < decode_step(config, first, 1, 64).seconds
    assert first.peak > 0 < first.bandwidth


def test_timings_that_no_longer_hold_are_taken_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path))
    monkeypatch.setattr(machine, "schedstat", lambda: None)
    loaded, calls = load_model("random:tiny-llama"), []
    curves = measure_operators(loaded, repeats=1)
    monkeypatch.setattr(operators, "measure_operators", lambda *_: calls.append(1) or curves)
    then, now = {1: curves.rest, 64: curves.rest_prefill}, {"factor": 1.0}

    def layer_now(timings: object, batch: int, new: int, context: int) -> float:
        products = sum(curve.at(new) for name, curve in curves.products.items() if name != "lm_head")
        return now["factor"] * (products + curves.attention(batch, new, context) + then[new].at(new))

    monkeypatch.setattr(operators._Timings, "layer", layer_now)
    for now["factor"], expected in ((1.0, 1), (1.1, 1), (1.3, 2), (0.7, 3)):
        this_machine(loaded)
        assert len(calls) == expected


def test_timings_that_other_work_held_up_are_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path))
    readings = iter([(0, 0), (80, 20)])
    monkeypatch.setattr(machine, "schedstat", lambda: next(readings))
    assert this_machine(load_model("random:tiny-gpt2")).curves is not None
    assert not (tmp_path / "operators").exists()


def test_a_disk_that_refuses_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path / "file"))
    assert this_machine(load_model("random:tiny-gpt2")).curves is not None

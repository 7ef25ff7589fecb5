"""From one device to a thousand: what each way gives, and where it stops paying."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nanoinfer.configs.catalog import MODELS
from nanoinfer.configs.config import SHAPES
from nanoinfer.configs.huggingface import from_hf
from nanoinfer.errors import RequestError
from nanoinfer.theory import roofline
from nanoinfer.theory.communication import Network
from nanoinfer.theory.parallel import DOUBLINGS, ParallelConfig, decode_step, scale
from nanoinfer.theory.roofline import Machine

LLAMA = SHAPES["llama-3.1-8b"]
BIG = replace(from_hf(MODELS["Llama-3-70B"][0], "Llama-3-70B"), context=131_072)
DEEPSEEK = from_hf(MODELS["DeepSeek-V3"][0], "DeepSeek-V3")
H100 = replace(Machine.datasheet("H100"), network=Network(450e9, across=50e9))


@pytest.mark.parametrize("way", ["tp", "pp", "cp", "replicas"])
def test_the_first_point_is_one_device(way: str) -> None:
    found = scale(LLAMA, H100, 80e9, way, batch=16, context=1024)
    first = found.points[0]
    step = roofline.decode_step(LLAMA, H100, 16, 1024)
    assert first.split == ParallelConfig() and first.fits and first.efficiency == 1 and first.link_share == 0
    assert first.decode_s == step.seconds and first.tokens_per_s == 16 / step.seconds
    assert first.prefill_s == roofline.prefill_step(LLAMA, H100, 1, 1024).seconds


def test_replicas_give_more_of_the_same() -> None:
    found = scale(LLAMA, H100, 80e9, "replicas", batch=16)
    assert [point.split.devices for point in found.points] == list(DOUBLINGS)
    assert all(point.decode_s == found.points[0].decode_s and point.efficiency == 1 for point in found.points)
    assert found.points[-1].tokens_per_s == pytest.approx(1024 * found.points[0].tokens_per_s)
    assert found.best_latency().split.devices == 1 and found.last_that_pays.split.devices == 1024


def test_tensor_parallel_ends_with_the_server_and_the_heads() -> None:
    found = scale(BIG, H100, 80e9, "tp", batch=32, context=2048)
    by = {point.split.tp: point for point in found.points}
    assert list(by) == [1, 2, 4, 8, 16, 32, 64] and found.ends.startswith("tp 128 does not divide 64 query heads")
    assert [point.fits for point in found.points] == [False, False, True, True, True, True, True]
    assert (
        by[4].efficiency == 1
        and by[8].tokens_per_s == 32 / decode_step(BIG, H100, ParallelConfig(tp=8), 32, 2048).seconds
    )
    # Beyond a server of eight the slow link eats what more devices bring.
    assert by[8].efficiency > 0.8 and by[16].efficiency < 0.5 and found.last_that_pays.split.tp == 8
    assert found.best_latency().split.tp == 16 and by[32].decode_s > by[16].decode_s
    assert by[32].link_share > 0.5


def test_stages_do_not_make_a_token_come_sooner() -> None:
    found = scale(LLAMA, H100, 80e9, "pp", batch=1)
    assert found.best_latency().split.pp == 1 and found.best_latency("prefill").split.pp == 1
    assert [point.split.pp for point in found.points] == [1, 2, 4, 8, 16, 32]
    assert "64 stages need a layer each" in found.ends
    assert found.last_that_pays.split.pp == 1  # half is lost at once: a single row is in one stage at a time


def test_context_parallel_shortens_a_long_prompt() -> None:
    found = scale(LLAMA, H100, 80e9, "cp", batch=1, context=65_536)
    assert found.best_latency("prefill").split.cp >= 16
    first = [point.prefill_s for point in found.points]
    assert first[0] / first[3] == pytest.approx(8, rel=0.01)  # eight in one server, the ring hidden


def test_experts_need_many_devices() -> None:
    found = scale(DEEPSEEK, H100, 80e9, "ep", batch=64, context=4096)
    fitting = [point.split.ep for point in found.points if point.fits]
    assert fitting[0] > 16 and found.points[-1].split.ep == 256
    assert found.best_latency().split.ep >= fitting[0]
    with pytest.raises(RequestError, match="ep 2 spreads experts and this model has none"):
        scale(LLAMA, H100, 80e9, "ep")

"""Steps of unlike rows: those of the roofline where rows are alike, and the cheap form equal to the full one."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoinfer.configs.catalog import MODELS
from nanoinfer.configs.config import SHAPES, ModelConfig
from nanoinfer.configs.huggingface import from_hf
from nanoinfer.errors import RequestError
from nanoinfer.theory.curves import Curve, OperatorCurves
from nanoinfer.theory.roofline import Machine, StepTimes, decode_step, mixed_step, prefill_step
from tests.examples import examples

H100 = Machine.datasheet("H100", "bfloat16")
EAGER = Machine.datasheet("A100", "bfloat16", launch_s=4e-6)


def named(name: str) -> ModelConfig:
    return from_hf(MODELS[name][0], name)


#: Dense, windows in some layers, experts with a latent cache, experts beside windows.
CONFIGS = {
    "llama": SHAPES["llama-3.1-8b"],
    "gpt2": SHAPES["gpt2"],
    "windows": named("gemma-3-1b"),
    "window": named("Mistral-7B-v0.1"),
    "mla": named("DeepSeek-V3"),
}


def timed() -> Machine:
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
    measured = OperatorCurves(
        products={name: Curve((1, 4), (1e-3, 2e-3)) for name in names},
        decode_attention={1: Curve((16, 64), (1e-4, 4e-4)), 4: Curve((16, 64), (4e-4, 16e-4))},
        paged_attention={1: Curve((16, 64), (2e-4, 8e-4)), 4: Curve((16, 64), (8e-4, 32e-4))},
        prefill_attention=Curve((16, 64), (5e-4, 3e-3)),
        rest=Curve((1, 8), (1e-5, 2e-5)),
        rest_prefill=Curve((16,), (3e-5,)),
        paged_rest=Curve((1, 8), (1e-5, 2e-5)),
        paged_rest_prefill=Curve((16,), (3e-5,)),
    )
    return Machine("here", "float32", 1e11, 1e10, curves=measured)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("context", [64, 900, 3000])
@pytest.mark.parametrize("name", ["llama", "windows", "window", "mla"])
def test_like_rows_decode_as_the_roofline_says(name: str, context: int, tp: int) -> None:
    if name == "windows":
        tp = 1  # four heads and one KV head: the same test once more
    config = CONFIGS[name]
    mixed = mixed_step(config, H100, [(context - 1, 1)] * 8, 8, tp)
    assert mixed.seconds == pytest.approx(decode_step(config, H100, 8, context, tp).seconds, rel=1e-9)
    assert mixed.nbytes == pytest.approx(decode_step(config, H100, 8, context, tp).nbytes, rel=1e-9)


@pytest.mark.parametrize("name", ["llama", "windows", "gpt2"])
def test_a_prompt_prefills_as_the_roofline_says(name: str) -> None:
    config = CONFIGS[name]
    mixed, alone = mixed_step(config, H100, [(0, 1000)], 1), prefill_step(config, H100, 1, 1000)
    assert mixed.seconds == pytest.approx(alone.seconds, rel=0.01)
    assert mixed.flops == pytest.approx(alone.flops, rel=0.01)


def test_attention_by_hand() -> None:
    # Mistral's 32 layers see 4,096 tokens. A chunk of 3 behind 4,094: its tokens see 4,095, 4,096 and 4,096.
    (attention,) = (
        op for op in mixed_step(CONFIGS["window"], H100, [(4094, 3)], 0).operators if op.name == "attention"
    )
    assert attention.flops == 4 * 32 * 128 * 32 * (4095 + 4096 + 4096)
    assert attention.nbytes == pytest.approx(32 * 4096 * 2 * 8 * 128 * 2)
    # Rows of unlike lengths each bring their own: 10 and 20 tokens are not 30 of one text in a window of 16.
    (two,) = (op for op in mixed_step(CONFIGS["llama"], H100, [(9, 1), (19, 1)], 2).operators if op.name == "attention")
    assert two.nbytes == pytest.approx(32 * 30 * 2 * 8 * 128 * 2)


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("machine", [H100, EAGER], ids=["h100", "eager"])
def test_the_cheap_form_is_the_full_one(name: str, machine: Machine, tp: int) -> None:
    config = CONFIGS[name]
    times = StepTimes(config, machine, tp)
    for rows, ends in (
        ([(0, 100)], 0),
        ([(0, 100)], 1),
        ([(17, 1)] * 3 + [(64, 30), (0, 5)], 4),
        ([(40, 1), (700, 1), (3, 1)], 3),
    ):
        assert times.seconds(rows, ends) == pytest.approx(
            mixed_step(config, machine, rows, ends, tp).seconds, rel=1e-12
        )
        assert times.seconds(rows, ends) == times.seconds(rows, ends)


def test_the_cheap_form_of_timed_operators() -> None:
    config, machine = SHAPES["smollm2-135m"], timed()
    for rows, ends in (([(15, 1)] * 4, 4), ([(15, 1), (16, 16)], 1), ([(0, 16)], 0)):
        full = mixed_step(config, machine, rows, ends)
        assert StepTimes(config, machine).seconds(rows, ends) == pytest.approx(full.seconds, rel=1e-12)


@examples(40)
@given(st.sampled_from(sorted(CONFIGS)), st.lists(st.integers(0, 5000), min_size=1, max_size=6))
def test_decode_steps_on_end_are_the_steps_one_by_one(name: str, held: list[int]) -> None:
    times = StepTimes(CONFIGS[name], H100)
    on_end = list(islice(times.decoding([old + 1 for old in held]), 5))
    assert on_end == [times.seconds([(old + step, 1) for old in held], len(held)) for step in range(5)]


def test_timed_decode_steps_on_end() -> None:
    times = StepTimes(SHAPES["smollm2-135m"], timed())
    on_end = list(islice(times.decoding([16, 33]), 4))
    assert on_end == [times.seconds([(15 + step, 1), (32 + step, 1)], 2) for step in range(4)]
    assert on_end == sorted(on_end) and on_end[0] < on_end[-1]


def test_what_cannot_be_shared_is_refused_at_once() -> None:
    with pytest.raises(RequestError, match="tp 3 does not divide"):
        StepTimes(SHAPES["llama-3.1-8b"], H100, 3)
    with pytest.raises(RequestError, match="no link"):
        StepTimes(SHAPES["llama-3.1-8b"], Machine("here", "bfloat16", 1e11, 1e10), 2)
    with pytest.raises(RequestError, match="tokens must be at least 1"):
        mixed_step(SHAPES["gpt2"], H100, [], 0)

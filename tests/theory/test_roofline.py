"""The step-time model against formulas worked out by hand; mixed steps, and the cheap form equal to the full one."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoinfer.configs.catalog import MODELS
from nanoinfer.configs.config import SHAPES, ModelConfig
from nanoinfer.configs.huggingface import from_hf
from nanoinfer.errors import DeviceError, RequestError
from nanoinfer.theory import arithmetic
from nanoinfer.theory.curves import Curve, OperatorCurves
from nanoinfer.theory.roofline import (
    Machine,
    Step,
    StepTimes,
    batched_seconds,
    cached_seconds,
    decode_step,
    mixed_step,
    naive_seconds,
    prefill_step,
)
from tests.examples import examples

LLAMA, XL, SMOL = SHAPES["llama-3.1-8b"], SHAPES["gpt2-xl"], SHAPES["smollm2-135m"]
H100 = Machine.datasheet("H100", "bfloat16")


def operator(step: Step, name: str) -> float:
    return next(op.seconds for op in step.operators if op.name == name)


def test_ridge_is_the_dense_one() -> None:
    assert round(H100.ridge) == 295
    assert H100.peak == 989e12 and H100.bandwidth == 3.35e12


def test_one_row_of_decode_reads_the_weights_once() -> None:
    step = decode_step(LLAMA, H100, batch=1, context=128)
    floor = 2 * arithmetic.active_parameters(LLAMA) / 3.35e12
    assert floor < step.seconds < 1.05 * floor
    assert step.bound == "memory"


def test_a_long_prefill_is_bound_by_arithmetic() -> None:
    step = prefill_step(LLAMA, H100, batch=4, tokens=2048)
    assert step.bound == "compute"
    assert step.flops == pytest.approx(4 * arithmetic.prefill_flops(LLAMA, 2048), rel=1e-4)  # norms are no products
    assert step.seconds > step.flops / H100.peak


def test_the_batch_where_a_product_turns_from_memory_to_arithmetic() -> None:
    """Crossover near the ridge: 295 rows for bf16, whose intensity is one FLOP per byte and row."""
    bounds = [
        op.bound for rows in (200, 500) for op in decode_step(LLAMA, H100, rows, 8).operators if op.name == "gate_proj"
    ]
    assert bounds == ["memory", "compute"]


def test_launches_add_up() -> None:
    eager, slow = (Machine.datasheet("H100", "bfloat16", launch_s=s) for s in (4e-6, 8e-6))
    steps = [decode_step(SMOL, machine, 1, 64) for machine in (eager, slow)]
    calls = sum(op.calls for op in steps[0].operators)
    assert calls == 30 * (7 + 1 + 44) + 1  # products, attention and small operators of 30 layers, and the head
    assert steps[1].seconds - steps[0].seconds == pytest.approx(4e-6 * calls, rel=1e-6)
    assert decode_step(SMOL, eager, 1, 64).bound == "launch"


def test_tensor_parallel_divides_weights_and_adds_all_reduces() -> None:
    one, four = (decode_step(LLAMA, H100, 1, 128, tp=tp) for tp in (1, 4))
    assert operator(four, "gate_proj") == pytest.approx(operator(one, "gate_proj") / 4, rel=0.01)
    # Two all-reduces in each of 32 layers and one after the embedding, 8 us each; a ring's bytes over 450 GB/s.
    moved = 65 * 2 * 3 / 4 * LLAMA.d_model * 2
    assert operator(four, "all-reduce") == pytest.approx(65 * 8e-6 + moved / 450e9)
    assert operator(four, "all-gather") == pytest.approx(8e-6 + 3 * 128_256 / 4 * 2 / 450e9)
    assert four.sent == pytest.approx(moved + 3 * 128_256 / 4 * 2) and one.sent == 0


def test_a_kv_head_is_copied_not_divided() -> None:
    with pytest.raises(RequestError, match="tp 3 does not divide"):
        decode_step(LLAMA, H100, 1, 128, tp=3)
    eight, sixteen = (decode_step(LLAMA, H100, 8, 4096, tp=tp) for tp in (8, 16))
    kv = [next(op.nbytes for op in step.operators if op.name == "attention") for step in (eight, sixteen)]
    assert kv[0] == kv[1]


def test_measured_rates_take_the_place_of_the_datasheet() -> None:
    machine = Machine("here", "float32", 1e11, 1e10, 0.0, 0.0, linear=((1, 5e9), (100, 5e10)))
    assert machine.linear_rate(1) == 5e9
    assert machine.linear_rate(10) == pytest.approx((5e9 * 5e10) ** 0.5)
    assert machine.linear_rate(5000) == 5e10
    q = 2 * SMOL.n_layers * SMOL.d_model**2 / 5e9
    assert operator(decode_step(SMOL, machine, 1, 8), "q_proj") == pytest.approx(q)


def test_engines_are_sums_of_steps() -> None:
    naive, cached = naive_seconds(XL, H100, 1, 32, 4), cached_seconds(XL, H100, 1, 32, 4)
    assert naive[0] == cached[0] == prefill_step(XL, H100, 1, 32).seconds
    assert naive[3] == prefill_step(XL, H100, 1, 35).seconds
    assert cached[3] == decode_step(XL, H100, 1, 35).seconds
    assert sum(naive) > sum(cached)


@given(batch=st.integers(1, 64), context=st.integers(1, 1000))
def test_more_rows_and_more_context_never_take_less(batch: int, context: int) -> None:
    base = decode_step(XL, H100, batch, context).seconds
    assert decode_step(XL, H100, batch + 1, context).seconds >= base
    assert decode_step(XL, H100, batch, context + 1).seconds >= base
    assert prefill_step(XL, H100, batch, context + 1).seconds >= prefill_step(XL, H100, batch, context).seconds


def test_errors_name_the_thing() -> None:
    with pytest.raises(RequestError, match="context 1025 is beyond the model's 1024"):
        decode_step(XL, H100, 1, 1025)
    with pytest.raises(RequestError, match="batch must be at least 1, got 0"):
        decode_step(XL, H100, 0, 5)
    with pytest.raises(DeviceError, match="fp8"):
        Machine.datasheet("T4", "fp8")
    with pytest.raises(DeviceError, match="did you mean 'h100'"):
        Machine.datasheet("H10")


class TestStaticBatches:
    """Padded to the longest prompt, as long as the longest answer, one batch after the other."""

    def test_each_batch_is_a_prefill_and_steps_until_its_longest_row_ends(self) -> None:
        first = prefill_step(XL, H100, 2, 30).seconds + sum(decode_step(XL, H100, 2, 30 + i).seconds for i in (1, 2, 3))
        second = prefill_step(XL, H100, 1, 5).seconds + decode_step(XL, H100, 1, 6).seconds
        assert batched_seconds(XL, H100, [10, 30, 5], [4, 1, 2], 2) == pytest.approx([first, second], rel=1e-12)

    def test_one_row_at_a_time_is_the_cached_engine(self) -> None:
        alone = [sum(cached_seconds(XL, H100, 1, prompt, new)) for prompt, new in ((10, 4), (30, 2))]
        assert batched_seconds(XL, H100, [10, 30], [4, 2], 1) == alone

    def test_a_batch_larger_than_the_requests_and_requests_without_output(self) -> None:
        assert batched_seconds(XL, H100, [10, 900], [4, 0], 32) == [sum(cached_seconds(XL, H100, 1, 10, 4))]
        assert batched_seconds(XL, H100, [], [], 32) == []
        assert batched_seconds(XL, H100, [7], [0], 32) == []

    def test_padded_rows_may_be_wider_than_the_context(self) -> None:
        (together,) = batched_seconds(XL, H100, [1000, 4], [24, 900], 2)
        assert together > max(batched_seconds(XL, H100, [1000, 4], [24, 900], 1))
        with pytest.raises(RequestError, match="1000 prompt and 25 output tokens are beyond the model's 1024"):
            batched_seconds(XL, H100, [1000], [25], 2)

    def test_errors_name_the_thing(self) -> None:
        with pytest.raises(RequestError, match="2 prompt lengths but 1 output lengths"):
            batched_seconds(XL, H100, [1, 2], [3], 2)
        with pytest.raises(RequestError, match="batch_size must be at least 1, got 0"):
            batched_seconds(XL, H100, [1], [3], 0)
        with pytest.raises(RequestError, match="prompt must be at least 1, got 0"):
            batched_seconds(XL, H100, [0], [3], 2)


# --- mixed steps ------------------------------------------------------------------------

EAGER = Machine.datasheet("A100", "bfloat16", launch_s=4e-6)


def named(name: str) -> ModelConfig:
    return from_hf(MODELS[name][0], name)


#: Dense, windows in some layers, experts with a latent cache, experts with windows.
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
def test_like_rows_decode_as_a_uniform_step(name: str, context: int, tp: int) -> None:
    if name == "windows":
        tp = 1  # four heads and one KV head: the same test once more
    config = CONFIGS[name]
    mixed = mixed_step(config, H100, [(context - 1, 1)] * 8, 8, tp)
    assert mixed.seconds == pytest.approx(decode_step(config, H100, 8, context, tp).seconds, rel=1e-9)
    assert mixed.nbytes == pytest.approx(decode_step(config, H100, 8, context, tp).nbytes, rel=1e-9)


@pytest.mark.parametrize("name", ["llama", "windows", "gpt2"])
def test_a_prompt_prefills_as_a_uniform_step(name: str) -> None:
    config = CONFIGS[name]
    mixed, alone = mixed_step(config, H100, [(0, 1000)], 1), prefill_step(config, H100, 1, 1000)
    assert mixed.seconds == pytest.approx(alone.seconds, rel=0.01)
    assert mixed.flops == pytest.approx(alone.flops, rel=0.01)


def test_attention_by_hand() -> None:
    # Mistral's 32 layers see 4,096 tokens. A chunk of 3 after 4,094: its tokens see 4,095, 4,096 and 4,096.
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

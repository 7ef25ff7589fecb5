"""Steps of split models: one device is the roofline's, ideal links give the ideal split, the rest by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoinfer.configs.catalog import MODELS
from nanoinfer.configs.config import SHAPES
from nanoinfer.configs.huggingface import from_hf
from nanoinfer.errors import RequestError
from nanoinfer.theory import arithmetic, capacity, roofline
from nanoinfer.theory.communication import Network, bubble, partition
from nanoinfer.theory.parallel import (
    ParallelConfig,
    decode_step,
    largest_batch,
    layers_of,
    memory,
    prefill_step,
    stage_weight_bytes,
    stages,
)
from nanoinfer.theory.roofline import Machine, Step
from tests.examples import examples

LLAMA, SMOL, GPT2 = SHAPES["llama-3.1-8b"], SHAPES["smollm2-135m"], SHAPES["gpt2"]
MIXTRAL = replace(from_hf(MODELS["Mixtral-8x7B"][0], "Mixtral-8x7B"), context=32_768)
DEEPSEEK = from_hf(MODELS["DeepSeek-V3"][0], "DeepSeek-V3")
GEMMA = from_hf(MODELS["gemma-3-1b"][0], "gemma-3-1b")
H100 = replace(Machine.datasheet("H100"), network=Network(450e9, across=50e9))
IDEAL = replace(H100, network=Network(math.inf, 0.0, math.inf, 0.0))
#: Next to no head, so that stages are equal.
EVEN = replace(LLAMA, vocab_size=1)


def seconds(step: Step, *bounds: str) -> float:
    return sum(op.seconds for op in step.operators if op.bound in bounds)


def operator(step: Step, name: str) -> Any:
    return next(op for op in step.operators if op.name == name)


@pytest.mark.parametrize("config", [LLAMA, GPT2, MIXTRAL], ids=["llama", "gpt2", "mixtral"])
def test_one_device_is_the_roofline_itself(config: Any) -> None:
    for split in (ParallelConfig(), ParallelConfig(replicas=7)):
        assert decode_step(config, H100, split, 5, 900) == roofline.decode_step(config, H100, 5, 900)
        assert prefill_step(config, H100, split, 5, 900) == roofline.prefill_step(config, H100, 5, 900)
    four = ParallelConfig(tp=4)
    assert decode_step(config, H100, four, 5, 900) == roofline.decode_step(config, H100, 5, 900, 4)


class TestPipeline:
    def test_a_single_stream_is_no_faster(self) -> None:
        """Ideal links: one row passes all stages one after the other, in the time of one device."""
        for pp in (2, 4, 7):
            alone = roofline.decode_step(LLAMA, IDEAL, 1, 900).seconds
            assert decode_step(LLAMA, IDEAL, ParallelConfig(pp=pp), 1, 900).seconds == pytest.approx(alone, rel=1e-12)

    @pytest.mark.parametrize(("p", "m"), [(2, 1), (4, 1), (4, 4), (4, 16), (8, 2)])
    def test_the_bubble(self, p: int, m: int) -> None:
        """Equal stages wait ``(p-1) / (m+p-1)`` of a prefill, whose rows are all waited for."""
        prefill = prefill_step(EVEN, IDEAL, ParallelConfig(pp=p), 16, 512, micro_batches=m)
        assert prefill.share("idle") == pytest.approx(bubble(p, m), rel=1e-3)

    def test_steady_decode_needs_as_many_micro_batches_as_stages(self) -> None:
        waits = [
            seconds(step, "idle") / step.seconds
            for step in (decode_step(EVEN, IDEAL, ParallelConfig(pp=4), 16, 512, micro_batches=m) for m in (1, 2, 4, 8))
        ]
        assert waits == pytest.approx([3 / 4, 2 / 4, 0, 0], abs=1e-3)
        assert (
            decode_step(EVEN, IDEAL, ParallelConfig(pp=4), 16, 512).operators[-1].calls == 4
        )  # taken where none are given

    def test_hops_by_hand(self) -> None:
        # One row, four stages in one server: three hops of 8,192 B, and the id back.
        step = decode_step(LLAMA, H100, ParallelConfig(pp=4), 1, 900)
        hop = 8e-6 + 8192 / 450e9
        ids = 8e-6 + 8 / 450e9
        alone = roofline.decode_step(LLAMA, H100, 1, 900).seconds
        assert step.seconds == pytest.approx(alone + 3 * hop + ids, rel=1e-9)
        assert operator(step, "send").nbytes == 8192
        # Of sixteen stages the eighth hop leaves the server.
        more = decode_step(LLAMA, H100, ParallelConfig(pp=16), 1, 900)
        far, back = 10e-6 + 8192 / 50e9, 18e-6 + 8 * (14 / 15 / 450e9 + 1 / 15 / 50e9)
        assert more.seconds == pytest.approx(alone + 14 * hop + far + back, rel=1e-9)

    def test_stages_hold_all_layers_once_and_a_tied_table_twice(self) -> None:
        assert [len(part) for part in stages(30, 4)] == [8, 8, 7, 7]
        for config, twice in ((LLAMA, 0), (SMOL, 49_152 * 576 * 2), (DEEPSEEK, 0), (GEMMA, 262_144 * 1152 * 2)):
            whole = arithmetic.weight_bytes(config, "bfloat16")
            for pp in (2, 3, 5):
                parts = [stage_weight_bytes(config, part, "bfloat16") for part in stages(config.n_layers, pp)]
                assert sum(parts) == whole + twice
            assert stage_weight_bytes(config, range(config.n_layers), "bfloat16") == whole

    def test_things_are_cut_evenly_and_in_order(self) -> None:
        assert partition(5, 2) == (range(3), range(3, 5))
        assert partition(5, 4) == (range(2), range(2, 3), range(3, 4), range(4, 5))
        assert partition(2, 3) == (range(1), range(1, 2), range(2, 2))

    def test_windows_and_experts_stay_where_they_are(self) -> None:
        part = layers_of(GEMMA, range(4, 13))  # full attention in the layers 5, 11, 17, 23
        assert [part.window_of(i) is None for i in range(9)] == [GEMMA.window_of(4 + i) is None for i in range(9)]
        assert [layers_of(DEEPSEEK, range(1, 5)).has_experts(i) for i in range(4)] == [False, False, True, True]

    def test_operators_add_up_to_the_model(self) -> None:
        """FLOPs of all stages are those of one device: what is taken from one layer is given to another."""
        whole = roofline.decode_step(DEEPSEEK, H100, 4, 64)
        parts = [layers_of(DEEPSEEK, part) for part in stages(61, 3)]
        heads = 2 * operator(whole, "lm_head").flops
        assert sum(roofline.decode_step(part, H100, 4, 64).flops for part in parts) == pytest.approx(
            whole.flops + heads, rel=1e-9
        )


class TestContext:
    def test_an_ideal_ring_divides_the_prefill(self) -> None:
        whole, four = (
            prefill_step(LLAMA, IDEAL, split, 1, 32_768) for split in (ParallelConfig(), ParallelConfig(cp=4))
        )
        head = operator(whole, "lm_head").seconds
        assert four.seconds - head == pytest.approx((whole.seconds - head) / 4, rel=2e-3)  # weights are read whole
        assert operator(four, "attention").flops == operator(whole, "attention").flops / 4

    def test_the_ring_is_hidden_from_1099_tokens_a_device(self) -> None:
        machine = replace(H100, network=Network(450e9, 0.0, 50e9))
        exposed = [
            operator(prefill_step(LLAMA, machine, ParallelConfig(cp=4), 1, 4 * c), "exposed exchange").seconds
            for c in (1090, 1110)
        ]
        assert exposed[0] > 0 == exposed[1]

    def test_what_is_not_hidden_by_hand(self) -> None:
        c, cp = 256, 4
        step = prefill_step(LLAMA, H100, ParallelConfig(cp=cp), 1, c * cp)
        exchange = 32 * 3 * (8e-6 + c * 4096 / 450e9)
        attention = operator(step, "attention").seconds
        assert operator(step, "exposed exchange").seconds == pytest.approx(exchange - 0.75 * attention)

    def test_decode_reads_all_weights_and_a_part_of_the_cache(self) -> None:
        one, four = (decode_step(LLAMA, H100, split, 8, 4096) for split in (ParallelConfig(), ParallelConfig(cp=4)))
        assert operator(four, "attention").nbytes == operator(one, "attention").nbytes / 4
        assert operator(four, "gate_proj") == operator(one, "gate_proj")
        gather = operator(four, "all-gather")
        assert gather.seconds == pytest.approx(32 * (8e-6 + 3 * 8 * 32 * 129 * 4 / 450e9))

    def test_with_tensor_parallel_messages_are_shared_too(self) -> None:
        both, alone = (
            prefill_step(LLAMA, H100, split, 1, 8192) for split in (ParallelConfig(tp=2, cp=4), ParallelConfig(cp=4))
        )
        assert operator(both, "exposed exchange").nbytes == operator(alone, "exposed exchange").nbytes / 2


class TestExperts:
    def test_weights_read_by_hand(self) -> None:
        # 16 rows draw 2 of 8 experts each: 8 (1 - (3/4)^16) are touched, a quarter of them on each of 4 devices.
        touched = 8 * (1 - 0.75**16)
        step = decode_step(MIXTRAL, H100, ParallelConfig(ep=4), 16, 1024)
        gate = operator(step, "expert_gate_proj")
        rows = 16 * 2 / 4
        assert gate.flops == pytest.approx(32 * 2 * rows * 4096 * 14_336)
        assert gate.nbytes == pytest.approx(32 * 2 * (touched / 4 * 4096 * 14_336 + rows * (4096 + 14_336)))
        # All else is done for a quarter of the rows.
        assert operator(step, "q_proj") == operator(roofline.decode_step(MIXTRAL, H100, 4, 1024), "q_proj")

    def test_an_ideal_link_and_even_tokens_leave_the_work_of_one(self) -> None:
        whole, four = (
            decode_step(MIXTRAL, IDEAL, split, 64, 1024) for split in (ParallelConfig(), ParallelConfig(ep=4))
        )
        assert 4 * four.flops == pytest.approx(whole.flops)
        assert whole.seconds / 4 < four.seconds < whole.seconds

    def test_the_busiest_device_sets_the_pace(self) -> None:
        even, uneven = (prefill_step(MIXTRAL, H100, ParallelConfig(ep=4), 4, 2048, imbalance=i) for i in (1.0, 1.5))
        assert operator(uneven, "expert_gate_proj").flops == 1.5 * operator(even, "expert_gate_proj").flops
        counts, small = 32 * 8 * 8 * 0.75, 12  # these do not depend on the load
        assert uneven.sent - counts - small == pytest.approx(1.5 * (even.sent - counts - small))
        assert uneven.seconds > even.seconds

    def test_refusals(self) -> None:
        with pytest.raises(RequestError, match="ep 2 spreads experts and this model has none"):
            decode_step(LLAMA, H100, ParallelConfig(ep=2), 1, 10)
        with pytest.raises(RequestError, match=r"imbalance.* lies from 1 to ep 4; got 5"):
            decode_step(MIXTRAL, H100, ParallelConfig(ep=4), 1, 10, imbalance=5)


class TestMemory:
    def test_one_device_and_tensor_parallel_are_as_they_were(self) -> None:
        for tp in (1, 4, 16):
            assert memory(LLAMA, ParallelConfig(tp=tp), 9, 777, block=16) == capacity.where_bytes_go(
                LLAMA, 9, 777, tp=tp, block=16
            )

    def test_by_hand(self) -> None:
        weights, kv = 2 * 8_030_261_248, 8 * 1024 * 131_072
        assert memory(LLAMA, ParallelConfig(replicas=8), 8, 1024).weights == weights
        cp = memory(LLAMA, ParallelConfig(cp=4), 8, 1024)
        assert (cp.weights, cp.kv) == (weights, kv / 4)
        experts = 32 * 8 * 3 * 4096 * 14_336 * 2
        ep = memory(MIXTRAL, ParallelConfig(ep=4), 8, 1024)
        assert ep.weights == arithmetic.weight_bytes(MIXTRAL, "bfloat16") - experts * 3 / 4
        assert ep.kv == 2 * 1024 * arithmetic.kv_bytes_per_token(MIXTRAL, "bfloat16")
        pp = memory(LLAMA, ParallelConfig(pp=4), 8, 1024)
        layers = 32 * (2 * 4096 * 128 * 40 + 3 * 4096 * 14_336 + 2 * 4096)
        assert pp.weights == 2 * (layers // 4 + 4096 * 128_256 + 4096)  # the last stage, with norm and head
        assert pp.kv == kv / 4

    @given(
        way=st.sampled_from(["tp", "pp", "cp"]),
        n=st.sampled_from([1, 2, 4, 8]),
        batch=st.integers(1, 64),
        context=st.integers(16, 8000),
    )
    def test_more_devices_never_hold_more_each(self, way: str, n: int, batch: int, context: int) -> None:
        one, two = (memory(LLAMA, ParallelConfig(**{way: k}), batch, context) for k in (n, 2 * n))
        assert two.weights <= one.weights and two.kv <= one.kv

    def test_the_largest_batch_is_the_last_that_fits(self) -> None:
        for split in (
            ParallelConfig(),
            ParallelConfig(tp=8),
            ParallelConfig(pp=4),
            ParallelConfig(cp=4),
            ParallelConfig(tp=2, pp=2),
        ):
            most = largest_batch(LLAMA, split, 2048, 80e9, utilisation=1.0, block=1)
            assert memory(LLAMA, split, most, 2048).total <= 80e9 < memory(LLAMA, split, most + 1, 2048).total
        assert largest_batch(from_hf(MODELS["Llama-3-70B"][0], "70B"), ParallelConfig(), 10, 80e9) == 0
        assert largest_batch(LLAMA, ParallelConfig(), 2048, 80e9) == capacity.fit(LLAMA, 80e9, 2048).max_batch


# --- properties -----------------------------------------------------------------------

SPLITS = [
    ParallelConfig(tp=2),
    ParallelConfig(tp=8),
    ParallelConfig(pp=4),
    ParallelConfig(cp=4),
    ParallelConfig(tp=2, pp=4),
    ParallelConfig(tp=4, cp=8),
    ParallelConfig(tp=32),
]


@examples(60)
@given(st.sampled_from(SPLITS), st.integers(1, 40), st.integers(64, 4000), st.floats(1, 50))
def test_slower_links_and_longer_calls_never_help(
    split: ParallelConfig, batch: int, context: int, times: float
) -> None:
    slower = replace(H100, network=Network(450e9 / times, 8e-6 * times, 50e9 / times, 10e-6 * times))
    for step in (decode_step, prefill_step):
        ideal, usual, slow = (step(LLAMA, machine, split, batch, context).seconds for machine in (IDEAL, H100, slower))
        assert ideal <= usual * (1 + 1e-12) <= slow * (1 + 1e-9)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_ideal_links_cost_nothing(split: ParallelConfig) -> None:
    for step in (decode_step(LLAMA, IDEAL, split, 32, 1024), prefill_step(LLAMA, IDEAL, split, 32, 1024)):
        assert seconds(step, "link") == 0 and step.sent > 0


def test_an_ideal_tensor_split_halves_all_that_is_shared() -> None:
    one, two = (decode_step(LLAMA, IDEAL, ParallelConfig(tp=n), 16, 4096) for n in (1, 2))
    assert operator(two, "attention").seconds == operator(one, "attention").seconds / 2
    assert two.seconds == pytest.approx(one.seconds / 2, rel=0.02)  # norms and activations are on every device


def test_between_servers_all_reduces_wait_for_the_slow_link() -> None:
    eight, sixteen = (decode_step(LLAMA, H100, ParallelConfig(tp=n), 64, 1024) for n in (8, 16))
    assert operator(sixteen, "all-reduce").seconds > 2 * operator(eight, "all-reduce").seconds
    # 65 x 64 x 8,192 B: twice 15/16 of them, of which a fifteenth goes between two servers.
    sent = 65 * 2 * 15 / 16 * 64 * 8192
    expected = 65 * 18e-6 + sent * (14 / 15 / 450e9 + 1 / 15 / 50e9)
    assert operator(sixteen, "all-reduce").seconds == pytest.approx(expected)


@pytest.mark.parametrize(
    ("split", "says"),
    [
        (ParallelConfig(tp=3), "tp 3 does not divide"),
        (ParallelConfig(pp=33), "pp 33 stages need a layer each and the model has 32"),
        (ParallelConfig(pp=2, cp=2), "cp and pp together are not modelled"),
        (ParallelConfig(replicas=0), "replicas must be at least 1, got 0"),
    ],
)
def test_what_a_model_does_not_allow(split: ParallelConfig, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        decode_step(LLAMA, H100, split, 1, 10)


def test_other_refusals() -> None:
    with pytest.raises(RequestError, match="ep spreads experts over devices that each hold all else"):
        decode_step(MIXTRAL, H100, ParallelConfig(tp=2, ep=2), 1, 10)
    with pytest.raises(RequestError, match="micro-batches are those of a pipeline"):
        decode_step(LLAMA, H100, ParallelConfig(tp=2), 4, 10, micro_batches=2)
    with pytest.raises(RequestError, match="1 rows do not fill 2 micro-batches"):
        decode_step(LLAMA, H100, ParallelConfig(pp=2), 1, 10, micro_batches=2)
    with pytest.raises(RequestError, match="no link in the table, so no split can be predicted"):
        decode_step(LLAMA, replace(H100, network=None), ParallelConfig(pp=2), 1, 10)
    with pytest.raises(RequestError, match="beyond the model's 131072"):
        prefill_step(LLAMA, H100, ParallelConfig(cp=8), 1, 131_080)


def test_names() -> None:
    assert str(ParallelConfig()) == "one device" and str(ParallelConfig(tp=8, replicas=4)) == "tp 8 x replicas 4"
    assert ParallelConfig(tp=8, pp=2, replicas=4).devices == 64 and ParallelConfig(tp=8, pp=2, replicas=4).group == 16

"""Interpolation between measured operators."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from nanoinfer.configs.config import SHAPES
from nanoinfer.store import restored
from nanoinfer.theory.curves import Curve, OperatorCurves
from nanoinfer.theory.roofline import Machine, decode_step, mixed_step, prefill_step

FLAT = Curve((1,), (1.0,))


def test_straight_lines_in_log_log() -> None:
    curve = Curve((1, 100), (2.0, 200.0))
    assert curve.at(10) == pytest.approx(20.0)
    assert curve.at(0.5) == 2.0  # flat below: a start is never cheaper than the smallest
    assert curve.at(1000) == pytest.approx(2000.0)  # in proportion beyond


@pytest.mark.parametrize(
    ("sizes", "seconds"), [((), ()), ((1, 2), (1.0,)), ((2, 1), (1.0, 2.0)), ((1, 1), (1.0, 2.0)), ((1,), (0.0,))]
)
def test_bad_curves_are_refused(sizes: tuple[float, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="curve"):
        Curve(sizes, seconds)


def curves() -> OperatorCurves:
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
    return OperatorCurves(
        products={name: Curve((1, 4), (1e-3, 2e-3)) for name in names},
        decode_attention={1: Curve((16, 64), (1e-4, 4e-4)), 4: Curve((16, 64), (4e-4, 16e-4))},
        paged_attention={1: Curve((16, 64), (2e-4, 8e-4)), 4: Curve((16, 64), (8e-4, 32e-4))},
        prefill_attention=Curve((16,), (5e-4,)),
        rest=Curve((1,), (1e-5,)),
        rest_prefill=Curve((16,), (3e-5,)),
        paged_rest=Curve((1,), (2e-5,)),
        paged_rest_prefill=Curve((16,), (6e-5,)),
    )


def test_a_step_is_the_sum_of_its_operators() -> None:
    config, machine = SHAPES["smollm2-135m"], Machine("here", "float32", 1e11, 1e10, curves=curves())
    decode = decode_step(config, machine, batch=1, context=64)
    assert decode.seconds == pytest.approx(30 * 7e-3 + 1e-3 + 30 * 4e-4 + 31 * 1e-5)
    assert decode_step(config, machine, 4, 16).seconds == pytest.approx(30 * 14e-3 + 2e-3 + 30 * 4e-4 + 31 * 4e-5)
    prefill = prefill_step(config, machine, batch=2, tokens=16)
    assert prefill.seconds == pytest.approx(30 * 7 * 16e-3 + np_head() + 30 * 2 * 5e-4 + 31 * 6e-5)


def np_head() -> float:
    return (1e-3 * 2e-3) ** 0.5  # two rows lie half-way, in logs, between one and four


def test_attention_between_batches_and_beyond() -> None:
    c = curves()
    assert c.attention(2, 1, 16) == pytest.approx(2e-4)
    assert c.attention(8, 1, 64) == pytest.approx(32e-4)
    assert c.attention(3, 16, 16) == pytest.approx(15e-4)


def test_a_mixed_step_of_decoding_rows_and_chunks() -> None:
    config, machine = SHAPES["smollm2-135m"], Machine("here", "float32", 1e11, 1e10, curves=curves())
    # Four rows at 16 tokens, the newest included; all of them choose a token.
    decode = mixed_step(config, machine, [(15, 1)] * 4, ends=4)
    assert decode.seconds == pytest.approx(30 * 14e-3 + 2e-3 + 30 * 8e-4 + 31 * 8e-5)
    # One of them with 16 tokens of a prompt after 16 others: the triangle of 32 less that of 16.
    mixed = mixed_step(config, machine, [(15, 1), (16, 16)], ends=1)
    attention = 30 * (2e-4 + 5e-4 * 32 / 16 - 5e-4)
    assert mixed.seconds == pytest.approx(30 * 7 * 17 / 4 * 2e-3 + 1e-3 + attention + 31 * 6e-5 * 17 / 16)
    assert [op.name for op in mixed_step(config, machine, [(0, 16)], ends=0).operators].count("lm_head") == 0


def test_a_mixed_step_of_like_rows_is_the_step_of_the_roofline() -> None:
    config, machine = SHAPES["smollm2-135m"], Machine.datasheet("H100", "bfloat16")
    assert mixed_step(config, machine, [(99, 1)] * 8, 8).seconds == pytest.approx(
        decode_step(config, machine, 8, 100).seconds
    )
    one, prefill = mixed_step(config, machine, [(0, 512)], 1), prefill_step(config, machine, 1, 512)
    assert one.nbytes == pytest.approx(prefill.nbytes)
    assert one.seconds == pytest.approx(prefill.seconds, rel=0.01)


def test_round_trip_and_damage() -> None:
    assert restored(OperatorCurves, json.loads(json.dumps(asdict(curves())))) == curves()
    for damaged in ([], {}, {"products": 3}, {**asdict(curves()), "rest": {"sizes": [1], "seconds": []}}):
        with pytest.raises((ValueError, TypeError, AttributeError)):
            restored(OperatorCurves, damaged)

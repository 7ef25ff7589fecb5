"""Every number of the article that the chapter rests on, and each of its slips by name."""

from __future__ import annotations

import pytest

from nanoinfer.errors import RequestError
from nanoinfer.theory import chen as c

FIGURES = {figure.name: figure for figure in c.figures()}


def computed(name: str) -> float:
    return FIGURES[name].computed


def test_keys_and_values_of_a_token() -> None:
    assert computed("k and v of a token, 52B") == 17_179_869_184
    assert computed("cache per token") == 2_097_152
    assert computed("k and v of a token, 52B") * 6 == computed("products per token, 52B")  # a sixth of a decoding step


def test_parameters_and_products() -> None:
    assert computed("parameters, 52B") == 12 * 64 * 8192**2 + 65_536 * 8192 == 52_076_478_464
    assert computed("products per token, 52B") == 64 * sum((2 * 3, 2, 2 * 8)) * 8192**2 == 103_079_215_104


def test_tokens_for_free_and_the_ratio_written_upside_down() -> None:
    assert computed("tokens for free, A100") == 208
    assert c.A100.bandwidth / c.A100.flops == pytest.approx(1 / 208)
    assert "upside" not in FIGURES["tokens for free, A100"].note
    assert "bandwidth over FLOP/s" in FIGURES["batch where compute takes over"].note


def test_time_to_pass_the_weights() -> None:
    matrices = 12 * c.B52.layers * c.B52.d**2
    assert round(1e3 * c.weights_time(matrices, 1)) == 69
    assert round(1e3 * c.weights_time(matrices, 4)) == 17


def test_capacity() -> None:
    assert c.WEIGHT_BYTES * c.P52 == 104e9  # 52e12 in the article
    assert computed("tokens that fit, four GPUs") == pytest.approx(26_703, abs=1)
    assert pytest.approx(28_000) == 56 / 0.002
    assert FIGURES["tokens that fit, four GPUs"].printed == 23_000


def test_tensor_parallel_communication() -> None:
    assert [c.communication(8192, n) for n in (1, 2, 4)] == [0, 2 * 8192, 3 * 8192]
    assert c.flops_per_number_sent(8192) == {"qkv": 24_576, "o": 8192, "w1": 32_768, "w2": 32_768}
    assert sum(c.flops_per_number_sent(8192).values()) == 24 * 8192**2 / 2 / 8192
    assert c.A100.flops / c.A100.link == 1040


def test_small_batches_wait_for_weights_and_messages() -> None:
    weights, messages = c.small_batch_latency(c.B52, c.P52, 4)
    assert weights == pytest.approx(2 * 52e9 / (4 * 1.5e12))
    assert messages == pytest.approx(4 * 64 * 8e-6)
    assert 1e3 * (weights + messages) == pytest.approx(19.4, abs=0.05)
    weights, messages = c.small_batch_latency(c.GOPHER, c.P260, 16)
    assert (round(1e3 * weights), 1e3 * messages) == (22, pytest.approx(2.56))  # not 2 * 4 * 80 * 8 us, 5.12
    assert c.small_batch_latency(c.B52, c.P52, 1)[1] == 0


def test_large_batches_wait_for_compute() -> None:
    compute, volume = c.large_batch_latency(c.GOPHER, c.P260, 16, 512)
    assert 1e3 * compute == pytest.approx(53.3, abs=0.05)
    assert 1e3 * volume == pytest.approx(17.9, abs=0.05)
    assert (
        max(compute, volume) == compute and "62 ms for the 53" in FIGURES["large batch 512, 260B on 16: compute"].note
    )
    compute, volume = c.large_batch_latency(c.B52, c.P52, 4, 256)
    assert (round(1e3 * compute), round(1e3 * volume)) == (21, 4)
    assert c.large_batch_latency(c.B52, c.P52, 4, 208)[0] == pytest.approx(c.weights_time(c.P52, 4))  # the crossover


def test_intermediates_shrink_to_an_eleventh_not_a_twentieth() -> None:
    assert c.intermediates_share(0.43, 1024, 8192) == pytest.approx(0.0862, abs=5e-5)
    assert pytest.approx(0.05375) == 0.43 * 8 / 64  # as printed: the other 57% are left where they were
    assert c.intermediates_share(0.43, 1024, 1024) == 0.43


@pytest.mark.parametrize("figure", c.figures(), ids=lambda figure: figure.name)
def test_what_is_printed_is_what_it_comes_to_or_says_why_not(figure: c.Figure) -> None:
    agrees = figure.computed == pytest.approx(figure.printed, rel=0.04) or (
        figure.unit == "ms" and figure.printed == round(figure.computed)
    )
    assert agrees or figure.note


def test_slips_are_named() -> None:
    notes = " ".join(figure.note for figure in c.figures())
    for slip in ("52e12", "28,000", "26,703", "two bytes each", "factor is 4", "62 ms", "over FLOP/s", "8.6%"):
        assert slip in notes


def test_no_gpu_is_no_answer() -> None:
    with pytest.raises(RequestError, match="n must be at least 1, got 0"):
        c.weights_time(c.P52, 0)

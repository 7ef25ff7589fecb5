"""Bytes on the wire, by hand; what real ranks send is held against the same functions in tests/parallel."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoinfer.configs.catalog import MODELS
from nanoinfer.configs.config import SHAPES
from nanoinfer.configs.huggingface import from_hf
from nanoinfer.errors import RequestError
from nanoinfer.theory import chen
from nanoinfer.theory import communication as c
from nanoinfer.theory.communication import Network, Traffic

LLAMA, GPT2, SMOL = SHAPES["llama-3.1-8b"], SHAPES["gpt2"], SHAPES["smollm2-135m"]
MIXTRAL = from_hf(MODELS["Mixtral-8x7B"][0], "Mixtral-8x7B")
DEEPSEEK = from_hf(MODELS["DeepSeek-V3"][0], "DeepSeek-V3")


class TestTensorParallel:
    def test_two_all_reduces_a_layer_one_more_and_a_gather(self) -> None:
        # 32 layers of width 4,096 in 16 bits: 65 messages of 8,192 B; of 128,256 logits each of 8 devices has 16,032.
        assert c.tensor_parallel(LLAMA, 1, 8, 2, 1) == (
            Traffic("all-reduce", 65, 8192, 65 * 2 * 7 / 8 * 8192),
            Traffic("all-gather", 1, 32_064, 7 * 32_064),
        )
        assert c.sent_bytes(c.tensor_parallel(LLAMA, 1, 8, 2, 1)) == 931_840 + 224_448

    def test_a_vocabulary_that_does_not_divide_is_rounded_up(self) -> None:
        (_, gather) = c.tensor_parallel(GPT2, 6, 2, 4, 3)
        assert gather.message == 3 * 25_129 * 4  # 50,257 / 2

    def test_without_ends_no_logits_and_without_embedding_one_message_less(self) -> None:
        assert c.tensor_parallel(LLAMA, 5, 2, 2, 0) == (Traffic("all-reduce", 65, 40_960, 65 * 40_960),)
        assert c.tensor_parallel(LLAMA, 5, 2, 2, 0, embeds=False)[0].calls == 64

    def test_layers_send_what_chen_counts(self) -> None:
        """In the article ``4 (n-1) d / n`` numbers a token and layer."""
        for n in (2, 4, 8):
            (reduces,) = c.tensor_parallel(LLAMA, 1, n, 2, 0, embeds=False)
            assert reduces.sent == pytest.approx(LLAMA.n_layers * chen.communication(LLAMA.d_model, n) * 2)

    def test_a_token_of_8b_on_eight_devices_waits_half_a_millisecond(self) -> None:
        """64 all-reduces of 8 us: 0.51 ms; the embedding's and the logits' make it 66 calls."""
        layers = c.tensor_parallel(LLAMA, 1, 8, 2, 0, embeds=False)
        assert Network(math.inf, 8e-6).seconds(layers, 8) == pytest.approx(0.512e-3)
        assert Network(math.inf, 8e-6).seconds(c.tensor_parallel(LLAMA, 1, 8, 2, 1), 8) == pytest.approx(66 * 8e-6)

    def test_heads_that_do_not_divide_are_refused(self) -> None:
        with pytest.raises(RequestError, match="tp 3 does not divide 32 query heads"):
            c.tensor_parallel(LLAMA, 1, 3, 2, 1)


class TestPipeline:
    def test_micro_batches_of_unlike_size_and_the_ids(self) -> None:
        # 5 rows of 7 tokens in two parts, 3 and 2 rows; 576 numbers of 4 bytes a token; an id of 8 bytes a row.
        assert c.pipeline_parallel(SMOL, 5, 7, 4, 4, 2) == (
            Traffic("send", 1, 3 * 7 * 576 * 4, 3 * 7 * 576 * 4),
            Traffic("send", 1, 2 * 7 * 576 * 4, 2 * 7 * 576 * 4),
            Traffic("broadcast", 1, 40, 40),
        )
        assert c.pipeline_parallel(SMOL, 6, 1, 2, 4, 3)[0] == Traffic("send", 3, 2 * 576 * 4, 6 * 576 * 4)

    @given(rows=st.integers(1, 200), parts=st.integers(1, 200))
    def test_micro_batches_are_even(self, rows: int, parts: int) -> None:
        if parts > rows:
            with pytest.raises(RequestError, match=f"{rows} rows do not fill {parts} micro-batches"):
                c.micro_batch_rows(rows, parts)
            return
        sizes = c.micro_batch_rows(rows, parts)
        assert sum(sizes) == rows and len(sizes) == parts and max(sizes) - min(sizes) <= 1
        assert sizes == tuple(sorted(sizes, reverse=True))

    def test_bubble(self) -> None:
        assert c.bubble(4, 1) == 3 / 4 and c.bubble(4, 4) == 3 / 7 and c.bubble(1, 9) == 0

    @given(p=st.integers(1, 64), m=st.integers(1, 64))
    def test_more_micro_batches_wait_less_and_more_stages_more(self, p: int, m: int) -> None:
        assert c.bubble(p, m + 1) <= c.bubble(p, m) <= c.bubble(p + 1, m) < 1
        # p stages are at work (1 - bubble) of the time: m of m + p - 1 turns.
        assert (1 - c.bubble(p, m)) * (m + p - 1) == pytest.approx(m)

    def test_more_stages_than_layers_are_refused(self) -> None:
        with pytest.raises(RequestError, match="30 layers do not fill 31 stages"):
            c.pipeline_parallel(SMOL, 1, 1, 31, 2, 1)


class TestContext:
    def test_keys_and_values_go_round(self) -> None:
        # Of 4,097 tokens each of 4 devices has up to 1,025: 2 x 8 heads x 128 numbers of 2 bytes each, 3 times a layer.
        ring, last, ids = c.context_parallel(LLAMA, 2, 4097, 4, 2)
        message = 2 * 1025 * 2 * 8 * 128 * 2
        assert ring == Traffic("exchange", 96, message, 96 * message)
        assert (last, ids) == (Traffic("broadcast", 1, 2 * 8192, 2 * 8192), Traffic("broadcast", 1, 16, 16))

    def test_a_decode_step_gathers_partial_attention_in_fp32(self) -> None:
        gather, ids = c.context_parallel_decode(LLAMA, 3, 4)
        assert gather == Traffic("all-gather", 32, 3 * 32 * 129 * 4, 32 * 3 * 3 * 32 * 129 * 4)
        assert ids.message == 24

    def test_latent_caches_are_narrower(self) -> None:
        assert c.context_parallel(DEEPSEEK, 1, 8, 2, 2)[0].message == 4 * (512 + 64) * 2

    def test_an_h100_hides_the_ring_from_1099_tokens_on(self) -> None:
        """``C b n_kv / (W n_q)``, causal work being balanced."""
        assert math.ceil(c.ring_hidden_tokens(LLAMA, 989e12, 450e9, 2)) == 1099
        assert c.ring_hidden_tokens(LLAMA, 989e12, 450e9, 2) == pytest.approx(2 * 989e12 * 2 * 8 / (2 * 450e9 * 32))

    def test_more_devices_than_tokens_are_refused(self) -> None:
        with pytest.raises(RequestError, match="3 tokens cannot be spread over 4 devices"):
            c.context_parallel(LLAMA, 1, 3, 4, 2)


class TestExperts:
    def test_tokens_there_and_back_after_their_counts(self) -> None:
        # 16 tokens, 2 experts each, 4,096 numbers of 2 bytes; 3 of 4 leave; 32 layers; 8 counts of 8 bytes.
        busy, counts, tokens = c.expert_parallel(MIXTRAL, 16, 4, 2)
        assert tokens == Traffic("all-to-all", 64, 16 * 2 * 4096 * 2, 64 * 0.75 * 16 * 2 * 4096 * 2)
        assert counts == Traffic("all-to-all", 32, 64, 32 * 48)
        assert busy == Traffic("all-reduce", 1, 8, 12)

    def test_dense_layers_say_nothing(self) -> None:
        assert c.expert_parallel(DEEPSEEK, 1, 8, 2)[-1].calls == 2 * (61 - 3)

    def test_refusals(self) -> None:
        with pytest.raises(RequestError, match="ep 2 spreads experts and this model has none"):
            c.expert_parallel(LLAMA, 1, 2, 2)
        with pytest.raises(RequestError, match="ep 3 does not divide 8 experts; take one of 1, 2, 4, 8"):
            c.expert_parallel(MIXTRAL, 1, 3, 2)


@given(n=st.integers(2, 64), nbytes=st.integers(1, 2**40))
def test_no_collective_sends_less_among_more(n: int, nbytes: int) -> None:
    for call in (c.all_reduce, c.all_gather, c.all_to_all):
        assert call(1, nbytes, n).sent <= call(1, nbytes, n + 1).sent
    assert nbytes <= c.all_reduce(1, nbytes, n).sent < 2 * nbytes
    assert c.all_to_all(1, nbytes, n).sent < nbytes


def test_one_device_says_nothing() -> None:
    assert c.tensor_parallel(LLAMA, 9, 1, 2, 9) == ()
    assert c.pipeline_parallel(LLAMA, 9, 1, 1, 2, 1) == ()
    assert c.context_parallel(LLAMA, 9, 9, 1, 2) == c.context_parallel_decode(LLAMA, 9, 1) == ()
    assert c.expert_parallel(LLAMA, 9, 1, 2) == c.expert_parallel(MIXTRAL, 9, 1, 2) == ()


def test_seconds_are_calls_and_bytes() -> None:
    traffic = (Traffic("send", 3, 10, 30), Traffic("broadcast", 1, 5, 5))
    assert Network(7.0, 2.0).seconds(traffic, 2) == pytest.approx(4 * 2.0 + 35 / 7.0)
    assert Network(math.inf, 0.0).seconds(traffic, 2) == 0


# --- links inside a server and between servers ------------------------------------------

#: 100 B/s and 1 s a call inside a server of 4, 10 B/s and 5 s between servers.
NETWORK = Network(100.0, 1.0, 10.0, 5.0, 4)


def test_inside_a_server_a_call_costs_alpha_and_its_bytes() -> None:
    traffic = (c.all_reduce(3, 80.0, 4), c.all_gather(1, 40.0, 4))
    assert NETWORK.seconds(traffic, 4) == Network(100.0, 1.0).seconds(traffic, 4) == pytest.approx(4 + 3.6 + 1.2)
    assert NETWORK.nodes(4) == 1


def test_an_all_reduce_over_two_servers() -> None:
    # 800 B among 8: each sends 2 x 7/8 of it, 1,400 B: inside a server 2 x 3/4, 1,200; the rest between two, 200.
    assert NETWORK.seconds((c.all_reduce(1, 800.0, 8),), 8) == pytest.approx(1.0 + 5.0 + 1200 / 100 + 200 / 10)


def test_an_all_gather_over_two_servers() -> None:
    # Its own 10 B to one partner in the other server; then 2 x 10 to the three next to it: 10 and 60 B.
    assert NETWORK.seconds((c.all_gather(1, 10.0, 8),), 8) == pytest.approx(6.0 + 60 / 100 + 10 / 10)


def test_an_all_to_all_uses_both_links_at_once() -> None:
    # Of 80 B each of 8 gets 10: 30 stay in the server, 40 leave it, which takes longer.
    assert NETWORK.seconds((c.all_to_all(1, 80.0, 8),), 8) == pytest.approx(5.0 + max(30 / 100, 40 / 10))


def test_a_tree_between_servers_is_climbed_once_for_each_doubling() -> None:
    alphas = [NETWORK.seconds((c.all_reduce(1, 0.0, n),), n) for n in (4, 8, 16, 20, 64)]
    assert alphas == [1.0, 6.0, 11.0, 16.0, 21.0]


def test_ranks_that_are_apart_fill_servers_sooner() -> None:
    """Stages of two devices each: two of them share a server of four."""
    assert (NETWORK.nodes(2, stride=2), NETWORK.nodes(4, stride=2), NETWORK.nodes(4, stride=4)) == (1, 2, 4)
    # With one rank of each server nothing is said inside.
    assert NETWORK.seconds((c.all_reduce(1, 80.0, 2),), 2, stride=4) == pytest.approx(5.0 + 80 / 10)


def test_a_ring_waits_for_its_slowest_pair() -> None:
    exchange = c.Traffic("exchange", 2, 50.0, 100.0)
    assert NETWORK.seconds((exchange,), 4) == pytest.approx(2.0 + 1.0)
    assert NETWORK.seconds((exchange,), 8) == NETWORK.hop(exchange, crosses=True) == pytest.approx(20.0)


def test_with_one_link_for_all_there_is_one_server() -> None:
    assert Network(100.0, 1.0).nodes(1024) == 1
    assert Network(100.0, 1.0).seconds((c.all_reduce(1, 80.0, 16),), 16) == pytest.approx(1.0 + 150 / 100)


@given(st.sampled_from([c.all_reduce, c.all_gather, c.all_to_all]), st.integers(2, 64), st.floats(0, 1e9))
def test_a_slow_link_never_helps_and_an_ideal_one_costs_nothing(call: object, n: int, nbytes: float) -> None:
    assert callable(call)
    traffic = (call(1, nbytes, n),)
    fast = Network(100.0, 1.0).seconds(traffic, n)
    if call is not c.all_to_all:  # which uses both links at once
        assert NETWORK.seconds(traffic, n) >= fast * (1 - 1e-9)
    assert Network(math.inf, 0.0, math.inf, 0.0, 4).seconds(traffic, n) == 0

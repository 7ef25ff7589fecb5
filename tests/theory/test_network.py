"""Messages inside a server and between servers, against times worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoinfer.errors import DeviceError
from nanoinfer.theory import communication as c
from nanoinfer.theory.hardware import link
from nanoinfer.theory.network import Network

#: 100 B/s and 1 s a call inside a server of 4, 10 B/s and 5 s between servers.
NETWORK = Network(100.0, 1.0, 10.0, 5.0, 4)


def test_inside_a_server_a_call_costs_alpha_and_its_bytes() -> None:
    traffic = (c.all_reduce(3, 80.0, 4), c.all_gather(1, 40.0, 4))
    assert NETWORK.seconds(traffic, 4) == c.seconds(traffic, 1.0, 100.0) == pytest.approx(4 + 3.6 + 1.2)
    assert NETWORK.nodes(4) == 1


def test_an_all_reduce_over_two_servers() -> None:
    # 800 B among 8: each sends 2 x 7/8 of it, 1,400 B: inside a server 2 x 3/4, 1,200; the rest between two, 200.
    assert NETWORK.seconds((c.all_reduce(1, 800.0, 8),), 8) == pytest.approx(1.0 + 5.0 + 1200 / 100 + 200 / 10)


def test_an_all_gather_over_two_servers() -> None:
    # Its own 10 B to one partner in the other server; then 2 x 10 to the three beside it: 10 and 60 B.
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


def test_links_between_servers_by_name() -> None:
    assert [link(name).gbs_one_way for name in ("ib-ndr", "ethernet-100g", "100GbE", "ethernet-400g")] == [
        50,
        12.5,
        12.5,
        50,
    ]
    assert link("ib-ndr") is link("InfiniBand NDR-400") and link("pcie5") is link("PCIe 5 x16")
    assert link("nvlink5").gbs_one_way == 900 and not link("nvlink5").between_servers
    assert all(link(name).between_servers for name in ("ib-ndr", "ethernet-100g", "ethernet-400g"))
    assert link("ib-ndr").latency_us == 10 > link("nvlink5").latency_us
    with pytest.raises(DeviceError, match="unknown link 'ib-ndt'; did you mean 'ib-ndr'"):
        link("ib-ndt")

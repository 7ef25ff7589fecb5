"""Money and energy, against figures worked out by hand."""

from __future__ import annotations

import pytest

from nanoinfer.errors import RequestError
from nanoinfer.theory.cost import Workload, joules_per_token, usd_per_mtok


def test_three_dollars_an_hour_at_a_thousand_tokens_a_second() -> None:
    assert usd_per_mtok(3, 1000) == pytest.approx(0.8333, rel=1e-3)


def test_energy() -> None:
    assert joules_per_token(700, 2000) == 0.35


def test_idle_hours_and_failed_requests_are_paid_for() -> None:
    busy, real = Workload(3, 10_000, 1000), Workload(3, 10_000, 1000, idle=0.5, failed=0.2)
    assert real.price.output == pytest.approx(busy.price.output / 0.4)
    assert busy.price.input == pytest.approx(0.08333, rel=1e-3)


def test_a_request_pays_for_input_cached_input_and_output() -> None:
    work = Workload(3.6, 1000, 100, cached_cost=0.1)  # 1e-6 $ an input token, 1e-5 $ an output token
    assert work.price.input == pytest.approx(1.0)
    assert work.request(1000, 100) == pytest.approx(2e-3)
    assert work.request(1000, 100, cached_tokens=500) == pytest.approx(5e-4 + 5e-5 + 1e-3)


@pytest.mark.parametrize(
    "bad",
    [{"usd_per_hour": 0}, {"decode_rate": -1}, {"prefill_rate": float("nan")}, {"idle": 1.0}, {"failed": -0.1}],
)
def test_bad_workloads(bad: dict[str, float]) -> None:
    with pytest.raises(RequestError, match=next(iter(bad))):
        Workload(**{"usd_per_hour": 1.0, "prefill_rate": 1.0, "decode_rate": 1.0, **bad})


def test_more_cached_than_input_is_refused() -> None:
    with pytest.raises(RequestError, match="cached"):
        Workload(1, 1, 1).request(10, 1, cached_tokens=11)

"""A link's two numbers, from points that are known and from ranks that are not."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from nanoinfer.calibrate import links as calibrate
from nanoinfer.calibrate.links import SIZES, LinkRates, Rate, fit_rate, measure_link, predicted
from nanoinfer.errors import RequestError
from nanoinfer.theory.communication import Traffic, all_gather, all_reduce
from tests.parallel.rank_results import answers

KINDS = {"all-reduce", "all-gather", "all-to-all", "exchange", "send", "broadcast"}


def test_a_line_is_found_again() -> None:
    rate = fit_rate([(sent, 2e-4 + sent / 5e9) for sent in SIZES])
    assert rate.alpha == pytest.approx(2e-4, rel=1e-9)
    assert rate.beta == pytest.approx(5e9, rel=1e-9)
    assert rate.error < 1e-9
    assert rate.seconds(3, 6e9) == pytest.approx(3 * 2e-4 + 1.2, rel=1e-9)


def test_errors_count_as_shares() -> None:
    """A large message that takes twice as long must not move the latency of small ones."""
    bent = [(sent, (2e-4 + sent / 5e9) * (2 if sent == SIZES[-1] else 1)) for sent in SIZES]
    rate = fit_rate(bent)
    assert rate.alpha == pytest.approx(2e-4, rel=0.05)
    assert rate.error == pytest.approx(max(abs(rate.seconds(1, x) / t - 1) for x, t in bent))


def test_neither_number_is_ever_negative() -> None:
    falling, steep = fit_rate([(1, 2.0), (100, 1.0)]), fit_rate([(1, 1.0), (100, 200.0)])
    assert (falling.alpha, falling.seconds(1, 1e9)) == pytest.approx((1.2, 1.2))
    assert (steep.alpha, steep.seconds(1, 100)) == (0, pytest.approx(120))


def test_a_prediction_adds_up_calls_and_bytes() -> None:
    rates = {"all-reduce": Rate(1e-3, 1e6, ()), "all-gather": Rate(1e-4, 1e9, ())}
    link = LinkRates(2, "cpu", rates, 0.0)
    traffic = [all_reduce(5, 1000.0, 2), all_gather(1, 2e6, 2)]
    assert predicted(traffic, link) == pytest.approx(5 * (1e-3 + 1e-3) + 1e-4 + 2e-3, rel=1e-12)
    with pytest.raises(RequestError, match="'broadcast' was not timed"):
        predicted([Traffic("broadcast", 1, 8, 8)], link)


@pytest.mark.parametrize("n", [2, 4])
def test_what_ranks_time(n: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One launch for all: what it found, kept and read again."""
    found = [answer["link"] for answer in answers(n, "slice")]
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path))
    launches: list[Any] = []

    def launched(*args: Any, **more: Any) -> list[Any]:
        launches.append((args, more))
        return found

    monkeypatch.setattr(calibrate, "launch", launched)
    quiet = [{**answer, "busy": 0.0} for answer in found]
    busy = [{**answer, "busy": found[0]["wall"]} for answer in found]
    found = busy
    assert measure_link(n).disturbed > 0.1
    found = quiet
    link = measure_link(n, rounds=2)
    assert launches == [
        (("nanoinfer.calibrate.links:time_calls", n, {"rounds": rounds}), {"device": "cpu"}) for rounds in (20, 2)
    ]  # what was disturbed was not kept
    assert measure_link(n) == link
    assert len(launches) == 2
    measure_link(n, fresh=True)
    assert len(launches) == 3
    (path,) = (tmp_path / "link").iterdir()
    path.write_text("{}")
    measure_link(n)
    assert len(launches) == 4
    os.utime(path, (0, time.time() - 25 * 3600))
    measure_link(n)
    assert len(launches) == 5

    assert set(link.rates) == KINDS
    assert (link.ranks, link.device, link.disturbed) == (n, "cpu", 0.0)
    shares = {"all-reduce": 2 * (n - 1) / n, "all-gather": n - 1, "all-to-all": (n - 1) / n}
    for kind, rate in link.rates.items():
        assert [sent for sent, _ in rate.points] == [size * shares.get(kind, 1) for size in SIZES]
        assert all(0 < seconds < 10 for _, seconds in rate.points)


def test_two_ranks_at_least() -> None:
    with pytest.raises(RequestError, match="at least 2, got 1"):
        measure_link(1)

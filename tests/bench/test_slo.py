"""Limits as people write them."""

from __future__ import annotations

import pytest

from nanoinfer.bench.slo import parse_slo, slo_text
from nanoinfer.errors import RequestError


def test_limits_are_seconds() -> None:
    assert parse_slo("ttft=200ms,tpot=50ms,e2e=3s") == {"ttft": 0.2, "tpot": 0.05, "e2e": 3.0}
    assert parse_slo(" ttft_service = 1.5 s , normalized_latency=250us") == {
        "ttft_service": 1.5,
        "normalized_latency": 0.00025,
    }
    assert parse_slo("ttft=70ms") == {"ttft": 0.07}  # 70 * 1e-3 would be 0.07 and a bit, and 70 ms would not meet 70 ms
    assert parse_slo("ttft=.5s,tpot=20.ms") == {"ttft": 0.5, "tpot": 0.02}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "write METRIC=TIME"),
        ("ttft", "slo 'ttft': write METRIC=TIME"),
        ("ttft=", "write METRIC=TIME"),
        ("ttft=200ms,", "write METRIC=TIME"),
        ("ttf=200ms", "no metric 'ttf' of a request; did you mean 'ttft'"),
        ("itl=20ms", "no metric 'itl'"),
        ("client_delay=1ms", "no metric 'client_delay'"),
        ("ttft=200", "slo 'ttft=200': 200 of what?; the units are us, ms, s, as in 200ms"),
        ("ttft=200sec", "unknown unit 'sec'; the units are us, ms, s"),
        ("ttft=fast", "'fast' is no time"),
        ("ttft=-1s", "'-1s' is no time"),
        ("ttft=nan", "'nan' is no time"),
        ("ttft=0ms", "must be above 0"),
        ("ttft=1s,ttft=2s", "ttft has a limit already"),
    ],
)
def test_mistakes_name_the_part(text: str, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_slo(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_limits_for_people() -> None:
    assert slo_text({"ttft": 0.2, "e2e": 3.0}) == "ttft at most 200 ms, e2e at most 3000 ms"

"""One range check, one line that names the thing and its limits; near names for a misspelt one."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from nanoinfer.errors import DeviceError, NanoinferError, RequestError, check, nearest


@pytest.mark.parametrize(
    ("value", "limits"),
    [
        (1, {"above": 0, "at_most": 1}),
        (0, {"at_least": 0, "below": 1}),
        (0.5, {}),
        (Fraction(1, 3), {"above": 0}),
        (np.int64(3), {"at_least": 1, "whole": True}),
        (np.float32(0.25), {"below": 1}),
    ],
)
def test_a_value_within_its_limits_passes(value: Any, limits: dict[str, Any]) -> None:
    check("--share", value, **limits)


@pytest.mark.parametrize(
    ("value", "limits", "message"),
    [
        (2, {"above": 0, "at_most": 1}, "--share must be above 0 and at most 1, got 2"),
        (0, {"above": 0}, "--share must be above 0, got 0"),
        (1, {"below": 1}, "--share must be below 1, got 1"),
        (-1, {"at_least": 0, "whole": True}, "--share must be a whole number at least 0, got -1"),
        (1.0, {"whole": True}, "--share must be a whole number, got 1.0"),
        (2_000_000, {"at_most": 1e6}, "--share must be at most 1,000,000, got 2000000"),
        (math.nan, {}, "--share must be a finite number, got nan"),
        (math.inf, {"above": 0}, "--share must be above 0, got inf"),
        (True, {"at_least": 0, "whole": True}, "--share must be a whole number at least 0, got True"),
        ("3", {"above": 0}, "--share must be above 0, got '3'"),
        (None, {}, "--share must be a finite number, got None"),
    ],
)
def test_a_value_outside_is_named_with_its_limits(value: Any, limits: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        check("--share", value, **limits)
    assert str(caught.value) == message


def test_the_error_is_the_callers_choice() -> None:
    with pytest.raises(DeviceError, match="threads must be above 0, got 0"):
        check("threads", 0, above=0, error=DeviceError)
    assert issubclass(RequestError, NanoinferError)


def test_near_names_are_offered_and_all_where_none_is_near() -> None:
    known = ["laptop", "smoke", "gpu"]
    assert nearest("smok", known) == "did you mean 'smoke'?"
    assert nearest("xyz", known) == "known: gpu, laptop, smoke"
    assert nearest("aab", ["aaa", "aac", "aad"], count=2).count("'") == 4

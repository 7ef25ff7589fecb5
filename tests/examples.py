"""How many examples Hypothesis draws: few by default, all of them where ``HYPOTHESIS_PROFILE=ci``."""

from __future__ import annotations

import os
from typing import Any, Final

from hypothesis import settings

IS_CI: Final = os.environ.get("HYPOTHESIS_PROFILE", "dev") == "ci"
#: Most examples of a test outside CI.
DEV_EXAMPLES: Final = 20


def load_profile() -> None:
    """For tests that name no number of examples. In CI Hypothesis' own default stays."""
    settings.register_profile("dev", max_examples=DEV_EXAMPLES, deadline=None)
    if not IS_CI:
        settings.load_profile("dev")


def examples(count: int, **others: Any) -> settings:
    """``@settings`` of ``count`` examples without a deadline: a busy machine is no failure."""
    return settings(max_examples=count if IS_CI else min(count, DEV_EXAMPLES), deadline=None, **others)

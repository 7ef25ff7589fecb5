"""The real default model, loaded once for all tests that need it."""

from __future__ import annotations

import pytest

from nanoinfer.models.registry import LoadedModel, load_model


@pytest.fixture(scope="session")
def loaded_smollm2() -> LoadedModel:
    return load_model("smollm2-135m", dtype="float32")

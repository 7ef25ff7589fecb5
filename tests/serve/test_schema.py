"""Bodies made from the server's own description of itself, good and broken ones: never a 500, always as described."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from nanoinfer.serve.service import ServerLimits
from tests.engines.helpers import LLAMA, tiny
from tests.examples import examples
from tests.serve.helpers import TEMPLATE, Server, serving

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    loaded = tiny(LLAMA)
    assert loaded.tokenizer is not None
    loaded.tokenizer.chat_template = TEMPLATE
    with serving(loaded, ServerLimits(seconds=10)) as server:
        yield server
        server.until_empty()
        assert server.complete(max_tokens=1).status_code == 200


GOOD, BROKEN = GenerationMode.POSITIVE, GenerationMode.NEGATIVE


@pytest.mark.parametrize(
    ("path", "mode"),
    [
        ("/v1/completions", GOOD),
        ("/v1/completions", BROKEN),
        ("/v1/chat/completions", GOOD),
        ("/v1/chat/completions", BROKEN),
        ("/v1/models", GOOD),
        ("/v1/models/{name}", GOOD),
    ],
)
def test_no_request_makes_the_server_fail(server: Server, path: str, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    (operation,) = [found.ok() for found in schema.get_all_operations() if found.ok().path == path]

    @given(case=operation.as_strategy(generation_mode=mode))
    @examples(50, derandomize=True, suppress_health_check=list(HealthCheck))
    def holds(case: Any) -> None:
        case.call_and_validate(checks=CHECKS, timeout=30)

    holds()

"""An API fuzzer that nobody here wrote (schemathesis) asks what /openapi.json allows, and what it does not."""

from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import CheckFunction
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.serving.http.serving_here import Running

CHECKS: list[CheckFunction] = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.mark.parametrize("num_examples", [4, pytest.param(500, marks=pytest.mark.whole)])
def test_whatever_is_asked_there_is_no_500_and_answers_are_as_described(here: Running, num_examples: int) -> None:
    with here.client() as client:
        described = client.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(described)
    statuses = set[int]()
    for operation in schema.get_all_operations():
        api: Any = operation.ok()
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            if api.method.upper() == "GET" and mode is schemathesis.GenerationMode.NEGATIVE:
                continue  # Nothing can be wrong with a path that takes nothing.
            strategy = api.as_strategy(generation_mode=mode)

            @hypothesis.settings(
                max_examples=num_examples, deadline=None, database=None, derandomize=True,
                suppress_health_check=list(hypothesis.HealthCheck),
            )  # fmt: skip
            @hypothesis.given(case=strategy)
            def ask(case: Any) -> None:
                if isinstance(case.body, dict) and isinstance(case.body.get("max_tokens"), int):
                    case.body["max_tokens"] = min(case.body["max_tokens"], 8)
                answer = case.call(base_url=here.url, timeout=30)
                statuses.add(answer.status_code)
                case.validate_response(answer, checks=CHECKS)

            ask()
    assert 200 in statuses
    assert 400 in statuses
    assert not any(status >= 500 for status in statuses)

"""Makes calls from the OpenAPI document of a server, and checks each response against it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.live.calls import fresh

CONFORMANCE = [content_type_conformance, response_schema_conformance, status_code_conformance]
UNAVAILABLE = {503, 504}
"""Lists the documented statuses above 499: the server has no room, or the deadline has passed."""
ENDLESS = "/cluster/events"
MESSAGES = [{"role": "user", "content": "x"}]
COMPLETE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/embeddings": {"input": "x"},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [7]},
}
"""Holds request bodies that the server answers. With a few fields of a drawn body they get further
into the server than a drawn body alone."""
NUM_DRAWN_FIELDS = 2
HEADERS = {"x-request-timeout-ms": "5000"}


def document_of(url: str) -> dict[str, Any]:
    found: dict[str, Any] = fresh.get(f"{url}/openapi.json", timeout=60).json()
    return found


def operations(document: dict[str, Any]) -> Iterator[Any]:
    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = found.ok()
        if operation.path != ENDLESS:
            yield operation


def check_operation(operation: Any, url: str, mode: GenerationMode, num_draws: int) -> Counter[int]:
    """Sends calls that the document allows or forbids. Fails at the first response that the
    document does not declare. Returns how many calls had each status."""
    seen: Counter[int] = Counter()

    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    @hypothesis.settings(
        max_examples=num_draws,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        send(case)
        complete = COMPLETE.get(operation.path)
        if complete is not None and isinstance(case.body, dict):
            drawn = [pair for pair in case.body.items() if pair[0] not in complete]
            case.body = complete | dict(drawn[:NUM_DRAWN_FIELDS])
            send(case)
            if not seen[200]:
                case.body = dict(complete)
                send(case)

    def send(case: Any) -> None:
        response = case.call(base_url=url, headers=HEADERS, timeout=60)
        seen[response.status_code] += 1
        checks = list(CONFORMANCE)
        if response.status_code not in UNAVAILABLE:
            checks.append(not_a_server_error)
        case.validate_response(response, checks=checks)

    try:
        check()
    except hypothesis.errors.Unsatisfiable:
        # because the server allows every call of this operation
        assert mode is GenerationMode.NEGATIVE
    except BaseExceptionGroup as group:
        pytest.fail(f"{operation.method} {operation.path}: {group.exceptions[0]!r} {group}")
    return seen

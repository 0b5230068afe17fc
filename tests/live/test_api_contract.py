"""Calls every operation of the OpenAPI document with what the document allows and what it
forbids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from schemathesis import GenerationMode

from tests.forked.commands import LocalServer
from tests.live.api_contract import COMPLETE, check_operation, document_of, operations
from tests.live.calls import fresh
from tests.live.conftest import MODEL, SMALL

BOTH = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


def check_all(server: LocalServer, num_draws: int) -> None:
    answered = set()
    for operation in operations(document_of(server.url)):
        seen: Counter[int] = Counter()
        for mode in BOTH:
            seen += check_operation(operation, server.url, mode, num_draws)
        if seen[200]:
            answered.add(operation.path)
    assert answered >= COMPLETE.keys(), "bodies reach the answers"
    assert not [line for line in server.log_lines() if "Traceback" in line or " ERROR " in line]


@pytest.mark.long
def test_responses_are_as_the_document_says() -> None:
    """Uses a server of its own, because one of the operations replaces the server's processes."""
    with LocalServer([MODEL, "--mixed", "1", *SMALL]) as server:
        check_all(server, 1)


@pytest.mark.long
def test_many_responses_are_as_the_document_says() -> None:
    with LocalServer([MODEL, "--mixed", "1", *SMALL]) as server:
        check_all(server, 40)
        assert fresh.get(f"{server.url}/health", timeout=60).status_code == 200


def forget_404(responses: dict[str, Any]) -> None:
    del responses["404"]


def name_another_kind(responses: dict[str, Any]) -> None:
    responses["404"]["content"] = {"text/html": {}}


def name_another_schema(responses: dict[str, Any]) -> None:
    responses["404"]["content"]["application/json"]["schema"] = {"type": "array"}


@pytest.mark.parametrize("change", [forget_404, name_another_kind, name_another_schema])
def test_a_response_that_the_document_does_not_say_is_found(
    cluster: LocalServer, change: Callable[[dict[str, Any]], None]
) -> None:
    document = document_of(cluster.url)
    path = "/v1/models/{model_id}"
    change(document["paths"][path]["get"]["responses"])
    [operation] = [found for found in operations(document) if found.path == path]
    with pytest.raises(pytest.fail.Exception):
        check_operation(operation, cluster.url, GenerationMode.POSITIVE, 3)

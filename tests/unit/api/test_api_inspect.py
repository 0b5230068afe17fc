"""Tests the endpoints with information: models, tokens, health, versions, explanations."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest
from scripted_head import ScriptedHead, call

from moonpool.api.serving_backend import ApiOptions


def get(head: ScriptedHead, path: str) -> httpx.Response:
    return call(head, path, method="GET")


def test_the_model_is_listed_and_found() -> None:
    listed = get(ScriptedHead(), "/v1/models").json()
    assert listed["object"] == "list"
    assert listed["data"][0]["id"] == "fake"
    assert listed["data"][0]["max_model_len"] == 256
    assert listed["data"][0]["default_sampling_params"] == {}
    assert get(ScriptedHead(), "/v1/models/fake").json() == listed["data"][0]
    assert get(ScriptedHead(), "/v1/models/org/other").status_code == 404


def test_a_model_is_listed_with_its_own_settings() -> None:
    head = ScriptedHead()
    head.card = msgspec.structs.replace(
        head.card, sampling={"temperature": 0.6, "max_tokens": 100.0}
    )
    said = get(head, "/v1/models").text
    assert '"default_sampling_params":{"temperature":0.6,"max_tokens":100}' in said


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health_is_an_empty_200_or_503(path: str) -> None:
    head = ScriptedHead()
    assert (get(head, path).status_code, get(head, path).content) == (200, b"")
    head.is_healthy = False
    assert get(head, path).status_code == 503


def test_probes_say_whether_to_send_requests_and_why_not() -> None:
    head = ScriptedHead()
    assert get(head, "/ready").json() == {"ready": True, "reason": None}
    head.is_healthy = False
    refused = get(head, "/ready")
    assert refused.status_code == 503
    assert refused.json() == {"ready": False, "reason": "no decode instance is up"}
    assert get(head, "/live").status_code == 200


def test_the_heads_own_pages_are_passed_on() -> None:
    head = ScriptedHead()
    head.explanations["r1"] = {"placed": "p0"}
    assert get(head, "/metrics").text == "# nothing\n"
    assert get(head, "/metrics").headers["content-type"].startswith("text/plain")
    assert get(head, "/cluster").json() == {"instances": []}
    assert get(head, "/server_info").json() == {"model": "fake"}
    assert get(head, "/version").json()["version"]
    assert get(head, "/").status_code == 200
    for asked in ("r1", "chatcmpl-r1", "cmpl-r1"):
        assert get(head, f"/explain/{asked}").json()["placed"] == "p0"
    assert get(head, "/explain/r2").json()["error"]["code"] == "request_not_found"


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "é"}, [0xC3, 0xA9]),
        ({"prompt": ""}, []),
        ({"messages": [{"role": "user", "content": "ab"}], "model": "fake"}, [97, 98]),
    ],
)
def test_tokenize_counts_tokens(body: dict[str, Any], tokens: list[int]) -> None:
    assert call(ScriptedHead(), "/tokenize", body).json() == {
        "count": len(tokens),
        "max_model_len": 256,
        "tokens": tokens,
        "token_strs": None,
    }


def test_tokenize_shows_the_texts_of_tokens() -> None:
    body = {"prompt": "ab", "return_token_strs": True}
    assert call(ScriptedHead(), "/tokenize", body).json()["token_strs"] == ["a", "b"]


def test_detokenize_is_the_way_back() -> None:
    answer = call(ScriptedHead(), "/detokenize", {"tokens": [0xC3, 0xA9, 257]})
    assert answer.json() == {"prompt": "é<eos>"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x", "model": 5}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [259]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
def test_bad_questions_are_named(path: str, body: dict[str, Any], param: str) -> None:
    response = call(ScriptedHead(), path, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "fields",
    [
        {"max_body_bytes": 0},
        {"max_choices": 0},
        {"body_timeout_s": 0},
        {"api_keys": {"": "ann"}},
        {"api_keys": {"a b": "ann"}},
        {"api_keys": {"key": "a/b"}},
        {"api_keys": {"key": ""}},
    ],
)
def test_options_that_make_no_sense_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        ApiOptions(**fields)

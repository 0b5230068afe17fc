"""Tests a server with several models: each call goes to the model that it names."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import structs
from scripted_head import ScriptedHead, call


class Zoo(ScriptedHead):
    """A head with two more models. One of them is a pooling model and has the name of the first
    model."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.pooling = ScriptedHead(), ScriptedHead()
        self.second.card = structs.replace(self.card, model_id="second", max_model_tokens=64)
        self.pooling.card = structs.replace(
            self.card, generates=False, forwards=("/v1/embeddings", "/score")
        )

    def models(self) -> list[ScriptedHead]:
        return [self, self.second, self.pooling]


class Empty(ScriptedHead):
    def models(self) -> list[ScriptedHead]:
        return []


def complete(head: ScriptedHead, **fields: Any) -> int:
    return call(head, "/v1/completions", {"prompt": "Hi", **fields}).status_code


def test_a_call_goes_to_the_model_that_it_names() -> None:
    zoo = Zoo()
    assert complete(zoo, model="second") == 200
    assert complete(zoo, model="fake") == 200
    assert complete(zoo) == 200
    assert (len(zoo.second.requests), len(zoo.requests)) == (1, 2)


def test_an_unknown_name_lists_all() -> None:
    answer = call(Zoo(), "/v1/completions", {"prompt": "x", "model": "nobody"})
    assert answer.status_code == 404
    assert "This server has fake, second, fake." in answer.text


def test_a_name_of_two_models_means_the_one_with_the_endpoint() -> None:
    zoo = Zoo()
    call(zoo, "/score", {"model": "fake", "text_1": "a", "text_2": "b"})
    assert len(zoo.pooling.calls) == 1
    assert complete(zoo, model="fake") == 200
    assert len(zoo.requests) == 1


def test_each_has_its_own_context() -> None:
    long = "x" * 100
    assert complete(Zoo(), model="fake", prompt=long) == 200
    answer = call(Zoo(), "/v1/completions", {"model": "second", "prompt": long})
    assert answer.status_code == 400
    assert "64 tokens" in answer.text


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"model": 3}', b'"x"', b"\xff"])
def test_a_body_that_names_none_gets_the_error_of_the_first(raw: bytes) -> None:
    assert call(Zoo(), "/v1/completions", raw=raw).status_code == 400


def test_all_endpoints_with_bodies_choose_by_name() -> None:
    zoo = Zoo()
    for path, body in (
        ("/tokenize", {"prompt": "abc"}),
        ("/detokenize", {"tokens": [97]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses/input_tokens", {"input": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
    ):
        answer = call(zoo, path, body | {"model": "second"})
        assert answer.status_code == 200, (path, answer.text)
    assert call(zoo, "/tokenize", {"prompt": "a", "model": "second"}).json()["max_model_len"] == 64
    assert len(zoo.second.requests) == 3
    assert not zoo.requests


@pytest.mark.parametrize("path", ["/beliefs", "/cluster/event_log"])
def test_pages_of_one_model_choose_by_name(path: str) -> None:
    zoo = Zoo()
    assert call(zoo, path, method="GET").status_code == 200
    assert call(zoo, f"{path}?model=fake", method="GET").status_code == 200
    unknown = call(zoo, f"{path}?model=nobody", method="GET")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


def test_without_a_model_a_call_may_come_again_and_the_list_is_empty() -> None:
    answer = call(Empty(), "/v1/completions", {"prompt": "x"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "5"
    assert call(Empty(), "/v1/models", method="GET").json()["data"] == []
    assert call(Empty(), "/v1/models/x", method="GET").status_code == 404


def test_other_names_are_listed_and_aliases_are_only_accepted() -> None:
    head = ScriptedHead()
    head.card = structs.replace(
        head.card, other_names=("b",), aliases=("/weights/of/it",), root="/r"
    )
    listed = call(head, "/v1/models", method="GET").json()["data"]
    assert [(one["id"], one["root"]) for one in listed] == [("fake", "/r"), ("b", "/r")]
    for name in ("fake", "b", "/weights/of/it"):
        answer = call(head, "/v1/completions", {"prompt": "x", "model": name})
        assert json.loads(answer.content)["model"] == name
        assert call(head, f"/v1/models/{name}", method="GET").json()["id"] == name
    assert head.requests[0].sampling.max_tokens == 16

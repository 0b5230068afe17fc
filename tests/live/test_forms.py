"""Answers with a required form keep that form, whichever client's field asks for it, and are the
same on each way of a request through real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from tests.forked.commands import LocalServer
from tests.live.conftest import SMALL
from tests.live.test_faults import answer_while_killing

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "dog"]},
        "ages": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "maxItems": 3,
        },
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}
WANTED = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
# forbids white space, because this model would not stop writing it
NO_SPACE = {"9": -90, "10": -90, "13": -90, "32": -90}
UNSEEN = "Nothing here looks like an answer; "
PROMPT = 'A pet: {"name": "Ida", "kind": "cat", "ages": [3]}. ' * 20


class Pet(BaseModel):
    name: str = Field(max_length=8)
    kind: Literal["cat", "dog"]
    age: int


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    """Serves the built-in model with decode instances of two stages; the last stage draws
    tokens."""
    arguments = ["--prefill", "1", "--decode", "2", "--decode-pipeline-parallel-size", "2"]
    with LocalServer([*arguments, *SMALL]) as server:
        yield server


def answers(url: str) -> list[dict[str, Any]]:
    with httpx.Client(base_url=url, timeout=60) as client:
        found = []
        for seed in range(4):
            prompt = PROMPT[: -7 * seed or None] if seed % 2 else UNSEEN * (10 + seed)
            body = {
                "prompt": prompt,
                "max_tokens": 900,
                "seed": seed,
                "temperature": 2 * (seed > 0),
            }
            body |= {"response_format": WANTED, "logprobs": 1}
            response = client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            found.append(response.json()["choices"][0])
        return found


@pytest.mark.long
def test_forms_are_kept_and_answers_do_not_depend_on_the_way(server: LocalServer) -> None:
    split = answers(server.url)
    for choice in split:
        assert choice["finish_reason"] == "stop"
        found = json.loads(choice["text"])
        assert found.keys() == SCHEMA["properties"].keys() and found["kind"] in ("cat", "dog")
    assert len({choice["text"] for choice in split}) > 2
    with LocalServer(["--mixed", "1", *SMALL, "--no-enable-prefix-caching"]) as alone:
        assert answers(alone.url) == split


def test_an_openai_client_gets_what_it_parses(server: LocalServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": PROMPT}]
    done = client.chat.completions.parse(
        model="moonpool/induction", messages=messages, response_format=Pet, seed=4, max_tokens=900
    )
    assert isinstance(done.choices[0].message.parsed, Pet)
    chosen = client.chat.completions.create(
        model="moonpool/induction",
        messages=messages,
        seed=1,
        stream=True,
        extra_body={"structured_outputs": {"choice": ["positive", "negative"]}},
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chosen)
    assert text in ("positive", "negative")


@pytest.mark.long
def test_many_at_once_beside_answers_without_a_form(server: LocalServer) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        body = {"prompt": UNSEEN * 9, "max_tokens": 900, "seed": 5, "n": 6, "temperature": 2}
        formed = client.post("/v1/completions", json=body | {"response_format": WANTED}).json()
        plain = client.post("/v1/completions", json=body | {"max_tokens": 40}).json()
    texts = [choice["text"] for choice in formed["choices"]]
    assert all(json.loads(text)["kind"] in ("cat", "dog") for text in texts)
    assert len(set(texts)) > 1
    assert len(plain["choices"]) == 6


@pytest.mark.long
def test_the_form_goes_on_where_an_instance_died(server: LocalServer) -> None:
    many = {"type": "array", "items": SCHEMA, "minItems": 12, "maxItems": 12}
    wanted = {"type": "json_schema", "json_schema": {"name": "pets", "schema": many}}
    body = {"prompt": UNSEEN * 9, "max_tokens": 2000, "seed": 8, "temperature": 0.7}
    body |= {"response_format": wanted, "logit_bias": NO_SPACE}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        expected = client.post("/v1/completions", json=body).json()["choices"][0]
        assert len(json.loads(expected["text"])) == 12
        killed = answer_while_killing(client, "decode", body=body)
        assert killed["choices"][0] == expected

"""The logprobs of a prompt's tokens equal the logprobs with which the model would have drawn the
tokens."""

from __future__ import annotations

import random
from typing import Any

import httpx
import pytest

NUM_PROMPT, NUM_DRAWN = 300, 40


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return random.Random(8).choices(range(256), k=NUM_PROMPT)


def ask(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"temperature": 1.0, "seed": 5, "ignore_eos": True} | fields
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_scored_answer_has_the_logprobs_it_was_drawn_with(
    http: httpx.Client, prompt: list[int]
) -> None:
    """Whether this holds bit for bit, over several chunks of a prompt and with a cached prefix."""
    drawn = ask(
        http, prompt=prompt, max_tokens=NUM_DRAWN, logprobs=3, return_tokens_as_token_ids=True,
        return_token_ids=True,
    )["choices"][0]  # fmt: skip
    whole = prompt + drawn["token_ids"]
    scored = ask(
        http, prompt=whole, max_tokens=0, logprobs=3, echo=True, return_tokens_as_token_ids=True
    )
    found = scored["choices"][0]["logprobs"]
    assert scored["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert scored["usage"]["completion_tokens"] == 0
    assert len(found["tokens"]) == len(whole)
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert found[name][NUM_PROMPT:] == drawn["logprobs"][name], name
    assert found["tokens"] == [f"token_id:{token}" for token in whole]


def test_prompt_logprobs_agree_with_echo_and_the_answer_is_the_same(
    http: httpx.Client, prompt: list[int]
) -> None:
    fields = {"prompt": prompt[:150], "max_tokens": 3, "logprobs": 2}
    plain = ask(http, **fields)["choices"][0]
    field = ask(http, **fields, prompt_logprobs=2)["choices"][0]
    echoed = ask(http, **fields, echo=True)["choices"][0]
    assert field["text"] == plain["text"] and field["logprobs"] == plain["logprobs"]
    assert echoed["logprobs"]["token_logprobs"][150:] == plain["logprobs"]["token_logprobs"]
    assert field["prompt_logprobs"][0] is None
    listed = field["prompt_logprobs"]
    own = [listed[i][str(prompt[i])]["logprob"] for i in range(1, 150)]
    assert own == echoed["logprobs"]["token_logprobs"][1:150]


def test_one_token_has_no_logprob(http: httpx.Client) -> None:
    found = ask(http, prompt=[7], max_tokens=0, echo=True, logprobs=1)["choices"][0]["logprobs"]
    assert found["token_logprobs"] == [None]

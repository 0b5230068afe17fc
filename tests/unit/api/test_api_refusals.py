"""Tests a refusal as clients see it: numbers in its body, and a real OpenAI client that comes
back."""

from __future__ import annotations

import time

import openai
import pytest
from scripted_head import ScriptedHead, Step, complete, served, spoken

from moonpool.api.serving_backend import RequestRefused
from moonpool.types import Request

NUMBERS = {"predicted_ttft_s": 41.5, "limit_ttft_s": 30.0}


def refused() -> RequestRefused:
    return RequestRefused(429, "ttft_slo", "too late", 0.4, NUMBERS)


def test_the_body_holds_the_projection() -> None:
    response = complete(ScriptedHead(lambda request: [refused()]))
    assert response.status_code == 429 and response.headers["retry-after"] == "1"
    error = response.json()["error"]
    assert error["code"] == "ttft_slo" and error["projection"] == NUMBERS


def test_a_refusal_without_numbers_has_no_such_field() -> None:
    response = complete(
        ScriptedHead(lambda request: [RequestRefused(503, "no_instance", "none", 5.0)])
    )
    assert "projection" not in response.json()["error"]


def test_an_openai_client_waits_as_long_as_it_was_told() -> None:
    asked_s: list[float] = []

    def script(request: Request) -> list[Step]:
        asked_s.append(time.monotonic())
        return [refused()] if len(asked_s) == 1 else spoken("Hello")

    with served(ScriptedHead(script)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=1)
        answer = client.completions.create(model="fake", prompt="Hi")
        assert answer.choices[0].text == "Hello"
        first_s, second_s = asked_s
        assert second_s - first_s >= 0.95

        asked_s.clear()
        without = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.RateLimitError) as caught:
            without.completions.create(model="fake", prompt="Hi")
        assert caught.value.code == "ttft_slo"
        assert isinstance(caught.value.body, dict) and caught.value.body["projection"] == NUMBERS

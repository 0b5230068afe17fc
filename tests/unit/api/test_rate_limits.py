"""Tests rates and priorities of tenants: buckets over time, and calls through the whole HTTP
layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_head import ScriptedHead, Step, served, spoken

from moonpool.api.errors import ApiError
from moonpool.api.keys import TenantLimits
from moonpool.api.rate_limits import BURST_S, RateLimits
from moonpool.api.serving_backend import ApiOptions, RequestRefused
from moonpool.types import ProgramContext, Request

KEYS = {"k-ann": "ann", "k-bob": "bob", "k-op": "admin"}


def limited(**limits: Any) -> RateLimits:
    return RateLimits({"ann": TenantLimits(**limits)})


def refusal_s(limits: RateLimits, now: float) -> float | None:
    """Returns the time that a refused call should wait, or None if the call begins."""
    try:
        limits.begin("ann", now)
    except RequestRefused as refused:
        return refused.refusal.retry_after_s
    return None


@given(
    rate=st.floats(0.1, 50),
    gaps_s=st.lists(st.floats(0, 5), min_size=1, max_size=80),
)
def test_no_more_calls_than_the_rate_and_one_burst(rate: float, gaps_s: list[float]) -> None:
    limits, now, num_begun = limited(requests_per_s=rate), 100.0, 0
    for gap_s in gaps_s:
        now += gap_s
        wait_s = refusal_s(limits, now)
        if wait_s is not None:  # a refusal says when to come back
            now += wait_s + 1e-6
            limits.begin("ann", now)
        num_begun += 1
    assert num_begun <= max(rate * BURST_S, 1.0) + rate * (now - 100.0) + 1e-3


def test_tokens_are_paid_when_they_come() -> None:
    limits = limited(tokens_per_s=10)
    limits.begin("ann", 0.0)
    limits.spend("ann", 300)  # the bucket held only 100 tokens, so it is in debt now
    with pytest.raises(RequestRefused, match="10 tokens per second") as caught:
        limits.begin("ann", 5.0)
    assert caught.value.refusal.retry_after_s == pytest.approx(15.0)
    limits.begin("ann", 20.1)


def test_prompts_of_a_refused_call_are_given_back() -> None:
    limits = limited(tokens_per_s=1)
    limits.begin("ann", 0.0)
    with pytest.raises(RequestRefused, match="busy"), limits.prompts("ann", 500):
        raise RequestRefused(429, "ttft_slo", "busy")
    limits.begin("ann", 0.0)
    with limits.prompts("ann", 500):
        pass
    assert refusal_s(limits, 0.0) == pytest.approx(490.0)


def test_other_tenants_are_not_limited() -> None:
    limits = limited(requests_per_s=0.1, tokens_per_s=1)
    for _ in range(100):
        limits.begin("bob", 0.0)
        limits.spend("bob", 1000)
    assert limits.counts("ann") and not limits.counts("bob")


def test_a_request_has_the_priority_of_its_key_or_a_worse_one() -> None:
    limits = limited(priority=-2)
    assert limits.priority("ann", None, is_operator=False, program=None) == -2
    assert limits.priority("ann", -2, is_operator=False, program=None) == -2
    assert limits.priority("ann", 7, is_operator=False, program=None) == 7
    assert limits.priority("bob", None, is_operator=False, program=None) == 0
    assert limits.priority("bob", -9, is_operator=True, program=None) == -9
    with pytest.raises(ApiError, match="at least 0 for this API key"):
        limits.priority("bob", -1, is_operator=False, program=None)


def test_a_program_asks_for_a_worse_priority_than_its_key_has() -> None:
    limits = limited(priority=-2)
    urgent, slow = (ProgramContext(program_id="p", priority=n) for n in (5, -3))
    assert limits.priority("ann", None, is_operator=False, program=urgent) == -2
    assert limits.priority("ann", None, is_operator=False, program=slow) == 1
    assert limits.priority("ann", 7, is_operator=False, program=urgent) == 7
    assert limits.priority("bob", None, is_operator=True, program=urgent) == -5


class Tenants:
    """A server whose clock the test moves, and its clients."""

    def __init__(self, url: str, head: ScriptedHead) -> None:
        self.url, self.now = url, 1000.0
        head.now = lambda: self.now

    def ask(self, key: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        whole = {"prompt": [1, 2, 3], "max_tokens": 4} | body
        if path == "/v1/embeddings":
            whole = body
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(self.url + path, json=whole, headers=headers, timeout=60)


@contextmanager
def tenants(head: ScriptedHead, **limits: Any) -> Iterator[Tenants]:
    options = ApiOptions(
        api_keys=KEYS, operators=frozenset({"admin"}), limits={"ann": TenantLimits(**limits)}
    )
    with served(head, options) as url:
        yield Tenants(url, head)


def test_calls_above_the_rate_get_429_with_the_time_to_wait() -> None:
    head = ScriptedHead()
    with tenants(head, requests_per_s=0.2) as server:
        assert [server.ask("k-ann").status_code for _ in range(2)] == [200, 200]
        refused = server.ask("k-ann", n=3)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit")
        assert refused.headers["retry-after"] == "5"
        assert server.ask("k-bob").status_code == 200, "another tenant"
        message = server.ask(
            "k-ann", "/v1/messages", prompt=None, messages=[{"role": "user", "content": "Hi"}]
        )
        assert message.json()["error"]["type"] == "rate_limit_error", "in Anthropic's form"
        server.now += 5
        assert server.ask("k-ann", n=3).status_code == 200, "one call, whatever its choices"
    assert head.refused == {"rate_limit": 2}


def test_prompts_and_answers_count_as_tokens_and_refused_ones_do_not() -> None:
    def script(request: Request) -> list[Step]:
        if len(request.token_ids) > 50:
            return [RequestRefused(429, "ttft_slo", "too much")]
        return spoken("Hello")

    with tenants(ScriptedHead(script), tokens_per_s=1) as server:
        assert server.ask("k-ann", prompt=[1] * 60).json()["error"]["code"] == "ttft_slo"
        # the bucket of 10 has room for 4 tokens of the prompt and 5 of the answer
        assert server.ask("k-ann", prompt=[1] * 4).status_code == 200
        assert server.ask("k-ann", prompt=[1] * 4, stream=True).status_code == 200
        refused = server.ask("k-ann")
        assert refused.json()["error"]["code"] == "rate_limit"
        assert refused.headers["retry-after"] == "8"
        server.now += 8.1
        assert server.ask("k-ann").status_code == 200


def test_embeddings_count_too() -> None:
    with tenants(ScriptedHead(), requests_per_s=0.1) as server:
        server.ask("k-ann")
        refused = server.ask("k-ann", "/v1/embeddings", input="a cat")
        assert refused.json()["error"]["code"] == "rate_limit"


def test_requests_have_the_priority_of_their_key() -> None:
    head = ScriptedHead()
    with tenants(head, priority=3) as server:
        server.ask("k-ann")
        server.ask("k-ann", priority=8)
        refused = server.ask("k-ann", priority=2)
        server.ask("k-op", priority=-5)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "priority"
    assert [request.priority for request in head.requests] == [3, 8, -5]

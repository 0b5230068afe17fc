"""Tests the messages about KV events that cannot be used, and the comparison with the server's own
counts."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.protocol.messages import CacheView
from moonpool.vllm.cache_check import LEAST_TOKENS, HitCheck, why_no_events
from moonpool.vllm.events import Connection

EVENTS = "tcp://127.0.0.1:5557"
BINDS = {"0": {"endpoint": "tcp://*:5557"}}
CONNECTS = {"0": {"endpoint": "tcp://127.0.0.1:5557"}}


@pytest.mark.parametrize(
    ("connection", "num_published", "other_block_tokens", "sources", "says"),
    [
        ("none", 0, 0, CONNECTS, 'write "endpoint": "tcp://*:5557"'),
        ("none", 0, 0, {}, "start it with --kv-events-config"),
        ("open", 0, 0, {}, "start it with --kv-events-config"),
        ("none", 0, 0, None, f"nothing listens at {EVENTS}"),
        ("none", 0, 0, BINDS, "vLLM publishes at tcp://\\*:5557"),
        ("none", 0, 0, {"0": "strange"}, f"nothing listens at {EVENTS}"),
        ("refused", 0, 0, BINDS, "is it another port"),
        ("open", 5, 64, BINDS, "blocks of 64 tokens, and this server has blocks of 16"),
        ("open", 5, 0, BINDS, "another server publishes them"),
        ("open", 0, 0, None, "is --kv-events-config set"),
    ],
)
def test_each_cause_has_its_words_and_what_to_do(
    connection: Connection,
    num_published: int,
    other_block_tokens: int,
    sources: dict[str, Any] | None,
    says: str,
) -> None:
    text = why_no_events(EVENTS, connection, num_published, other_block_tokens, 16, sources)
    assert says.replace("\\*", "*") in text
    assert "\n" not in text


def view(prompt: int, expected: int, queries: int, hits: int, source: str = "events") -> CacheView:
    return CacheView(
        source=source,
        prompt_tokens=prompt,
        expected_tokens=expected,
        engine_queries=queries,
        engine_hits=hits,
    )


def test_counts_that_are_far_apart_are_said_once() -> None:
    check = HitCheck()
    assert not check.compare(view(LEAST_TOKENS - 1, 0, LEAST_TOKENS - 1, 4000)), "too few"
    assert check.compare(view(10_000, 0, 10_000, 3_600))
    assert "found 36% of the last 10,000 prompt tokens cached" in check.note
    assert "expected 0%" in check.note
    assert not check.compare(view(20_000, 0, 20_000, 7_200)), "it is said already"
    assert check.compare(view(30_000, 9_000, 30_000, 16_200))
    assert check.note == ""


def test_hits_of_other_clients_say_nothing() -> None:
    check = HitCheck()
    assert not check.compare(view(10_000, 0, 50_000, 25_000))
    assert not check.compare(view(20_000, 0, 50_000, 25_000)), "none was looked up"


def test_an_assumption_that_is_too_high_names_the_events() -> None:
    check = HitCheck()
    assert check.compare(view(10_000, 8_000, 10_000, 1_000, "assumed"))
    assert "--vllm URL,EVENTS" in check.note


def test_a_decode_vllm_that_fetches_nothing_is_told_of_its_connector() -> None:
    check = HitCheck(fetches=True)
    assert not check.compare(view(10_000, 9_000, 10_000, 8_800, "assumed"))
    assert check.compare(view(20_000, 18_000, 20_000, 8_800, "assumed"))
    assert "computes again" in check.note
    assert "--kv-transfer-config" in check.note
    assert check.compare(view(30_000, 27_000, 30_000, 17_800, "assumed"))
    assert check.note == ""

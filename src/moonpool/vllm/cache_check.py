"""Explains why the KV events of a vLLM server cannot be used, and checks whether the server's
counts of hits agree with the expected hits. Pure: used only for words and warnings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moonpool.protocol.messages import CacheView
from moonpool.vllm.events import Connection

LEAST_TOKENS = 4096
"""Least number of prompt tokens that one comparison covers."""
OTHER_CLIENTS = 1.2
"""A server that counts this many times moonpool's tokens has other clients, whose hits are not
moonpool's."""
FAR_APART = 0.2
"""If two shares of hits differ by this or more, a line in the log says so."""


def why_no_events(
    events: str,
    connection: Connection,
    num_published: int,
    other_block_tokens: int,
    block_tokens: int,
    sources: Mapping[str, Any] | None,
) -> str:
    """Returns a clause for the operator that says why the events cannot be used. `events`: the
    address from which events are read. `num_published`: number of batches that came. `sources`:
    what the server says about its publishers, by rank, or None if it does not tell."""
    if num_published and other_block_tokens:
        return (
            f"those at {events} are of blocks of {other_block_tokens} tokens, and this server has"
            f" blocks of {block_tokens}: another server publishes them"
        )
    if num_published:
        return (
            f"those at {events} do not name the prompts that this server has computed: another"
            " server publishes them, they continue blocks from before moonpool's start (give it"
            " REPLAY, too), or vLLM has another chat template (give moonpool --chat-template, too)"
        )
    if connection == "refused":
        return f"what listens at {events} does not publish events: is it another port?"
    if sources is not None and not sources:
        return "vLLM publishes none: start it with --kv-events-config"
    endpoint = _endpoint(sources)
    if endpoint.startswith("tcp://") and "*" not in endpoint:
        port = endpoint.rpartition(":")[2]
        return (
            f'vLLM connects to {endpoint} and does not listen there: write "endpoint":'
            f' "tcp://*:{port}" in its --kv-events-config'
        )
    if connection == "none":
        where = f"; vLLM publishes at {endpoint}" if endpoint else ""
        return (
            f'nothing listens at {events}{where}. vLLM listens only at an "endpoint" such as'
            ' "tcp://*:5557"; with a host in place of *, it connects'
        )
    return f"none come from {events}: is --kv-events-config set at this vLLM?"


def _endpoint(sources: Mapping[str, Any] | None) -> str:
    first = next(iter((sources or {}).values()), None)
    found = first.get("endpoint") if isinstance(first, dict) else None
    return found if isinstance(found, str) else ""


class HitCheck:
    """Compares each time another LEAST_TOKENS tokens of prompts were sent."""

    def __init__(self, fetches: bool = False) -> None:
        """`fetches`: whether the server's connector should fetch what a prefill instance has
        computed."""
        self._fetches = fetches
        self._before = CacheView(source="")
        self.note = ""

    def compare(self, now: CacheView) -> bool:
        """Compares the counts since the last comparison. `note` then says how they differ, or is ""
        if they agree. Returns whether a difference is new, or has gone."""
        before = self._before
        asked = now.prompt_tokens - before.prompt_tokens
        counted = now.engine_queries - before.engine_queries
        if asked < LEAST_TOKENS or now.engine_queries < before.engine_queries:
            return False
        self._before, was = now, self.note
        expected = (now.expected_tokens - before.expected_tokens) / asked
        found = (now.engine_hits - before.engine_hits) / max(counted, 1)
        if not 0 < counted <= OTHER_CLIENTS * asked or abs(found - expected) < FAR_APART:
            self.note = ""
            return bool(was)
        self.note = (
            f"vLLM found {found:.0%} of the last {asked:,} prompt tokens cached, where moonpool"
            f" expected {expected:.0%}"
        )
        if self._fetches and found < expected:
            self.note = (
                f"vLLM computes again what a prefill instance has computed ({found:.0%} of the last"
                f" {asked:,} prompt tokens were fetched or cached): give it the same"
                " --kv-transfer-config as the prefill vLLM"
            )
        elif now.source == "assumed" and found < expected:
            self.note += ": its KV events would tell what it still caches (--vllm URL,EVENTS)"
        return not was

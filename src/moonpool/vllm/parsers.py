"""Finds out what a server parses: tool calls (`--tool-call-parser`) and reasoning
(`--reasoning-parser`). No endpoint tells, so the server is asked for one short answer."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from moonpool.protocol.model_offer import Parsing
from moonpool.types import MALFORMED
from moonpool.vllm.client import VllmClient, VllmError
from moonpool.vllm.facts import VllmFacts

CHAT = "/v1/chat/completions"
SHOWN_TOKENS = 16
"""Number of tokens that is enough for a model to begin to reason."""
_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        },
    },
}


class _Message(msgspec.Struct):
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Answer(msgspec.Struct):
    choices: list[_Choice]


_ANSWER = msgspec.json.Decoder(_Answer)


async def find_parsers(client: VllmClient, facts: VllmFacts) -> tuple[Parsing, ...]:
    """Returns what the server has shown to parse. Without a parser of tool calls, vLLM refuses
    tools that the model may choose to call. A server whose answer shows no reasoning is taken to
    parse none. Raises VllmError if the server fails or is gone."""
    if CHAT not in facts.offer.paths or not facts.offer.generates:
        return ()
    found: list[Parsing] = []
    answer = await _ask(client, facts, {"tools": [_TOOL], "tool_choice": "auto"})
    if answer is None:
        answer = await _ask(client, facts, {})
    else:
        found.append("tools")
    if answer is not None and shows_reasoning(answer):
        found.append("reasoning")
    return tuple(found)


def shows_reasoning(answer: bytes) -> bool:
    """Whether the answer to a chat has a part that is reasoning."""
    try:
        choices = _ANSWER.decode(answer).choices
    except MALFORMED:
        return False
    return any(one.message.reasoning or one.message.reasoning_content for one in choices)


async def _ask(client: VllmClient, facts: VllmFacts, fields: Mapping[str, Any]) -> bytes | None:
    """Returns the answer, or None if the server refuses such a call. Raises VllmError."""
    body = {
        "model": facts.model_id,
        "messages": [{"role": "user", "content": "What is 2 + 3?"}],
        "max_tokens": SHOWN_TOKENS,
        "temperature": 0.0,
        "cache_salt": secrets.token_hex(32),
        **fields,
    }
    whole = b""
    try:
        async for part in client.forward(CHAT, msgspec.json.encode(body)):
            whole += part
    except VllmError as error:
        if error.status:
            return None
        raise
    return whole.partition(b"\n")[2]

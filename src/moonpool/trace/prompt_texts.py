"""The prompts of rows that have their text: plain, as chat messages, or as the body of an API.

No tokenizer is known, so a token is four bytes of the text. Token ids count as they are. Equal
beginnings of two prompts have equal ids of blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from moonpool.trace.programs import SESSION_BLOCK_TOKENS, block_id
from moonpool.trace.row import MAX_LENGTH_TOKENS, LineError

BYTES_PER_TOKEN = 4
MAX_DEPTH = 16
"""Parts of the content of a message within each other; deeper ones have no text."""
_MEDIA = ("image", "video", "audio", "input_", "file")
_ANSWER = ("max_completion_tokens", "max_tokens", "max_output_tokens", "output_length")


class KnownPrompt(NamedTuple):
    """The tokens of a prompt, and the ids of its blocks; the last one may be partial."""

    num_tokens: int
    block_ids: tuple[int, ...]


def text_prompt(text: str, block_tokens: int = SESSION_BLOCK_TOKENS) -> KnownPrompt:
    """Returns the prompt of a plain text."""
    data, width = text.encode(), BYTES_PER_TOKEN * block_tokens
    parts = (data[start : start + width] for start in range(0, len(data), width))
    return KnownPrompt(-(-len(data) // BYTES_PER_TOKEN), tuple(_chained(parts)))


def message_text(messages: Sequence[Any], tools: Any = None) -> str:
    """Returns the text of chat messages, and of the tools before them, in an order that only grows
    when messages are added."""
    parts = [as_json(tools)] if tools else []
    for message in messages:
        if isinstance(message, str):
            parts.append(message)
            continue
        if not isinstance(message, dict):
            raise LineError(f"a message is {message!r:.40}; it must be an object with a role")
        calls = message.get("tool_calls")
        parts += [f"\n{message.get('role', '')}\n", content_text(message.get("content"))]
        parts += [as_json(calls)] if calls else []
    return "".join(parts)


def body_prompt(body: dict[str, Any], block_tokens: int = SESSION_BLOCK_TOKENS) -> KnownPrompt:
    """Returns the prompt of a request body: a completion, a chat, a message or a response."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and all(type(one) is int for one in prompt):
        starts = range(0, len(prompt), block_tokens)
        parts = (repr(prompt[at : at + block_tokens]).encode() for at in starts)
        return KnownPrompt(len(prompt), tuple(_chained(parts)))
    if prompt is not None:
        return text_prompt(content_text(prompt), block_tokens)
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, str):
        messages = [messages]
    if not isinstance(messages, list):
        raise LineError("the payload has neither a prompt nor messages")
    before = [content_text(body[name]) for name in ("system", "instructions") if body.get(name)]
    text = message_text([*before, *messages], body.get("tools"))
    return text_prompt(text, block_tokens)


def answer_tokens(body: dict[str, Any]) -> float | None:
    """The limit of the answer that a body of a request has, or None if it has none."""
    for name in _ANSWER:
        value = body.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if 0 < value <= MAX_LENGTH_TOKENS:
            return float(value)
    return None


def content_text(content: Any, depth: int = 0) -> str:
    """Returns the text of a message's content. Images and other media count by their kind alone."""
    if content is None or depth > MAX_DEPTH:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(content_text(part, depth + 1) for part in content)
    if not isinstance(content, dict):
        return str(content)
    for name in ("text", "content", "contents"):
        if name in content:
            return content_text(content[name], depth + 1)
    kind = str(content.get("type", ""))
    return f"[{kind}]" if kind.startswith(_MEDIA) else as_json(content)


def as_json(value: Any) -> str:
    """Raises LineError."""
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise LineError("a message is nested too deeply") from None


def _chained(parts: Iterator[bytes]) -> Iterator[int]:
    """An id for each part that stands for all parts up to it."""
    digest = b""
    for part in parts:
        digest = hashlib.blake2b(digest + part, digest_size=16).digest()
        yield block_id(digest)

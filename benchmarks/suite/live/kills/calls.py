"""Calls of all endpoints for a campaign, and the texts of their responses."""

from __future__ import annotations

import json
import random
from typing import Any

from benchmarks.errors import BenchError

Body = dict[str, Any]
Texts = dict[Any, str]
LARGE_BYTES = 70 << 10  # above what the head reads in its own process


class ResponseError(BenchError):
    """A response that is not complete, or contains an error; the text says which."""


def calls(count: int, seed: int, longest: int = 240) -> list[tuple[str, Body]]:
    """Streams of all endpoints, greedy and sampled, and answers that come at once."""
    drawn = random.Random(seed)
    found: list[tuple[str, Body]] = []
    for number in range(count):
        tokens = [drawn.randrange(3, 250) for _ in range(drawn.randrange(40, 300))]
        sampling: Body = {"temperature": 0} if number % 2 else {"temperature": 1, "seed": number}
        shared = {**sampling, "max_tokens": drawn.randrange(longest // 2, longest), "stream": True}
        text = "".join(chr(97 + token % 26) for token in tokens)
        chat = {"messages": [{"role": "user", "content": text}], **shared}
        match number % 8:
            case 0:
                found.append(("/v1/completions", {"prompt": tokens, **shared, "stream": False}))
            case 1:
                found.append(("/v1/chat/completions", chat | {"logprobs": True}))
            case 2:
                chat = {name: chat[name] for name in ("messages", "max_tokens", "stream")}
                found.append(("/v1/messages", chat | {"temperature": 0}))
            case 3:
                del shared["max_tokens"]
                body = {"input": text, **shared, "max_output_tokens": longest // 2}
                found.append(("/v1/responses", body))
            case 4:
                found.append(("/v1/completions", {"prompt": tokens, **shared, "n": 2}))
            case 6:  # allowed tokens depend on all earlier ones, also before a fault
                banned = {"bad_words": [text[:1], text[:2], text[-2:]]}
                found.append(("/v1/completions", {"prompt": tokens, **shared, **banned}))
            case 7:
                allowed = {"allowed_token_ids": sorted({*tokens})}
                found.append(("/v1/completions", {"prompt": tokens, **shared, **allowed}))
            case _:
                found.append(("/v1/completions", {"prompt": tokens, **shared}))
        if "completions" in found[-1][0]:
            found[-1][1]["ignore_eos"] = True
    return found


def encoded(number: int, body: Body) -> bytes:
    """The body as JSON; every ninth is so large that a body reader has to read it."""
    raw = json.dumps(body).encode()
    return raw if number % 9 else raw[:-1] + b" " * LARGE_BYTES + b"}"


def headers_of(number: int) -> bytes:
    """Every fifth stream has event ids."""
    return b"" if number % 5 else b"Last-Event-ID: 0\r\n"


def texts_of(path: str, body: Body, raw: bytes) -> Texts:
    """Returns the texts and logprobs of a whole response by choice. Raises ResponseError."""
    if not body.get("stream"):
        choices = json.loads(raw)["choices"]
        return {choice["index"]: choice["text"] for choice in choices}
    blocks = raw.decode().split("\n\n")
    if blocks.pop() != "":
        raise ResponseError("the stream ends within an event")
    if "completions" in path and (not blocks or not blocks.pop().endswith("data: [DONE]")):
        raise ResponseError("the stream ends without [DONE]")
    said = [block for block in blocks if not block.startswith(": ")]  # comments say nothing
    events = [json.loads(block.split("data: ", 1)[1]) for block in said]
    texts: Texts = {}
    for event in events:
        _read(event, texts)
    if path == "/v1/responses":
        numbers = [event["sequence_number"] for event in events]
        if numbers != list(range(len(events))):
            raise ResponseError(f"the numbers of events are not in order: {numbers}")
        if events[-1]["type"] not in ("response.completed", "response.incomplete"):
            raise ResponseError(f"the stream ends with {events[-1]}")
    if path == "/v1/messages" and events[-1]["type"] != "message_stop":
        raise ResponseError("the stream ends without message_stop")
    return texts


def _read(event: dict[str, Any], texts: Texts) -> None:
    if event.get("error") or event.get("type") == "error":
        raise ResponseError(f"the stream ends with an error: {event}")
    for choice in event.get("choices", ()):
        text = choice.get("text", choice.get("delta", {}).get("content", ""))
        texts[choice["index"]] = texts.get(choice["index"], "") + text
        for token in (choice["logprobs"] or {}).get("content", ()):
            texts["logprobs"] = texts.get("logprobs", "") + f"{token['logprob']} "
    if event.get("type") == "content_block_delta":
        texts[0] = texts.get(0, "") + event["delta"]["text"]
    if event.get("type") == "response.output_text.delta":
        texts[0] = texts.get(0, "") + event["delta"]

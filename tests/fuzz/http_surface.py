"""Fuzzes the HTTP API as a reader: an input is a line with method and path, and a body."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from moonpool.api.app import make_app
from tests.unit.api.scripted_head import ScriptedHead

MAX_BODY_BYTES = 48 << 10  # keeps bodies so small that no separate process reads them
PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
)
BODIES: tuple[dict[str, Any], ...] = (
    {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "max_tokens": 4,
        "stream": True,
        "stop": ["x", "yz"],
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "response_format": {"type": "text"},
        "kv_transfer_params": {"remote_host": "10.0.0.1", "remote_port": 1},
    },
    {"prompt": ["Hi", "you"], "max_tokens": 4, "temperature": 0.5, "seed": 7, "n": 2},
    {"input": "Hi", "max_output_tokens": 4, "instructions": "short", "previous_response_id": "r"},
    {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "system": "s"},
    {"input": ["Hi", "you"], "encoding_format": "base64", "dimensions": 3},
    {"prompt": "Hi", "add_special_tokens": False},
    {"tokens": [72, 105]},
)


class ServerFailedError(Exception):
    """Is raised if the server answered a request with a 5xx."""


@cache
def _served() -> tuple[ScriptedHead, httpx.AsyncClient, asyncio.Runner]:
    head = ScriptedHead()
    client = httpx.AsyncClient(transport=httpx.ASGITransport(make_app(head)), base_url="http://h")
    return head, client, asyncio.Runner()


def http_samples() -> list[bytes]:
    posts = [
        f"POST {path}\n".encode() + json.dumps(body | {"model": "fake"}).encode()
        for path, body in zip(PATHS, BODIES, strict=True)
    ]
    gets = [f"GET {path}\n".encode() for path in ("/v1/models", "/explain/x", "/cluster?a=b")]
    return posts + gets


def ask(data: bytes, folder: Path) -> int:
    """Sends one request, and reads the whole answer. Raises ServerFailedError for a 5xx."""
    line, _, body = data.partition(b"\n")
    method, _, target = line.partition(b" ")
    text = "".join(c for c in target.decode("latin-1") if c.isprintable() and c not in " \\#")
    verb = "POST" if method.startswith(b"P") else "GET"
    if not text.startswith("/") or text.startswith("//"):
        text = PATHS[len(data) % len(PATHS)]
    head, client, runner = _served()
    headers = {"content-type": "application/json"}
    try:
        request = client.build_request(verb, text, content=body[:MAX_BODY_BYTES], headers=headers)
    except httpx.InvalidURL:
        return 0  # an input that no client can send
    response = runner.run(client.send(request))
    for record in (head.requests, head.delivered, head.kept, head.aborted, head.drained):
        record.clear()
    if response.status_code >= 500:
        raise ServerFailedError(f"status {response.status_code}: {response.text[:300]}")
    return response.status_code

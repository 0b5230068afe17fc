"""Runs an HTTP proxy in front of a server that plants one kind of fault into streamed answers."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from moonpool_lab.demo.local_server import free_port

EVERY_TOKENS = 40


class FaultyProxy:
    """`fault` is "", "drop", "double", "mix" (one token in EVERY_TOKENS), "swap" (the answer of
    another conversation), "cut" or "hang" (one stream in 8)."""

    def __init__(self, upstream: str, fault: str) -> None:
        self._client = httpx.AsyncClient(base_url=upstream, timeout=120)
        self._fault = fault
        self._rng = random.Random(fault)
        self._former: list[bytes] = []
        self._latest = " the"
        self.planted = 0

    async def forward(self, request: Request) -> Response:
        body = await request.body()
        streams = b'"stream":true' in body
        if self._fault == "swap" and streams:
            body = self._maybe_swapped(body, request.url.path)
        sent = self._client.build_request(
            request.method,
            request.url.path,
            content=body,
            headers={"content-type": "application/json"} if body else {},
        )
        got = await self._client.send(sent, stream=streams)
        if not streams or got.status_code != 200:
            content = await got.aread()
            kind = got.headers.get("content-type", "application/json")
            return Response(content, got.status_code, media_type=kind)
        return StreamingResponse(self._events(got), media_type="text/event-stream")

    def _maybe_swapped(self, body: bytes, path: str) -> bytes:
        self._former = [*self._former[-20:], body]
        same_route = [b for b in self._former if (b'"messages"' in b) == ("chat" in path)]
        other = self._rng.choice(same_route)
        if self._rng.random() < 0.1 and other != body:
            self.planted += 1
            return other
        return body

    async def _events(self, got: httpx.Response) -> AsyncIterator[bytes]:
        ends_at = 3 if self._rng.random() < 1 / 8 else None
        number = 0
        try:
            async for line in got.aiter_lines():
                if not line:
                    continue
                number += 1
                if number == ends_at and self._fault in ("cut", "hang"):
                    self.planted += 1
                    if self._fault == "cut":
                        return
                    await asyncio.sleep(3600)
                for each in self._changed(line):
                    yield each.encode() + b"\n\n"
        finally:
            await got.aclose()

    def _changed(self, line: str) -> list[str]:
        if self._fault not in ("drop", "double", "mix") or not line.startswith("data: {"):
            return [line]
        event = json.loads(line.removeprefix("data: "))
        choices: list[dict[str, Any]] = event["choices"]
        said = choices[0].get("delta", choices[0]) if choices else {}
        key = "content" if "content" in said else "text"
        text = said.get(key)
        if not text or choices[0].get("finish_reason"):
            return [line]
        latest, self._latest = self._latest, text
        if self._rng.random() > 1 / EVERY_TOKENS or (self._fault == "mix" and latest == text):
            return [line]
        self.planted += 1
        if self._fault == "mix":
            said[key] = latest
            return [f"data: {json.dumps(event)}"]
        return [] if self._fault == "drop" else [line, line]


@contextmanager
def faulty_proxy(upstream: str, fault: str) -> Iterator[tuple[str, FaultyProxy]]:
    """Serves on a free port until the block ends."""
    proxy = FaultyProxy(upstream, fault)
    app = Starlette(routes=[Route("/{path:path}", proxy.forward, methods=["GET", "POST"])])
    port = free_port()
    server = uvicorn.Server(
        uvicorn.Config(
            app, port=port, log_level="critical", lifespan="off", timeout_graceful_shutdown=1
        )
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        threading.Event().wait(0.02)
    try:
        yield f"http://127.0.0.1:{port}", proxy
    finally:
        server.should_exit = True
        thread.join(60)

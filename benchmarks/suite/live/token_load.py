"""Sends many calls at the same time, from a separate process that parses as little as possible.

    python -m benchmarks.suite.live.token_load PORT STREAMS TOKENS CALLS

Prints one line of JSON: seconds, tokens, calls, and the times to the first byte of content.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from typing import cast

import uvloop

CONNECT_AT_ONCE = 256
DONE = b"0\r\n\r\n"
PROMPT = "The quick brown fox jumps over the lazy dog. " * 8


class _Client(asyncio.Protocol):
    """One connection, which makes `calls` calls one after another."""

    def __init__(self, request: bytes, calls: int, over: asyncio.Future[None]) -> None:
        self._request = request
        self._calls = calls
        self._over = over
        self._tail = b""
        self._begun_s = 0.0
        self.first_s: list[float] = []
        self.num_events = 0
        self.error = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def itself(self) -> _Client:
        return self

    def begin(self) -> None:
        self._calls -= 1
        self._begun_s = time.monotonic()
        self._is_new = self._is_silent = True
        self._tail = b""
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._is_new and not data.startswith(b"HTTP/1.1 200"):
            self._end(data[:300].decode(errors="replace"))
            return
        self._is_new = False
        if self._is_silent and b"data:" in data:
            self._is_silent = False
            self.first_s.append(time.monotonic() - self._begun_s)
        self.num_events += data.count(b"data:")
        self._tail = (self._tail + data)[-len(DONE) :]
        if self._tail == DONE:
            if self._calls:
                self.begin()
            else:
                self._end("")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("the connection ended")

    def _end(self, error: str) -> None:
        if not self._over.done():
            self.error = error
            self._over.set_result(None)
            self._transport.close()


async def load(port: int, streams: int, tokens: int, calls: int) -> dict[str, object]:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
    }
    raw = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw
    loop = asyncio.get_running_loop()
    clients: list[_Client] = []
    ends: list[asyncio.Future[None]] = []
    while len(clients) < streams:
        some = min(CONNECT_AT_ONCE, streams - len(clients))
        ends += [loop.create_future() for _ in range(some)]
        made = [_Client(request, calls, over) for over in ends[-some:]]
        await asyncio.gather(
            *[loop.create_connection(client.itself, "127.0.0.1", port) for client in made]
        )
        clients += made
    began_s = time.monotonic()
    for client in clients:
        client.begin()
    await asyncio.gather(*ends)
    errors = [client.error for client in clients if client.error]
    first_s = sorted(each for client in clients for each in client.first_s)
    return {
        "seconds": time.monotonic() - began_s,
        "events": sum(client.num_events for client in clients),
        "calls": streams * calls,
        "ttft_p50_ms": 1e3 * statistics.median(first_s) if first_s else None,
        "errors": len(errors),
        "first_error": errors[0] if errors else "",
    }


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:5]]
    print(json.dumps(uvloop.run(load(*numbers))))

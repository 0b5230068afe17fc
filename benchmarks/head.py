"""CPU time of the HTTP layer: per request and per streamed token, over a real socket.

The answers come from a stub of the head, one token per turn of the event loop, so only the API is
measured: parsing, tokenising, detokenising, chunks, uvicorn. The same client then calls a bare
Starlette application that streams fixed bytes, which gives the cost that no Python server can
avoid.

    python benchmarks/head.py [--tokens 200] [--requests 400] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import uvloop
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from moonpool.api.app import http_server, make_app
from moonpool.api.connection.listening import listen
from moonpool.api.serving_backend import ApiOptions, ModelCard, Output
from moonpool.config.slo import SloConfig
from moonpool.head.supervisor_link import SupervisorLink
from moonpool.link.packets import MAX_FDS, MAX_PACKET_BYTES, packet_pair
from moonpool.protocol.messages import ForwardedCall
from moonpool.text.tokenizers.byte import ByteTokenizer
from moonpool.types import FinishReason, Request, RequestId, Token

KINDS = ("api", "kept", "bare")
CONNECTIONS = 16
ROUNDS = 3
PROMPT = "The quick brown fox jumps over the lazy dog. " * 22  # about 1,000 bytes
CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}\n\n'


class InstantHead:
    """A `ServingBackend` that answers every prompt with the requested number of letters."""

    def __init__(self) -> None:
        self.tokenizer = ByteTokenizer()
        self.card = ModelCard(
            model_id="instant",
            created_s=0,
            max_model_tokens=1 << 20,
            vocab_size=259,
            eos_token_ids=(257,),
        )
        self.slo = SloConfig(ttft_s=30.0, tbt_s=0.1)
        self.request_timeout_s = 600.0
        self.now = time.monotonic

    async def submit(
        self, request: Request, delivered: tuple[int, ...] | None = None
    ) -> AsyncIterator[Output]:
        output = Output(tokens=(Token(120),))
        for _ in range(request.sampling.max_tokens - 1):
            yield output
            await asyncio.sleep(0)
        yield Output(tokens=(Token(120),), finish_reason=FinishReason.LENGTH)

    def abort(self, request_id: RequestId) -> None:
        pass

    def stage(self, request_id: RequestId) -> str:
        return "prefill"

    def models(self) -> list[InstantHead]:
        return [self]

    def options(self, shared: ApiOptions) -> ApiOptions:
        return shared

    def forward(
        self, request: Request, call: ForwardedCall, delivered: tuple[int, ...] | None = None
    ) -> AsyncIterator[Output]:
        return self.submit(request, delivered)

    def why_not_forwarded(self) -> str:
        return ""

    def take_reader(self) -> None:
        return None

    def note_answered(self, lengths: Sequence[int]) -> None:
        pass

    def explain(self, request_id: str) -> dict[str, Any] | None:
        return None

    def cluster(self) -> dict[str, Any]:
        return {}

    def server_info(self) -> dict[str, Any]:
        return {}

    def metrics_text(self) -> bytes:
        return b""


def bare_app() -> Starlette:
    """An ASGI application that writes the same bytes on the wire, without moonpool."""

    async def answer(request: HttpRequest) -> Response:
        asked = json.loads(await request.body())
        if not asked.get("stream"):
            return Response(b"{}", media_type="application/json")

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(asked["max_tokens"]):
                yield CHUNK
                await asyncio.sleep(0)
            yield b"data: [DONE]\n\n"

        return StreamingResponse(chunks(), media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])


def with_cpu_clock(app: ASGIApp) -> ASGIApp:
    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/cpu":
            answer = Response(str(time.process_time_ns()))
            await answer(scope, receive, send)
            return
        await app(scope, receive, send)

    return wrapped


def start_supervisor() -> socket.socket:
    """Starts a process that receives the logs and sockets that a supervisor would hold. Returns the
    head's socket."""
    ours, theirs = packet_pair()
    if os.fork():
        theirs.close()
        return ours
    ours.close()
    while True:
        body, fds, _, _ = socket.recv_fds(theirs, MAX_PACKET_BYTES, MAX_FDS)
        if not body:
            os._exit(0)
        for fd in fds:
            os.close(fd)


def serve(kind: str) -> None:
    listener = listen("127.0.0.1", 0)
    supervisor = start_supervisor() if kind == "kept" else None

    async def run() -> None:
        keeper = None if supervisor is None else SupervisorLink(supervisor)
        app = bare_app() if kind == "bare" else make_app(InstantHead())
        server = http_server(app, keeper=keeper)
        server.config.app = with_cpu_clock(app)
        print(listener.getsockname()[1], flush=True)
        await server.serve(sockets=[listener])

    uvloop.run(run())


def request_bytes(max_tokens: int, stream: bool) -> bytes:
    body = json.dumps(
        {
            "model": None,
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": max_tokens,
            "stream": stream,
            "temperature": 0,
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def ask_many(port: int, payload: bytes, num_requests: int, end: bytes) -> None:
    """Sends `num_requests` over one connection, one after another."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
    for _ in range(num_requests):
        writer.write(payload)
        await reader.readuntil(end)
    writer.close()


async def ask_whole(port: int, payload: bytes, num_requests: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(num_requests):
        writer.write(payload)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
    writer.close()


async def cpu_s(port: int) -> float:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /cpu HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return int(answer.rsplit(b"\r\n", 1)[1]) / 1e9


async def cpu_per_request_s(port: int, payload: bytes, stream: bool, num_requests: int) -> float:
    """Returns the server's CPU seconds per request: the best of the rounds, because other processes
    can only add to it."""
    best = float("inf")
    each = num_requests // CONNECTIONS
    for _ in range(ROUNDS + 1):  # the first round warms up
        before = await cpu_s(port)
        if stream:
            asks = [ask_many(port, payload, each, b"\r\n0\r\n\r\n") for _ in range(CONNECTIONS)]
        else:
            asks = [ask_whole(port, payload, each) for _ in range(CONNECTIONS)]
        await asyncio.gather(*asks)
        best = min(best, (await cpu_s(port) - before) / (each * CONNECTIONS))
    return best


async def measure(port: int, num_tokens: int, num_requests: int) -> dict[str, float]:
    whole_s = await cpu_per_request_s(port, request_bytes(1, False), False, num_requests)
    short_s = await cpu_per_request_s(port, request_bytes(1, True), True, num_requests)
    long_s = await cpu_per_request_s(
        port, request_bytes(num_tokens, True), True, max(CONNECTIONS, num_requests // 8)
    )
    return {
        "request_ms": whole_s * 1e3,
        "streamed_request_ms": short_s * 1e3,
        "token_us": (long_s - short_s) / (num_tokens - 1) * 1e6,
    }


def measure_server(kind: str, num_tokens: int, num_requests: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--serve", kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            return asyncio.run(measure(port, num_tokens, num_requests))
        finally:
            server.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.serve)
        return
    figures = {kind: measure_server(kind, asked.tokens, asked.requests) for kind in KINDS}
    print(f"{'CPU of the server':24}{'moonpool api':>14}{'kept answers':>14}{'bare starlette':>16}")
    for name in figures["api"]:
        api, kept, bare = (figures[kind][name] for kind in KINDS)
        print(f"{name:24}{api:14.3f}{kept:14.3f}{bare:16.3f}")
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()

"""A response goes on over its connection at the exact byte, wherever its log was cut off."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import uvloop
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scripted_head import ScriptedHead, Step
from shelf import Shelf
from uvicorn.server import ServerState

from moonpool.api.app import HttpServer, http_server, make_app
from moonpool.api.connection.call_log import CallLog
from moonpool.api.connection.kept_stream import KeptStream
from moonpool.api.connection.resumption import ResumedTransport, accepted_bytes
from moonpool.api.frontend import Output
from moonpool.types import FinishReason, Request, Token

NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
"""A connection that does not end would make it take minutes."""
TEXT = "Zwölf Boxkämpfer jagen \N{GRINNING FACE} über den Deich".encode()
CALLS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "stream": True},
    "/v1/messages": {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 90,
        "stream": True,
    },
    "/v1/responses": {"input": "x", "stream": True},
}
PATHS = [*CALLS]


def scripted(sizes: Sequence[int]) -> ScriptedHead:
    """A head that says the text in increments of so many tokens, from where the client is."""

    def script(_: Request) -> list[Step]:
        position, steps, number = len(head.delivered[-1] or ()), list[Step](), 0
        while position < len(TEXT):
            part = TEXT[position : position + sizes[number % len(sizes)]]
            steps.append(Output(tokens=tuple(map(Token, part))))
            position, number = position + len(part), number + 1
        return [*steps, Output(finish_reason=FinishReason.STOP)]

    head = ScriptedHead(script)
    return head


def connected() -> tuple[socket.socket, socket.socket]:
    """The client's and the server's end of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname(), timeout=20)
        theirs, _ = listener.accept()
        return ours, theirs


def make_server(head: ScriptedHead, shelf: Shelf, date: bytes) -> HttpServer:
    server = http_server(make_app(head), keeper=shelf)
    server.config.load()
    server.server_state = ServerState()
    server.server_state.default_headers = [(b"date", date)]
    return server


def received(
    ours: socket.socket, begin: Callable[[], Any], num_bytes: int = 0
) -> tuple[bytes, bytes]:
    """Runs a server until the connection ends. Returns `num_bytes` that were in the connection
    before, and the others."""

    async def run() -> bytes:
        await begin()
        return await asyncio.to_thread(lambda: b"".join(iter(lambda: ours.recv(1 << 16), b"")))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        raw = runner.run(run())
    return raw[:num_bytes], raw[num_bytes:]


def respond(path: str, sizes: Sequence[int], shelf: Shelf) -> tuple[bytes, int]:
    """Returns the response of a server that nothing happens to, and the position of its begin."""
    ours, theirs = connected()
    server = make_server(scripted(sizes), shelf, b"Mon")
    body = json.dumps(CALLS[path]).encode()
    ours.sendall(
        b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
        % (path.encode(), len(body), body)
    )
    base = accepted_bytes(theirs.fileno())

    async def begin() -> None:
        protocol = server.config.http_protocol_class(
            config=server.config,
            server_state=server.server_state,
            app_state={},
            _loop=asyncio.get_running_loop(),
        )
        await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, theirs)

    with ours:
        return received(ours, begin)[1], base


def go_on(log: bytes, sent: bytes, sizes: Sequence[int]) -> bytes:
    """Returns what another head sends over a connection that has sent these bytes."""
    ours, theirs = connected()
    shelf = Shelf()
    server = make_server(scripted(sizes), shelf, b"Tue")
    fd = os.memfd_create("log")
    os.write(fd, log)
    found = CallLog(shelf, 7, fd)
    found.read()
    kept = KeptStream.take_over(found)
    # The base of another connection may differ from this one's.
    kept.opening = _with_base(kept, accepted_bytes(theirs.fileno()))
    theirs.sendall(sent)
    with ours:
        before, rest = received(ours, lambda: server.resume(theirs, kept), len(sent))
    assert before == sent
    assert shelf.dropped == [7]
    assert shelf.taken_bytes == 0
    return rest


def _with_base(kept: KeptStream, base: int) -> Any:
    return msgspec.structs.replace(kept.opening, base=base)


class _Wire:
    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._raw)


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """Fails unless the response is whole."""
    response = http.client.HTTPResponse(_Wire(raw))  # type: ignore[arg-type]
    response.begin()
    assert response.status == 200
    assert response.headers["date"] == "Mon"
    blocks = response.read().decode().split("\n\n")
    assert blocks.pop() == ""
    data = [block.split("data: ", 1)[1] for block in blocks]
    return [json.loads(text) for text in data if text != "[DONE]"]


def text_of(events: list[dict[str, Any]]) -> str:
    text = ""
    for event in events:
        for choice in event.get("choices", ()):
            text += choice.get("text", "") or choice.get("delta", {}).get("content", "")
        if event.get("type") == "content_block_delta":
            text += event["delta"]["text"]
        if event.get("type") == "response.output_text.delta":
            text += event["delta"]
    return text


sizes_of_increments = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None, phases=NO_SHRINKING)
@given(st.sampled_from(PATHS), sizes_of_increments, sizes_of_increments, st.data())
def test_a_response_goes_on_at_the_exact_byte(
    path: str, first: list[int], second: list[int], data: st.DataObject
) -> None:
    shelf = Shelf()
    whole, base = respond(path, first, shelf)
    log = shelf.log()
    assert text_of(events_of(whole)) == TEXT.decode()
    begin = shelf.sent[0][0]
    cut = data.draw(st.integers(begin, len(log)), label="bytes of the log")
    # A head logs an increment before it sends a byte of it. So a log without an entry goes with
    # at most the bytes that were sent before this entry.
    ends = [*(size for size, _ in shelf.sent[1:]), len(log)]
    before = [sent - base for end, (_, sent) in zip(ends, shelf.sent, strict=True) if end > cut]
    most = min(before, default=len(whole))
    num_sent = data.draw(st.integers(0, most), label="bytes sent")
    rest = go_on(log[:cut], whole[:num_sent], second)
    events = events_of(whole[:num_sent] + rest)
    assert text_of(events) == TEXT.decode()
    if cut == len(log) or first == second == [1]:
        assert whole[:num_sent] + rest == whole
    shelf.close()


class _Sink:
    def __init__(self) -> None:
        self.got = b""

    def write(self, data: bytes) -> None:
        assert data, "nothing is written for nothing"
        self.got += data


@given(st.lists(st.binary(max_size=20)), st.integers(0, 200))
def test_a_resumed_transport_drops_what_was_sent(parts: list[bytes], num_sent: int) -> None:
    sink = _Sink()
    transport = ResumedTransport(sink, num_sent)  # type: ignore[arg-type]
    for part in parts:
        transport.write(part)
    assert sink.got == b"".join(parts)[num_sent:]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 1 << 16), max_size=8), st.booleans())
def test_the_kernel_counts_accepted_bytes_whether_the_client_reads_or_not(
    sizes: list[int], reads: bool
) -> None:
    ours, theirs = connected()
    with ours, theirs:
        theirs.setblocking(False)
        base = accepted_bytes(theirs.fileno())
        num_bytes = 0
        for size in sizes:
            try:
                num_bytes += theirs.send(bytes(size))
            except BlockingIOError:
                continue
            if reads:
                ours.recv(size)
            assert accepted_bytes(theirs.fileno()) - base == num_bytes

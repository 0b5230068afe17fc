"""Tests that a response continues over its connection at the exact byte, wherever its log was cut
off."""

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
from moonpool.api.connection.kept_stream import KeptStream, ResumedTransport, accepted_bytes
from moonpool.api.serving_backend import ApiOptions, Output
from moonpool.types import FinishReason, Request, Token

NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
"""Without shrinking, because some shrunk examples would not end the connection, and the test would
take minutes."""
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


PERIOD_S = 0.004
"""The time between two checks of a silent stream."""


class SometimesSilent(ScriptedHead):
    is_silent = False


def scripted(sizes: Sequence[int], silences: Sequence[bool] = (False,)) -> SometimesSilent:
    """A head that sends the text in increments of this many tokens, from the client's position.
    Before some increments, the head is silent."""

    def script(_: Request) -> list[Step]:
        position, steps, number = len(head.delivered[-1] or ()), list[Step](), 0
        while position < len(TEXT):
            part = TEXT[position : position + sizes[number % len(sizes)]]
            if silences[number % len(silences)]:
                # The silence lasts two periods, because on a busy machine one period may end in the
                # same turn as the silence.
                steps += [1.25 * PERIOD_S] * 2
            steps.append(Output(tokens=tuple(map(Token, part))))
            position, number = position + len(part), number + 1
        return [*steps, Output(finish_reason=FinishReason.STOP)]

    head = SometimesSilent(script)
    head.is_silent = any(silences)
    return head


def connected() -> tuple[socket.socket, socket.socket]:
    """Returns the client's and the server's end of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname(), timeout=120)
        theirs, _ = listener.accept()
        return ours, theirs


def make_server(head: SometimesSilent, shelf: Shelf, date: bytes) -> HttpServer:
    options = ApiOptions(keepalive_s=PERIOD_S if head.is_silent else 0)
    server = http_server(make_app(head, options), keeper=shelf)
    server.config.load()
    server.server_state = ServerState()
    server.server_state.default_headers = [(b"date", date)]
    return server


def received(
    ours: socket.socket, begin: Callable[[], Any], num_bytes: int = 0
) -> tuple[bytes, bytes]:
    """Runs a server until the connection ends. Returns the first `num_bytes` bytes, which were in
    the connection before, and the bytes after them."""

    async def run() -> bytes:
        await begin()
        return await asyncio.to_thread(lambda: b"".join(iter(lambda: ours.recv(1 << 16), b"")))

    raw = uvloop.run(run())
    return raw[:num_bytes], raw[num_bytes:]


def respond(
    path: str, head: SometimesSilent, shelf: Shelf, fields: dict[str, Any] | None = None
) -> tuple[bytes, int]:
    """Returns the response of an undisturbed server, and the position in the connection where the
    response starts."""
    ours, theirs = connected()
    server = make_server(head, shelf, b"Mon")
    body = json.dumps(fields or CALLS[path]).encode()
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


def go_on(log: bytes, sent: bytes, head: SometimesSilent) -> bytes:
    """Returns what another head sends over a connection that has sent these bytes."""
    ours, theirs = connected()
    shelf = Shelf()
    server = make_server(head, shelf, b"Tue")
    fd = os.memfd_create("log")
    os.write(fd, log)
    found = CallLog(shelf, 7, fd)
    found.read()
    kept = KeptStream.take_over(found)
    # Another connection may have another base than this connection.
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
    """Returns the events of a response. Fails unless the response is complete."""
    response = http.client.HTTPResponse(_Wire(raw))  # type: ignore[arg-type]
    response.begin()
    assert response.status == 200
    assert response.headers["date"] == "Mon"
    blocks = response.read().decode().split("\n\n")
    assert blocks.pop() == ""
    blocks = [block for block in blocks if not block.startswith(": ")]
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


shares = st.floats(0, 1) | st.sampled_from([0.0, 1.0])
sizes_of_increments = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None, phases=NO_SHRINKING)
@given(st.sampled_from(PATHS), sizes_of_increments, sizes_of_increments, shares, shares)
def test_a_response_goes_on_at_the_exact_byte(
    path: str, first: list[int], second: list[int], logged: float, sent: float
) -> None:
    alike = first == second == [1]
    check_going_on(path, scripted(first), scripted(second), logged, sent, alike)


@settings(max_examples=15, deadline=None, phases=NO_SHRINKING)
@given(
    st.sampled_from(PATHS),
    sizes_of_increments,
    st.lists(st.booleans(), min_size=1, max_size=4).filter(any),
    shares,
    shares,
)
def test_what_a_silent_stream_says_is_made_again_in_its_place(
    path: str, sizes: list[int], silences: list[bool], logged: float, sent: float
) -> None:
    heads = scripted(sizes, silences), scripted(sizes, silences)
    whole = check_going_on(path, *heads, logged, sent)
    assert (b"event: ping" if path == "/v1/messages" else b": prefill\n\n") in whole


def check_going_on(
    path: str,
    first: SometimesSilent,
    second: SometimesSilent,
    logged: float,
    sent: float,
    alike: bool = False,
) -> bytes:
    """Lets the second head continue the first head's response, and returns the response. `logged`
    is the share of the log that exists, and `sent` is the share of the bytes that the head may have
    sent by then.
    """
    shelf = Shelf()
    whole, base = respond(path, first, shelf)
    log = shelf.log()
    assert text_of(events_of(whole)) == TEXT.decode()
    cut, num_sent = cut_of(shelf, base, len(whole), logged, sent)
    rest = go_on(log[:cut], whole[:num_sent], second)
    events = events_of(whole[:num_sent] + rest)
    assert text_of(events) == TEXT.decode()
    if cut == len(log) or alike:
        assert whole[:num_sent] + rest == whole
    shelf.close()
    return whole


def cut_of(shelf: Shelf, base: int, num_bytes: int, logged: float, sent: float) -> tuple[int, int]:
    """Returns how many bytes of the log the head has written, and how many of the response it has
    sent, when it ends."""
    log = shelf.log()
    begin = shelf.sent[0][0]
    cut = begin + round(logged * (len(log) - begin))
    # A head logs an increment before it sends its first byte. So if the log lacks an entry, the
    # head sent only bytes before this entry.
    ends = [*(size for size, _ in shelf.sent[1:]), len(log)]
    before = [sent - base for end, (_, sent) in zip(ends, shelf.sent, strict=True) if end > cut]
    return cut, round(sent * min(before, default=num_bytes))


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

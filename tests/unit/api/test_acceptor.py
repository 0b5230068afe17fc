"""A connection is held from the moment when it is accepted, and errors do not end the loop that
accepts."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable

import pytest
import uvloop
from scripted_head import ScriptedHead
from shelf import Shelf

from moonpool.api.app import http_server, make_app
from moonpool.api.connection import acceptor
from moonpool.api.connection.acceptor import Acceptor
from moonpool.api.connection.http_protocol import LimitedProtocol


def run(work: Callable[[], Awaitable[None]]) -> None:
    uvloop.run(asyncio.wait_for(work(), 60))


def test_a_connection_is_held_before_its_protocol_hears_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    made, keep = LimitedProtocol.connection_made, Shelf.keep

    def note_made(self: LimitedProtocol, transport: asyncio.Transport) -> None:
        order.append("made")
        made(self, transport)

    def note_keep(self: Shelf, socket_fd: int, log_fd: int, party: str) -> int | None:
        order.append("held")
        return keep(self, socket_fd, log_fd, party)

    monkeypatch.setattr(LimitedProtocol, "connection_made", note_made)
    monkeypatch.setattr(Shelf, "keep", note_keep)
    server = http_server(make_app(ScriptedHead(lambda _: [])), keeper=Shelf())
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()

    async def work() -> None:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        server.should_exit = True
        await serving
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address)

    run(work)
    assert order[:2] == ["held", "made"]


class Scarce(socket.socket):
    """A listener that finds no file descriptor for the first connections."""

    num_failures = 2

    def accept(self) -> tuple[socket.socket, object]:
        if self.num_failures:
            self.num_failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_accepting_goes_on_after_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor, "RETRY_S", 0.01)
    greeting = asyncio.Event()

    class Greeting(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            greeting.set()
            transport.close()

    async def work() -> None:
        listener = Scarce()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        accepting = Acceptor(listener, lambda sock: Greeting())
        _, writer = await asyncio.open_connection(*listener.getsockname())
        await greeting.wait()
        accepting.close()
        await accepting.wait_closed()
        writer.close()
        listener.close()

    run(work)
    assert caplog.text.count("cannot accept a connection: [Errno 24] Too many open files") == 2

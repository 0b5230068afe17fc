"""One connection between a front and the head: frames of a length and a message, over a pair of
Unix sockets that the supervisor made. So no other process can be at the other end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

from moonpool.framing import FrameTooLongError, Framing
from moonpool.types import MALFORMED

_FRAMES = Framing(">", max_bytes=256 << 20)
"""A forwarded body has up to 48 MB, and a page of metrics less."""
MAX_UNSENT_BYTES = 256 << 20
"""Limit of unsent bytes: the connection ends if the other side does not read."""

In = TypeVar("In")


class FrontChannel(asyncio.Protocol, Generic[In]):
    """`send` queues a message; all messages of one turn of the loop leave in one write.

    `on_message` gets each message in order. `on_end` is called once with the reason. A malformed
    message ends the connection. `before_write`: called before each write; it may still `send`.
    """

    def __init__(
        self,
        incoming: msgspec.msgpack.Decoder[In],
        on_message: Callable[[In], None],
        on_end: Callable[[str], None],
        before_write: Callable[[], None] | None = None,
    ) -> None:
        self._decoder = incoming
        self._encoder = msgspec.msgpack.Encoder()
        self._on_message = on_message
        self._on_end = on_end
        self._before_write = before_write
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._pending = bytearray()
        self._is_waiting = False
        self._reason = ""
        self._loop = asyncio.get_running_loop()

    async def open(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        await self._loop.create_connection(lambda: self, sock=sock)

    def send(self, message: Any) -> None:
        begun = _FRAMES.begin(self._pending)
        self._encoder.encode_into(message, self._pending, -1)
        _FRAMES.finish(self._pending, begun)
        self.wake()

    def wake(self) -> None:
        """Has `before_write` called at the end of this turn of the loop."""
        if not self._is_waiting:
            self._is_waiting = True
            self._loop.call_soon(self._write)

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def num_unsent_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.wake()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while not self._reason:
            try:
                body = _FRAMES.pop(self._buffer)
                if body is None:
                    return
                message = self._decoder.decode(body)
            except FrameTooLongError as error:
                self._fail(str(error))
                return
            except MALFORMED as error:
                self._fail(f"a malformed message: {error}")
                return
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end(self._reason or (str(exc) if exc else "it is gone"))

    def _write(self) -> None:
        self._is_waiting = False
        if self._transport is None:
            return  # the queued messages are written when the connection is made
        if self._before_write is not None:
            self._is_waiting = True  # messages that `before_write` adds are part of this write
            try:
                self._before_write()
            finally:
                self._is_waiting = False
        if not self._pending or self._transport.is_closing():
            self._pending.clear()
            return
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._fail("it does not read its messages")
            return
        self._transport.write(bytes(self._pending))
        self._pending.clear()

    def _fail(self, reason: str) -> None:
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.abort()

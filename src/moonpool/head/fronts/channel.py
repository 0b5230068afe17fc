"""One connection between a front and the head: frames of a length and a message, over a pair of
Unix sockets that the supervisor made. So nobody else can be at its other end."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

from moonpool.types import MALFORMED

MAX_FRAME_BYTES = 256 << 20
"""A forwarded body has up to 48 MB, and a page of metrics less."""
MAX_UNSENT_BYTES = 256 << 20
"""If the other side leaves this much unread, the connection ends."""
_HEADER = struct.Struct(">I")

In = TypeVar("In")


class FrontChannel(asyncio.Protocol, Generic[In]):
    """`send` queues a message; all of one turn of the loop leave in one write.

    `on_message` gets each message in order. `on_end` is called once with the reason. A malformed
    message ends the connection. `before_write`: called before each write, and may still `send`.
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
        start = len(self._pending)
        self._pending += bytes(_HEADER.size)
        self._encoder.encode_into(message, self._pending, -1)
        _HEADER.pack_into(self._pending, start, len(self._pending) - start - _HEADER.size)
        self.wake()

    def wake(self) -> None:
        """Lets `before_write` be called at the end of this turn of the loop."""
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
        buffer = self._buffer
        buffer += data
        offset = 0
        while len(buffer) - offset >= _HEADER.size and not self._reason:
            (length,) = _HEADER.unpack_from(buffer, offset)
            if length > MAX_FRAME_BYTES:
                self._fail(f"a frame of {length} bytes exceeds {MAX_FRAME_BYTES}")
                return
            end = offset + _HEADER.size + length
            if len(buffer) < end:
                break
            try:
                body = memoryview(buffer)[offset + _HEADER.size : end]
                with body:
                    message = self._decoder.decode(body)
            except MALFORMED as error:
                self._fail(f"a malformed message: {error}")
                return
            offset = end
            self._on_message(message)
        del buffer[:offset]

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end(self._reason or (str(exc) if exc else "it is gone"))

    def _write(self) -> None:
        self._is_waiting = False
        if self._transport is None:
            return  # written when the connection is made
        if self._before_write is not None:
            self._is_waiting = True  # what it sends leaves now
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

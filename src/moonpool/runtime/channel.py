"""Typed frames over an authenticated asyncio connection: 4 bytes of length, then msgpack.

Writes never wait, but are bounded: a peer that does not read is cut off instead of being buffered
for.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

import msgspec

In = TypeVar("In")
Out = TypeVar("Out")

_HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20
MAX_UNSENT_BYTES = 256 << 20
_READ_BYTES = 1 << 18


class ChannelError(Exception):
    """The connection is unusable; one line says why."""


class Channel(Generic[In, Out]):
    """Receives `In`, sends `Out` (both unions of tagged structs)."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        incoming: msgspec.msgpack.Decoder[In],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = incoming
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, frame: Out) -> None:
        """Queues a frame. Does nothing on a closed connection: the reader notices the end."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            transport.abort()
            return
        body = self._encoder.encode(frame)
        self._writer.write(_HEADER.pack(len(body)) + body)

    async def flush(self) -> None:
        await self._writer.drain()

    async def frames(self) -> AsyncIterator[In]:
        """Frames until the peer closes. Raises ChannelError on garbage, OSError on a broken
        line."""
        buffer = bytearray()
        while True:
            data = await self._reader.read(_READ_BYTES)
            if not data:
                if buffer:
                    raise ChannelError("the peer closed the connection in the middle of a frame")
                return
            buffer += data
            offset = 0
            while len(buffer) - offset >= _HEADER.size:
                (length,) = _HEADER.unpack_from(buffer, offset)
                if length > MAX_FRAME_BYTES:
                    raise ChannelError(f"a frame of {length} bytes exceeds {MAX_FRAME_BYTES}")
                end = offset + _HEADER.size + length
                if len(buffer) < end:
                    break
                body = bytes(memoryview(buffer)[offset + _HEADER.size : end])
                offset = end
                yield self._decode(body)
            del buffer[:offset]

    def _decode(self, body: bytes) -> In:
        try:
            return self._decoder.decode(body)
        except msgspec.DecodeError as error:
            raise ChannelError(f"a malformed frame: {error}") from None

    def close(self) -> None:
        if not self._writer.transport.is_closing():
            self._writer.close()

"""Frames of 4 length bytes and a body: on sockets and pipes, and one after another in memory.

A framing reads no body that is longer than its limit. Three formats are separate: the transfer's
has a checksum beside the length (`moonpool_engine.transfer.frame_socket`), that of attention
workers has the step and layer (`moonpool_engine.attention_offload.wire`), and DNS over TCP is
defined elsewhere.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from asyncio import StreamReader


class FrameTooLongError(ValueError):
    """A frame claims to be longer than the other side may send."""


class Framing:
    """One format of frames: the byte order of the length (`<` or `>`), and the longest body that is
    read."""

    NUM_LENGTH_BYTES = 4

    def __init__(self, byte_order: Literal["<", ">"], max_bytes: int = (1 << 32) - 1) -> None:
        self.max_bytes = max_bytes
        self._length = struct.Struct(f"{byte_order}I")

    def framed(self, body: bytes) -> bytes:
        """Returns the frame of a body."""
        return self._length.pack(len(body)) + body

    def write(self, sink: IO[bytes], body: bytes) -> None:
        """Writes the frame of a body at once."""
        sink.write(self.framed(body))
        sink.flush()

    def begin(self, pending: bytearray) -> int:
        """Leaves room for a length at the end of `pending`. Returns what `finish` needs."""
        pending += bytes(self.NUM_LENGTH_BYTES)
        return len(pending)

    def finish(self, pending: bytearray, begun: int) -> None:
        """Makes the bytes since `begin` the body of a frame."""
        self._length.pack_into(pending, begun - self.NUM_LENGTH_BYTES, len(pending) - begun)

    def num_body_bytes(self, start: bytes | bytearray) -> int:
        """Returns the length of the frame that starts so. Raises FrameTooLongError."""
        length: int = self._length.unpack_from(start)[0]
        if length > self.max_bytes:
            raise FrameTooLongError(f"a frame of {length} bytes exceeds {self.max_bytes}")
        return length

    def pop(self, received: bytearray) -> bytes | None:
        """Removes the first frame from `received` and returns its body, or None if it is not all
        there. Raises FrameTooLongError."""
        if len(received) < self.NUM_LENGTH_BYTES:
            return None
        end = self.NUM_LENGTH_BYTES + self.num_body_bytes(received)
        if len(received) < end:
            return None
        body = bytes(memoryview(received)[self.NUM_LENGTH_BYTES : end])
        del received[:end]
        return body

    def pop_all(self, received: bytearray) -> Iterator[bytes]:
        """Yields the bodies of all complete frames, like `pop`."""
        while (body := self.pop(received)) is not None:
            yield body

    def read(self, read: Callable[[int], bytes]) -> bytes:
        """Reads the next body. `read` returns fewer bytes than asked for only at the end. Raises
        FrameTooLongError, and EOFError at the end."""
        start = read(self.NUM_LENGTH_BYTES)
        if len(start) == self.NUM_LENGTH_BYTES:
            body = read(length := self.num_body_bytes(start))
            if len(body) == length:
                return body
        raise EOFError("the other side has ended the connection")

    async def read_from(self, reader: StreamReader) -> bytes:
        """Reads the next body. Raises FrameTooLongError, and what the reader raises."""
        start = await reader.readexactly(self.NUM_LENGTH_BYTES)
        return await reader.readexactly(self.num_body_bytes(start))

"""Frames of the pool's unix socket, and who is at its other end."""

from __future__ import annotations

import os
import socket
import struct
from asyncio import StreamReader
from typing import TypeVar

import msgspec

from moonpool.host_pool.messages import MAX_FRAME_BYTES, ClientMessage, PoolMessage

LENGTH = struct.Struct(">I")
_PEER = struct.Struct("3i")  # process, user, group
_T = TypeVar("_T")


def framed(message: ClientMessage | PoolMessage) -> bytes:
    """The bytes of a message on the socket."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def body_bytes(head: bytes) -> int:
    """The length of the body that follows. Raises ValueError if it is too long."""
    length: int = LENGTH.unpack(head)[0]
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes exceeds the {MAX_FRAME_BYTES} allowed")
    return length


async def read_message(reader: StreamReader, decoder: msgspec.msgpack.Decoder[_T]) -> _T:
    """Reads one message. Raises what the reader raises, ValueError, and the decoder's errors."""
    length = body_bytes(await reader.readexactly(LENGTH.size))
    return decoder.decode(await reader.readexactly(length))


def is_own_user(sock: socket.socket) -> bool:
    """Whether the process at the other end is of this process's user, as the kernel says. A
    stranger could open a socket where the pool is looked for, and would get what users wrote."""
    credentials = getattr(socket, "SO_PEERCRED", None)
    if credentials is None:  # no system but Linux has a pool
        return False
    _, user, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, credentials, _PEER.size))
    return bool(user == os.geteuid())

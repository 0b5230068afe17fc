"""Frames of the pool's unix socket, and who is at its other end."""

from __future__ import annotations

import os
import socket
import struct
from asyncio import StreamReader
from typing import TypeVar

import msgspec

from moonpool.framing import Framing
from moonpool.host_pool.messages import MAX_FRAME_BYTES, ClientMessage, PoolMessage

FRAMES = Framing(">", MAX_FRAME_BYTES)
_PEER = struct.Struct("3i")  # process, user, group
_T = TypeVar("_T")


def framed(message: ClientMessage | PoolMessage) -> bytes:
    """The bytes of a message on the socket."""
    return FRAMES.framed(msgspec.msgpack.encode(message))


async def read_message(reader: StreamReader, decoder: msgspec.msgpack.Decoder[_T]) -> _T:
    """Reads one message. Raises what the reader raises, ValueError, and the decoder's errors."""
    return decoder.decode(await FRAMES.read_from(reader))


def is_own_user(sock: socket.socket) -> bool:
    """Whether the process at the other end is of this process's user, as the kernel says. A
    stranger could open a socket where the pool is looked for, and would get what users wrote."""
    credentials = getattr(socket, "SO_PEERCRED", None)
    if credentials is None:  # no system but Linux has a pool
        return False
    _, user, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, credentials, _PEER.size))
    return bool(user == os.geteuid())

"""Going on with the bytes of a response on a connection that another head began."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
import termios
from typing import Any

from starlette.types import Scope

_BYTES_ACKED = 120
"""Offset of `tcpi_bytes_acked` in Linux's `struct tcp_info`."""
_U64 = struct.Struct("=Q")
_I32 = struct.Struct("=i")
_MAX_LOOKS = 1000
_NOT_REPEATED = (b"content-length", b"transfer-encoding", b"expect")


def accepted_bytes(fd: int) -> int:
    """Returns how many bytes the kernel has accepted on a TCP socket, counted from a start that is
    fixed per connection. Raises OSError if the kernel does not count them.

    Bytes are accepted when they are acknowledged or still in the kernel's queue.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=os.dup(fd)) as sock:
        acked = _acked(sock)
        for _ in range(_MAX_LOOKS):
            queued = fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4))
            before, acked = acked, _acked(sock)
            if before == acked:  # else an acknowledgement came between the two looks
                return acked + int(_I32.unpack(queued)[0])
    raise OSError("the connection's counters keep changing")


def _acked(sock: socket.socket) -> int:
    if not hasattr(socket, "TCP_INFO"):
        raise OSError("this kernel does not count acknowledged bytes")
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(info) < _BYTES_ACKED + _U64.size:
        raise OSError("this kernel does not count acknowledged bytes")
    return int(_U64.unpack_from(info, _BYTES_ACKED)[0])


def request_bytes(scope: Scope, body: bytes) -> bytes:
    """Returns a request as a client would send it whose body has arrived."""
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    version = scope["http_version"].encode()
    lines = [b"%b %b%b HTTP/%b" % (scope["method"].encode(), scope["raw_path"], query, version)]
    lines += [b"%b: %b" % pair for pair in scope["headers"] if pair[0] not in _NOT_REPEATED]
    lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


class ResumedTransport:
    """A transport that does not send its first bytes, because the client was sent them before."""

    def __init__(self, transport: asyncio.Transport, num_sent: int) -> None:
        self._transport = transport
        self._num_left = num_sent

    def write(self, data: bytes) -> None:
        if self._num_left:
            num_skipped = min(self._num_left, len(data))
            self._num_left -= num_skipped
            data = data[num_skipped:]
        if data:
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

"""Packets with file descriptors between the supervisor and its head, and the files without a name
whose descriptors they carry."""

from __future__ import annotations

import array
import asyncio
import logging
import os
import socket
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from moonpool.protocol.supervision import Packet
from moonpool.types import MALFORMED

log = logging.getLogger("moonpool.supervisor")

In = TypeVar("In", bound=Packet)
Out = TypeVar("Out", bound=Packet)

MAX_PACKET_BYTES = 1 << 17
MAX_FDS = 2
MAX_PENDING = 1 << 14


_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends that keep the borders of packets. On macOS, whose packet sockets do not show that
    the other side has ended, a caller must watch the other side's process."""
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_PACKET_BYTES)
    return ours, theirs


class PacketSocket(Generic[In, Out]):
    """Receives `In`, sends `Out` (both unions of tagged structs), on the running loop.

    `on_packet` gets each packet with its file descriptors, whose owner it becomes. `on_end` is
    called once, at the end. A damaged packet, or one without its file descriptors, ends the
    connection.
    """

    def __init__(
        self,
        sock: socket.socket,
        incoming: msgspec.msgpack.Decoder[In],
        on_packet: Callable[[In, Sequence[int]], None],
        on_end: Callable[[], None],
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder = incoming
        self._encoder = msgspec.msgpack.Encoder()
        self._on_packet = on_packet
        self._on_end = on_end
        self._pending: deque[tuple[bytes, list[int]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        self._loop.add_reader(sock.fileno(), self._read)

    def send(self, message: Out, fds: Sequence[int] = ()) -> bool:
        """Sends a packet, immediately or as soon as the peer reads. Returns False if it cannot be
        sent: the connection has ended, or too many packets wait."""
        if not self._is_open or len(self._pending) >= MAX_PENDING:
            return False
        body = self._encoder.encode(message)
        if not self._pending and self._sent(body, fds):
            return True
        if not self._is_open:
            return False
        if not self._pending:
            self._loop.add_writer(self._sock.fileno(), self._write)
        self._pending.append((body, [os.dup(fd) for fd in fds]))
        return True

    @property
    def num_pending(self) -> int:
        """Packets that wait until the peer reads."""
        return len(self._pending)

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for _, fds in self._pending:
            _close(fds)
        self._pending.clear()

    def _sent(self, body: bytes, fds: Sequence[int]) -> bool:
        try:
            control: list[Any] = []
            if fds:
                control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            self._sock.sendmsg([body], control)
        except BlockingIOError:
            return False
        except OSError:
            self._end()
            return False
        return True

    def _write(self) -> None:
        while self._pending:
            body, fds = self._pending[0]
            if not self._sent(body, fds):
                return
            self._pending.popleft()
            _close(fds)
        self._loop.remove_writer(self._sock.fileno())

    def _read(self) -> None:
        while self._is_open:
            try:
                body, fds, flags, _ = socket.recv_fds(
                    self._sock, MAX_PACKET_BYTES, MAX_FDS, _CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                body, fds, flags = b"", [], 0
            packet = self._packet(body, fds, flags) if body else None
            if packet is None:
                _close(fds)
                self._end()
                return
            if not _CLOEXEC:
                for fd in fds:
                    os.set_inheritable(fd, False)
            self._on_packet(packet, fds)

    def _packet(self, body: bytes, fds: Sequence[int], flags: int) -> In | None:
        """Returns None if the packet is damaged."""
        try:
            packet = self._decoder.decode(body)
        except MALFORMED as error:
            log.error("a packet between supervisor and head is damaged: %s", error)
            return None
        if len(fds) == packet.num_fds and not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            return packet
        text = "a packet between supervisor and head came with %d of %d file descriptors"
        log.error(text, len(fds), packet.num_fds)
        return None

    def _end(self) -> None:
        if self._is_open:
            self.close()
            self._on_end()


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def anonymous_file(name: str) -> int:
    """Makes a file without a name, in memory if the system supports that. Returns its descriptor,
    which the caller owns, and which programs do not inherit. Linux shows `name` in /proc. Raises
    OSError."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    fd, path = tempfile.mkstemp(prefix="moonpool-")
    os.unlink(path)
    return fd

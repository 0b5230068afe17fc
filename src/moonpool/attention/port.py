"""The way between a model worker and an attention worker: a socket, or rings in shared memory.

Both are streams of bytes, in order, each used by one thread. Within a host the rings save the
kernel's part of every message; the socket beside them tells when the other side is gone.

An attention worker may be stuck with an answer while the model worker is stuck with the next
question. So the model worker's end, while it cannot send, takes in what comes (`absorbs`); that is
never more than the answers to the steps it has under way.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import select
import socket
import struct
import time
from typing import Protocol

import torch
from torch import Tensor

from moonpool.attention.wire import HEADER, Header
from moonpool.engine.native.library import Call
from moonpool.engine.native.rings import Rings, Waiter, open_rings

RING_DATA_BYTES = 4096  # where the bytes of a ring begin; ring.h has the same number
CHECK_S = 0.05
"""How often whoever waits looks whether the other side lives."""
MAX_AHEAD_BYTES = 256 << 20
_AHEAD_BYTES = 1 << 18
_STUCK_S = 0.001
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_HELLO = struct.Struct("<Q")
Payload = memoryview | Tensor
"""Writable, and contiguous."""


class PortError(Exception):
    """The other side is gone, silent or talks nonsense; one line."""


class Port(Protocol):
    """One end. `receive` waits without end if `patience_s` is None."""

    transport: str
    patience_s: float | None

    def send(self, header: Header, *payload: Payload) -> None: ...

    def receive(self, target: Payload | None = None) -> Header:
        """The next message's head; and its payload, if `target` has just its size."""
        ...

    def receive_into(self, target: Payload) -> None:
        """Exactly as many bytes as `target` has."""
        ...

    def close(self) -> None:
        """Also from another thread: whoever waits then fails."""
        ...


class _Ahead:
    """What came before it was asked for."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def put(self, data: bytes) -> None:
        if not data:
            raise PortError("the other side is gone")
        if len(self._bytes) + len(data) > MAX_AHEAD_BYTES:
            raise PortError("the other side answers what was never asked")
        self._bytes += data

    def __bool__(self) -> bool:
        return bool(self._bytes)

    def get(self, target: memoryview) -> memoryview:
        """Fills what it can of `target`; returns the rest."""
        count = min(len(target), len(self._bytes))
        if count:
            target[:count] = self._bytes[:count]
            del self._bytes[:count]
        return target[count:]


class SocketPort:
    """Over a connected stream socket, which is the port's from now on."""

    transport = "socket"

    def __init__(
        self, sock: socket.socket, patience_s: float | None, absorbs: bool = False
    ) -> None:
        self.patience_s = patience_s
        self._sock = sock
        self._absorbs = absorbs
        self._ahead = _Ahead()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN | select.POLLOUT)
        sock.settimeout(patience_s)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, header: Header, *payload: Payload) -> None:
        parts = map(view_of, payload)
        buffers = [memoryview(header.pack()), *(part for part in parts if len(part))]
        try:
            while buffers:
                if self._absorbs:
                    self._take_in()
                count = self._sock.sendmsg(buffers)
                while buffers and count >= len(buffers[0]):
                    count -= len(buffers.pop(0))
                if count:
                    buffers[0] = buffers[0][count:]
        except OSError as error:
            raise PortError(f"the other side takes nothing: {error}") from None

    def _take_in(self) -> None:
        """Until something can be sent."""
        ends_s = time.monotonic() + (self.patience_s or 0.0)
        while True:
            events = dict(self._poll.poll(CHECK_S * 1000)).get(self._sock.fileno(), 0)
            if events & select.POLLOUT or events & ~select.POLLIN:
                return  # what has happened to the socket, `sendmsg` says
            if events:
                self._ahead.put(self._sock.recv(_AHEAD_BYTES))
            elif time.monotonic() > ends_s:
                raise PortError(f"the other side took nothing for {self.patience_s} s")

    def receive(self, target: Payload | None = None) -> Header:
        data = bytearray(HEADER.size)
        self.receive_into(memoryview(data))
        header = Header(*HEADER.unpack(data))
        if target is not None and target.nbytes == header.num_bytes:
            self.receive_into(target)
        return header

    def receive_into(self, target: Payload) -> None:
        rest = self._ahead.get(view_of(target))
        try:
            while len(rest):
                count = self._sock.recv_into(rest)
                if not count:
                    raise PortError("the other side is gone")
                rest = rest[count:]
        except OSError as error:
            raise PortError(f"the other side says nothing: {error}") from None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class RingPort:
    """Over two rings in one anonymous, sealed memory file."""

    transport = "ring"

    def __init__(
        self,
        sock: socket.socket,
        memory: mmap.mmap,
        capacity: int,
        asks: bool,
        patience_s: float | None,
        spin_s: float,
    ) -> None:
        """`asks`: this is the side that made the rings, and writes to the first."""
        self.patience_s = patience_s
        self.capacity = capacity
        self.waiter = Waiter(spin_ns=int(spin_s * 1e9))
        self._waiter_address = ctypes.addressof(self.waiter)
        self._sock = sock
        self._memory: mmap.mmap | None = memory
        self._rings = _native_rings()
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        there, back = base, base + RING_DATA_BYTES + capacity
        self.outward, self.inward = (there, back) if asks else (back, there)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN | select.POLLHUP)
        self._header = bytearray(HEADER.size)
        self._header_at = ctypes.addressof(ctypes.c_char.from_buffer(self._header))
        self._sent = bytearray(HEADER.size)
        self._sent_at = ctypes.addressof(ctypes.c_char.from_buffer(self._sent))
        self._closed = False
        self._absorbs = asks
        self._ahead = _Ahead()

    def send(self, header: Header, *payload: Payload) -> None:
        HEADER.pack_into(
            self._sent, 0, header.num_bytes, header.kind, header.layer, header.step, header.busy_ns
        )
        head = self._sent_at, HEADER.size
        for part in payload or (_NOTHING,):
            self._move(self._rings.write, self.outward, head, _place(part))
            head = 0, 0

    def receive(self, target: Payload | None = None) -> Header:
        place = (0, 0) if target is None else _place(target)
        if self._ahead:
            self.receive_into(memoryview(self._header))
            if target is not None and Header(*HEADER.unpack(self._header)).num_bytes == place[1]:
                self.receive_into(target)
        else:
            self._move(self._rings.read, self.inward, (self._header_at, HEADER.size), place)
        return Header(*HEADER.unpack(self._header))

    def receive_into(self, target: Payload) -> None:
        rest = self._ahead.get(view_of(target)) if self._ahead else target
        if rest.nbytes:
            self._move(self._rings.read, self.inward, (0, 0), _place(rest))

    def live(self) -> None:
        """Raises PortError if the other side is gone, or this end was closed."""
        if self._closed or self._poll.poll(0):
            raise PortError("the other side is gone")

    def _move(self, call: Call, ring: int, head: tuple[int, int], body: tuple[int, int]) -> None:
        """What `head` says may be less than all of `body`: then only the head is read."""
        total = head[1] + body[1]
        done = 0
        ends_s = None
        absorbs = self._absorbs and ring == self.outward
        check_ns = int((_STUCK_S if absorbs else CHECK_S) * 1e9)
        while True:
            before = done
            done = call(ring, self.capacity, *head, *body, before, self._waiter_address, check_ns)
            if done < 0:
                raise PortError("the other side's ring makes no sense")
            if done == total or (done == head[1] and self._is_other(ring, body[1])):
                return
            self.live()
            if absorbs:
                self._take_in()
            if self.patience_s is not None:
                now_s = time.monotonic()
                ends_s = now_s + self.patience_s if done > before or ends_s is None else ends_s
                if now_s > ends_s:
                    raise PortError(f"the other side did nothing for {self.patience_s:.0f} s")

    def _is_other(self, ring: int, expected_bytes: int) -> bool:
        """Whether the head that was read is of a payload of another size."""
        if ring != self.inward:
            return False
        num_bytes: int = HEADER.unpack(self._header)[0]
        return num_bytes != expected_bytes

    def _take_in(self) -> None:
        """What is there now."""
        data = bytearray(_AHEAD_BYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(data))
        body = address, len(data)
        count = self._rings.read(
            self.inward, self.capacity, 0, 0, *body, 0, self._waiter_address, 0
        )
        if count > 0:
            self._ahead.put(bytes(data[:count]))

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def offer_rings(
    sock: socket.socket, capacity: int, patience_s: float | None, spin_s: float
) -> RingPort:
    """Makes two rings and hands them over a unix socket. Raises OSError or PortError."""
    size = 2 * (RING_DATA_BYTES + capacity)
    fd = os.memfd_create("moonpool-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        memory = mmap.mmap(fd, size)
        socket.send_fds(sock, [_HELLO.pack(capacity)], [fd])
    finally:
        os.close(fd)
    return RingPort(sock, memory, capacity, True, patience_s, spin_s)


def take_rings(sock: socket.socket, patience_s: float | None, spin_s: float) -> RingPort:
    """The other end of `offer_rings`. Raises OSError or PortError."""
    data, fds, flags, _ = socket.recv_fds(sock, _HELLO.size, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        if len(data) != _HELLO.size or len(fds) != 1 or flags & socket.MSG_CTRUNC:
            raise PortError("the other side handed over no rings")
        (capacity,) = _HELLO.unpack(data)
        size = 2 * (RING_DATA_BYTES + capacity)
        seals = fcntl.fcntl(fds[0], fcntl.F_GET_SEALS)
        if seals & _SEALS != _SEALS or os.fstat(fds[0]).st_size != size:
            raise PortError("the other side's rings are not sealed or of another size")
        memory = mmap.mmap(fds[0], size)
    finally:
        for fd in fds:
            os.close(fd)
    return RingPort(sock, memory, capacity, False, patience_s, spin_s)


def rings_available() -> bool:
    return open_rings() is not None


def _native_rings() -> Rings:
    rings = open_rings()
    assert rings is not None, "asked for only where there are some"
    return rings


def view_of(part: Payload) -> memoryview:
    """Its bytes, shared."""
    if isinstance(part, memoryview):
        return part
    found: memoryview = part.reshape(-1).view(torch.uint8).numpy().data
    return found


def _place(part: Payload) -> tuple[int, int]:
    """Address and size."""
    if isinstance(part, Tensor):
        return part.data_ptr(), part.nbytes
    if not len(part):
        return 0, 0
    return ctypes.addressof(ctypes.c_char.from_buffer(part)), len(part)


_NOTHING = memoryview(bytearray())

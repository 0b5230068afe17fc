"""The channel for steps between a model worker and an attention worker: a socket or two rings.

Both kinds of channel are ordered byte streams; each end is used by one thread. Within a host, rings
in shared memory save the system calls for every message. A socket beside the rings shows when the
peer has ended.

Both sides can block on sending: the attention worker with results, the model worker with the next
rows. To avoid this deadlock, the model worker's end reads arrived data into a buffer while it
cannot send (`reads_ahead`). The channel never holds more than the results of the steps that the
worker has under way.
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
from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from moonpool_engine.attention_offload.wire import HEADER, Header
from moonpool_engine.engine.native.library import Call
from moonpool_engine.engine.native.shared_memory import Rings, Waiter, open_rings

RING_DATA_BYTES = 4096  # offset of a ring's data; ring.h has the same number
CHECK_S = 0.05
"""How often a waiting side checks that its peer is alive."""
MAX_READ_AHEAD_BYTES = 256 << 20
_READ_AHEAD_BYTES = 1 << 18
_READ_AHEAD_CHECK_S = 0.001
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_CAPACITY = struct.Struct("<Q")
Payload = memoryview | Tensor
"""The bytes must be writable and contiguous."""


class AttentionChannelError(Exception):
    """The peer is gone, silent, or sends malformed messages; one line."""


class AttentionChannel(Protocol):
    """One end of a channel. Every method but `close` raises AttentionChannelError: if the peer
    fails, and after `timeout_s` seconds without progress (None: waits forever)."""

    transport: str
    timeout_s: float | None

    def send(self, header: Header, *payload: Payload) -> None:
        """Sends one message: the header, then the concatenated payload."""
        ...

    def receive(self, target: Payload | None = None) -> Header:
        """Receives the next message's header, and its payload into `target` if the sizes are
        equal."""
        ...

    def receive_into(self, target: Payload) -> None:
        """Receives exactly as many bytes as `target` has."""
        ...

    def close(self) -> None:
        """Thread-safe: a thread that waits in another method then fails."""
        ...


class ReceivedEarly:
    """A channel that keeps bytes which were read before `receive` needed them."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def put(self, data: bytes) -> None:
        """Keeps bytes that were read. Raises AttentionChannelError at the end of the stream, and
        for more than MAX_READ_AHEAD_BYTES."""
        if not data:
            raise AttentionChannelError("the peer is gone")
        if len(self._bytes) + len(data) > MAX_READ_AHEAD_BYTES:
            raise AttentionChannelError("the peer sends more than was asked for")
        self._bytes += data

    def __bool__(self) -> bool:
        return bool(self._bytes)

    def get(self, target: memoryview) -> memoryview:
        """Fills the beginning of `target`; returns the part that is still empty."""
        count = min(len(target), len(self._bytes))
        if count:
            target[:count] = self._bytes[:count]
            del self._bytes[:count]
        return target[count:]


class StreamChannel(ABC):
    """The common part of channels over a stream of bytes."""

    @abstractmethod
    def receive_into(self, target: Payload) -> None: ...

    def receive(self, target: Payload | None = None) -> Header:
        data = bytearray(HEADER.size)
        self.receive_into(memoryview(data))
        header = Header(*HEADER.unpack(data))
        if target is not None and target.nbytes == header.num_bytes:
            self.receive_into(target)
        return header


class SocketChannel(StreamChannel):
    """A channel over a connected stream socket, which it owns."""

    transport = "socket"

    def __init__(
        self, sock: socket.socket, timeout_s: float | None, reads_ahead: bool = False
    ) -> None:
        self.timeout_s = timeout_s
        self._sock = sock
        self._reads_ahead = reads_ahead
        self._ahead = ReceivedEarly()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN | select.POLLOUT)
        sock.settimeout(timeout_s)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, header: Header, *payload: Payload) -> None:
        """Raises AttentionChannelError if the peer is gone or takes nothing for `timeout_s`."""
        parts = map(view_of, payload)
        buffers = [memoryview(header.pack()), *(part for part in parts if len(part))]
        try:
            while buffers:
                if self._reads_ahead:
                    self._read_ahead()
                count = self._sock.sendmsg(buffers)
                while buffers and count >= len(buffers[0]):
                    count -= len(buffers.pop(0))
                if count:
                    buffers[0] = buffers[0][count:]
        except OSError as error:
            raise AttentionChannelError(f"cannot send to the peer: {error}") from None

    def _read_ahead(self) -> None:
        """Reads into the buffer until something can be sent."""
        ends_s = time.monotonic() + (self.timeout_s or 0.0)
        while True:
            events = dict(self._poll.poll(CHECK_S * 1000)).get(self._sock.fileno(), 0)
            if events & select.POLLOUT or events & ~select.POLLIN:
                return  # writable, or `sendmsg` raises the socket's error
            if events:
                self._ahead.put(self._sock.recv(_READ_AHEAD_BYTES))
            elif time.monotonic() > ends_s:
                raise AttentionChannelError(f"the peer received nothing for {self.timeout_s} s")

    def receive_into(self, target: Payload) -> None:
        """Raises AttentionChannelError if the peer is gone or sends nothing for `timeout_s`."""
        rest = self._ahead.get(view_of(target))
        try:
            while len(rest):
                count = self._sock.recv_into(rest)
                if not count:
                    raise AttentionChannelError("the peer is gone")
                rest = rest[count:]
        except OSError as error:
            raise AttentionChannelError(f"the peer sends nothing: {error}") from None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class RingChannel:
    """A channel over two rings, one each way, in one anonymous sealed memory file."""

    transport = "ring"

    def __init__(
        self,
        sock: socket.socket,
        memory: mmap.mmap,
        capacity: int,
        is_maker: bool,
        timeout_s: float | None,
        spin_s: float,
    ) -> None:
        """`is_maker`: whether this side made the rings, so that it writes to the first one, and
        reads ahead."""
        self.timeout_s = timeout_s
        self.capacity = capacity
        self.waiter = Waiter(spin_ns=int(spin_s * 1e9))
        self._waiter_address = ctypes.addressof(self.waiter)
        self._sock = sock
        self._memory: mmap.mmap | None = memory
        self._rings = _native_rings()
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        there, back = base, base + RING_DATA_BYTES + capacity
        self.outward, self.inward = (there, back) if is_maker else (back, there)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN | select.POLLHUP)
        self._header = bytearray(HEADER.size)
        self._header_at = ctypes.addressof(ctypes.c_char.from_buffer(self._header))
        self._sent = bytearray(HEADER.size)
        self._sent_at = ctypes.addressof(ctypes.c_char.from_buffer(self._sent))
        self._closed = False
        self._reads_ahead = is_maker
        self._ahead = ReceivedEarly()

    def send(self, header: Header, *payload: Payload) -> None:
        HEADER.pack_into(
            self._sent, 0, header.num_bytes, header.kind, header.layer, header.step, header.busy_ns
        )
        head = self._sent_at, HEADER.size
        for part in payload or (_NOTHING,):
            self._move(self._rings.write, self.outward, head, _memory_of(part))
            head = 0, 0

    def receive(self, target: Payload | None = None) -> Header:
        place = (0, 0) if target is None else _memory_of(target)
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
            self._move(self._rings.read, self.inward, (0, 0), _memory_of(rest))

    def check_peer(self) -> None:
        """Raises AttentionChannelError if the peer is gone, or this end was closed."""
        if self._closed or self._poll.poll(0):
            raise AttentionChannelError("the peer is gone")

    def _move(self, call: Call, ring: int, head: tuple[int, int], body: tuple[int, int]) -> None:
        """Reads or writes `head` and `body`, each (address, bytes). A message that is read may have
        a payload of another size than `body`: then only its header is read."""
        total = head[1] + body[1]
        done = 0
        ends_s = None
        reads_ahead = self._reads_ahead and ring == self.outward
        check_ns = int((_READ_AHEAD_CHECK_S if reads_ahead else CHECK_S) * 1e9)
        while True:
            before = done
            done = call(ring, self.capacity, *head, *body, before, self._waiter_address, check_ns)
            if done < 0:
                raise AttentionChannelError("the peer's ring is corrupt")
            if done == total or (done == head[1] and self._is_other_size(ring, body[1])):
                return
            self.check_peer()
            if reads_ahead:
                self._read_ahead()
            if self.timeout_s is not None:
                now_s = time.monotonic()
                ends_s = now_s + self.timeout_s if done > before or ends_s is None else ends_s
                if now_s > ends_s:
                    raise AttentionChannelError(
                        f"the peer made no progress for {self.timeout_s:.0f} s"
                    )

    def _is_other_size(self, ring: int, expected_bytes: int) -> bool:
        """Whether the header that was read has a payload of another size."""
        if ring != self.inward:
            return False
        num_bytes: int = HEADER.unpack(self._header)[0]
        return num_bytes != expected_bytes

    def _read_ahead(self) -> None:
        """Reads into the buffer what has arrived."""
        data = bytearray(_READ_AHEAD_BYTES)
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
    sock: socket.socket, capacity: int, timeout_s: float | None, spin_s: float
) -> RingChannel:
    """Makes two rings of `capacity` bytes and sends their file descriptor over a unix socket.
    Raises OSError or AttentionChannelError."""
    size = 2 * (RING_DATA_BYTES + capacity)
    fd = os.memfd_create("moonpool-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        memory = mmap.mmap(fd, size)
        socket.send_fds(sock, [_CAPACITY.pack(capacity)], [fd])
    finally:
        os.close(fd)
    return RingChannel(sock, memory, capacity, True, timeout_s, spin_s)


def take_rings(sock: socket.socket, timeout_s: float | None, spin_s: float) -> RingChannel:
    """Receives the rings of `offer_rings`. Raises OSError or AttentionChannelError."""
    data, fds, flags, _ = socket.recv_fds(sock, _CAPACITY.size, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        if len(data) != _CAPACITY.size or len(fds) != 1 or flags & socket.MSG_CTRUNC:
            raise AttentionChannelError("the peer sent no rings")
        (capacity,) = _CAPACITY.unpack(data)
        size = 2 * (RING_DATA_BYTES + capacity)
        seals = fcntl.fcntl(fds[0], fcntl.F_GET_SEALS)
        if seals & _SEALS != _SEALS or os.fstat(fds[0]).st_size != size:
            raise AttentionChannelError("the peer's rings are not sealed, or of another size")
        memory = mmap.mmap(fds[0], size)
    finally:
        for fd in fds:
            os.close(fd)
    return RingChannel(sock, memory, capacity, False, timeout_s, spin_s)


def rings_available() -> bool:
    """Whether the native ring functions are built for this machine."""
    return open_rings() is not None


def _native_rings() -> Rings:
    rings = open_rings()
    assert rings is not None, "callers check `rings_available`"
    return rings


def view_of(part: Payload) -> memoryview:
    """The payload's bytes, without a copy."""
    if isinstance(part, memoryview):
        return part
    found: memoryview = part.reshape(-1).view(torch.uint8).numpy().data
    return found


def _memory_of(part: Payload) -> tuple[int, int]:
    """Address and size of the payload."""
    if isinstance(part, Tensor):
        return part.data_ptr(), part.nbytes
    if not len(part):
        return 0, 0
    return ctypes.addressof(ctypes.c_char.from_buffer(part)), len(part)


_NOTHING = memoryview(bytearray())

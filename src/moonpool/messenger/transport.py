"""What a transport is, and the framed socket that all of ours stand on.

A transport moves slices between two arenas and messages between two messengers. It knows neither
operations nor checksums. Each call ends by `deadline_s` (on `time.monotonic`), and each failure is
a TransportError whose text is one line.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from moonpool.messenger.wire import MAX_FRAME_BYTES, Codec, Message, SliceOffer
from moonpool.types import InstanceId

FRAME_HEADER = struct.Struct(">I")
_MAX_BUFFERS = 512  # the kernel's limit per call is 1024


class TransportError(Exception):
    """The connection is of no more use."""


class PeerGoneError(TransportError):
    """The peer closed the connection or died."""


class DeadlineError(TransportError):
    """The peer was too slow."""


class ProtocolError(TransportError):
    """The peer sent what it must not send."""


class Connection(Protocol):
    """One authenticated connection, used by one thread; only `interrupt` may come from another."""

    transport: str
    peer: InstanceId

    def send(self, message: Message, deadline_s: float) -> None: ...

    def receive(self, deadline_s: float) -> Message: ...

    def offer(
        self, offers: list[SliceOffer], slices: Sequence[memoryview], deadline_s: float
    ) -> None:
        """Sends a Slices message, with the bytes or so that the peer can read them itself."""
        ...

    def take(
        self, offers: Sequence[SliceOffer], targets: list[memoryview], deadline_s: float
    ) -> None:
        """Fills `targets` with the slices of a received Slices message, in its order."""
        ...

    def fileno(self) -> int:
        """For polling: readable when a message or the end of the connection is there."""
        ...

    def interrupt(self) -> None:
        """Makes the thread that uses the connection fail now. Safe at any time."""
        ...

    def close(self) -> None: ...


class FrameSocket:
    """A stream socket that carries frames (4 bytes of length, then the body) under deadlines."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = (
            threading.Lock()
        )  # keeps `interrupt` off a descriptor that was closed and reused
        self._closed = False
        self._codec = Codec()

    @property
    def socket(self) -> socket.socket:
        return self._sock

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Message, deadline_s: float) -> None:
        self.send_frame(self._codec.encode(message), deadline_s)

    def receive(self, deadline_s: float) -> Message:
        body = self.receive_frame(MAX_FRAME_BYTES, deadline_s)
        try:
            return self._codec.decode(body)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"malformed message: {error}") from error

    def send_frame(
        self, body: bytes, deadline_s: float, payload: Sequence[memoryview] = ()
    ) -> None:
        if len(body) > MAX_FRAME_BYTES:
            raise ProtocolError(f"message of {len(body)} bytes exceeds {MAX_FRAME_BYTES}")
        frame = memoryview(FRAME_HEADER.pack(len(body)) + body)
        self._send_all([frame, *payload], deadline_s)

    def receive_frame(self, max_bytes: int, deadline_s: float) -> bytes:
        """The next frame's body. For one that claims more than max_bytes, nothing is allocated."""
        header = bytearray(FRAME_HEADER.size)
        self.receive_into([memoryview(header)], deadline_s)
        (num_bytes,) = FRAME_HEADER.unpack(header)
        if num_bytes > max_bytes:
            raise ProtocolError(f"frame of {num_bytes} bytes exceeds the {max_bytes} allowed")
        body = bytearray(num_bytes)
        self.receive_into([memoryview(body)], deadline_s)
        return bytes(body)

    def receive_into(self, targets: Sequence[memoryview], deadline_s: float) -> None:
        pending = [target for target in targets if len(target)]
        while pending:
            self._arm(deadline_s)
            try:
                count = self._sock.recvmsg_into(pending[:_MAX_BUFFERS])[0]
            except TimeoutError as error:
                raise DeadlineError("the peer sent nothing until the deadline") from error
            except OSError as error:
                raise PeerGoneError(f"the connection broke: {error}") from error
            if count == 0:
                raise PeerGoneError("the peer closed the connection")
            _advance(pending, count)

    def _send_all(self, buffers: list[memoryview], deadline_s: float) -> None:
        while buffers:
            self._arm(deadline_s)
            try:
                count = self._sock.sendmsg(buffers[:_MAX_BUFFERS])
            except TimeoutError as error:
                raise DeadlineError("the peer took nothing until the deadline") from error
            except OSError as error:
                raise PeerGoneError(f"the connection broke: {error}") from error
            _advance(buffers, count)

    def _arm(self, deadline_s: float) -> None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineError("the deadline passed")
        try:
            self._sock.settimeout(left_s)
        except OSError as error:
            raise PeerGoneError(f"the connection broke: {error}") from error

    def interrupt(self) -> None:
        with self._lock:
            if not self._closed:
                with contextlib.suppress(OSError):  # already disconnected
                    self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._sock.close()


def _advance(buffers: list[memoryview], count: int) -> None:
    """Drops the first `count` bytes of `buffers`, in place."""
    done = 0
    while done < len(buffers) and count >= len(buffers[done]):
        count -= len(buffers[done])
        done += 1
    del buffers[:done]
    if count:
        buffers[0] = buffers[0][count:]

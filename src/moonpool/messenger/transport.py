"""What a transport is, and the framed socket that all of ours stand on.

A transport moves slices between two arenas and messages between two messengers. It knows neither
operations nor checksums. Each call ends by `deadline_s` (on `time.monotonic`), and each failure is
a TransportError whose text is one line.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import xxhash

from moonpool.messenger.arena import Arena
from moonpool.messenger.cut import Cut
from moonpool.messenger.wire import MAX_FRAME_BYTES, Codec, Message, Slices
from moonpool.types import InstanceId

if TYPE_CHECKING:
    from moonpool.messenger.landing_table import LandingTable

FRAME_HEADER = struct.Struct(">I")
_SUMMED_HEADER = struct.Struct(">II")  # length, and the low half of the body's xxh3_64
_MAX_BUFFERS = 512  # the kernel's limit per call is 1024
_READ_AHEAD_BYTES = 16 << 10
_TIMEVAL = struct.Struct("ll")
_TICK_S = 1.0  # to set a timeout is a call to the kernel: it is set to this once, and seldom anew
_TICK_SLACK_S = 0.005


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
    takes_unnamed: bool
    """Slices of a stream may be offered without their sums: who takes them computes these."""

    @property
    def closed(self) -> bool: ...

    def send(self, message: Message, deadline_s: float) -> None: ...

    def hold(self, message: Message) -> None:
        """The message goes out together with the next one: one wake-up less for the peer."""
        ...

    @property
    def holds(self) -> bool:
        """Something is held that has not gone out."""
        ...

    def flush(self, deadline_s: float) -> None:
        """Sends what is held."""
        ...

    def receive(self, deadline_s: float) -> Message: ...

    def offer(self, offer: Slices, arena: Arena, deadline_s: float, cut: Cut | None = None) -> None:
        """Sends `offer`, with the bytes from `arena` (of whole slices there what the `cut` says) or
        so that the peer can read them itself."""
        ...

    def take(self, offers: bytes, table: LandingTable, deadline_s: float) -> int:
        """Moves slices of a received Slices message, in its order, to where the table has them,
        and returns how many are not what their sender named."""
        ...

    def fileno(self) -> int:
        """For polling: readable when a message or the end of the connection is there."""
        ...

    def has_input(self) -> bool:
        """A message, or the end of the connection, is there already."""
        ...

    def hung_up(self) -> bool:
        """The other side has closed it, or is gone, whatever it sent before."""
        ...

    def interrupt(self) -> None:
        """Makes the thread that uses the connection fail now. Safe at any time."""
        ...

    def close(self) -> None: ...


class FrameSocket:
    """A stream socket that carries frames (4 bytes of length, then the body) under deadlines.

    It blocks, and the kernel keeps the time: Python's own timeouts cost a second call for each, and
    cannot wait for all of a payload at once.

    It reads exactly what it is asked for until `read_ahead` is called: descriptors that travel
    between two frames are lost to whoever reads past the first of them. From that call on, the
    handshake being over, 4 bytes of checksum follow the length: a slice that arrives whole is still
    garbage if a bit flipped in what says which slice it is.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.settimeout(None)
        # Keeps `interrupt` off a descriptor that was closed and reused.
        self._lock = threading.Lock()
        self._closed = False
        self._codec = Codec()
        self._held: list[memoryview] = []
        self._ahead = memoryview(b"")
        self._start = self._end = 0
        self._armed_s = -1.0
        self._summed = False

    @property
    def socket(self) -> socket.socket:
        return self._sock

    @property
    def closed(self) -> bool:
        return self._closed

    def fileno(self) -> int:
        return self._sock.fileno()

    def read_ahead(self) -> None:
        """From now on frames carry a checksum, and small ones may be read together, with one call
        to the kernel."""
        self._summed = True
        self._ahead = memoryview(bytearray(_READ_AHEAD_BYTES))

    def has_input(self) -> bool:
        if self._start < self._end:
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def hung_up(self) -> bool:
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    def send(self, message: Message, deadline_s: float) -> None:
        self.send_frame(self._codec.encode(message), deadline_s)

    def hold(self, message: Message) -> None:
        self._held.append(self._framed(self._codec.encode(message)))

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def flush(self, deadline_s: float) -> None:
        held, self._held = self._held, []
        self._send_all(held, deadline_s)

    def receive(self, deadline_s: float) -> Message:
        body = self.receive_frame(MAX_FRAME_BYTES, deadline_s)
        try:
            return self._codec.decode(body)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"malformed message: {error}") from error

    def send_frame(
        self, body: bytes, deadline_s: float, payload: Sequence[memoryview] = ()
    ) -> None:
        held, self._held = self._held, []
        self._send_all([*held, self._framed(body), *payload], deadline_s)

    def head_of(self, body: bytes) -> bytes:
        """The frame, for a caller who sends it with its payload himself, and before it what was
        held."""
        held, self._held = self._held, []
        return b"".join([*held, self._framed(body)])

    def receive_frame(self, max_bytes: int, deadline_s: float) -> bytes:
        """The next frame's body. For one that claims more than max_bytes, nothing is allocated."""
        if self._summed:
            num_bytes, wanted = _SUMMED_HEADER.unpack(self._read(_SUMMED_HEADER.size, deadline_s))
        else:
            (num_bytes,) = FRAME_HEADER.unpack(self._read(FRAME_HEADER.size, deadline_s))
        if num_bytes > max_bytes:
            raise ProtocolError(f"frame of {num_bytes} bytes exceeds the {max_bytes} allowed")
        body = self._read(num_bytes, deadline_s)
        if self._summed and _sum(body) != wanted:
            raise ProtocolError("a message arrived changed: its checksum does not match")
        return body

    def take_ahead(self, most_bytes: int) -> memoryview:
        """What has been read beyond the last frame already, up to so many bytes. Valid until the
        next call."""
        start = self._start
        self._start = min(self._end, start + most_bytes)
        return self._ahead[start : self._start]

    def receive_into(self, targets: Sequence[memoryview], deadline_s: float) -> None:
        pending = [target for target in targets if len(target)]
        while pending and self._start < self._end:  # what was read ahead
            count = min(len(pending[0]), self._end - self._start)
            pending[0][:count] = self._ahead[self._start : self._start + count]
            self._start += count
            _advance(pending, count)
        while pending:
            count = self._receive_some(pending[:_MAX_BUFFERS], deadline_s, socket.MSG_WAITALL)
            _advance(pending, count)

    def _framed(self, body: bytes) -> memoryview:
        if len(body) > MAX_FRAME_BYTES:
            raise ProtocolError(f"message of {len(body)} bytes exceeds {MAX_FRAME_BYTES}")
        if self._summed:
            return memoryview(_SUMMED_HEADER.pack(len(body), _sum(body)) + body)
        return memoryview(FRAME_HEADER.pack(len(body)) + body)

    def _read(self, num_bytes: int, deadline_s: float) -> bytes:
        start = self._start
        if self._end - start < num_bytes:
            if num_bytes > len(self._ahead):
                body = bytearray(num_bytes)
                self.receive_into([memoryview(body)], deadline_s)
                return bytes(body)
            rest = bytes(self._ahead[start : self._end])
            start, self._end = 0, len(rest)
            self._ahead[: self._end] = rest
            while self._end < num_bytes:
                self._end += self._receive_some([self._ahead[self._end :]], deadline_s)
        self._start = start + num_bytes
        return bytes(self._ahead[start : self._start])

    def _receive_some(self, targets: list[memoryview], deadline_s: float, flags: int = 0) -> int:
        silent = ""
        while True:
            self.arm(deadline_s, silent)
            try:
                count = self._sock.recvmsg_into(targets, 0, flags)[0]
            except BlockingIOError:
                silent = "the peer sent nothing until the deadline"
                continue
            except OSError as error:
                raise PeerGoneError(f"the connection broke: {error}") from error
            if count == 0:
                raise PeerGoneError("the peer closed the connection")
            return count

    def _send_all(self, buffers: list[memoryview], deadline_s: float) -> None:
        silent = ""
        while buffers:
            self.arm(deadline_s, silent)
            try:
                count = self._sock.sendmsg(buffers[:_MAX_BUFFERS])
            except BlockingIOError:
                silent = "the peer took nothing until the deadline"
                continue
            except OSError as error:
                raise PeerGoneError(f"the connection broke: {error}") from error
            _advance(buffers, count)

    def arm(self, deadline_s: float, silent: str = "") -> None:
        """The next call returns by the deadline, or a little earlier, with BlockingIOError. Raises
        DeadlineError, saying `silent`, if that has passed."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineError(silent or "the deadline passed")
        wanted_s = min(left_s, _TICK_S)
        if wanted_s / 2 <= self._armed_s <= left_s + _TICK_SLACK_S:
            return
        seconds, rest_s = divmod(wanted_s, 1.0)
        value = _TIMEVAL.pack(int(seconds), max(1, int(rest_s * 1e6)) if not seconds else 0)
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
        except OSError as error:
            raise PeerGoneError(f"the connection broke: {error}") from error
        self._armed_s = wanted_s

    def interrupt(self) -> None:
        with self._lock:
            if not self._closed:
                with contextlib.suppress(OSError):  # already disconnected
                    self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._sock.close()


def _sum(body: bytes) -> int:
    return int(xxhash.xxh3_64_intdigest(body)) & 0xFFFFFFFF


def _advance(buffers: list[memoryview], count: int) -> None:
    """Drops the first `count` bytes of `buffers`, in place."""
    if len(buffers) == 1 and count == len(buffers[0]):
        buffers.clear()
        return
    done = 0
    while done < len(buffers) and count >= len(buffers[done]):
        count -= len(buffers[done])
        done += 1
    del buffers[:done]
    if count:
        buffers[0] = buffers[0][count:]

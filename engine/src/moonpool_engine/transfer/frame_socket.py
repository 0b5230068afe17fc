"""A stream socket that carries frames under deadlines: the base of all transports."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence

import xxhash

from moonpool.types import MALFORMED
from moonpool_engine.transfer.errors import DeadlineError, PeerGoneError, ProtocolError
from moonpool_engine.transfer.wire import MAX_FRAME_BYTES, Codec, Message

FRAME_HEADER = struct.Struct(">I")
_CHECKED_HEADER = struct.Struct(">II")  # length, and the lower half of the body's xxh3_64
_MAX_BUFFERS = 512  # the kernel's limit per call is 1024 buffers
_READ_AHEAD_BYTES = 16 << 10
_TIMEVAL = struct.Struct("ll")
# A socket's timeout costs a system call, so a long wait uses this one, which is rarely set again.
TICK_S = 1.0
TICK_SLACK_S = 0.005


class FrameSocket:
    """A stream socket that carries frames (4 bytes of length, then the body) under deadlines.

    The socket blocks, and the kernel enforces the timeouts: Python's own timeouts cost a second
    system call each and cannot wait for a whole payload at once.

    Until `end_handshake` the socket reads no byte beyond the current frame: file descriptors that
    are passed between two frames would be lost. Afterwards 4 bytes of checksum follow the length.
    Checksums protect the messages, because an intact slice in the wrong place is as wrong as a
    damaged one.
    """

    is_encrypted = False
    """Whether only this object's methods may move bytes, because they are encrypted on the way."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.settimeout(None)
        # Keeps `interrupt` off a descriptor that was closed and reused.
        self._lock = threading.Lock()
        self._closed = False
        self._codec = Codec()
        self._queued: list[memoryview] = []
        self._ahead = memoryview(b"")
        self._start = self._end = 0
        self._armed_s = -1.0
        self._has_checksums = False

    def begin(self, deadline_s: float) -> None:
        """Does what the transport needs before the first frame. Raises TransportError."""

    @property
    def socket(self) -> socket.socket:
        return self._sock

    @property
    def closed(self) -> bool:
        return self._closed

    def fileno(self) -> int:
        return self._sock.fileno()

    def end_handshake(self) -> None:
        """Adds a checksum to all later frames; one system call may then read several small
        frames."""
        self._has_checksums = True
        self._ahead = memoryview(bytearray(_READ_AHEAD_BYTES))

    def has_input(self) -> bool:
        """Whether data, or the end of the connection, has arrived."""
        if self._start < self._end:
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def hung_up(self) -> bool:
        """Whether the peer has closed its end."""
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    def send(self, message: Message, deadline_s: float) -> None:
        self.send_frame(self._codec.encode(message), deadline_s)

    def queue(self, message: Message) -> None:
        """Sends the message together with the next one."""
        self._queued.append(self._framed(self._codec.encode(message)))

    @property
    def has_queued(self) -> bool:
        return bool(self._queued)

    def flush(self, deadline_s: float) -> None:
        queued, self._queued = self._queued, []
        self._send_all(queued, deadline_s)

    def receive(self, deadline_s: float) -> Message:
        """Waits for the next message. Raises ProtocolError for a malformed one, PeerGoneError, and
        DeadlineError."""
        body = self.receive_frame(MAX_FRAME_BYTES, deadline_s)
        try:
            return self._codec.decode(body)
        except MALFORMED as error:
            raise ProtocolError(f"malformed message: {error}") from error

    def send_frame(
        self, body: bytes, deadline_s: float, payload: Sequence[memoryview] = ()
    ) -> None:
        queued, self._queued = self._queued, []
        self._send_all([*queued, self._framed(body), *payload], deadline_s)

    def take_frame(self, body: bytes) -> bytes:
        """Returns the queued messages and the frame of `body`, for a caller that sends both
        together with their payload."""
        queued, self._queued = self._queued, []
        return b"".join([*queued, self._framed(body)])

    def receive_frame(self, max_bytes: int, deadline_s: float) -> bytes:
        """Returns the next frame's body. Allocates nothing for a frame beyond `max_bytes`.

        Raises ProtocolError.
        """
        if self._has_checksums:
            num_bytes, expected = _CHECKED_HEADER.unpack(
                self._read(_CHECKED_HEADER.size, deadline_s)
            )
        else:
            (num_bytes,) = FRAME_HEADER.unpack(self._read(FRAME_HEADER.size, deadline_s))
        if num_bytes > max_bytes:
            raise ProtocolError(f"frame of {num_bytes} bytes exceeds the {max_bytes} allowed")
        body = self._read(num_bytes, deadline_s)
        if self._has_checksums and _checksum(body) != expected:
            raise ProtocolError("a message was damaged on its way: its checksum does not match")
        return body

    def take_read_ahead(self, most_bytes: int) -> memoryview:
        """Returns up to `most_bytes` that were already read beyond the last frame. The result is
        valid until the next call."""
        start = self._start
        self._start = min(self._end, start + most_bytes)
        return self._ahead[start : self._start]

    def receive_into(self, targets: Sequence[memoryview], deadline_s: float) -> None:
        """Fills the buffers, in order, with what follows the last frame."""
        pending = [target for target in targets if len(target)]
        while pending and self._start < self._end:  # first takes the bytes that were read ahead
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
        if self._has_checksums:
            return memoryview(_CHECKED_HEADER.pack(len(body), _checksum(body)) + body)
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
        timeout_text = ""
        while True:
            self.set_timeout(deadline_s, timeout_text)
            try:
                count = self._sock.recvmsg_into(targets, 0, flags)[0]
            except BlockingIOError:
                timeout_text = "the peer sent nothing before the deadline"
                continue
            except OSError as error:
                raise PeerGoneError(f"the connection broke: {error}") from error
            if count == 0:
                raise PeerGoneError("the peer closed the connection")
            return count

    def _send_all(self, buffers: list[memoryview], deadline_s: float) -> None:
        timeout_text = ""
        while buffers:
            self.set_timeout(deadline_s, timeout_text)
            try:
                count = self._sock.sendmsg(buffers[:_MAX_BUFFERS])
            except BlockingIOError:
                timeout_text = "the peer accepted no data before the deadline"
                continue
            except OSError as error:
                raise PeerGoneError(f"the connection broke: {error}") from error
            _advance(buffers, count)

    def set_timeout(self, deadline_s: float, timeout_text: str = "") -> None:
        """Makes the next call on the socket end with BlockingIOError at the deadline or a little
        earlier. Raises DeadlineError with `timeout_text` if the deadline has passed, and
        PeerGoneError if the connection has broken."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineError(timeout_text or "the deadline passed")
        timeout_s = min(left_s, TICK_S)
        if timeout_s / 2 <= self._armed_s <= left_s + TICK_SLACK_S:
            return
        seconds, rest_s = divmod(timeout_s, 1.0)
        value = _TIMEVAL.pack(int(seconds), max(1, int(rest_s * 1e6)) if not seconds else 0)
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
        except OSError as error:
            raise PeerGoneError(f"the connection broke: {error}") from error
        self._armed_s = timeout_s

    def interrupt(self) -> None:
        """Makes the thread that uses the socket fail. Ends blocking calls; safe at any time."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(OSError):  # already disconnected
                    self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._sock.close()


def _checksum(body: bytes) -> int:
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

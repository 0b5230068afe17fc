"""Runs a FrameSocket over mutual TLS."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence

from moonpool.link.tls import PeerTls, tls_text
from moonpool_engine.transfer.errors import DeadlineError, PeerGoneError
from moonpool_engine.transfer.frame_socket import TICK_S, FrameSocket


def connected(tls: PeerTls, sock: socket.socket) -> TlsFrameSocket:
    """Makes the frame socket of the side that connected. Raises PeerGoneError."""
    return TlsFrameSocket(tls.client, sock, is_server=False)


def accepted(tls: PeerTls, sock: socket.socket) -> TlsFrameSocket:
    """Makes the frame socket of the side that accepted. Raises PeerGoneError."""
    return TlsFrameSocket(tls.server, sock, is_server=True)


class TlsFrameSocket(FrameSocket):
    """A FrameSocket over TLS. `fileno` is only for polling, because its bytes are encrypted.

    One thread may send while another receives. OpenSSL allows one call at a time on a connection,
    so each call is short: the socket does not block, and the threads wait outside of the lock.
    """

    is_encrypted = True

    def __init__(self, context: ssl.SSLContext, sock: socket.socket, is_server: bool) -> None:
        """Raises PeerGoneError if the peer has left already."""
        try:
            tls = context.wrap_socket(sock, server_side=is_server, do_handshake_on_connect=False)
        except OSError as error:
            sock.close()
            raise PeerGoneError(tls_text(error)) from None
        super().__init__(tls)
        tls.setblocking(False)
        self._tls = tls
        self._calling = threading.Lock()

    def begin(self, deadline_s: float) -> None:
        """Performs the TLS handshake. Raises PeerGoneError if it fails, and DeadlineError."""
        text = "the TLS handshake did not end before the deadline"
        while (events := self.attempt(self._tls.do_handshake)[1]) != 0:
            self.wait(events, deadline_s, text)

    def has_input(self) -> bool:
        return bool(self.num_pending()) or super().has_input()

    def num_pending(self) -> int:
        """Returns how many bytes have been decrypted and not received."""
        with self._calling:
            return self._tls.pending()

    def attempt(self, call: Callable[[], int | None]) -> tuple[int, int]:
        """Calls a method of the TLS socket. Returns its result, and 0 or the event of `poll` after
        which to try again. Raises PeerGoneError."""
        try:
            with self._calling:
                return call() or 0, 0
        except ssl.SSLWantReadError:
            return 0, select.POLLIN
        except ssl.SSLWantWriteError:
            return 0, select.POLLOUT
        except OSError as error:
            raise PeerGoneError(tls_text(error)) from None

    def receive_now(self, target: memoryview) -> tuple[int, int]:
        """Fills the beginning of `target` with the bytes that have arrived. Returns the number of
        bytes, and the event to wait for. Raises PeerGoneError, also at the end of the stream."""
        count, events = self.attempt(lambda: self._tls.recv_into(target))
        if not count and not events:
            raise PeerGoneError("the peer closed the connection")
        return count, events

    def send_now(self, buffer: memoryview) -> tuple[int, int]:
        """Sends the beginning of `buffer`. If the result is 0 bytes, the next call must pass the
        same bytes. Returns the number of bytes, and the event to wait for. Raises PeerGoneError."""
        return self.attempt(lambda: self._tls.send(buffer))

    def wait(self, events: int, deadline_s: float, timeout_text: str) -> None:
        """Waits a while for an event of `poll`. Raises DeadlineError, and PeerGoneError if this end
        was closed."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineError(timeout_text)
        self.poll(events, min(left_s, TICK_S))

    def poll(self, events: int, timeout_s: float) -> int:
        """Returns which of these events of `poll` have happened. Raises PeerGoneError if this end
        was closed."""
        poll = select.poll()
        try:
            poll.register(self._tls, events)
        except ValueError:
            raise PeerGoneError("this end was closed") from None
        return sum(found for _, found in poll.poll(timeout_s * 1000))

    def set_timeout(self, deadline_s: float, timeout_text: str = "") -> None:
        """Raises DeadlineError with `timeout_text` if the deadline has passed: no call blocks."""
        if deadline_s <= time.monotonic():
            raise DeadlineError(timeout_text or "the deadline passed")

    def interrupt(self) -> None:
        with self._lock:
            if not self._closed:
                self._shut_down()

    def close(self) -> None:
        with self._calling:  # a thread that sends must not find the socket without encryption
            self._shut_down()
            super().close()

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):  # SSLSocket's own method would end the encryption
            socket.socket.shutdown(self._tls, socket.SHUT_RDWR)

    def _receive_some(self, targets: list[memoryview], deadline_s: float, flags: int = 0) -> int:
        self.set_timeout(deadline_s)
        while True:
            count, events = self.receive_now(targets[0])
            if count:
                return count
            self.wait(events, deadline_s, "the peer sent nothing before the deadline")

    def _send_all(self, buffers: list[memoryview], deadline_s: float) -> None:
        self.set_timeout(deadline_s)
        for buffer in joined(buffers):
            sent = 0
            while sent < len(buffer):
                count, events = self.send_now(buffer[sent:])
                sent += count
                if events:
                    self.wait(events, deadline_s, "the peer accepted no data before the deadline")


def joined(buffers: Sequence[memoryview]) -> list[memoryview]:
    """Puts small buffers together, so that a frame is one record."""
    found: list[memoryview] = []
    small: list[memoryview] = []
    for buffer in buffers:
        if len(buffer) <= _SMALL_BYTES:
            small.append(buffer)
            continue
        if small:
            found.append(memoryview(b"".join(small)))
            small = []
        found.append(buffer.cast("B"))
    return [*found, memoryview(b"".join(small))] if small else found


_SMALL_BYTES = 4096

"""Mutual TLS of the connections between machines.

Every part has a certificate, and takes only peers whose certificate the same authority has signed.
Host names are not compared: parts know each other by address, and the authority signs nothing but
parts of this cluster. The handshake of `auth` follows inside.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Sequence

from moonpool.transfer.errors import DeadlineError, PeerGoneError
from moonpool.transfer.frame_socket import TICK_S, TICK_SLACK_S, FrameSocket

HANDSHAKE_S = 10.0
_FLAG = "--cluster-ssl-"
TLS_STARTS = (b"\x15\x03", b"\x16\x03")
"""The first bytes of an alert and of a handshake of TLS."""
SERVER_MAY_NEED_TLS = f"if it has {_FLAG}certfile, give it to this part, too"
PLAIN_ANSWER = b"no TLS here"
"""Shows a client of TLS that this port does not speak it."""
NO_TLS_HERE = (
    f"the peer speaks TLS, and this part does not: give {_FLAG}certfile to all parts, or to none"
)


class PeerTlsError(ValueError):
    """The files of a part cannot be used; one line says which and why."""


class PeerTls:
    """The contexts of both sides. The files are read once, when this is made."""

    def __init__(self, certfile: str, keyfile: str, ca_certs: str) -> None:
        """All are PEM. An empty `keyfile` means that the key is in `certfile`. Raises
        PeerTlsError."""
        self.server = _context(ssl.PROTOCOL_TLS_SERVER, certfile, keyfile, ca_certs)
        self.client = _context(ssl.PROTOCOL_TLS_CLIENT, certfile, keyfile, ca_certs)
        self.server.num_tickets = 0  # a ticket would look like a message outside an operation

    def connected(self, sock: socket.socket) -> TlsFrameSocket:
        """Makes the frame socket of the side that connected."""
        return TlsFrameSocket(self.client, sock, is_server=False)

    def accepted(self, sock: socket.socket) -> TlsFrameSocket:
        """Makes the frame socket of the side that accepted."""
        return TlsFrameSocket(self.server, sock, is_server=True)


class TlsFrameSocket(FrameSocket):
    """A FrameSocket over TLS. `fileno` serves for polling only: its bytes are encrypted."""

    is_encrypted = True

    def __init__(self, context: ssl.SSLContext, sock: socket.socket, is_server: bool) -> None:
        tls = context.wrap_socket(sock, server_side=is_server, do_handshake_on_connect=False)
        super().__init__(tls)
        self._tls = tls

    def begin(self, deadline_s: float) -> None:
        """Performs the TLS handshake. Raises PeerGoneError if it fails, and DeadlineError."""
        text = ""
        while True:
            self.set_timeout(deadline_s, text)
            try:
                self._tls.do_handshake()
                return
            except TimeoutError:
                text = "the TLS handshake did not end before the deadline"
            except OSError as error:
                raise PeerGoneError(tls_text(error)) from None

    def has_input(self) -> bool:
        return bool(self._tls.pending()) or super().has_input()

    def set_timeout(self, deadline_s: float, timeout_text: str = "") -> None:
        """OpenSSL does not end by the kernel's timeouts; Python's wait before each record. Raises
        DeadlineError with `timeout_text` if the deadline has passed."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineError(timeout_text or "the deadline passed")
        timeout_s = min(left_s, TICK_S)
        if not timeout_s / 2 <= self._armed_s <= left_s + TICK_SLACK_S:
            self._tls.settimeout(timeout_s)
            self._armed_s = timeout_s

    def interrupt(self) -> None:
        with self._lock:
            if not self._closed:
                with contextlib.suppress(OSError):  # that of SSLSocket would end the encryption
                    socket.socket.shutdown(self._tls, socket.SHUT_RDWR)

    def _receive_some(self, targets: list[memoryview], deadline_s: float, flags: int = 0) -> int:
        text = ""
        while True:
            self.set_timeout(deadline_s, text)
            try:
                count = self._tls.recv_into(targets[0])
            except TimeoutError:
                text = "the peer sent nothing before the deadline"
                continue
            except OSError as error:
                raise PeerGoneError(tls_text(error)) from None
            if count == 0:
                raise PeerGoneError("the peer closed the connection")
            return count

    def _send_all(self, buffers: list[memoryview], deadline_s: float) -> None:
        text = ""
        for buffer in _joined(buffers):
            sent = 0
            while sent < len(buffer):
                self.set_timeout(deadline_s, text)
                try:
                    sent += self._tls.send(buffer[sent:])
                    text = ""
                except TimeoutError:
                    text = "the peer accepted no data before the deadline"
                except OSError as error:
                    raise PeerGoneError(tls_text(error)) from None


_NEEDED = f"all parts need certificates of the authority in {_FLAG}ca-certs"
CERTIFICATE_REFUSED = f"the peer does not accept this certificate: {_NEEDED}"


def is_refusal(error: BaseException) -> bool:
    """Whether a retry would not help: certificates do not fit, or the peer speaks no TLS."""
    reason = getattr(error, "reason", None) or ""
    return any(word in reason for word in ("CERT", "UNKNOWN_CA", *_NO_TLS))


def tls_text(error: BaseException) -> str:
    """Returns what went wrong with TLS, and what to do, in one line."""
    reason = getattr(error, "reason", None) or ""
    if any(word in reason for word in _NO_TLS):
        return f"the peer does not speak TLS: give {_FLAG}certfile to all parts, or to none"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate is not accepted ({error.verify_message}): {_NEEDED}"
    if is_refusal(error):
        return CERTIFICATE_REFUSED
    return f"the connection broke: {reason or error}"


_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")


def _joined(buffers: Sequence[memoryview]) -> list[memoryview]:
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


def _context(protocol: int, certfile: str, keyfile: str, ca_certs: str) -> ssl.SSLContext:
    flags = (("certfile", certfile), ("keyfile", keyfile), ("ca-certs", ca_certs))
    for name, path in flags:
        try:
            if path:
                with open(path, "rb"):
                    pass
        except OSError as error:
            raise PeerTlsError(f"cannot read {_FLAG}{name} {path}: {error.strerror}") from None
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(certfile, keyfile or None, _no_password)
    except (OSError, ValueError) as error:
        where = f"{certfile} with {_FLAG}keyfile {keyfile or certfile}"
        raise PeerTlsError(
            f"cannot use {_FLAG}certfile {where}: {error}; give PEM files that fit each other"
        ) from None
    try:
        context.load_verify_locations(ca_certs)
    except (OSError, ValueError) as error:
        text = f"cannot use {_FLAG}ca-certs {ca_certs}: {error}; give certificates in PEM"
        raise PeerTlsError(text) from None
    return context


def _no_password() -> str:
    """Called for an encrypted key, in place of a question on the terminal."""
    raise ValueError("the key is encrypted; store it without a passphrase")

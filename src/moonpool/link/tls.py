"""Mutual TLS of the connections between machines.

Every part has a certificate, and takes only peers whose certificate the same authority has signed.
Host names are not compared: parts know each other by address, and the authority signs nothing but
parts of this cluster. The handshake of `auth` follows inside.
"""

from __future__ import annotations

import ssl

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
        """All arguments are names of PEM files. An empty `keyfile` means that the key is in
        `certfile`. Raises PeerTlsError."""
        self.server = _context(ssl.PROTOCOL_TLS_SERVER, certfile, keyfile, ca_certs)
        self.client = _context(ssl.PROTOCOL_TLS_CLIENT, certfile, keyfile, ca_certs)
        # a session ticket would look like a message outside an operation
        self.server.num_tickets = 0


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
    if isinstance(error, ssl.SSLEOFError):
        return "the connection broke: the peer ended it, and its log says why"
    return f"the connection broke: {reason or error}"


_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")


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
    if not context.cert_store_stats()["x509"]:
        raise PeerTlsError(f"{_FLAG}ca-certs {ca_certs} holds no certificate: give one in PEM")
    return context


def _no_password() -> str:
    """Called for an encrypted key, in place of a question on the terminal."""
    raise ValueError("the key is encrypted; store it without a passphrase")

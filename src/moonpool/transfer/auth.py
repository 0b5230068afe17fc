"""Mutual authentication: both ends of a connection prove that they know the cluster's secret.

Challenge and response with HMAC-SHA256; the secret itself is never sent. Every connection between
parts of a cluster starts with this handshake:

    client Hello -> server Greeting (its Hello and proof) -> client Proof -> server Welcome

Both proofs cover both hellos (with fresh nonces), so neither can be replayed or reflected. The
hellos carry protocol version, service and block layout; a mismatch is refused with the reason.
The core does no I/O: `start` and `feed` return the bodies to send, as frames of 4 bytes of length
and the body. `authenticate_frames` runs it over a FrameSocket; other channels have their own loop.
The connection is not encrypted: keep attackers who can alter packets off that network.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Annotated, Protocol

import msgspec

from moonpool.transfer.errors import TransportError
from moonpool.transfer.frame_socket import FrameSocket
from moonpool.types import MALFORMED, InstanceId, Struct

PROTOCOL_VERSION = 10
MAX_HANDSHAKE_FRAME_BYTES = 2048
_NONCE_BYTES = 32
_Short = Annotated[str, msgspec.Meta(max_length=200)]


class AuthError(Exception):
    """One side refuses the other. `reply` is the body to send to the peer, with the reason."""

    def __init__(self, reason: str, reply: bytes = b"") -> None:
        super().__init__(reason)
        self.reply = reply


class Identity(Struct, frozen=True):
    """One end of a connection: its instance, `service` ("blocks", "control") and block layout."""

    instance_id: Annotated[InstanceId, msgspec.Meta(max_length=200)]
    service: _Short
    fingerprint: Annotated[bytes, msgspec.Meta(max_length=64)]
    version: int = PROTOCOL_VERSION


class Hello(Struct, frozen=True, tag=True):
    """The client's first message."""

    identity: Identity
    nonce: Annotated[bytes, msgspec.Meta(min_length=_NONCE_BYTES, max_length=_NONCE_BYTES)]


class Greeting(Struct, frozen=True, tag=True):
    """The server's hello and proof."""

    hello: Hello
    proof: Annotated[bytes, msgspec.Meta(max_length=64)]


class Proof(Struct, frozen=True, tag=True):
    """The client's proof."""

    proof: Annotated[bytes, msgspec.Meta(max_length=64)]


class Welcome(Struct, frozen=True, tag=True):
    """The server accepts the client."""


class Denied(Struct, frozen=True, tag=True):
    """One side refuses the other."""

    reason: Annotated[str, msgspec.Meta(max_length=500)]


_Step = Hello | Greeting | Proof | Welcome | Denied
_DECODER: msgspec.msgpack.Decoder[_Step] = msgspec.msgpack.Decoder(_Step)
_WRONG_SECRET = "the cluster secret differs; start all parts with the same one"  # noqa: S105


class Handshake(Protocol):
    """Either side. `peer` is set once the peer is authenticated, `done` once both are."""

    peer: Identity | None
    done: bool

    def start(self) -> bytes:
        """Returns the first body to send; empty on the server."""
        ...

    def feed(self, body: bytes) -> bytes:
        """Handles the peer's next body and returns the answer, maybe empty. Raises AuthError."""
        ...


class ClientHandshake:
    """The side that connected."""

    def __init__(self, secret: bytes, me: Identity) -> None:
        self._secret = _checked(secret)
        self._hello = Hello(identity=me, nonce=secrets.token_bytes(_NONCE_BYTES))
        self.peer: Identity | None = None
        self.done = False

    def start(self) -> bytes:
        return _encode(self._hello)

    def feed(self, body: bytes) -> bytes:
        step = _decode(body)
        if isinstance(step, Denied):
            raise AuthError(f"the peer refused us: {step.reason[:300]!r}")
        if self.peer is None and isinstance(step, Greeting):
            expected = _mac(self._secret, b"server", self._hello, step.hello)
            if not hmac.compare_digest(expected, step.proof):
                raise _refusal(_WRONG_SECRET)
            _check_fits(self._hello.identity, step.hello.identity)
            self.peer = step.hello.identity
            return _encode(Proof(proof=_mac(self._secret, b"client", self._hello, step.hello)))
        if self.peer is not None and isinstance(step, Welcome) and not self.done:
            self.done = True
            return b""
        raise _refusal(f"unexpected {type(step).__name__} during the handshake")


class ServerHandshake:
    """The side that accepted."""

    def __init__(self, secret: bytes, me: Identity) -> None:
        self._secret = _checked(secret)
        self._hello = Hello(identity=me, nonce=secrets.token_bytes(_NONCE_BYTES))
        self._client: Hello | None = None
        self.peer: Identity | None = None
        self.done = False

    def start(self) -> bytes:
        return b""

    def feed(self, body: bytes) -> bytes:
        step = _decode(body)
        if isinstance(step, Denied):
            raise AuthError(f"the peer refused us: {step.reason[:300]!r}")
        if self._client is None and isinstance(step, Hello):
            if step.identity.version != PROTOCOL_VERSION:  # first: the rest may differ
                raise _refusal(_version_text(step.identity.version))
            self._client = step
            proof = _mac(self._secret, b"server", step, self._hello)
            return _encode(Greeting(hello=self._hello, proof=proof))
        if self._client is not None and isinstance(step, Proof) and not self.done:
            expected = _mac(self._secret, b"client", self._client, self._hello)
            if not hmac.compare_digest(expected, step.proof):
                raise _refusal(_WRONG_SECRET)
            _check_fits(self._hello.identity, self._client.identity)
            self.peer = self._client.identity
            self.done = True
            return _encode(Welcome())
        raise _refusal(f"unexpected {type(step).__name__} during the handshake")


def authenticate_frames(frames: FrameSocket, handshake: Handshake, deadline_s: float) -> Identity:
    """Runs the handshake over a socket and returns the peer's identity. Raises AuthError or
    TransportError; does not close the socket."""
    answer = handshake.start()
    while True:
        if answer:
            frames.send_frame(answer, deadline_s)
        if handshake.done and handshake.peer is not None:
            return handshake.peer
        try:
            answer = handshake.feed(frames.receive_frame(MAX_HANDSHAKE_FRAME_BYTES, deadline_s))
        except AuthError as error:
            if error.reply:
                _send_refusal(frames, error.reply, deadline_s)
            raise


def _send_refusal(frames: FrameSocket, reply: bytes, deadline_s: float) -> None:
    try:
        frames.send_frame(reply, deadline_s)
    except TransportError:
        return  # the peer is refused either way


def _checked(secret: bytes) -> bytes:
    if not secret:
        raise AuthError("the cluster secret is empty; every part of a cluster needs the same one")
    return secret


def _check_fits(ours: Identity, theirs: Identity) -> None:
    if theirs.version != PROTOCOL_VERSION:
        raise _refusal(_version_text(theirs.version))
    if theirs.service != ours.service:
        raise _refusal(f"service {theirs.service!r} was requested, but this is {ours.service!r}")
    if not hmac.compare_digest(theirs.fingerprint, ours.fingerprint):
        raise _refusal(
            f"block layouts differ ({ours.fingerprint.hex()[:12]} here,"
            f" {theirs.fingerprint.hex()[:12]} at {theirs.instance_id!r});"
            " all instances must serve the same model, dtype and block size"
        )


def _version_text(theirs: int) -> str:
    return f"protocol version {theirs} there, {PROTOCOL_VERSION} here; install the same release"


def _mac(secret: bytes, side: bytes, client: Hello, server: Hello) -> bytes:
    hellos = hashlib.sha256(_encode(client)).digest() + hashlib.sha256(_encode(server)).digest()
    return hmac.new(secret, b"moonpool " + side + hellos, hashlib.sha256).digest()


def _refusal(reason: str) -> AuthError:
    return AuthError(reason, _encode(Denied(reason=reason[:500])))


def _encode(step: _Step) -> bytes:
    return msgspec.msgpack.encode(step)


def _decode(body: bytes) -> _Step:
    try:
        return _DECODER.decode(body)
    except MALFORMED as error:
        raise _refusal(f"malformed handshake: {error}") from error

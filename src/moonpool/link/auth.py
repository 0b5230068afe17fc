"""Mutual authentication: both ends of a connection prove that they know the cluster's secret.

Challenge and response with HMAC-SHA256; the secret is never sent. Every connection between parts of
a cluster starts with this handshake:

    client Hello -> server Greeting (its Hello and proof) -> client Proof -> server Welcome

Both proofs cover both hellos (with fresh nonces), so neither can be replayed or reflected. The
hellos carry service and block layout, and in their nonces the versions that each side speaks
(`protocol.versions`); a mismatch is refused with the reason. The form of a hello never changes. The
core does no I/O: `start` and `feed` return the bodies to send, as frames of 4 bytes of length and
the body. Each kind of channel has a separate loop (`transfer.authentication`, `link.channel`). The
handshake encrypts nothing: without certificates (`tls`), keep attackers who can alter packets off
the network.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from abc import ABC, abstractmethod
from typing import Annotated

import msgspec

from moonpool.protocol.versions import (
    OWN,
    STATED_BYTES,
    Agreed,
    VersionError,
    VersionRange,
    Versions,
    agree,
    read_versions,
    state_versions,
)
from moonpool.types import MALFORMED, InstanceId, Struct

HELLO_FORM = 10
"""The value of `version` in every hello. It stays 10, because peers that speak protocol 10 refuse
any other number there. The nonce states the supported versions."""
MAX_HANDSHAKE_FRAME_BYTES = 2048
_NONCE_BYTES = 32
_Short = Annotated[str, msgspec.Meta(max_length=200)]


class AuthError(Exception):
    """One side of a connection refuses the other. `reply` is the body to send to the peer, which
    has the reason."""

    def __init__(self, reason: str, reply: bytes = b"") -> None:
        super().__init__(reason)
        self.reply = reply


class Identity(Struct, frozen=True):
    """One end of a connection: its instance, its `service` ("blocks", "control") and its block
    layout."""

    instance_id: Annotated[InstanceId, msgspec.Meta(max_length=200)]
    service: _Short
    fingerprint: Annotated[bytes, msgspec.Meta(max_length=64)]
    version: int = HELLO_FORM


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
    """One side of a connection refuses the other."""

    reason: Annotated[str, msgspec.Meta(max_length=500)]


_Step = Hello | Greeting | Proof | Welcome | Denied
_DECODER: msgspec.msgpack.Decoder[_Step] = msgspec.msgpack.Decoder(_Step)
_WRONG_SECRET = "the cluster secret differs; start all parts with the same one"  # noqa: S105


class Handshake(ABC):
    """Either side. `peer` and `agreed` are set once the peer is authenticated, `done` once both
    sides are."""

    def __init__(self, secret: bytes, me: Identity, versions: Versions = OWN) -> None:
        self._secret = _checked(secret)
        self._versions = versions
        self._hello = Hello(identity=me, nonce=_nonce(versions))
        self.agreed: Agreed | None = None
        self.peer: Identity | None = None
        self.done = False

    def start(self) -> bytes:
        """Returns the first body to send; empty on the server."""
        return b""

    def feed(self, body: bytes) -> bytes:
        """Handles the peer's next body and returns the answer, maybe empty. Raises AuthError for
        another secret, a peer that refuses or speaks no common version, and a message out of
        order."""
        step = _decode(body)
        if isinstance(step, Denied):
            raise AuthError(f"the peer refused the connection: {step.reason[:300]!r}")
        answer = self._answer(step)
        if answer is None:
            raise _refusal(f"unexpected {type(step).__name__} during the handshake")
        return answer

    @abstractmethod
    def _answer(self, step: _Step) -> bytes | None:
        """Returns None for a step that is out of turn. Raises AuthError."""

    def _check_proof(self, proof: bytes, side: bytes, client: Hello, server: Hello) -> None:
        if not hmac.compare_digest(_mac(self._secret, side, client, server), proof):
            raise _refusal(_WRONG_SECRET)


class ClientHandshake(Handshake):
    """The side that connected."""

    def start(self) -> bytes:
        return _encode(self._hello)

    def _answer(self, step: _Step) -> bytes | None:
        if self.peer is None and isinstance(step, Greeting):
            self._check_proof(step.proof, b"server", self._hello, step.hello)
            self.agreed = _check_fits(self._hello, step.hello, self._versions)
            self.peer = step.hello.identity
            return _encode(Proof(proof=_mac(self._secret, b"client", self._hello, step.hello)))
        if self.peer is not None and isinstance(step, Welcome) and not self.done:
            self.done = True
            return b""
        return None


class ServerHandshake(Handshake):
    """The side that accepted."""

    _client: Hello | None = None

    def _answer(self, step: _Step) -> bytes | None:
        if self._client is None and isinstance(step, Hello):
            # checked first, because the other fields may differ
            _agree(self._hello, step, self._versions)
            self._client = step
            proof = _mac(self._secret, b"server", step, self._hello)
            return _encode(Greeting(hello=self._hello, proof=proof))
        if self._client is not None and isinstance(step, Proof) and not self.done:
            self._check_proof(step.proof, b"client", self._client, self._hello)
            self.agreed = _check_fits(self._hello, self._client, self._versions)
            self.peer = self._client.identity
            self.done = True
            return _encode(Welcome())
        return None


def _checked(secret: bytes) -> bytes:
    if not secret:
        raise AuthError("the cluster secret is empty; every part of a cluster needs the same one")
    return secret


def _nonce(versions: Versions) -> bytes:
    return state_versions(versions) + secrets.token_bytes(_NONCE_BYTES - STATED_BYTES)


def _agree(our_hello: Hello, their_hello: Hello, versions: Versions) -> Agreed:
    ours, theirs = our_hello.identity, their_hello.identity
    stated = read_versions(their_hello.nonce)
    if theirs.version != HELLO_FORM:  # the peer is older than protocol 10
        stated = Versions(VersionRange(theirs.version, theirs.version), stated.blocks)
    try:
        return agree(versions, stated, ours.instance_id, theirs.instance_id)
    except VersionError as error:
        raise _refusal(str(error)) from None


def _check_fits(our_hello: Hello, their_hello: Hello, versions: Versions) -> Agreed:
    agreed = _agree(our_hello, their_hello, versions)
    ours, theirs = our_hello.identity, their_hello.identity
    if theirs.service != ours.service:
        raise _refusal(f"service {theirs.service!r} was requested, but this is {ours.service!r}")
    if not hmac.compare_digest(theirs.fingerprint, ours.fingerprint):
        raise _refusal(
            f"block layouts differ ({ours.fingerprint.hex()[:12]} here,"
            f" {theirs.fingerprint.hex()[:12]} at {theirs.instance_id!r});"
            " all instances must serve the same model, dtype and block size"
        )
    return agreed


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

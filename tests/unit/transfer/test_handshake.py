"""The handshake without I/O, and over asyncio streams: it needs the secret."""

from __future__ import annotations

import msgspec
import pytest

from moonpool.transfer.auth import (
    PROTOCOL_VERSION,
    AuthError,
    ClientHandshake,
    Greeting,
    Hello,
    Identity,
    Proof,
    ServerHandshake,
)
from moonpool.types import InstanceId

SECRET = b"s3cret"


def identity(
    name: str,
    service: str = "control",
    fingerprint: bytes = b"f" * 32,
    version: int = PROTOCOL_VERSION,
) -> Identity:
    return Identity(
        instance_id=InstanceId(name), service=service, fingerprint=fingerprint, version=version
    )


def run(client: ClientHandshake, server: ServerHandshake) -> None:
    """Exchanges bodies until both sides have no more."""
    body = client.start()
    while body:
        body = server.feed(body)
        body = client.feed(body) if body else b""


def test_both_sides_learn_who_the_other_is() -> None:
    client, server = ClientHandshake(SECRET, identity("c")), ServerHandshake(SECRET, identity("s"))
    run(client, server)
    assert client.done
    assert server.done
    assert client.peer == identity("s")
    assert server.peer == identity("c")


def test_a_client_detects_a_server_without_the_secret() -> None:
    client, server = ClientHandshake(SECRET, identity("c")), ServerHandshake(b"x", identity("s"))
    with pytest.raises(AuthError, match="secret differs") as caught:
        client.feed(server.feed(client.start()))
    assert client.peer is None
    with pytest.raises(AuthError, match=r"refused us.*secret differs"):
        server.feed(caught.value.reply)


def test_a_server_detects_a_client_without_the_secret() -> None:
    client, server = ClientHandshake(SECRET, identity("c")), ServerHandshake(SECRET, identity("s"))
    server.feed(client.start())
    forged = msgspec.msgpack.encode(Proof(proof=bytes(32)))
    with pytest.raises(AuthError, match="secret differs"):
        server.feed(forged)
    assert server.peer is None
    assert not server.done


def test_the_servers_own_proof_cannot_be_reflected() -> None:
    client, server = ClientHandshake(SECRET, identity("c")), ServerHandshake(SECRET, identity("s"))
    greeting = msgspec.msgpack.decode(server.feed(client.start()), type=Hello | Greeting)
    assert isinstance(greeting, Greeting)
    with pytest.raises(AuthError, match="secret differs"):
        server.feed(msgspec.msgpack.encode(Proof(proof=greeting.proof)))


def test_an_old_proof_cannot_be_replayed() -> None:
    client, server = ClientHandshake(SECRET, identity("c")), ServerHandshake(SECRET, identity("s"))
    hello = client.start()
    proof = client.feed(server.feed(hello))
    assert server.feed(proof)
    again = ServerHandshake(SECRET, identity("s"))
    again.feed(hello)
    with pytest.raises(AuthError, match="secret differs"):
        again.feed(proof)


def test_the_identity_is_part_of_the_proof() -> None:
    client, server = ClientHandshake(SECRET, identity("c")), ServerHandshake(SECRET, identity("s"))
    hello = msgspec.msgpack.decode(client.start(), type=Hello | Greeting)
    assert isinstance(hello, Hello)
    altered = msgspec.structs.replace(hello, identity=identity("someone else"))
    with pytest.raises(AuthError, match="secret differs"):
        client.feed(server.feed(msgspec.msgpack.encode(altered)))


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        (identity("s", fingerprint=b"g" * 32), "block layouts differ"),
        (identity("s", service="blocks"), "service"),
        (identity("s", version=PROTOCOL_VERSION + 1), "protocol version"),
    ],
)
def test_a_mismatch_is_refused_with_the_reason(theirs: Identity, reason: str) -> None:
    with pytest.raises(AuthError, match=reason):
        run(ClientHandshake(SECRET, identity("c")), ServerHandshake(SECRET, theirs))


def test_unexpected_steps_and_invalid_bodies_are_refused() -> None:
    server = ServerHandshake(SECRET, identity("s"))
    with pytest.raises(AuthError, match="unexpected Proof"):
        server.feed(msgspec.msgpack.encode(Proof(proof=bytes(32))))
    for rubbish in (b"", b"\xc1", b"GET / HTTP/1.1", bytes(2000)):
        with pytest.raises(AuthError, match="malformed"):
            ServerHandshake(SECRET, identity("s")).feed(rubbish)
    with pytest.raises(AuthError, match="empty"):
        ClientHandshake(b"", identity("c"))

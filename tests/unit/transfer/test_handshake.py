"""Tests the handshake, which needs the secret, without I/O and over asyncio streams."""

from __future__ import annotations

import secrets

import msgspec
import pytest

from moonpool.link import auth
from moonpool.link.auth import (
    HELLO_FORM,
    AuthError,
    ClientHandshake,
    Greeting,
    Hello,
    Identity,
    Proof,
    ServerHandshake,
)
from moonpool.protocol.versions import (
    OWN,
    STATED_BYTES,
    UNSTATED,
    Agreed,
    VersionRange,
    Versions,
)
from moonpool.types import InstanceId

SECRET = b"s3cret"


def identity(
    name: str,
    service: str = "control",
    fingerprint: bytes = b"f" * 32,
    version: int = HELLO_FORM,
) -> Identity:
    return Identity(
        instance_id=InstanceId(name), service=service, fingerprint=fingerprint, version=version
    )


def run(client: ClientHandshake, server: ServerHandshake) -> None:
    """Exchanges bodies until neither side has another one."""
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
    with pytest.raises(AuthError, match=r"refused the connection.*secret differs"):
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
        (identity("s", version=9), "c speaks protocol 10 to 11, s 9: upgrade s, one release"),
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


def speaking(oldest: int, newest: int, blocks: int = 1) -> Versions:
    return Versions(VersionRange(oldest, newest), VersionRange(blocks, blocks))


NEXT = speaking(OWN.protocol.newest, OWN.protocol.newest + 1)


@pytest.mark.parametrize(
    ("here", "there", "protocol"),
    [
        (OWN, OWN, OWN.protocol.newest),
        (OWN, NEXT, OWN.protocol.newest),
        (NEXT, OWN, OWN.protocol.newest),
        (speaking(10, 10), OWN, 10),
    ],
)
def test_both_sides_use_the_newest_version_that_both_speak(
    here: Versions, there: Versions, protocol: int
) -> None:
    client = ClientHandshake(SECRET, identity("c"), here)
    server = ServerHandshake(SECRET, identity("s"), there)
    run(client, server)
    assert client.agreed == server.agreed == Agreed(protocol, 1)


def without_statement(hello: Hello) -> Hello:
    """Returns the hello of protocol 10, whose nonce is wholly random."""
    return msgspec.structs.replace(hello, nonce=secrets.token_bytes(32))


def test_a_peer_that_states_nothing_speaks_protocol_10(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ServerHandshake(SECRET, identity("s"))
    with monkeypatch.context() as patched:  # makes the whole nonce random, as in protocol 10
        patched.setattr(auth, "state_versions", lambda _: secrets.token_bytes(STATED_BYTES))
        client = ClientHandshake(SECRET, identity("c"))
    run(client, server)
    assert server.agreed == Agreed(UNSTATED.protocol.newest, 1)


@pytest.mark.parametrize(
    ("here", "there", "text"),
    [
        (speaking(10, 11), speaking(12, 13), "s speaks protocol 12 to 13, c 10 to 11: upgrade c"),
        (speaking(12, 13), speaking(10, 11), "s speaks protocol 10 to 11, c 12 to 13: upgrade s"),
        (speaking(10, 11, 1), speaking(10, 11, 2), "s speaks block format 2, c 1: upgrade c"),
    ],
)
def test_a_peer_without_a_common_version_learns_both_and_what_to_do(
    here: Versions, there: Versions, text: str
) -> None:
    client = ClientHandshake(SECRET, identity("c"), here)
    with pytest.raises(AuthError, match=text) as caught:
        run(client, ServerHandshake(SECRET, identity("s"), there))
    assert "\n" not in str(caught.value)
    with pytest.raises(AuthError, match=f"refused the connection.*{text}"):
        client.feed(caught.value.reply)


def test_versions_cannot_be_lowered_on_the_way() -> None:
    client = ClientHandshake(SECRET, identity("c"))
    server = ServerHandshake(SECRET, identity("s"))
    hello = msgspec.msgpack.decode(client.start(), type=Hello)
    lowered = msgspec.msgpack.encode(without_statement(hello))
    with pytest.raises(AuthError, match="secret differs"):
        client.feed(server.feed(lowered))

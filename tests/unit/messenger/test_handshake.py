"""The handshake without I/O, and over asyncio streams: nobody gets in without the secret."""

from __future__ import annotations

import asyncio
import socket
import threading

import msgspec
import pytest

from moonpool.messenger.auth import (
    PROTOCOL_VERSION,
    AuthError,
    ClientHandshake,
    Greeting,
    Hello,
    Identity,
    Proof,
    ServerHandshake,
    authenticate,
    authenticate_streams,
)
from moonpool.types import InstanceId

SECRET = b"s3cret"


def identity(
    name: str, service: str = "control", fingerprint: bytes = b"f" * 32, version: int = 1
) -> Identity:
    return Identity(
        instance_id=InstanceId(name), service=service, fingerprint=fingerprint, version=version
    )


def run(client: ClientHandshake, server: ServerHandshake) -> None:
    """Passes bodies to and fro until both are silent."""
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


def test_a_client_finds_out_a_server_without_the_secret() -> None:
    client, server = ClientHandshake(SECRET, identity("c")), ServerHandshake(b"x", identity("s"))
    with pytest.raises(AuthError, match="secret differs") as caught:
        client.feed(server.feed(client.start()))
    assert client.peer is None
    with pytest.raises(AuthError, match=r"refused us.*secret differs"):
        server.feed(caught.value.reply)


def test_a_server_finds_out_a_client_without_the_secret() -> None:
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
def test_what_does_not_fit_is_refused_with_the_reason(theirs: Identity, reason: str) -> None:
    with pytest.raises(AuthError, match=reason):
        run(ClientHandshake(SECRET, identity("c")), ServerHandshake(SECRET, theirs))


def test_steps_out_of_turn_and_rubbish_are_refused() -> None:
    server = ServerHandshake(SECRET, identity("s"))
    with pytest.raises(AuthError, match="unexpected Proof"):
        server.feed(msgspec.msgpack.encode(Proof(proof=bytes(32))))
    for rubbish in (b"", b"\xc1", b"GET / HTTP/1.1", bytes(2000)):
        with pytest.raises(AuthError, match="malformed"):
            ServerHandshake(SECRET, identity("s")).feed(rubbish)
    with pytest.raises(AuthError, match="empty"):
        ClientHandshake(b"", identity("c"))


def test_blocking_client_meets_asyncio_server() -> None:
    found: list[Identity] = []

    def connect(port: int, secret: bytes) -> None:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            found.append(authenticate(sock, ClientHandshake(secret, identity("c")), 2.0))

    async def serve(secret: bytes) -> Identity | Exception:
        ended: asyncio.Future[Identity | Exception] = asyncio.get_running_loop().create_future()

        async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            handshake = ServerHandshake(SECRET, identity("s"))
            try:
                ended.set_result(await authenticate_streams(reader, writer, handshake, 2.0))
            except AuthError as error:
                ended.set_result(error)
            writer.close()

        server = await asyncio.start_server(admit, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        thread = threading.Thread(target=_quietly, args=(connect, port, secret))
        thread.start()
        result = await asyncio.wait_for(ended, 3)
        await asyncio.to_thread(thread.join)
        server.close()
        return result

    assert asyncio.run(serve(SECRET)) == identity("c")
    assert found == [identity("s")]
    refused = asyncio.run(serve(b"wrong"))
    assert isinstance(refused, AuthError)
    assert "secret differs" in str(refused)


def _quietly(connect: object, port: int, secret: bytes) -> None:
    assert callable(connect)
    try:
        connect(port, secret)
    except AuthError:
        return


@pytest.mark.parametrize("noise", [b"\xff\xff\xff\xff", b"\x00\x00", b"\x00\x00\x00\x01\xc1"])
def test_asyncio_server_survives_noise(noise: bytes) -> None:
    async def meet() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(noise)
        reader.feed_eof()
        a, b = socket.socketpair()
        _, writer = await asyncio.open_connection(sock=a)
        with pytest.raises(AuthError):
            await authenticate_streams(reader, writer, ServerHandshake(SECRET, identity("s")), 1)
        writer.close()
        b.close()

    asyncio.run(meet())


def test_asyncio_server_gives_up_on_a_silent_client() -> None:
    async def meet() -> None:
        a, b = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=a)
        with pytest.raises(TimeoutError):
            await authenticate_streams(reader, writer, ServerHandshake(SECRET, identity("s")), 0.05)
        writer.close()
        b.close()

    asyncio.run(meet())

"""Tests the control connection over real sockets: handshake, frames, foreign clients and noise."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import uvloop

from moonpool.link import channel as channel_module
from moonpool.link.auth import ClientHandshake, Handshake, Identity, ServerHandshake
from moonpool.link.channel import Channel
from moonpool.types import InstanceId, Struct

SECRET = b"a secret of the test"


class Word(Struct, frozen=True, tag=True):
    text: str


class Ear:
    """Records what a channel reports."""

    def __init__(self) -> None:
        self.peer: Identity | None = None
        self.words: list[str] = []
        self.heard = asyncio.Event()
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_connected(self) -> None:
        """Does nothing."""

    def on_open(self, peer: Identity) -> None:
        self.peer = peer
        self.heard.set()

    def on_frame(self, frame: Word) -> None:
        self.words.append(frame.text)
        self.heard.set()

    def on_closed(self, reason: str) -> None:
        self.closed.set_result(reason)


def identity(name: str) -> Identity:
    return Identity(instance_id=InstanceId(name), service="control", fingerprint=b"")


def make(handshake: Handshake, **options: Any) -> tuple[Channel[Word, Word], Ear]:
    ear = Ear()
    return Channel(handshake, msgspec.msgpack.Decoder(Word), ear, **options), ear


class Meeting:
    """A listening server channel, with clients of any kind."""

    async def __aenter__(self) -> Meeting:
        self.server, self.ear = make(ServerHandshake(SECRET, identity("s")), handshake_s=0.3)
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(lambda: self.server, "127.0.0.1", 0)
        self.port = self._listening.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        self._listening.close()

    async def client(self, secret: bytes = SECRET) -> tuple[Channel[Word, Word], Ear]:
        client, ear = make(ClientHandshake(secret, identity("c")))
        loop = asyncio.get_running_loop()
        self.transport, _ = await loop.create_connection(lambda: client, "127.0.0.1", self.port)
        return client, ear


async def until(ear: Ear, count: int) -> None:
    async with asyncio.timeout(60):
        while len(ear.words) < count:
            ear.heard.clear()
            await ear.heard.wait()


def test_frames_of_any_size_arrive_in_order_both_ways() -> None:
    async def run() -> None:
        async with Meeting() as meeting:
            client, ear = await meeting.client()
            await asyncio.wait_for(ear.heard.wait(), 60)
            assert ear.peer == identity("s")
            sizes = [0, 1, 70_000, 3, 2_000_000, 5]
            for size in sizes:
                client.send(Word(text="x" * size))
            await until(meeting.ear, len(sizes))
            assert [len(w) for w in meeting.ear.words] == sizes
            assert meeting.ear.peer == identity("c")
            for number in range(300):
                meeting.server.send(Word(text=str(number)))
            await until(ear, 300)
            assert ear.words == [str(number) for number in range(300)]
            meeting.server.close("enough")
            assert await asyncio.wait_for(meeting.ear.closed, 60) == "enough"
            assert "closed" in await asyncio.wait_for(ear.closed, 60)
            # nobody reads this message, and the call must not raise
            client.send(Word(text="into the void"))

    uvloop.run(run())


def test_a_wrong_secret_is_told_to_both() -> None:
    async def run() -> None:
        async with Meeting() as meeting:
            client, ear = await meeting.client(b"another secret")
            assert "secret differs" in await asyncio.wait_for(ear.closed, 60)
            await asyncio.wait_for(meeting.ear.closed, 60)
            assert client.refused
            assert meeting.ear.peer is None

    uvloop.run(run())


@pytest.mark.parametrize("noise", [b"\xff" * 8, b"\x01\x00\x00\x00\xc1", b"GET / HTTP/1.1\r\n\r\n"])
def test_noise_ends_only_its_own_connection(noise: bytes) -> None:
    async def run() -> None:
        async with Meeting() as meeting:
            _, writer = await asyncio.open_connection("127.0.0.1", meeting.port)
            writer.write(noise)
            reason = await asyncio.wait_for(meeting.ear.closed, 60)
            assert reason
            assert meeting.ear.peer is None
            writer.close()

    uvloop.run(run())


def test_a_silent_client_is_given_up() -> None:
    async def run() -> None:
        async with Meeting() as meeting:
            _, writer = await asyncio.open_connection("127.0.0.1", meeting.port)
            assert "too long" in await asyncio.wait_for(meeting.ear.closed, 60)
            writer.close()

    uvloop.run(run())


def test_oversized_and_malformed_frames_cut_the_peer_off() -> None:
    async def run(body: bytes, word: str) -> None:
        async with Meeting() as meeting:
            _, ear = await meeting.client()
            await asyncio.wait_for(ear.heard.wait(), 60)
            meeting.transport.write(body)
            assert word in await asyncio.wait_for(meeting.ear.closed, 60)
            assert meeting.ear.words == []

    uvloop.run(run((1 << 31).to_bytes(4, "little"), "exceeds"))
    uvloop.run(run(b"\x03\x00\x00\x00abc", "malformed"))


def test_a_peer_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with Meeting() as meeting:
            _, ear = await meeting.client()
            await asyncio.wait_for(ear.heard.wait(), 60)
            meeting.transport.pause_reading()
            for _ in range(200):
                meeting.server.send(Word(text="y" * 100_000))
            assert "does not read" in await asyncio.wait_for(meeting.ear.closed, 60)

    monkeypatch.setattr(channel_module, "MAX_UNSENT_BYTES", 4 << 20)
    uvloop.run(run())


def test_a_word_before_the_handshake_is_over_does_not_break_it() -> None:
    async def run() -> None:
        async with Meeting() as meeting:
            client, ear = await meeting.client()
            client.send(Word(text="too early"))
            await asyncio.wait_for(ear.heard.wait(), 60)
            assert ear.peer == identity("s")
            client.send(Word(text="in time"))
            await until(meeting.ear, 1)
            assert meeting.ear.words == ["in time"]
            client.close()

    uvloop.run(run())


def test_abort_does_not_wait_for_a_peer_that_does_not_read() -> None:
    async def run() -> None:
        async with Meeting() as meeting:
            client, ear = await meeting.client()
            await asyncio.wait_for(ear.heard.wait(), 60)
            meeting.transport.pause_reading()
            meeting.server.send(Word(text="x" * 20_000_000))
            meeting.server.abort("it said nothing")
            assert await asyncio.wait_for(meeting.ear.closed, 60) == "it said nothing"
            client.close()

    uvloop.run(run())

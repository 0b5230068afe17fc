"""Tests a worker's link to its head over real sockets: heads come back, stop, refuse, or stay
away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest
import uvloop

from moonpool.link import head_link
from moonpool.link.auth import Identity, ServerHandshake
from moonpool.link.channel import Channel
from moonpool.link.head_link import HeadLink, WorkerError
from moonpool.protocol.frames import (
    CONTROL_SERVICE,
    AttentionMoved,
    DownFrame,
    HeadAddress,
    Leadership,
    Stop,
    TurnedAway,
    UpFrame,
    WorkFrame,
)
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.types import InstanceId

SECRET = b"a secret of the test"
HeadChannel = Channel[UpFrame, DownFrame]


class FakeHead:
    """Runs the test's next act on every new connection."""

    def __init__(self, acts: list[Callable[[HeadChannel], None]], secret: bytes = SECRET) -> None:
        self.acts = acts
        self._secret = secret
        self._channel: HeadChannel | None = None

    async def start(self, port: int = 0) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        return await loop.create_server(self.accept, "127.0.0.1", port)

    def accept(self) -> HeadChannel:
        me = Identity(instance_id=InstanceId("head"), service=CONTROL_SERVICE, fingerprint=b"")
        handshake = ServerHandshake(self._secret, me)
        self._channel = Channel(handshake, msgspec.msgpack.Decoder(UpFrame), self)
        return self._channel

    def on_connected(self) -> None:
        """Does nothing."""

    def on_open(self, peer: Identity) -> None:
        assert self._channel is not None
        self.acts.pop(0)(self._channel)

    def on_frame(self, frame: UpFrame) -> None:
        raise AssertionError(f"nobody sends {frame}")

    def on_closed(self, reason: str) -> None:
        pass


class Follower:
    """Records its calls."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_head(self) -> None:
        self.heard.append("head")

    def on_frame(self, frame: WorkFrame) -> None:
        self.heard.append(type(frame).__name__)

    def on_lost(self) -> None:
        self.heard.append("lost")


def follow(head: FakeHead) -> tuple[list[str], str]:
    """Returns what the follower heard, and the error of `run`."""

    async def run() -> tuple[list[str], str]:
        server = await head.start()
        port = server.sockets[0].getsockname()[1]
        follower = Follower()
        link = HeadLink(InstanceId("p0"), SECRET, follower)
        try:
            async with asyncio.timeout(60):
                await link.run("127.0.0.1", port)
        except WorkerError as error:
            return follower.heard, str(error).replace(str(port), "PORT")
        finally:
            server.close()
        return follower.heard, ""

    return uvloop.run(run())


def stop(channel: HeadChannel) -> None:
    channel.send(Stop())


def vanish(channel: HeadChannel) -> None:
    channel.abort("it is gone")


def turn_away(channel: HeadChannel) -> None:
    channel.send(TurnedAway(message="there is one of that name"))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_link, "RETRY_S", 0.01)


def test_a_lost_head_is_sought_until_it_is_back_and_says_stop() -> None:
    assert follow(FakeHead([vanish, vanish, stop])) == (
        ["head", "lost", "head", "lost", "head"],
        "",
    )


def test_a_head_that_stays_away_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_link, "RECONNECT_S", 0.1)

    async def run() -> None:
        server = await FakeHead([]).start()
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        follower = Follower()
        with pytest.raises(WorkerError, match="is gone"):
            await HeadLink(InstanceId("p0"), SECRET, follower).run("127.0.0.1", port)
        assert set(follower.heard) == {"lost"} and len(follower.heard) > 2

    uvloop.run(run())


@pytest.mark.parametrize("num_opened", [0, 1])
def test_only_a_head_that_never_answered_may_want_certificates(
    num_opened: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that hangs cuts connections, too, but this worker was connected to it before."""
    monkeypatch.setattr(head_link, "RECONNECT_S", 0.1)
    head = FakeHead([vanish] * num_opened)

    async def run() -> str:
        def accept() -> asyncio.Protocol:
            return head.accept() if head.acts else Cutting()

        server = await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(WorkerError, match="is gone") as caught:
            await HeadLink(InstanceId("p0"), SECRET, Follower()).run("127.0.0.1", port)
        server.close()
        return str(caught.value)

    assert ("--cluster-ssl-certfile" in uvloop.run(run())) == (num_opened == 0)


class Cutting(asyncio.Protocol):
    """Ends each connection at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def test_one_that_is_turned_away_or_refused_does_not_come_again() -> None:
    heard, error = follow(FakeHead([turn_away, stop]))
    assert heard == ["head"]
    assert error == "the head rejected p0: there is one of that name"
    heard, error = follow(FakeHead([stop], secret=b"another one's secret"))
    assert heard == []
    assert error.startswith("the head and this worker do not agree: ")


def test_other_frames_are_the_followers() -> None:
    def move_and_stop(channel: HeadChannel) -> None:
        address = PeerAddress(InstanceId("a0"), "here", "", "127.0.0.1", 1)
        channel.send(AttentionMoved(place=0, address=address), Stop())

    assert follow(FakeHead([move_and_stop])) == (["head", "AttentionMoved"], "")


def test_a_link_leaves_a_head_that_was_replaced_and_finds_the_next_one() -> None:
    """The old head comes back with its own epoch, but the worker obeys only the new head."""
    seen: list[str] = []

    def lead(name: str, leadership: Leadership) -> Callable[[HeadChannel], None]:
        def act(channel: HeadChannel) -> None:
            seen.append(name)
            channel.send(leadership)
            if name == "first":
                channel.close("it is gone")
            if name == "next":
                channel.send(Stop())

        return act

    async def run() -> None:
        old, new = FakeHead([]), FakeHead([])
        servers = [await old.start(), await new.start()]
        port, next_port = (server.sockets[0].getsockname()[1] for server in servers)
        standby = HeadAddress(host="127.0.0.1", port=next_port)
        old.acts += [
            lead("first", Leadership(epoch=4, standbys=(standby,))),
            lead("back", Leadership(epoch=3)),
        ]
        new.acts += [lead("next", Leadership(epoch=5))]
        link = HeadLink(InstanceId("p0"), SECRET, Follower())
        async with asyncio.timeout(60):
            await link.run("127.0.0.1", port)
        for server in servers:
            server.close()
        assert (link.heads.epoch, link.heads.address) == (5, standby)

    uvloop.run(run())
    assert seen == ["first", "back", "next"]


def test_a_head_with_a_standby_that_is_silent_counts_as_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(head_link, "SILENT_HEAD_S", 0)

    def promise(channel: HeadChannel) -> None:
        address = HeadAddress(host="127.0.0.1", port=channel.local_address[1])
        channel.send(Leadership(epoch=1, standbys=(address,)))

    assert follow(FakeHead([promise, stop])) == (["head", "lost", "head"], "")

"""Runs the control connection of an instance in runs with two versions of the protocol.

Handshake, frames, and the choice of fields for a peer of the earlier version are the product's own
at both ends. An end of the earlier release states no versions, and refuses fields and frames that
it does not know.
"""

from __future__ import annotations

import secrets
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import msgspec

from moonpool.head.takeover.standby_links import StandbyLinks
from moonpool.link import auth
from moonpool.link.auth import ClientHandshake, Identity, ServerHandshake
from moonpool.link.channel import Channel
from moonpool.link.head_link import InstanceProcess
from moonpool.protocol import frames
from moonpool.protocol.frames import CONTROL_SERVICE, Leadership
from moonpool.protocol.known_heads import KnownHeads
from moonpool.protocol.messages import InstanceInfo, Report
from moonpool.protocol.versions import (
    BLOCK_FORMATS,
    NEWEST_PROTOCOL,
    OWN,
    STATED_BYTES,
    VersionRange,
    Versions,
)
from moonpool.types import InstanceId, Struct

if TYPE_CHECKING:
    from tests.sim.clock import Link
    from tests.sim.member import Member

SECRET = b"of the swarm"
BEFORE = NEWEST_PROTOCOL - 1
RELEASE_BEFORE = Versions(VersionRange(BEFORE, BEFORE), BLOCK_FORMATS)


class JoinedBefore(Struct, frozen=True, tag="Joined"):
    """`Joined` in the form of the earlier release."""

    info: InstanceInfo


_UP = msgspec.msgpack.Decoder(frames.UpFrame)
_DOWN = msgspec.msgpack.Decoder(frames.DownFrame)
_UP_BEFORE = msgspec.msgpack.Decoder(JoinedBefore | Report)  # type: ignore[arg-type]
_DOWN_BEFORE = msgspec.msgpack.Decoder(frames.WorkFrame | frames.Stop | frames.TurnedAway)


class _Transport:
    """Collects what one end writes."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def take(self) -> bytes:
        data, self.written = b"".join(self.written), []
        return data

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        raise AssertionError("a connection ends during its handshake")

    def abort(self) -> None:
        raise AssertionError("a connection ends for a frame that its peer does not know")


class _End:
    """The channel of one end, and the function that handles a frame there."""

    def __init__(self, handshake: Any, decoder: Any, on_frame: Any) -> None:
        self.channel: Channel[Any, Any] = Channel(handshake, decoder, self)
        self.transport = _Transport()
        self.on_frame = on_frame
        self.channel.begin(self.transport)  # type: ignore[arg-type]

    def on_connected(self) -> None:
        assert self.channel.protocol == 0

    def on_open(self, peer: Identity) -> None:
        assert self.channel.protocol > 0, peer

    def on_closed(self, reason: str) -> None:
        raise AssertionError(reason)

    def encoded(self, frame: Any) -> bytes:
        """Returns the frame in its form on the wire."""
        self.channel.send(frame)
        return self.transport.take()


class ControlWire:
    """One connection after its handshake."""

    def __init__(self, member: Member, up: Link, down: Link, old_head: bool, old: bool) -> None:
        self._member, self._up, self._down = member, up, down
        self.heads = KnownHeads()
        self.heads.begin("head", 1)
        ours = _handshake(ServerHandshake, "head", old_head)
        theirs = _handshake(ClientHandshake, member.instance_id, old)
        self.head = _End(ours, _UP_BEFORE if old_head else _UP, self._on_up)
        self.worker = _End(theirs, _DOWN_BEFORE if old else _DOWN, self._on_down)
        while self.worker.transport.written or self.head.transport.written:
            self.head.channel.data_received(self.worker.transport.take())
            self.worker.channel.data_received(self.head.transport.take())
        spoken = {self.head.channel.protocol, self.worker.channel.protocol}
        assert len(spoken) == 1, f"the ends speak different versions: {spoken}"
        assert spoken == {BEFORE if old or old_head else NEWEST_PROTOCOL}
        member.world.seen[f"protocol {'before' if old or old_head else 'newest'}"] += 1
        self._old_head, self._old = old_head, old

    def join(self, info: InstanceInfo) -> None:
        """Joins like `InstanceProcess`, or like its earlier release."""
        if self._old:
            self.report(JoinedBefore(info=info))
            return
        process = SimpleNamespace(_link=self, _report_leaving=lambda: None)
        joined = frames.Joined(info=info)
        InstanceProcess._join_over(process, self.channel, joined)  # type: ignore[arg-type]

    channel = property(lambda self: self.worker.channel)
    stopping = False

    def send(self, frame: Any) -> None:
        self.report(frame)

    def report(self, frame: Any) -> None:
        data = self.worker.encoded(frame)
        self._up.carry(lambda: self.head.channel.data_received(data))

    def command(self, frame: Any) -> None:
        data = self.head.encoded(frame)
        self._down.carry(lambda: self.worker.channel.data_received(data))

    def lead(self) -> None:
        """Sends the epoch of a new head to its worker, as each new head does."""
        if not self._old_head:
            link = SimpleNamespace(channel=SimpleNamespace(protocol=self.head.channel.protocol))
            link.channel.send = self.command
            StandbyLinks().announce_to(link)  # type: ignore[arg-type]

    def _on_up(self, frame: Any) -> None:
        world = self._member.world
        if isinstance(frame, JoinedBefore | frames.Joined):
            world.on_joined(self._member, frame.info, self._down)
            self.lead()
        else:
            world.on_report(self._member, frame)

    def _on_down(self, frame: Any) -> None:
        if isinstance(frame, Leadership):
            assert self.heads.accept_leader(frame)
            self._member.world.seen["leaders heard"] += 1
        else:
            self._member.post(frame)


def _handshake(kind: Any, name: str, old: bool) -> Any:
    me = Identity(instance_id=InstanceId(name), service=CONTROL_SERVICE, fingerprint=b"")
    if not old:
        return kind(SECRET, me, OWN)
    with patch.object(auth, "state_versions", lambda _: secrets.token_bytes(STATED_BYTES)):
        return kind(SECRET, me, RELEASE_BEFORE)  # the nonce does not matter here

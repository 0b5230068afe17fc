"""The head's end of one worker's control connection: its identity and its last message."""

from __future__ import annotations

import logging
from typing import Protocol

import msgspec

from moonpool.link.auth import Identity, ServerHandshake
from moonpool.link.channel import Channel
from moonpool.protocol.frames import (
    CONTROL_SERVICE,
    Apply,
    ApplyAttention,
    ApplyStandby,
    AttentionReady,
    DownFrame,
    Failed,
    Joined,
    Setup,
    TurnedAway,
    UpFrame,
)
from moonpool.protocol.messages import Report
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.types import InstanceId

log = logging.getLogger("moonpool.head")


class LinkOwner(Protocol):
    """The head as its links see it."""

    def on_apply(self, link: WorkerLink, apply: Apply) -> None:
        """Sends the Setup, at once or when the instance's attention workers are present."""
        ...

    def setup(self) -> Setup: ...

    def on_standby(self, link: WorkerLink, apply: ApplyStandby) -> None: ...

    def on_attention(self, link: WorkerLink, address: PeerAddress) -> None:
        """Handles that an attention worker is ready."""
        ...

    def admit(self, link: WorkerLink, joined: Joined) -> str | None:
        """Admits the instance, or returns why it cannot join."""
        ...

    def on_start_failed(self, link: WorkerLink, message: str) -> None: ...

    def on_report(self, link: WorkerLink, report: Report) -> None: ...

    def on_lost(self, link: WorkerLink, reason: str) -> None:
        """Called when a link ends, even if its worker never joined."""
        ...

    def on_connected(self, link: WorkerLink) -> None: ...

    def on_proved(self, link: WorkerLink) -> None:
        """Called when the peer has proved that it knows the secret."""
        ...

    def listened_s(self) -> float:
        """Returns how long the head has listened."""
        ...


class WorkerLink:
    """A link is created for each connection; `channel` is its asyncio protocol."""

    def __init__(self, owner: LinkOwner, secret: bytes) -> None:
        me = Identity(instance_id=InstanceId("head"), service=CONTROL_SERVICE, fingerprint=b"")
        self._owner = owner
        self._reason = ""
        self.has_failed = False  # whether the worker could not start, or its model was rejected
        self.instance_id = InstanceId("")
        self.pid, self.host = 0, ""  # set for an attention worker; `info` has them for an instance
        self.is_ordered = False  # whether the worker was told to end
        self.release = ""  # release of an instance's worker, or "" if unknown
        # time of the last message, on the head's clock of listening
        self.heard_s = owner.listened_s()
        self.channel: Channel[UpFrame, DownFrame] = Channel(
            ServerHandshake(secret, me), msgspec.msgpack.Decoder(UpFrame), self
        )

    def on_connected(self) -> None:
        self._owner.on_connected(self)

    def on_open(self, peer: Identity) -> None:
        self.instance_id = peer.instance_id
        self._owner.on_proved(self)

    def on_frame(self, frame: UpFrame) -> None:
        self.heard_s = self._owner.listened_s()
        match frame:
            case Apply():
                self._owner.on_apply(self, frame)
            case ApplyAttention():
                self.pid, self.host = frame.pid, frame.host
                self.channel.send(self._owner.setup())
            case ApplyStandby():
                self._owner.on_standby(self, frame)
            case AttentionReady():
                self._owner.on_attention(self, frame.address)
            case Joined():
                self.release = frame.release
                unwanted = self._owner.admit(self, frame)
                if unwanted is not None:
                    self.channel.send(TurnedAway(message=unwanted))
                    self.channel.close(f"rejected: {unwanted}")
            case Failed():
                self._reason = frame.message
                self._owner.on_start_failed(self, frame.message)
            case _:
                self._owner.on_report(self, frame)

    def on_closed(self, reason: str) -> None:
        self._owner.on_lost(self, self._reason or reason)

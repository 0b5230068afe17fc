"""The link between the head and an instance of its own process: frames are passed on as they are.

Commands arrive at once. Reports arrive in the next turn of the loop, so that no report arrives
while the head still performs the actions to which the command belongs.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable

import msgspec

from moonpool.head.worker_link import LinkOwner, WorkerLink
from moonpool.link.auth import ClientHandshake, Identity, ServerHandshake
from moonpool.link.channel import Channel
from moonpool.link.head_link import Follower, HeadLink
from moonpool.protocol.frames import CONTROL_SERVICE, DownFrame, Leadership, UpFrame
from moonpool.protocol.versions import NEWEST_PROTOCOL
from moonpool.types import InstanceId

AGAIN_S = 1.0
"""Time from the end of a link that the head has cut to the next one."""


class _LocalChannel(Channel[UpFrame, DownFrame]):
    """The head's end of the local connection."""

    def __init__(
        self, link: WorkerLink, take: Callable[[DownFrame], None], end: Callable[[str], None]
    ) -> None:
        handshake = ServerHandshake(secrets.token_bytes(32), _identity(InstanceId("head")))
        super().__init__(handshake, msgspec.msgpack.Decoder(UpFrame), link)
        self.protocol = NEWEST_PROTOCOL
        self._pass_on = take
        self._end = end

    def send(self, *frames: DownFrame) -> None:
        for frame in frames:
            self._pass_on(frame)

    def close(self, reason: str = "closed on this side") -> None:
        self._end(reason)

    def abort(self, reason: str) -> None:
        self._end(reason)


class LocalLink(HeadLink):
    """A `HeadLink` to a head in the same process."""

    def __init__(self, name: InstanceId, follower: Follower, owner: LinkOwner) -> None:
        super().__init__(name, secrets.token_bytes(32), follower)
        self._owner = owner
        self._up: deque[UpFrame] = deque()
        self._head_end: WorkerLink | None = None

    @property
    def protocol(self) -> int:
        return NEWEST_PROTOCOL if self.channel is not None else 0

    def send(self, *frames: UpFrame) -> None:
        if self.channel is None:
            return
        if not self._up:
            self._loop.call_soon(self._flush)
        self._up.extend(frames)

    async def run(self, head_host: str = "", head_port: int = 0) -> None:
        """Serves until `stop` or the head ends it. Raises WorkerError."""
        while True:
            await self._serve()
            if self._is_over():
                return
            self._follower.on_lost()
            if self._is_over():
                return
            await asyncio.sleep(AGAIN_S)

    async def _serve(self) -> None:
        self._closed = self._loop.create_future()
        handshake = ClientHandshake(secrets.token_bytes(32), _identity(self._name))
        self.channel = Channel(handshake, msgspec.msgpack.Decoder(DownFrame), self)
        head_end = self._head_end = WorkerLink(self._owner, secrets.token_bytes(32))
        head_end.channel = _LocalChannel(head_end, self._on_down, self.on_closed)
        head_end.on_connected()
        head_end.on_open(_identity(self._name))
        self._follower.on_head()
        reason = "the instance ends"
        try:
            reason = await self._closed
        finally:
            self._flush()
            self.channel, self._head_end = None, None
            head_end.on_closed(reason)

    def _on_down(self, frame: DownFrame) -> None:
        # there is only one head, so Leadership is not needed
        if self.channel is not None and not isinstance(frame, Leadership):
            self.on_frame(frame)

    def _flush(self) -> None:
        while self._up and self._head_end is not None:
            self._head_end.on_frame(self._up.popleft())
        self._up.clear()

    def _hang_up(self, reason: str) -> None:
        self.on_closed(reason)


def _identity(name: InstanceId) -> Identity:
    return Identity(instance_id=name, service=CONTROL_SERVICE, fingerprint=b"")

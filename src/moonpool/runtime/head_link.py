"""A worker's end of its control connection: seeks the head, and seeks it again when it is lost.

Owns the connection, and why the worker ends: it is told to stop, it cannot go on, or the head stays
away. Never looks into frames, but for the two that end it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

import msgspec

from moonpool.messenger.auth import ClientHandshake, Identity
from moonpool.runtime.channel import Channel
from moonpool.runtime.protocol import (
    CONTROL_SERVICE,
    DownFrame,
    Stop,
    TurnedAway,
    UpFrame,
    WorkFrame,
)
from moonpool.types import InstanceId

log = logging.getLogger("moonpool.worker")

RECONNECT_S = 60.0
"""How long a worker seeks a lost head before it ends itself."""
RETRY_S = 1.0

HeadChannel = Channel[DownFrame, UpFrame]


class WorkerError(Exception):
    """The worker cannot go on; one line for the person who started it."""


class HungError(WorkerError):
    """The same, with a thread that does not come back: nobody may wait for it at exit."""


class Follower(Protocol):
    """The worker behind a link. Called on the event loop."""

    def on_head(self) -> None:
        """There is a connection: time to apply."""
        ...

    def on_frame(self, frame: WorkFrame) -> None: ...

    def on_lost(self) -> None:
        """The connection ended, or none came about; another try follows."""
        ...


class HeadLink:
    """`run` lasts as long as the worker does; `channel` is None while there is no connection."""

    def __init__(self, name: InstanceId, secret: bytes, follower: Follower) -> None:
        self.channel: HeadChannel | None = None
        self.stopping = False
        self.fatal = ""
        self._name = name
        self._secret = secret
        self._follower = follower
        self._loop = asyncio.get_running_loop()
        self._closed: asyncio.Future[str] = self._loop.create_future()

    @property
    def local_host(self) -> str:
        """This machine's address, as the head sees it."""
        assert self.channel is not None
        return self.channel.local_host

    def send(self, *frames: UpFrame) -> None:
        """Does nothing while there is no connection."""
        if self.channel is not None:
            self.channel.send(*frames)

    def stop(self, reason: str) -> None:
        """Lets `run` return, once everything is sent."""
        self.stopping = True
        self._hang_up(reason)

    def fail(self, message: str, reason: str) -> None:
        """Lets `run` raise WorkerError(`message`); the head's log says `reason`."""
        self.fatal = message
        self._hang_up(reason)

    async def run(self, head_host: str, head_port: int, reconnect: bool) -> None:
        """Raises WorkerError."""
        where = f"{head_host}:{head_port}"
        heard_s = time.monotonic()
        while True:
            was_there, reason = await self._serve_once(head_host, head_port)
            if self._is_over():
                return
            self._follower.on_lost()
            if self._is_over():
                return
            now_s = time.monotonic()
            heard_s = now_s if was_there else heard_s
            if not reconnect or now_s - heard_s > RECONNECT_S:
                raise WorkerError(f"the head at {where} is gone: {reason}")
            log.warning("no connection to the head at %s: %s", where, reason)
            await asyncio.sleep(RETRY_S)
            if self._is_over():
                return

    def _is_over(self) -> bool:
        if self.fatal and not self.stopping:
            raise WorkerError(self.fatal)
        return self.stopping

    async def _serve_once(self, head_host: str, head_port: int) -> tuple[bool, str]:
        """One connection from begin to end: whether the head was there, and why it ended."""
        me = Identity(instance_id=self._name, service=CONTROL_SERVICE, fingerprint=b"")
        handshake = ClientHandshake(self._secret, me)
        self._closed = self._loop.create_future()
        channel: HeadChannel = Channel(handshake, msgspec.msgpack.Decoder(DownFrame), self)
        self.channel = channel
        try:
            await self._loop.create_connection(lambda: channel, head_host, head_port)
            return True, await self._closed
        except OSError as error:
            return False, str(error)
        finally:
            channel.close()
            self.channel = None

    def _hang_up(self, reason: str) -> None:
        if self.channel is not None:
            self.channel.close(reason)

    # Listener of the channel

    def on_open(self, peer: Identity) -> None:
        self._follower.on_head()

    def on_frame(self, frame: DownFrame) -> None:
        match frame:
            case Stop():
                self.stop("the head stops")
            case TurnedAway():
                self.fail(f"the head turned {self._name} away: {frame.message}", "turned away")
            case _:
                self._follower.on_frame(frame)

    def on_closed(self, reason: str) -> None:
        if self.channel is not None and self.channel.refused:
            self.fatal = f"the head and this worker do not agree: {reason}"
        if not self._closed.done():
            self._closed.set_result(reason)

"""One attention worker's process: tells the head where it listens; the rest is between it and the
instance that owns it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time

import msgspec

from moonpool.attention.keeper import Keeper
from moonpool.attention.service import AttentionService
from moonpool.engine.split_choice import choose_split_ops
from moonpool.kvcache.layout import BlockLayout
from moonpool.messenger.arena import Arena
from moonpool.messenger.auth import ClientHandshake, Identity
from moonpool.runtime.channel import Channel
from moonpool.runtime.instance_boot import pool_blocks
from moonpool.runtime.protocol import (
    CONTROL_SERVICE,
    ApplyAttention,
    AttentionReady,
    DownFrame,
    Setup,
    Stop,
    TurnedAway,
    UpFrame,
)
from moonpool.runtime.worker import RECONNECT_S, WorkerError
from moonpool.types import InstanceId

log = logging.getLogger("moonpool.worker")


class AttentionWorker:
    """Serves until the head says stop. A head that is gone for a while changes nothing."""

    def __init__(
        self, name: InstanceId, machine: str, listen_host: str | None, secret: bytes
    ) -> None:
        self._name = name
        self._machine = machine
        self._listen_host = listen_host
        self._secret = secret
        self._loop = asyncio.get_running_loop()
        self._closed: asyncio.Future[str] = self._loop.create_future()
        self._channel: Channel[DownFrame, UpFrame] | None = None
        self._service: AttentionService | None = None
        self._ready: AttentionReady | None = None
        self._heard_s = 0.0
        self._stopping = False
        self._fatal = ""

    async def run(self, head_host: str, head_port: int, reconnect: bool) -> None:
        """Raises WorkerError."""
        self._heard_s = time.monotonic()
        try:
            while not self._stopping:
                reason = await self._serve_once(head_host, head_port)
                if self._stopping:
                    return
                late = time.monotonic() - self._heard_s > RECONNECT_S
                if self._fatal or not reconnect or late:
                    text = f"the head at {head_host}:{head_port} is gone: {reason}"
                    raise WorkerError(self._fatal or text)
                await asyncio.sleep(1.0)
        finally:
            if self._service is not None:
                await asyncio.to_thread(self._service.close)

    async def _serve_once(self, head_host: str, head_port: int) -> str:
        me = Identity(instance_id=self._name, service=CONTROL_SERVICE, fingerprint=b"")
        self._closed = self._loop.create_future()
        channel: Channel[DownFrame, UpFrame] = Channel(
            ClientHandshake(self._secret, me), msgspec.msgpack.Decoder(DownFrame), self
        )
        self._channel = channel
        try:
            await self._loop.create_connection(lambda: channel, head_host, head_port)
            reason = await self._closed
            self._heard_s = time.monotonic()
            return reason
        except OSError as error:
            return str(error)
        finally:
            channel.close()
            self._channel = None

    # Listener of the channel

    def on_open(self, peer: Identity) -> None:
        assert self._channel is not None
        if self._listen_host is None:
            self._listen_host = self._channel.local_host
        self._channel.send(ApplyAttention(host=self._machine, pid=os.getpid()))

    def on_frame(self, frame: DownFrame) -> None:
        match frame:
            case Setup():
                self._begin(frame)
            case Stop():
                self._stopping = True
                self._hang_up("the head stops")
            case TurnedAway():
                self._fatal = f"the head turned this attention worker away: {frame.message}"
                self._hang_up("turned away")
            case _:
                log.warning("the head sent what is not for an attention worker")

    def on_closed(self, reason: str) -> None:
        if self._channel is not None and self._channel.refused:
            self._fatal = f"the head and this worker do not agree: {reason}"
        if not self._closed.done():
            self._closed.set_result(reason)

    def _hang_up(self, reason: str) -> None:
        if self._channel is not None:
            self._channel.close(reason)

    def _begin(self, setup: Setup) -> None:
        """Listens on the first setup; takes milliseconds, since an owner brings what is large."""
        if self._service is None:
            assert self._listen_host is not None

            def make_arena(layout: BlockLayout, num_blocks: int) -> Arena:
                return Arena(layout, num_blocks or pool_blocks(setup, layout))

            use_shm = setup.network.use_shared_memory
            keeper = Keeper(
                self._name, self._secret, choose_split_ops(), make_arena, self._listen_host, use_shm
            )
            self._service = AttentionService(
                self._name, self._secret, keeper, self._listen_host, use_shm
            )
            try:
                address = self._service.start()
            except OSError as error:
                self._fatal = f"cannot listen for model workers: {error}"
                self._hang_up("it cannot start")
                return
            self._ready = AttentionReady(address=address)
        if self._channel is not None and self._ready is not None:
            self._channel.send(self._ready)

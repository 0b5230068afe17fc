"""One attention worker's process: tells the head where it listens; the rest is between it and the
instance that owns it.
"""

from __future__ import annotations

import asyncio
import logging
import os

from moonpool.attention.keeper import Keeper
from moonpool.attention.service import AttentionService
from moonpool.engine.split_choice import choose_split_ops
from moonpool.kvcache.layout import BlockLayout
from moonpool.messenger.arena import Arena
from moonpool.messenger.cut import Cut
from moonpool.runtime.head_link import HeadLink
from moonpool.runtime.instance_boot import pool_blocks
from moonpool.runtime.protocol import ApplyAttention, AttentionReady, Setup, WorkFrame
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
        self._link = HeadLink(name, secret, self)
        self._service: AttentionService | None = None
        self._ready: AttentionReady | None = None

    async def run(self, head_host: str, head_port: int, reconnect: bool) -> None:
        """Raises WorkerError."""
        try:
            await self._link.run(head_host, head_port, reconnect)
        finally:
            if self._service is not None:
                await asyncio.to_thread(self._service.close)

    # Follower of the link

    def on_head(self) -> None:
        if self._listen_host is None:
            self._listen_host = self._link.local_host
        self._link.send(ApplyAttention(host=self._machine, pid=os.getpid()))

    def on_frame(self, frame: WorkFrame) -> None:
        if isinstance(frame, Setup):
            self._begin(frame)
        else:
            log.warning("the head sent what is not for an attention worker")

    def on_lost(self) -> None:
        """Its owner goes on without the head."""

    def _begin(self, setup: Setup) -> None:
        """Listens on the first setup; takes milliseconds, since an owner brings what is large."""
        if self._service is None:
            assert self._listen_host is not None

            def make_arena(layout: BlockLayout, num_blocks: int, cut: Cut | None) -> Arena:
                return Arena(layout, num_blocks or pool_blocks(setup, layout), cut=cut)

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
                message = f"cannot listen for model workers: {error}"
                self._link.fail(message, "it cannot start")
                return
            self._ready = AttentionReady(address=address)
        if self._ready is not None:
            self._link.send(self._ready)

"""The process of one attention worker.

The process reports its address to the head; all other messages go between the process and the
instance that owns it.
"""

from __future__ import annotations

import asyncio
import logging
import os

from moonpool.link.head_link import HeadLink
from moonpool.link.tls import PeerTls
from moonpool.plugins.workers import WorkerSettings
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.frames import ApplyAttention, AttentionReady, Setup, WorkFrame
from moonpool.types import InstanceId
from moonpool_engine.attention_offload.service import AttentionService
from moonpool_engine.attention_offload.worker_state import AttentionWorkerState
from moonpool_engine.engine.runner import choose_split_ops
from moonpool_engine.transfer.arena import Arena
from moonpool_engine.transfer.reshard import ShardView
from moonpool_engine.worker.engine_boot import pool_blocks

log = logging.getLogger("moonpool.worker")


class AttentionWorker:
    """Serves until the head stops it. An attention worker continues to serve while the head is
    unreachable."""

    def __init__(
        self,
        name: InstanceId,
        machine: str,
        listen_host: str | None,
        secret: bytes,
        tls: PeerTls | None = None,
    ) -> None:
        self._name = name
        self._machine = machine
        self._listen_host = listen_host
        self._secret = secret
        self._tls = tls
        self._link = HeadLink(name, secret, self, tls)
        self._service: AttentionService | None = None
        self._ready: AttentionReady | None = None

    async def run(self, head_host: str, head_port: int) -> None:
        """Serves until stopped. Raises WorkerError."""
        try:
            await self._link.run(head_host, head_port)
        finally:
            if self._service is not None:
                await asyncio.to_thread(self._service.close)

    def not_ready(self) -> str:
        """Returns "", or why it keeps no KVCache yet."""
        return self._link.not_open() or ("" if self._ready else "the worker is starting")

    # Callbacks of the head link

    def on_head(self) -> None:
        if self._listen_host is None:
            self._listen_host = self._link.local_host
        self._link.send(ApplyAttention(host=self._machine, pid=os.getpid()))

    def on_frame(self, frame: WorkFrame) -> None:
        if isinstance(frame, Setup):
            self._begin(frame)
        else:
            log.warning(
                "ignored a frame of the head that is not for attention workers: %s", type(frame)
            )

    def on_lost(self) -> None:
        """Does nothing: its owner continues without the head."""

    def _begin(self, setup: Setup) -> None:
        """Listens for connections when the first setup arrives. Takes milliseconds: the arena is
        made when an owner attaches."""
        if self._service is None:
            assert self._listen_host is not None

            def make_arena(layout: BlockLayout, num_blocks: int, view: ShardView | None) -> Arena:
                return Arena(layout, num_blocks or pool_blocks(setup, layout), shard_view=view)

            use_shm = setup.network.use_shared_memory
            where = self._listen_host, use_shm, self._tls
            state = AttentionWorkerState(
                self._name, self._secret, choose_split_ops(), make_arena, *where
            )
            self._service = AttentionService(self._name, self._secret, state, *where)
            try:
                address = self._service.start()
            except OSError as error:
                message = f"cannot listen for model workers: {error}"
                self._link.fail(message, "it cannot start")
                return
            self._ready = AttentionReady(address=address)
        if self._ready is not None:
            self._link.send(self._ready)


def make_worker(settings: WorkerSettings) -> AttentionWorker:
    """Makes a worker of the kind "attention" (`moonpool.plugins.workers`)."""
    return AttentionWorker(
        settings.name, settings.machine, settings.host, settings.secret, settings.tls
    )

"""The models of a pool: opens their spaces, and makes room for another model."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moonpool.host_pool.messages import AttachRank
from moonpool.host_pool.pool_group import BlockGroup
from moonpool.link.tls import PeerTls
from moonpool.protocol.transfer_events import MessengerEvent
from moonpool_engine.host_pool.pooled_model import PooledModel
from moonpool_engine.host_pool.space_host import SpaceError, SpaceHost, SpacePlace, open_space

log = logging.getLogger("moonpool.pool")


@dataclass(frozen=True, slots=True)
class HostPoolPlace:
    """The resources that the pool may use. Bytes are of all models together; each of `num_models`
    gets an equal part, its ranks equal parts of that. `ssd_folder` is None if no SSD is used."""

    socket_path: Path
    memory_folder: Path
    dram_bytes: int
    ssd_folder: Path | None
    ssd_bytes: int
    num_models: int
    listen_host: str
    secret: bytes
    tls: PeerTls | None = None


class PooledModels:
    """Models whose blocks are in DRAM, by their key. One event loop uses `PooledModels`."""

    def __init__(self, place: HostPoolPlace, on_change: Callable[[PooledModel], None]) -> None:
        """`on_change`: called when a model's space has been opened, or has handled an event."""
        self.by_key: dict[bytes, PooledModel] = {}
        self._place = place
        self._on_change = on_change
        self._num_uses = 0
        self._opening = asyncio.Lock()

    async def close(self) -> None:
        for group in self.by_key.values():
            for host in group.hosts.values():
                await asyncio.to_thread(host.close)

    def use(self, group: PooledModel) -> None:
        """Notes a use of the model. The model that is unused for longest is replaced by a new
        one."""
        self._num_uses += 1
        group.used = self._num_uses

    async def attach(self, message: AttachRank) -> tuple[PooledModel, SpaceHost]:
        """Attaches a rank of a server. Returns its model, and the open space. Raises SpaceError."""
        async with self._opening:
            group = self.by_key.get(message.group) or await self._make_group(message)
            group.num_attaching += 1
        try:
            return group, await self._attach(group, message)
        finally:
            group.num_attaching -= 1

    async def _attach(self, group: PooledModel, message: AttachRank) -> SpaceHost:
        """Raises SpaceError."""
        if group.state.num_ranks != message.num_ranks or message.rank >= message.num_ranks:
            raise SpaceError("other processes of this model state another number of ranks")
        self.use(group)
        async with group.lock:
            host = group.hosts.get(message.rank)
            if host is None:
                host = await self._open(group, message)
                group.hosts[message.rank] = host
                group.state.spaces[message.rank] = host.space
                if message.window_blocks:
                    group.state.windows[message.rank] = message.window_blocks
                self._on_change(group)
        window = group.state.windows.get(message.rank, 0)
        if host.layout != message.layout or window != message.window_blocks:
            raise SpaceError("another process of this model and rank lays its blocks out otherwise")
        return host

    async def _make_group(self, message: AttachRank) -> PooledModel:
        name = message.group.hex()[:24]
        await self._make_room(name)
        state = BlockGroup(message.num_ranks)
        group = PooledModel(name, message.model, message.block_tokens, state)
        self.by_key[message.group] = group
        return group

    async def _make_room(self, name: str) -> None:
        """Makes room for another model by deleting the memory of models that nobody uses. Raises
        SpaceError."""
        root = self._place.memory_folder
        open_names = {group.name for group in self.by_key.values()}
        found = [path for path in root.glob("*-r*") if path.is_dir()] if root.is_dir() else []
        closed = sorted(
            {path.name.rpartition("-r")[0] for path in found} - open_names - {name},
            key=lambda one: max(p.stat().st_mtime for p in root.glob(f"{one}-r*")),
        )
        while closed and len(open_names) + len(closed) >= self._place.num_models:
            for path in root.glob(f"{closed.pop(0)}-r*"):
                shutil.rmtree(path, ignore_errors=True)
        while len(self.by_key) >= self._place.num_models:
            idle = [one for one in self.by_key.items() if one[1].is_idle]
            if not idle:
                raise SpaceError(
                    f"the pool serves {self._place.num_models} models already: start it with a"
                    " larger --models"
                )
            key, group = min(idle, key=lambda one: one[1].used)
            log.info("the blocks of %s leave DRAM for another model", group.model)
            del self.by_key[key]
            group.is_closed = True
            for host in group.hosts.values():
                await asyncio.to_thread(host.close)
            for path in root.glob(f"{group.name}-r*"):
                shutil.rmtree(path, ignore_errors=True)

    async def _open(self, group: PooledModel, message: AttachRank) -> SpaceHost:
        place, loop = self._place, asyncio.get_running_loop()
        parts = place.num_models * message.num_ranks
        name = f"{group.name}-r{message.rank}"
        own = SpacePlace(
            name=name,
            memory_folder=place.memory_folder,
            dram_bytes=place.dram_bytes // parts,
            ssd_folder=place.ssd_folder,
            ssd_bytes=place.ssd_bytes // parts,
            listen_host=place.listen_host,
            secret=place.secret,
            tls=place.tls,
        )
        rank = message.rank

        def post(event: MessengerEvent) -> None:
            loop.call_soon_threadsafe(self._on_event, group, rank, event)

        log.info("opening the space of %s, rank %d", message.model, rank)
        return await asyncio.to_thread(open_space, message.layout, own, post)

    def _on_event(self, group: PooledModel, rank: int, event: MessengerEvent) -> None:
        host = group.hosts.get(rank)
        if host is not None and not group.is_closed:
            host.space.handle(event)
            self._on_change(group)

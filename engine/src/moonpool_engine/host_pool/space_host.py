"""One rank's space with its memory, its SSD folder and its connections to other hosts' pools.

The memory is a file in a tmpfs (`storage.kept_memory`). Clients map it. The memory outlives its
users and the pool: the next pool finds all blocks whose checksums are still right.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from moonpool.host_pool.block_space import BlocksFetched, BlocksFound, BlockSpace, SpaceAction
from moonpool.host_pool.messages import RankBlocks, SpaceState
from moonpool.link.tls import PeerTls
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.messages import BlocksChanged
from moonpool.protocol.transfer_events import MessengerEvent, PeerAddress
from moonpool.scheduler.actions import FetchBlocks
from moonpool.types import BlockId, BlockKey, InstanceId
from moonpool_engine.engine.native.slices import open_slices
from moonpool_engine.storage.block_ledger import BlockLedger
from moonpool_engine.storage.folder import StoreError
from moonpool_engine.storage.format import SEGMENT_BYTES, make_geometry
from moonpool_engine.storage.kept_memory import open_in_folder
from moonpool_engine.storage.store import BlockStore, open_store
from moonpool_engine.transfer.arena import Arena, ArenaError
from moonpool_engine.transfer.local_peer import LocalPeer
from moonpool_engine.transfer.messenger import Messenger
from moonpool_engine.transfer.slice_copier import fastest_copier
from moonpool_engine.worker.transfers import storage_by, transfers_by

log = logging.getLogger("moonpool.pool")

LEAST_BLOCKS = 8
FLAGS = {
    "pool.ssd_tokens_per_instance": "--ssd",
    "pool.dram_tokens_per_instance": "--dram",
    "pool.ssd_folder": "--folder",
    "pool.keep_memory": "--memory-folder",
}
"""Maps settings of workers to the flags of `moonpool pool serve` with the same meaning."""
MIN_SEGMENT_SLOTS = 4


class SpaceError(Exception):
    """A space cannot be opened; one line says why."""


@dataclass(frozen=True, slots=True)
class SpacePlace:
    """The memory, the disk and the port of a space. `ssd_folder` is None if no SSD is used."""

    name: str
    memory_folder: Path
    dram_bytes: int
    ssd_folder: Path | None
    ssd_bytes: int
    listen_host: str
    secret: bytes
    tls: PeerTls | None = None


class SpaceHost:
    """An open space. All methods are for the event loop's thread; `post` is called from other
    threads."""

    def __init__(
        self,
        layout: BlockLayout,
        arena: Arena,
        ledger: BlockLedger,
        store: BlockStore | None,
        store_error: str,
        messenger: Messenger,
        space: BlockSpace,
        path: str,
    ) -> None:
        self.layout = layout
        self.space = space
        self.path = path
        self._arena = arena
        self._ledger = ledger
        self._store = store
        self._store_error = store_error
        self._messenger = messenger
        self._performers = {**transfers_by(messenger, layout.num_layers)}
        if store is not None:
            self._performers |= storage_by(store)
        self.address: PeerAddress = messenger.start()

    @property
    def num_blocks(self) -> int:
        return self._arena.num_blocks

    def perform(self) -> tuple[list[BlocksFound | BlocksFetched], BlocksChanged | None]:
        """Performs what the space requests. Returns what its clients wait for, and what has
        changed. Must be called after each change, before a client hears of it."""
        actions, changes = self.space.take()
        # A record ends before anything can overwrite its block.
        self._ledger.note(self.space.pool.take_rekeyed(), at_once=True)
        ended: list[BlocksFound | BlocksFetched] = []
        for action in actions:
            self._perform(action, ended)
        return ended, changes

    def _perform(self, action: SpaceAction, ended: list[BlocksFound | BlocksFetched]) -> None:
        match action:
            case BlocksFound() | BlocksFetched():
                ended.append(action)
            case _:
                if isinstance(action, FetchBlocks):
                    self._arena.checksums.forget(action.block_ids)
                if (performed_by := self._performers.get(type(action))) is not None:
                    performed_by(action)

    def reserve(
        self, number: int, keys: Sequence[BlockKey], first_depth: int
    ) -> list[BlockId | None]:
        """Reserves as `BlockSpace.reserve` does; the old checksums of these blocks are
        forgotten."""
        places = self.space.reserve(number, keys, first_depth)
        self._arena.checksums.forget(self.space.reserved(number))
        return places

    def commit(self, number: int, checksums: bytes) -> bool:
        """Takes the blocks of a reservation. Returns False, and ends the reservation, if there is
        not one checksum per slice. Without any checksums, only ends the reservation."""
        blocks = self.space.reserved(number)
        layers = self.layout.num_layers
        if len(checksums) != 8 * len(blocks) * layers:
            self.space.abandon(number)
            return not checksums
        if blocks:
            numbers = self._numbers(blocks)
            self._arena.checksums.set_many(numbers, np.frombuffer(checksums, "<u8"))
            self.space.commit(number)
        else:
            self.space.abandon(number)
        return True

    def places(self, block_ids: Sequence[BlockId]) -> RankBlocks:
        """Returns where a client finds these blocks, and their checksums."""
        found = self._arena.checksums.get_many(self._numbers(block_ids))
        ids = np.asarray(block_ids, "<i8").tobytes()
        return RankBlocks(block_ids=ids, checksums=found.astype("<u8").tobytes())

    def _numbers(self, block_ids: Sequence[BlockId]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        layers = np.arange(self.layout.num_layers, dtype=np.int64)
        starts = np.asarray(block_ids, np.int64) * self.layout.num_layers
        return np.asarray((starts[:, None] + layers).ravel())

    def state(self, rank: int) -> SpaceState:
        """Gauges and counters."""
        pool, tier = self.space.pool, self.space.kv_cache.tier_load()
        counters = dict(self.space.actions_out.counters)
        received = self._messenger.counts().received_bytes
        counters |= {f"{way}_received_bytes": float(count) for way, count in received.items()}
        rate = 0.0
        if self._store is not None:
            found = msgspec.structs.asdict(self._store.counts())
            counters |= {f"ssd_{name}": float(count) for name, count in found.items()}
            rate = self._store.read_bytes_per_s
        return SpaceState(
            rank=rank,
            num_blocks=pool.num_blocks,
            held=pool.num_held,
            cached=pool.num_cached,
            block_bytes=self.layout.block_bytes,
            address=self.address,
            ssd_blocks=0 if tier is None else tier.blocks,
            ssd_cached=0 if tier is None else tier.cached,
            ssd_error=self._store_error if tier is None else tier.error,
            ssd_read_bytes_per_s=rate,
            owners=pool.named_owners() if len(pool.owners()) <= 64 else {},
            counters=counters,
        )

    def close(self) -> None:
        """Ends all transfers and closes the files; the blocks stay."""
        self._messenger.close()
        if self._store is not None:
            self._store.close()
        self._ledger.close()
        self._arena.close()


def open_space(
    layout: BlockLayout, place: SpacePlace, post: Callable[[MessengerEvent], None]
) -> SpaceHost:
    """Opens a space with what earlier processes left in it; takes seconds. Raises SpaceError."""
    num_blocks = place.dram_bytes // layout.block_bytes
    if num_blocks < LEAST_BLOCKS:
        mib = layout.block_bytes * LEAST_BLOCKS / (1 << 20)
        raise SpaceError(
            f"its share of the pool's DRAM, {place.dram_bytes / (1 << 20):.0f} MiB, has no room for"
            f" {LEAST_BLOCKS} of its blocks ({mib:.0f} MiB): start the pool with a larger --dram"
        )
    try:
        memory = open_in_folder(place.memory_folder, place.name)
        path = memory.path
        try:
            fd, ledger_memory = memory.prepare(layout, num_blocks)
            arena = Arena(layout, num_blocks, sealed=False, kept_fd=fd)
        except BaseException:
            memory.close()
            raise
    except (StoreError, ArenaError) as error:
        raise SpaceError(_in_flags(error)) from None
    ledger = BlockLedger(arena, ledger_memory)
    kept = _recover(ledger, place.name, num_blocks)
    store, store_error = _open_store(layout, place, arena, post)
    messenger = Messenger(
        arena,
        layout,
        LocalPeer(InstanceId(place.name), place.secret, place.listen_host, place.tls),
        post,
        fastest_copier(arena, open_slices()),
    )
    space = BlockSpace(
        layout,
        num_blocks,
        0 if store is None else store.num_slots,
        () if store is None else store.stored,
        kept,
    )
    space.pool.watch_keys()
    return SpaceHost(layout, arena, ledger, store, store_error, messenger, space, path)


def _recover(ledger: BlockLedger, name: str, num_blocks: int) -> list[tuple[BlockId, BlockKey]]:
    if not ledger.names_any:
        return []
    began_s = time.monotonic()
    kept, num_damaged = ledger.recover()
    text = "%s: found %d of %d blocks in memory in %.2f s; %d more were overwritten or damaged"
    log.info(text, name, len(kept), num_blocks, time.monotonic() - began_s, num_damaged)
    return kept


def _open_store(
    layout: BlockLayout, place: SpacePlace, arena: Arena, post: Callable[[MessengerEvent], None]
) -> tuple[BlockStore | None, str]:
    """Returns the SSD tier, or None and why it is not used."""
    if place.ssd_folder is None:
        return None, ""
    slot_bytes = make_geometry(layout, SEGMENT_BYTES).slot_bytes
    num_slots = place.ssd_bytes // slot_bytes
    if num_slots < MIN_SEGMENT_SLOTS:
        return None, f"{place.ssd_bytes} bytes of SSD have no room for blocks of {slot_bytes}"
    began_s = time.monotonic()
    try:
        store = open_store(place.ssd_folder, place.name, arena, num_slots, post)
    except StoreError as error:
        said = _in_flags(error)
        log.warning("%s: the pool serves without its SSD: %s", place.name, said)
        return None, said
    text = "%s: SSD at %s: found %d of %d blocks in %.2f s"
    seconds = time.monotonic() - began_s
    log.info(text, place.name, store.describe(), len(store.stored), num_slots, seconds)
    return store, ""


def _in_flags(error: Exception) -> str:
    said = str(error)
    for setting, flag in FLAGS.items():
        said = said.replace(setting, flag)
    return said

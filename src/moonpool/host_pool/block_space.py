"""The blocks of one rank of one model in a host's pool; it is pure, like `scheduler.instance`.

DRAM, SSD, eviction and transfers are those of moonpool's own instances: the block pool, `Demotion`
and `Promotion`. The engine that computes is another program (vLLM), which stores what it computed
and loads what it misses. So a block here has these owners, in addition to those of `KVCacheManager`
(owner, purpose, what begins the hold, what ends it):

    find:<owner>       what a client may copy                  find       release
    store:<number>     where a client writes                   reserve    commit, or its end
    read:<id>          what the pool of another host copies    on_read_*  ReadEnded
    fetch:<id>         where a copy from another host arrives  fetch      FetchEnded
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from moonpool.kvcache.block_owner import BlockOwner, owners_of
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.messages import BlocksChanged, BlocksSnapshot
from moonpool.protocol.transfer_events import (
    FetchEnded,
    FetchProgress,
    LoadEnded,
    LoadProgress,
    LoadReturned,
    MessengerEvent,
    PeerAddress,
    ReadEnded,
    ReadRequested,
    StoreEnded,
    StoreLost,
    StoreReturned,
    TierPaused,
    TierResumed,
)
from moonpool.scheduler.actions import (
    ActionBuffer,
    FetchBlocks,
    ForgetStored,
    GrantRead,
    LoadBlocks,
    StoreBlocks,
)
from moonpool.scheduler.instance_config import InstanceConfig
from moonpool.scheduler.kv_cache_manager import KVCacheManager
from moonpool.scheduler.ssd_tiering import Demotion, Promotion
from moonpool.types import BlockId, BlockKey

STORE_SHARE = 4
"""At most this fraction (1 / STORE_SHARE) of the blocks is reserved for stores under way."""

AHEAD_SHARE = 4
"""At most this fraction (1 / AHEAD_SHARE) of the blocks waits until it is copied to the SSD. So
stored blocks are soon on the SSD, and their place in memory is free for blocks that are read: a
read that first has to write blocks to the SSD takes at least twice as long."""


class Finder(NamedTuple):
    """A client of the pool that looks for blocks, and the client's name for the search."""

    client: int
    name: str

    def __str__(self) -> str:
        return f"{self.client}/{self.name}"


@dataclass(frozen=True, slots=True)
class BlocksFound:
    """A find has ended: these blocks are held. `num_loaded` of the blocks came from the SSD."""

    owner: Finder
    block_ids: tuple[BlockId, ...]
    num_loaded: int


@dataclass(frozen=True, slots=True)
class BlocksFetched:
    """A fetch has ended: the first `num_blocks` of its keys are here."""

    fetch_id: str
    num_blocks: int
    num_bytes: int
    seconds: float
    error: str


SpaceAction = (
    StoreBlocks | LoadBlocks | ForgetStored | GrantRead | FetchBlocks | BlocksFound | BlocksFetched
)


@dataclass(slots=True)
class _Search:
    """A find or a peer's read, which may wait for loads. `tell` gets the blocks found, and how many
    of them were loaded for the search."""

    keys: Sequence[BlockKey]
    tell: Callable[[list[BlockId], int], None]
    load_ids: set[str] = field(default_factory=set)
    num_loaded: int = 0


@dataclass(frozen=True, slots=True)
class _Reservation:
    keys: tuple[BlockKey, ...]
    block_ids: tuple[BlockId, ...]
    depths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Fetch:
    keys: tuple[BlockKey, ...]
    block_ids: tuple[BlockId, ...]
    num_local: int
    first_depth: int


class BlockSpace:
    """The space of one rank: `num_blocks` in DRAM and `num_slots` on the SSD. Methods change it;
    `take` returns the actions of all since the last call."""

    def __init__(
        self,
        layout: BlockLayout,
        num_blocks: int,
        num_slots: int = 0,
        stored: Sequence[tuple[int, BlockKey]] = (),
        kept: Sequence[tuple[BlockId, BlockKey]] = (),
        eviction: str = "lru",
    ) -> None:
        """`stored` and `kept`: what earlier processes have left on the SSD and in DRAM, the least
        recently used first."""
        config = InstanceConfig(eviction=eviction, ssd_blocks=num_slots, ssd_write_ahead=True)
        self.layout = layout
        self.actions_out = ActionBuffer()
        self.kv_cache = KVCacheManager(config, layout, num_blocks)
        self.pool = self.kv_cache.pool
        self._promotion = Promotion(self.kv_cache, self.actions_out)
        ahead = num_blocks // AHEAD_SHARE if self.kv_cache.num_slots else 0
        self._demotion = Demotion(self.kv_cache, self.actions_out, ahead)
        self._searches: dict[BlockOwner, _Search] = {}
        self._reservations: dict[int, _Reservation] = {}
        self._reserved_keys: set[BlockKey] = set()
        self._fetches: dict[str, _Fetch] = {}
        self._found: list[BlocksFound | BlocksFetched] = []
        self._handlers: dict[type[MessengerEvent], Callable[[Any], None]] = {
            FetchProgress: _ignore,
            FetchEnded: self._on_fetch_ended,
            ReadRequested: self._on_read_requested,
            ReadEnded: self._on_read_ended,
            LoadProgress: _ignore,
            LoadEnded: self._on_load_ended,
            LoadReturned: self._promotion.on_returned,
            StoreEnded: self._demotion.on_ended,
            StoreReturned: self._demotion.on_returned,
            StoreLost: self._on_store_lost,
            TierPaused: self._on_tier_paused,
            TierResumed: self._on_tier_resumed,
        }
        if self.kv_cache.tier is not None:
            slots = self.kv_cache.tier.slots
            void = slots.adopt([(BlockId(slot), key) for slot, key in stored])
            if void:
                self.actions_out.perform(ForgetStored(tuple(int(slot) for slot in void)))
        if kept:
            self.pool.adopt(kept)

    def handle(self, event: MessengerEvent) -> None:
        """Handles the end of a transfer, or a read of another host's pool."""
        self._handlers[type(event)](event)

    def take(self) -> tuple[list[SpaceAction], BlocksChanged | None]:
        """Returns the actions to perform, in this order, and the changes of keys, or None without
        changes."""
        self._demotion.run()
        changes = self.kv_cache.take_changes()
        self._write_ahead(())
        actions: list[SpaceAction] = [*self.actions_out.take(), *self._found]  # type: ignore[list-item]
        self._found = []
        return actions, changes

    def _write_ahead(self, new: Sequence[BlockKey]) -> None:
        """Copies blocks to the SSD before they leave DRAM, while the disk has nothing else to
        do."""
        self._demotion.write_ahead(new, disk_reads=self._promotion.num_loads > 0)

    def snapshot(self) -> BlocksSnapshot:
        """Returns all keys, which include earlier changes."""
        return self.kv_cache.take_snapshot()

    # Finds

    def present(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each block is here, in DRAM or on the SSD."""
        return self._promotion.present(keys)

    def find(self, owner: Finder, keys: Sequence[BlockKey]) -> None:
        """Holds the longest prefix of `keys` that the space has, after loading blocks that are only
        on the SSD. Ends with `BlocksFound`."""

        def tell(blocks: list[BlockId], num_loaded: int) -> None:
            self._found.append(BlocksFound(owner, tuple(blocks), min(num_loaded, len(blocks))))

        self._search(BlockOwner("find", str(owner)), _Search(keys, tell))

    def release(self, owner: Finder) -> None:
        """Ends a find and its holds; ignored if there is none."""
        self._searches.pop(BlockOwner("find", str(owner)), None)
        self.pool.release(BlockOwner("find", str(owner)))

    def shorten(self, owner: Finder, num_blocks: int, block_ids: Sequence[BlockId]) -> None:
        """Ends the holds of a find beyond its first `num_blocks`."""
        self.pool.release_some(BlockOwner("find", str(owner)), list(block_ids[num_blocks:]))

    def _search(self, owner: BlockOwner, search: _Search) -> None:
        self._searches.pop(owner, None)
        self.pool.release(owner)
        num_local, absent = self._promotion.reach(search.keys)
        if absent and self.kv_cache.num_slots:
            # The blocks in DRAM are held, so that loading the others does not evict them.
            found = (self.pool.find(key) for key in search.keys[:num_local])
            self.pool.acquire(owner, [block for block in found if block is not None])
            search.load_ids = self._promotion.load(absent) or set()
            if search.load_ids:
                search.num_loaded = len(absent)
                self._searches[owner] = search
                return
        self._end_search(owner, search)

    def _end_search(self, owner: BlockOwner, search: _Search) -> None:
        blocks = self.pool.match(search.keys)
        self.pool.release(owner)
        self.pool.acquire(owner, blocks)
        search.tell(blocks, search.num_loaded)

    def _on_load_ended(self, event: LoadEnded) -> None:
        self._promotion.on_ended(event)
        for owner, search in list(self._searches.items()):
            search.load_ids.discard(event.load_id)
            if not search.load_ids:
                del self._searches[owner]
                self._end_search(owner, search)
        self._promotion.free(event.load_id)

    # Stores

    def reserve(
        self, number: int, keys: Sequence[BlockKey], first_depth: int
    ) -> list[BlockId | None]:
        """Reserves room for the blocks of `keys` that are neither in DRAM nor reserved, or for as
        many of them as fit. Returns the reserved block of each key, or None. `first_depth`: the
        index of the first key in its prompt."""
        assert number not in self._reservations
        lacking = [
            (key, first_depth + index)
            for index, key in enumerate(keys)
            if self.pool.find(key) is None and key not in self._reserved_keys
        ]
        lacking = list(dict(lacking).items())
        most = max(self.pool.num_blocks // STORE_SHARE, 1) - len(self._reserved_keys)
        room = max(min(len(lacking), most, self.pool.num_available), 0)
        self.actions_out.count("stores_refused_blocks", len(lacking) - room)
        self.actions_out.count("stores_spared_blocks", len(keys) - len(lacking))
        taken = lacking[:room]
        blocks = self.pool.allocate(BlockOwner("store", str(number)), len(taken))
        assert blocks is not None
        wanted = tuple(key for key, _ in taken)
        depths = tuple(depth for _, depth in taken)
        self._reservations[number] = _Reservation(wanted, tuple(blocks), depths)
        self._reserved_keys.update(wanted)
        place = dict(zip(wanted, blocks, strict=True))
        # if a key occurs twice, only the first gets its place
        return [place.pop(key, None) for key in keys]

    def reserved(self, number: int) -> tuple[BlockId, ...]:
        """The places of a reservation, in its order; () if there is none."""
        reservation = self._reservations.get(number)
        return () if reservation is None else reservation.block_ids

    def commit(self, number: int) -> None:
        """Gives the reserved blocks, which are full now, their keys."""
        reservation = self._reservations.pop(number)
        self._reserved_keys.difference_update(reservation.keys)
        items = zip(reservation.block_ids, reservation.keys, reservation.depths, strict=True)
        for block_id, key, depth in items:
            self.pool.cache_block(block_id, key, depth)
        self._write_ahead(reservation.keys)  # started while the blocks are held
        self.pool.release(BlockOwner("store", str(number)))
        self.actions_out.count("stored_in_dram_blocks", len(reservation.keys))

    def abandon(self, number: int) -> None:
        """Ends a reservation whose blocks were not filled. Does nothing without such a
        reservation."""
        reservation = self._reservations.pop(number, None)
        if reservation is not None:
            self._reserved_keys.difference_update(reservation.keys)
            self.pool.release(BlockOwner("store", str(number)))

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """Drops damaged blocks, so that no search finds them in DRAM from now on."""
        blocks = self.pool.find_all(keys)
        self.pool.uncache(blocks)
        self.actions_out.count("damaged_blocks", len(blocks))

    # Other hosts

    def fetch(
        self,
        fetch_id: str,
        source: PeerAddress,
        keys: Sequence[BlockKey],
        timeout_s: float,
        first_depth: int = 0,
    ) -> None:
        """Copies missing blocks of `keys` from another host. `first_depth`: the index of the first
        key in its prompt. Ends with `BlocksFetched`."""
        num_local = len(self.pool.match(keys))
        missing = tuple(keys[num_local:])
        owner = BlockOwner("fetch", fetch_id)
        self.pool.acquire(owner, self.pool.match(keys[:num_local]))
        room = min(len(missing), max(self.pool.num_available - 1, 0))
        blocks = self.pool.allocate(owner, room)
        if not missing or not room or blocks is None:
            self.pool.release(owner)
            error = "" if not missing else "the pool has no room"
            self._found.append(BlocksFetched(fetch_id, num_local, 0, 0.0, error))
            return
        self._fetches[fetch_id] = _Fetch(missing[:room], tuple(blocks), num_local, first_depth)
        self.actions_out.perform(
            FetchBlocks(fetch_id, source, missing[:room], tuple(blocks), timeout_s)
        )

    def _on_fetch_ended(self, event: FetchEnded) -> None:
        fetch = self._fetches.pop(event.fetch_id)
        arrived = fetch.block_ids[: event.num_blocks]
        for index, block_id in enumerate(arrived):
            depth = fetch.first_depth + fetch.num_local + index
            self.pool.cache_block(block_id, fetch.keys[index], depth)
        self.pool.release(BlockOwner("fetch", event.fetch_id))
        self.actions_out.count("fetched_blocks", event.num_blocks)
        self.actions_out.count("fetched_bytes", event.num_bytes)
        self.actions_out.count("failed_fetches", 1 if event.error else 0)
        number = fetch.num_local + event.num_blocks
        ended = BlocksFetched(event.fetch_id, number, event.num_bytes, event.seconds, event.error)
        self._found.append(ended)

    def _on_read_requested(self, event: ReadRequested) -> None:
        def tell(blocks: list[BlockId], num_loaded: int) -> None:
            self.actions_out.perform(GrantRead(event.read_id, blocks))

        self._search(BlockOwner("read", event.read_id), _Search(event.keys, tell))

    def _on_read_ended(self, event: ReadEnded) -> None:
        self._searches.pop(BlockOwner("read", event.read_id), None)
        self.pool.uncache(event.corrupt)
        self.actions_out.count("damaged_blocks", len(event.corrupt))
        self.pool.release(BlockOwner("read", event.read_id))

    # The SSD

    def _on_store_lost(self, event: StoreLost) -> None:
        if self.kv_cache.tier is not None:
            self.kv_cache.tier.lose(event.error)

    def _on_tier_paused(self, event: TierPaused) -> None:
        if self.kv_cache.tier is not None:
            self.kv_cache.tier.paused = event.error

    def _on_tier_resumed(self, event: TierResumed) -> None:
        if self.kv_cache.tier is not None:
            self.kv_cache.tier.paused = ""

    def validate(self) -> None:
        """Asserts the invariants that hold between any two calls."""
        self.pool.validate()
        if self.kv_cache.tier is not None:
            self.kv_cache.tier.validate()
        known = owners_of("store", map(str, self._reservations))
        known |= owners_of("fetch", self._fetches)
        known |= self._demotion.owners | self._promotion.owners
        others = {o for o in self.pool.owners() if o.kind not in ("read", "find")}
        assert others <= known, others - known
        assert self._reserved_keys == {k for r in self._reservations.values() for k in r.keys}


def _ignore(event: MessengerEvent) -> None:
    """Does nothing, because nobody waits for single layers."""

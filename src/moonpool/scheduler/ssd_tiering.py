"""Moves blocks between DRAM and the SSD: `Demotion` writes them, `Promotion` reads them back.

Demotion makes room in DRAM before it is needed. The next victims go to the SSD, in batches:

    free blocks below the low mark --> victims withdrawn, up to the high mark --> written --> free

A block keeps its hash while it is written, and requests can still hit it. Blocks that are already
on the SSD, or that the SSD does not admit, are freed at once. Where demand outruns the writes,
blocks are evicted without a write. Blocks under write are held and cannot be promised to requests,
so an instance with an SSD promises fewer blocks than it has (`reserved_blocks`).

Blocks are also copied to the SSD while they are in use, where the disk has nothing else to do
(`write_ahead`), so that the most used blocks survive a power cut. Blocks that requests have found
again come first. New blocks go to free slots only, because the SSD then holds a block that DRAM
holds too. The copies in progress and those that wait hold no more blocks than `reserved_blocks`; a
block that finds no place is tried again at its next use.

A shared store takes the place of the SSD where other instances use it too. The store receives every
new block immediately (`publish`), not only when the block leaves DRAM. So other instances find the
block, and so does a cluster that starts after this one has ended.

A load belongs to the instance, not to the request that caused it. Any request or peer that needs a
block under load waits for that load; a request that ends leaves its loads to the others. A failed
load is a miss: the missing blocks are computed, and a block that could not be read is forgotten. If
the disk hangs, the load also ends as a miss. The blocks and slots that the disk may still touch
stay held by an owner of kind "hung:load" or "hung:store" until the disk returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from moonpool.kvcache.block_owner import BlockOwner, owners_of
from moonpool.kvcache.ssd_tier import SsdTier
from moonpool.protocol.transfer_events import LoadEnded, LoadReturned, StoreEnded, StoreReturned
from moonpool.scheduler.actions import ActionBuffer, ForgetStored, LoadBlocks, StoreBlocks
from moonpool.scheduler.kv_cache_manager import KVCacheManager
from moonpool.scheduler.request_state import TransferEta
from moonpool.types import BlockId, BlockKey

RESERVED_SHARE = 16
"""At most this fraction (1 / RESERVED_SHARE) of the blocks is under write to the SSD, and as many
are kept free."""
MAX_BATCH_BLOCKS = 16
"""Most blocks of one write. Small writes free their blocks sooner than one large write would."""


def reserved_blocks(num_blocks: int, num_slots: int) -> int:
    """Returns the most blocks of the DRAM pool that demotion holds at a time."""
    return max(num_blocks // RESERVED_SHARE, 1) if num_slots and num_blocks > 1 else 0


@dataclass(frozen=True, slots=True)
class _Store:
    keys: tuple[BlockKey, ...]
    depths: tuple[int, ...]
    slots: tuple[BlockId, ...]
    # the tenant of each block, if it has a share of the cache
    owners: tuple[tuple[str, float] | None, ...]
    ahead: bool  # whether the blocks stay in DRAM


class Demotion:
    """Manages the writes in progress. Owners of these writes are of kind "demote" in both pools."""

    def __init__(
        self, kv_cache: KVCacheManager, actions_out: ActionBuffer, ahead_blocks: int = 0
    ) -> None:
        """`ahead_blocks`: how many blocks copies may hold, for a pool of which no request is
        promised blocks; 0 means a part of `reserved_blocks`."""
        self._kv_cache = kv_cache
        self._pool = kv_cache.pool
        self._actions_out = actions_out
        self._ahead_blocks = ahead_blocks
        self._stores: dict[str, _Store] = {}
        # slots that a hung disk may still write, by write
        self._hung: dict[str, tuple[BlockId, ...]] = {}
        self._num_stores = 0
        self._num_storing = 0  # blocks
        self._num_copying = 0  # number of blocks under write that stay in DRAM
        self._writing: set[BlockKey] = set()
        # blocks that are held to be copied while the disk is idle
        self._ahead: dict[BlockKey, BlockId] = {}
        # keys that are not published yet
        self._new: deque[BlockKey] = deque(maxlen=self._pool.num_blocks)
        self._limit = reserved_blocks(self._pool.num_blocks, kv_cache.num_slots)

    @property
    def owners(self) -> set[BlockOwner]:
        """Returns all owners of holds for writes."""
        ahead = {_ahead(key) for key in self._ahead}
        return owners_of("demote", self._stores) | owners_of("hung:store", self._hung) | ahead

    def publish(self, keys: Iterable[BlockKey]) -> None:
        """Writes newly cached blocks to a shared store; does nothing without a shared store."""
        tier = self._kv_cache.tier
        if tier is not None and self._kv_cache.store_shared and not tier.lost:
            self._new.extend(keys)
            self._publish(tier)

    def run(self) -> None:
        """Starts the writes that the number of free blocks calls for. The instance calls this last,
        after all other changes of an event."""
        tier = self._kv_cache.tier
        if tier is None or not tier.usable:
            return
        self._publish(tier)
        soon_free = self._pool.num_free + self._num_storing - self._num_copying
        if soon_free >= self._limit:
            return
        wanted = 2 * self._limit - soon_free
        while wanted > 0 and self._room and self._pool.num_evictable:
            wanted -= self._demote(tier, min(wanted, self._room))

    @property
    def _room(self) -> int:
        """Returns how many more blocks may be demoted."""
        if self._ahead_blocks:
            return max(self._limit - self._num_storing + self._num_copying, 0)
        return self._ahead_room

    @property
    def _ahead_room(self) -> int:
        """Returns how many more blocks may be held for copies."""
        held = self._num_storing + len(self._ahead)
        return max(max(self._limit, self._ahead_blocks) - held, 0)

    def write_ahead(self, new: Sequence[BlockKey], disk_reads: bool = False) -> None:
        """Copies blocks in use to the SSD: `new` blocks, and blocks that requests have found since
        the last call. `disk_reads`: whether the disk is busy for requests."""
        tier, pool = self._kv_cache.tier, self._pool
        if tier is None or not self._kv_cache.writes_ahead:
            return
        reused = self._kv_cache.take_reused()
        if not tier.usable:
            self._take_ahead(len(self._ahead))
            return
        for block_id in reused:
            key = pool.key_of(block_id)
            if key is not None:
                self._hold_ahead(tier, key)
        for key in new:
            if tier.slots.num_free <= len(self._ahead):
                break
            self._hold_ahead(tier, key)
        if self._ahead and not self._stores and not disk_reads:
            self._write_held(tier)

    def _hold_ahead(self, tier: SsdTier, key: BlockKey) -> None:
        pool = self._pool
        block_id = pool.find(key)
        if block_id is None or not pool.is_held(block_id) or tier.knows(key):
            return
        if key in self._ahead or key in self._writing or not self._ahead_room:
            return
        if tier.would_admit(key, pool.num_uses(block_id) > 0):
            pool.guard(_ahead(key), (block_id,))
            self._ahead[key] = block_id

    def _write_held(self, tier: SsdTier) -> None:
        """Starts one write of blocks that wait to be copied."""
        owner = self._next_owner()
        blocks = self._take_ahead(MAX_BATCH_BLOCKS, owner)
        self._actions_out.count("written_ahead_blocks", len(blocks))
        self._write(tier, owner, blocks, ahead=True)

    def _take_ahead(self, num_blocks: int, heir: BlockOwner | None = None) -> list[BlockId]:
        """Ends the holds of the first blocks that wait for a copy. Returns those that are still
        cached; `heir` holds them from now on."""
        taken = list(islice(self._ahead.items(), num_blocks))
        cached = [block_id for key, block_id in taken if self._pool.key_of(block_id) == key]
        if heir is not None:
            self._pool.guard(heir, cached)
        for key, _ in taken:
            del self._ahead[key]
            self._pool.release(_ahead(key))
        return cached

    def _publish(self, tier: SsdTier) -> None:
        while self._new and self._num_storing < self._limit:
            most = min(self._limit - self._num_storing, MAX_BATCH_BLOCKS)
            blocks: dict[BlockId, None] = {}
            while self._new and len(blocks) < most:
                key = self._new.popleft()
                block = self._pool.find(key)
                if block is not None and not tier.knows(key):
                    blocks[block] = None
            owner = self._next_owner()
            self._pool.acquire(owner, blocks)
            self._write(tier, owner, list(blocks))

    def _demote(self, tier: SsdTier, num_blocks: int) -> int:
        """Demotes at most `num_blocks`, and no more than fit into one write; returns how many."""
        pool = self._pool
        owner = self._next_owner()
        victims = pool.withdraw(owner, min(num_blocks, MAX_BATCH_BLOCKS))
        # The pool returns the end of a prompt first, but the disk stores a prompt in its order.
        written = [b for b in reversed(victims) if self._deserves_write(tier, b)]
        writing = set(written)
        pool.release_some(owner, [b for b in victims if b not in writing])
        self._write(tier, owner, written)
        return len(victims)

    def _next_owner(self) -> BlockOwner:
        self._num_stores += 1
        return BlockOwner("demote", str(self._num_stores))

    def _write(
        self, tier: SsdTier, owner: BlockOwner, blocks: list[BlockId], ahead: bool = False
    ) -> None:
        """Writes as many of the owner's blocks as there are slots for; releases the remaining
        blocks."""
        pool = self._pool
        slots, voided = tier.reserve(owner, len(blocks))
        if voided:
            self._actions_out.perform(ForgetStored(tuple(voided)))
        refused = blocks[len(slots) :]
        self._actions_out.count("refused_blocks", len(refused))
        pool.release_some(owner, refused)
        written = blocks[: len(slots)]
        if written:
            store_id = str(self._num_stores)
            keys = tuple(_known(pool.key_of(b)) for b in written)
            depths = tuple(pool.depth_of(b) for b in written)
            owners = tuple(map(self._kv_cache.spares.owner_of, written))
            self._stores[store_id] = _Store(keys, depths, tuple(slots), owners, ahead)
            self._writing.update(keys)
            self._num_storing += len(written)
            self._num_copying += len(written) if ahead else 0
            self._actions_out.perform(StoreBlocks(store_id, keys, tuple(written), tuple(slots)))

    def _deserves_write(self, tier: SsdTier, block_id: BlockId) -> bool:
        key = _known(self._pool.key_of(block_id))
        slot = tier.slot_of(key)
        if slot is not None:
            tier.touch([slot])
            self._actions_out.count("spared_writes")
            return False
        if tier.admits(key, self._pool.num_uses(block_id) > 0):
            return True
        self._actions_out.count("refused_blocks")
        return False

    def on_ended(self, event: StoreEnded) -> None:
        """Handles the end of a write."""
        store = self._stores.pop(event.store_id)
        tier = self._kv_cache.tier
        assert tier is not None
        self._writing.difference_update(store.keys)
        self._num_storing -= len(store.keys)
        self._num_copying -= len(store.keys) if store.ahead else 0
        owner = BlockOwner("demote", event.store_id)
        num_stored = 0 if tier.lost else event.num_blocks
        void = [] if event.hung else list(store.slots[num_stored:])
        for index in range(num_stored):
            slot, key = store.slots[index], store.keys[index]
            if not tier.fill(slot, key, store.depths[index], store.owners[index]):
                void.append(slot)
        if event.hung:  # a hung disk could later overwrite new content of these slots
            tier.slots.release_some(owner, store.slots[:num_stored])
            tier.slots.hand_over(owner, BlockOwner("hung:store", event.store_id))
            self._hung[event.store_id] = store.slots[num_stored:]
            self._actions_out.count("hung_stores")
        tier.slots.release(owner)
        self._pool.release(owner)
        if void and not tier.lost:
            self._actions_out.perform(ForgetStored(tuple(void)))
        self._actions_out.count("stored_blocks", num_stored)
        self._actions_out.count("stored_bytes", event.num_bytes)
        self._actions_out.count("failed_stores", 1 if event.error else 0)

    def on_returned(self, event: StoreReturned) -> None:
        """Frees the slots of a write that hung, after the disk has returned."""
        tier = self._kv_cache.tier
        assert tier is not None
        slots = self._hung.pop(event.store_id)
        tier.slots.release(BlockOwner("hung:store", event.store_id))
        if slots and not tier.lost:
            self._actions_out.perform(ForgetStored(slots))


@dataclass(frozen=True, slots=True)
class _Load:
    keys: tuple[BlockKey, ...]
    slots: tuple[BlockId, ...]
    block_ids: tuple[BlockId, ...]
    num_sharing: int  # loads in progress when this load began, including itself


class Promotion:
    """Manages the loads in progress. Owners of these loads are of kind "load" in both pools."""

    def __init__(self, kv_cache: KVCacheManager, actions_out: ActionBuffer) -> None:
        self._kv_cache = kv_cache
        self._actions_out = actions_out
        self._loads: dict[str, _Load] = {}
        # (id of the load, target block) by key
        self._loading: dict[BlockKey, tuple[str, BlockId]] = {}
        self._etas: dict[str, TransferEta] = {}  # estimates of loads that arrive layer by layer
        self._hung: set[str] = set()
        self._num_loads = 0

    @property
    def owners(self) -> set[BlockOwner]:
        """Returns all owners of holds for loads."""
        return owners_of("load", self._loads) | owners_of("hung:load", self._hung)

    @property
    def num_loads(self) -> int:
        """Number of loads in progress."""
        return len(self._loads)

    def num_sharing(self, load_id: str) -> int:
        """Returns how many loads shared the disk when this load began, including itself."""
        return self._loads[load_id].num_sharing

    def target_of(self, key: BlockKey, load_ids: Collection[str]) -> BlockId | None:
        """Returns the block into which one of these loads reads `key`, or None if no load reads
        it."""
        load_id, block_id = self._loading.get(key, ("", None))
        return block_id if load_id in load_ids else None

    def set_eta(self, load_id: str, eta: TransferEta) -> None:
        """Records the progress of a load; ignored if the load has ended."""
        if load_id in self._loads:
            self._etas[load_id] = eta

    def eta(self, load_id: str) -> TransferEta | None:
        """Returns None if there is no progress yet, or if the load does not arrive layer by
        layer."""
        return self._etas.get(load_id)

    def size_of(self, load_id: str) -> int:
        """Returns the number of blocks of a load, or 0 if it has ended."""
        load = self._loads.get(load_id)
        return 0 if load is None else len(load.keys)

    def reach(self, keys: Sequence[BlockKey]) -> tuple[int, list[BlockKey]]:
        """Returns the length of the longest run of `keys` that is in DRAM or on the SSD, and the
        keys of that run which are not in DRAM."""
        pool = self._kv_cache.pool
        absent: list[BlockKey] = []
        for index, key in enumerate(keys):
            if pool.find(key) is not None:
                continue
            if not self._is_stored(key):
                return index, absent
            absent.append(key)
        return len(keys), absent

    def present(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Returns whether each of `keys` is in DRAM or on the SSD."""
        pool = self._kv_cache.pool
        return [pool.find(key) is not None or self._is_stored(key) for key in keys]

    def _is_stored(self, key: BlockKey) -> bool:
        """Whether a load can bring the block, or is bringing it."""
        tier = self._kv_cache.tier
        return tier is not None and (tier.slot_of(key) is not None or key in self._loading)

    def load(self, keys: Sequence[BlockKey], by_layer: bool = False) -> set[str] | None:
        """Starts loading `keys`, which `reach` has just returned as absent. Returns the ids of the
        loads to wait for, or None, starting nothing, if there is no room."""
        tier, loading = self._kv_cache.tier, self._loading
        assert tier is not None
        waits = {loading[key][0] for key in keys if key in loading}
        new = tuple(dict.fromkeys(key for key in keys if key not in loading))  # each once
        if not new:
            return waits
        self._num_loads += 1
        load_id = str(self._num_loads)
        owner = BlockOwner("load", load_id)
        blocks = self._kv_cache.pool.allocate(owner, len(new))
        if blocks is None:
            return None
        slots = []
        for key, block_id in zip(new, blocks, strict=True):
            slot = tier.slot_of(key)
            assert slot is not None
            slots.append(slot)
            loading[key] = load_id, block_id
        tier.hold(owner, slots)
        self._loads[load_id] = _Load(new, tuple(slots), tuple(blocks), len(self._loads) + 1)
        self._actions_out.perform(LoadBlocks(load_id, new, tuple(slots), tuple(blocks), by_layer))
        return waits | {load_id}

    def on_ended(self, event: LoadEnded) -> tuple[BlockKey, ...]:
        """Caches the blocks that arrived and returns the keys of the others. All blocks stay held
        until `free`, so that the waiting requests can acquire them first."""
        load = self._loads[event.load_id]
        tier, actions_out = self._kv_cache.tier, self._actions_out
        assert tier is not None
        for index in range(event.num_blocks):
            depth = tier.slots.depth_of(load.slots[index])
            self._kv_cache.pool.cache_block(load.block_ids[index], load.keys[index], depth)
        if event.hung:
            self._hung.add(event.load_id)
        elif event.num_blocks < len(load.keys) and not tier.lost:
            # the state of the slots after the first failed one is unknown
            bad = load.slots[event.num_blocks]
            tier.slots.uncache([bad])
            actions_out.perform(ForgetStored((bad,)))
        actions_out.count("loaded_blocks", event.num_blocks)
        actions_out.count("loaded_bytes", event.num_bytes)
        actions_out.count("corrupt_slices", event.corrupt_slices)
        actions_out.count("failed_loads", 1 if event.num_blocks < len(load.keys) else 0)
        actions_out.count("hung_loads", 1 if event.hung else 0)
        return load.keys[event.num_blocks :]

    def free(self, load_id: str) -> None:
        """Ends the holds of a load that has ended, except those that a hung disk needs."""
        load = self._loads.pop(load_id)
        self._etas.pop(load_id, None)
        tier = self._kv_cache.tier
        assert tier is not None
        for key in load.keys:
            del self._loading[key]
        pool, owner = self._kv_cache.pool, BlockOwner("load", load_id)
        if load_id in self._hung:
            arrived = [b for b in load.block_ids if pool.key_of(b) is not None]
            pool.release_some(owner, arrived)
            pool.hand_over(owner, BlockOwner("hung:load", load_id))
            tier.slots.hand_over(owner, BlockOwner("hung:load", load_id))
        pool.release(owner)
        tier.slots.release(owner)

    def on_returned(self, event: LoadReturned) -> None:
        """Frees the blocks and slots of a load that hung, after the disk has returned."""
        tier, owner = self._kv_cache.tier, BlockOwner("hung:load", event.load_id)
        assert tier is not None
        self._hung.remove(event.load_id)
        self._kv_cache.pool.release(owner)
        tier.slots.release(owner)


def _ahead(key: BlockKey) -> BlockOwner:
    return BlockOwner("ahead", key.hex())


def _known(key: BlockKey | None) -> BlockKey:
    assert key is not None
    return key

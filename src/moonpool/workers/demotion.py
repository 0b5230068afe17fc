"""Makes room in DRAM before it is needed: the next victims go to the SSD, in batches.

    free blocks under the low mark --> victims withdrawn, up to the high mark --> written --> free

While a block is written it keeps its name, and can be hit. Blocks that the SSD has already are
freed at once, and so are those that it does not admit. Where demand outruns the writes, blocks are
evicted plainly. What is being written is held, so it cannot be promised to anybody: an instance
with an SSD tier promises fewer blocks than it has (`reserved_blocks`).

A store that other instances use too gets every new block at once (`publish`), not only when it
leaves DRAM here: so the others find it, and so does a cluster that starts when this one has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from moonpool.kvcache.tiers import SsdTier
from moonpool.kvcache.transfers import StoreEnded
from moonpool.types import BlockId, BlockKey
from moonpool.workers.actions import ForgetStored, StoreBlocks
from moonpool.workers.holdings import Holdings
from moonpool.workers.outbox import Outbox

RESERVED_SHARE = 16
"""One block of so many may be under way to the SSD; as many are kept free, at least."""
MAX_BATCH_BLOCKS = 16
"""Of one write: the first of them are free again when it ends, not when all are written."""


def reserved_blocks(num_blocks: int, num_slots: int) -> int:
    """Blocks of the DRAM pool that demotion may hold at a time."""
    return max(num_blocks // RESERVED_SHARE, 1) if num_slots and num_blocks > 1 else 0


@dataclass(frozen=True, slots=True)
class _Store:
    keys: tuple[BlockKey, ...]
    depths: tuple[int, ...]
    slots: tuple[BlockId, ...]


class Demotion:
    """The writes under way. Owners are "demote:<id>" in both pools."""

    def __init__(self, holdings: Holdings, outbox: Outbox) -> None:
        self._holdings = holdings
        self._pool = holdings.pool
        self._outbox = outbox
        self._stores: dict[str, _Store] = {}
        self._hung: dict[str, tuple[BlockId, ...]] = {}  # the slots that a hung disk may write to
        self._num_stores = 0
        self._num_storing = 0  # blocks
        self._new: deque[BlockKey] = deque(maxlen=self._pool.num_blocks)  # the newest
        self._limit = reserved_blocks(self._pool.num_blocks, holdings.num_slots)

    @property
    def owners(self) -> set[str]:
        return {_owner(store_id) for store_id in self._stores} | {
            _hung(store_id) for store_id in self._hung
        }

    def publish(self, keys: Iterable[BlockKey]) -> None:
        """These have just got their names."""
        tier = self._holdings.tier
        if tier is not None and self._holdings.store_shared and not tier.lost:
            self._new.extend(keys)
            self._publish(tier)

    def run(self) -> None:
        """Begins what the free blocks call for; to be called when everything else has been done."""
        tier = self._holdings.tier
        if tier is None or not tier.usable:
            return
        self._publish(tier)
        soon_free = self._pool.num_free + self._num_storing
        if soon_free >= self._limit:
            return
        wanted = 2 * self._limit - soon_free
        while wanted > 0 and self._num_storing < self._limit and self._pool.num_evictable:
            wanted -= self._demote(tier, min(wanted, self._limit - self._num_storing))

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
        """Up to so many blocks, and no more than one write takes; returns how many they are."""
        pool = self._pool
        owner = self._next_owner()
        victims = pool.withdraw(owner, min(num_blocks, MAX_BATCH_BLOCKS))
        # Victims come with the end of a prompt first; on the disk they are a prompt's in its order.
        written = [b for b in reversed(victims) if self._deserves_write(tier, b)]
        writing = set(written)
        pool.release_some(owner, [b for b in victims if b not in writing])
        self._write(tier, owner, written)
        return len(victims)

    def _next_owner(self) -> str:
        self._num_stores += 1
        return _owner(str(self._num_stores))

    def _write(self, tier: SsdTier, owner: str, blocks: list[BlockId]) -> None:
        """Of the blocks that `owner` holds, those there are slots for; lets go of the others."""
        pool = self._pool
        slots, voided = tier.reserve(owner, len(blocks))
        if voided:
            self._outbox.do(ForgetStored(tuple(voided)))
        refused = blocks[len(slots) :]
        self._outbox.count("refused_blocks", len(refused))
        pool.release_some(owner, refused)
        written = blocks[: len(slots)]
        if written:
            store_id = str(self._num_stores)
            keys = tuple(_key(pool.key_of(b)) for b in written)
            depths = tuple(pool.depth_of(b) for b in written)
            self._stores[store_id] = _Store(keys, depths, tuple(slots))
            self._num_storing += len(written)
            self._outbox.do(StoreBlocks(store_id, keys, tuple(written), tuple(slots)))

    def _deserves_write(self, tier: SsdTier, block_id: BlockId) -> bool:
        key = _key(self._pool.key_of(block_id))
        slot = tier.slot_of(key)
        if slot is not None:
            tier.touch([slot])
            self._outbox.count("spared_writes")
            return False
        if tier.admits(key, self._pool.num_uses(block_id) > 0):
            return True
        self._outbox.count("refused_blocks")
        return False

    def on_ended(self, event: StoreEnded) -> None:
        store = self._stores.pop(event.store_id)
        tier = self._holdings.tier
        assert tier is not None
        self._num_storing -= len(store.keys)
        owner = _owner(event.store_id)
        num_stored = 0 if tier.lost else event.num_blocks
        void = [] if event.hung else list(store.slots[num_stored:])
        for index in range(num_stored):
            slot, key = store.slots[index], store.keys[index]
            if not tier.fill(slot, key, store.depths[index]):
                void.append(slot)
        if event.hung:  # whoever wrote to these slots now could be overwritten
            tier.slots.release_some(owner, store.slots[:num_stored])
            tier.slots.hand_over(owner, _hung(event.store_id))
            self._hung[event.store_id] = store.slots[num_stored:]
            self._outbox.count("hung_stores")
        tier.slots.release(owner)
        self._pool.release(owner)
        if void and not tier.lost:
            self._outbox.do(ForgetStored(tuple(void)))
        self._outbox.count("stored_blocks", num_stored)
        self._outbox.count("stored_bytes", event.num_bytes)
        self._outbox.count("failed_stores", 1 if event.error else 0)

    def on_returned(self, store_id: str) -> None:
        """What a hung disk held is free."""
        tier = self._holdings.tier
        assert tier is not None
        slots = self._hung.pop(store_id)
        tier.slots.release(_hung(store_id))
        if slots and not tier.lost:
            self._outbox.do(ForgetStored(slots))


def _hung(store_id: str) -> str:
    return f"hung:store:{store_id}"


def _owner(store_id: str) -> str:
    return f"demote:{store_id}"


def _key(key: BlockKey | None) -> BlockKey:
    assert key is not None
    return key

"""Tests DRAM and SSD of one instance together, in random histories of requests, writes, reads and
faults.

No history may lose a block, hold a block twice, cache a block under a wrong key, or report a wrong
block.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moonpool.kvcache.ssd_tier import GHOSTS_PER_BLOCK, SsdTier
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.transfer_events import LoadEnded, LoadReturned, StoreEnded, StoreReturned
from moonpool.scheduler.actions import ActionBuffer, ForgetStored, LoadBlocks, StoreBlocks
from moonpool.scheduler.instance_config import InstanceConfig
from moonpool.scheduler.kv_cache_manager import KVCacheManager
from moonpool.scheduler.ssd_tiering import Demotion, Promotion
from moonpool.types import BlockId, BlockKey

LAYOUT = BlockLayout(
    model_fingerprint="m", dtype="float32", block_tokens=4, num_layers=1, num_kv_heads=1, head_dim=4
)


def key(name: int) -> BlockKey:
    return BlockKey(name.to_bytes(16, "big"))


class TiersMachine(RuleBasedStateMachine):
    """A driver of the instance. As the content of each block, its arena and disk hold the key that
    the block should have."""

    @initialize(
        eviction=st.sampled_from(("lru", "lfu", "length-aware", "predictive")),
        admission=st.sampled_from(("always", "second-use")),
        num_slots=st.integers(1, 40),
    )
    def begin(self, eviction: str, admission: str, num_slots: int) -> None:
        config = InstanceConfig(
            eviction=eviction,  # type: ignore[arg-type]
            ssd_blocks=num_slots,
            ssd_admission=admission,  # type: ignore[arg-type]
        )
        self.kv_cache = KVCacheManager(config, LAYOUT, 48)
        self.actions_out = ActionBuffer()
        self.demotion = Demotion(self.kv_cache, self.actions_out)
        self.promotion = Promotion(self.kv_cache, self.actions_out)
        self.arena: dict[BlockId, BlockKey] = {}
        self.disk: dict[int, BlockKey] = {}
        self.stores: list[StoreBlocks] = []
        self.loads: list[LoadBlocks] = []
        self.hung_loads: list[tuple[LoadBlocks, int]] = []
        self.hung_stores: list[tuple[StoreBlocks, int]] = []
        self.announced: dict[BlockKey, str] = {}
        self.num_owners = 0
        self.owners: list[str] = []

    @rule(start=st.integers(0, 3), length=st.integers(1, 30))
    def serve(self, start: int, length: int) -> None:
        """Runs a prompt: uses its blocks in DRAM and computes the others."""
        keys = [key(100 * start + place) for place in range(length)]
        pool = self.kv_cache.pool
        self.num_owners += 1
        owner = f"work:{self.num_owners}"
        cached = pool.match(keys)
        pool.acquire(owner, cached)
        new = pool.allocate(owner, length - len(cached))
        if new is None:
            pool.release(owner)
        else:
            for depth, block in enumerate(new, len(cached)):
                self.arena[block] = keys[depth]
                pool.cache_block(block, keys[depth], depth)
            self.owners.append(owner)
        self.after()

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def end_work(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        self.owners.remove(owner)
        self.kv_cache.pool.release(owner)
        self.after()

    @precondition(lambda self: self.stores)
    @rule(data=st.data())
    def end_store(self, data: st.DataObject) -> None:
        store = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
        stored = data.draw(st.sampled_from((len(store.slots), len(store.slots), 0, 1)))
        for name, block, slot in list(zip(store.keys, store.block_ids, store.slots, strict=True)):
            assert self.arena[block] == name, "the block changed during its write"
            self.disk[slot] = name
        self.demotion.on_ended(StoreEnded(store_id=store.store_id, num_blocks=stored))
        self.after()

    @rule(start=st.integers(0, 3), length=st.integers(1, 30))
    def load(self, start: int, length: int) -> None:
        keys = [key(100 * start + place) for place in range(length)]
        reach, absent = self.promotion.reach(keys)
        pool, tier = self.kv_cache.pool, self.tier()
        for name in keys[:reach]:
            assert (pool.find(name) is None) == (name in absent)
        assert all(self.promotion.present(list(absent)))
        if absent and tier.usable:
            self.promotion.load(absent)
        self.after()

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        load = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        arrived = data.draw(st.sampled_from((len(load.slots), len(load.slots), 0)))
        lost = self.tier().lost
        arrived = 0 if lost else arrived
        for name, slot, block in zip(load.keys, load.slots, load.block_ids, strict=True):
            assert lost or self.disk[slot] == name, "the slot changed during its read"
            self.arena[block] = name
        missing = self.promotion.on_ended(LoadEnded(load_id=load.load_id, num_blocks=arrived))
        assert missing == load.keys[arrived:]
        self.promotion.free(load.load_id)
        self.after()

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def hang_load(self, data: st.DataObject) -> None:
        """Lets a load hang. The load ends as a miss, and the disk may still write to its blocks
        later."""
        load = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        arrived = 0 if self.tier().lost else data.draw(st.integers(0, len(load.slots) - 1))
        for name, block in list(zip(load.keys, load.block_ids, strict=True))[:arrived]:
            self.arena[block] = name
        ended = LoadEnded(load_id=load.load_id, num_blocks=arrived, hung=True)
        assert self.promotion.on_ended(ended) == load.keys[arrived:]
        self.promotion.free(load.load_id)
        self.hung_loads.append((load, arrived))
        self.tier().paused = "it does not answer"
        self.after()

    @precondition(lambda self: self.stores)
    @rule(data=st.data())
    def hang_store(self, data: st.DataObject) -> None:
        store = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
        stored = data.draw(st.integers(0, len(store.slots) - 1))
        for name, slot in list(zip(store.keys, store.slots, strict=True))[:stored]:
            self.disk[slot] = name
        ended = StoreEnded(store_id=store.store_id, num_blocks=stored, hung=True)
        self.demotion.on_ended(ended)
        self.hung_stores.append((store, stored))
        self.tier().paused = "it does not answer"
        self.after()

    @precondition(lambda self: self.hung_loads or self.hung_stores)
    @rule()
    def return_all(self) -> None:
        """Lets the disk write once more to all blocks and slots of hung operations; the operations
        then return."""
        pool = self.kv_cache.pool
        for load, arrived in self.hung_loads:
            for block in load.block_ids[arrived:]:
                assert pool.key_of(block) is None and pool.is_held(block)
                self.arena[block] = key(999_999)
            self.promotion.on_returned(LoadReturned(load_id=load.load_id))
        for store, stored in self.hung_stores:
            for slot in store.slots[stored:]:
                assert self.tier().slots.key_of(slot) is None
                self.disk[slot] = key(999_999)
            self.demotion.on_returned(StoreReturned(store_id=store.store_id))
        self.hung_loads, self.hung_stores = [], []
        self.tier().paused = ""
        self.after()

    @rule(rarely=st.integers(0, 60))
    def lose(self, rarely: int) -> None:
        if not rarely and not self.tier().lost:
            self.disk.clear()
            self.tier().lose("the folder vanished")
            self.after()

    @rule()
    def snapshot(self) -> None:
        found = self.kv_cache.take_snapshot()
        self.announced = dict.fromkeys(found.keys, "dram") | dict.fromkeys(found.demoted, "ssd")
        assert len(self.announced) == len(found.keys) + len(found.demoted)

    def tier(self) -> SsdTier:
        assert self.kv_cache.tier is not None
        return self.kv_cache.tier

    def after(self) -> None:
        """Performs the actions of the instance after each event, and checks the invariants."""
        self.demotion.run()
        for action in self.actions_out.take():
            match action:
                case StoreBlocks():
                    for name, block in zip(action.keys, action.block_ids, strict=True):
                        assert self.arena[block] == name
                    assert not set(action.slots) & set(self.disk), "the slot was not forgotten"
                    self.stores.append(action)
                case LoadBlocks():
                    self.loads.append(action)
                case ForgetStored():
                    for slot in action.slots:
                        self.disk.pop(slot, None)
        changes = self.kv_cache.take_changes()
        if changes is None:
            return
        for where, names in (("dram", changes.stored), ("ssd", changes.demoted)):
            self.announced.update(dict.fromkeys(names, where))
        for name in changes.removed:
            self.announced.pop(name, None)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "kv_cache"):
            return
        pool, tier = self.kv_cache.pool, self.tier()
        pool.validate()
        tier.validate()
        for name, block in zip(pool.keys(), pool.cached_blocks(), strict=True):
            assert self.arena[block] == name
        for name, slot in zip(tier.slots.keys(), tier.slots.cached_blocks(), strict=True):
            assert self.disk[slot] == name
        where = dict.fromkeys(tier.slots.keys(), "ssd") | dict.fromkeys(pool.keys(), "dram")
        assert self.announced == where
        owners = {*self.owners, *self.demotion.owners, *self.promotion.owners}
        assert set(pool.owners()) <= owners and set(tier.slots.owners()) <= owners
        assert len(self.demotion.owners) == len(self.stores) + len(self.hung_stores)
        assert sum(len(store.slots) for store in self.stores) <= 48 // 16

    def teardown(self) -> None:
        """Ends all operations and asserts that no block is held."""
        if not hasattr(self, "kv_cache"):
            return
        for owner in self.owners:
            self.kv_cache.pool.release(owner)
        for store in self.stores:
            self.demotion.on_ended(StoreEnded(store_id=store.store_id, num_blocks=0))
        for load in self.loads:
            self.promotion.on_ended(LoadEnded(load_id=load.load_id, num_blocks=0))
            self.promotion.free(load.load_id)
        for load, _ in self.hung_loads:
            self.promotion.on_returned(LoadReturned(load_id=load.load_id))
        for store, _ in self.hung_stores:
            self.demotion.on_returned(StoreReturned(store_id=store.store_id))
        assert not self.kv_cache.pool.num_held and not self.tier().slots.num_held


TiersMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestTiersMachine = TiersMachine.TestCase


def test_a_block_is_admitted_by_its_second_use() -> None:
    tier = SsdTier(8, 8, "second-use", "lru")
    assert not tier.admits(key(1), reused=False)
    assert tier.admits(key(1), reused=False), "it was dropped once before"
    assert tier.admits(key(2), reused=True)
    assert SsdTier(8, 8, "always", "lru").admits(key(3), reused=False)


def test_the_memory_of_dropped_blocks_is_bounded() -> None:
    tier = SsdTier(8, 8, "second-use", "lru")
    tier.note_dropped(key(n) for n in range(1000))
    assert not tier.admits(key(0), reused=False)
    assert tier.admits(key(1000 - GHOSTS_PER_BLOCK * 16 + 1), reused=False)
    tier.validate()

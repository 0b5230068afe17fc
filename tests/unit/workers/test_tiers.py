"""DRAM and SSD of one instance together: no history of demands, writes, reads and faults may lose a
block, hold one twice, name it wrongly, or announce it where it is not."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moonpool.config import InstanceConfig
from moonpool.kvcache.layout import BlockLayout
from moonpool.kvcache.tiers import GHOSTS_PER_BLOCK, SsdTier
from moonpool.kvcache.transfers import LoadEnded, StoreEnded
from moonpool.types import BlockId, BlockKey
from moonpool.workers.actions import ForgetStored, LoadBlocks, StoreBlocks
from moonpool.workers.demotion import Demotion
from moonpool.workers.holdings import Holdings
from moonpool.workers.outbox import Outbox
from moonpool.workers.promotion import Promotion

LAYOUT = BlockLayout(
    model_fingerprint="m", dtype="float32", block_tokens=4, num_layers=1, num_kv_heads=1, head_dim=4
)


def key(name: int) -> BlockKey:
    return BlockKey(name.to_bytes(16, "big"))


class TiersMachine(RuleBasedStateMachine):
    """A driver with an arena and a disk, whose contents are the names they should have."""

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
        self.holdings = Holdings(config, LAYOUT, 48)
        self.outbox = Outbox()
        self.demotion = Demotion(self.holdings, self.outbox)
        self.promotion = Promotion(self.holdings, self.outbox)
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
        """A prompt: what is in DRAM is used, the rest computed."""
        keys = [key(100 * start + place) for place in range(length)]
        pool = self.holdings.pool
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
                pool.seal(block, keys[depth], depth)
            self.owners.append(owner)
        self.after()

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def end_work(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        self.owners.remove(owner)
        self.holdings.pool.release(owner)
        self.after()

    @precondition(lambda self: self.stores)
    @rule(data=st.data())
    def end_store(self, data: st.DataObject) -> None:
        store = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
        stored = data.draw(st.sampled_from((len(store.slots), len(store.slots), 0, 1)))
        for name, block, slot in list(zip(store.keys, store.block_ids, store.slots, strict=True)):
            assert self.arena[block] == name, "it changed while it was written"
            self.disk[slot] = name
        self.demotion.on_ended(StoreEnded(store_id=store.store_id, num_blocks=stored))
        self.after()

    @rule(start=st.integers(0, 3), length=st.integers(1, 30))
    def load(self, start: int, length: int) -> None:
        keys = [key(100 * start + place) for place in range(length)]
        reach, absent = self.promotion.reach(keys)
        pool, tier = self.holdings.pool, self.tier()
        for name in keys[:reach]:
            assert (pool.find(name) is None) == (name in absent)
        assert all(tier.slot_of(n) is not None or n in self.promotion._loading for n in absent)
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
            assert lost or self.disk[slot] == name, "it changed while it was read"
            self.arena[block] = name
        missing = self.promotion.on_ended(LoadEnded(load_id=load.load_id, num_blocks=arrived))
        assert missing == load.keys[arrived:]
        self.promotion.let_go(load.load_id)
        self.after()

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def hang_load(self, data: st.DataObject) -> None:
        """It ends as a miss after what had arrived, and the rest may still be written to."""
        load = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        arrived = 0 if self.tier().lost else data.draw(st.integers(0, len(load.slots) - 1))
        for name, block in list(zip(load.keys, load.block_ids, strict=True))[:arrived]:
            self.arena[block] = name
        ended = LoadEnded(load_id=load.load_id, num_blocks=arrived, hung=True)
        assert self.promotion.on_ended(ended) == load.keys[arrived:]
        self.promotion.let_go(load.load_id)
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
        """The disk writes once more to what it held, and lets go."""
        pool = self.holdings.pool
        for load, arrived in self.hung_loads:
            for block in load.block_ids[arrived:]:
                assert pool.key_of(block) is None and pool._num_holds[block] == 1
                self.arena[block] = key(999_999)
            self.promotion.on_returned(load.load_id)
        for store, stored in self.hung_stores:
            for slot in store.slots[stored:]:
                assert self.tier().slots.key_of(slot) is None
                self.disk[slot] = key(999_999)
            self.demotion.on_returned(store.store_id)
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
        found = self.holdings.take_snapshot()
        self.announced = dict.fromkeys(found.keys, "dram") | dict.fromkeys(found.demoted, "ssd")
        assert len(self.announced) == len(found.keys) + len(found.demoted)

    def tier(self) -> SsdTier:
        assert self.holdings.tier is not None
        return self.holdings.tier

    def after(self) -> None:
        """What the instance does at the end of each event, and the driver with it."""
        self.demotion.run()
        for action in self.outbox.take():
            match action:
                case StoreBlocks():
                    for name, block in zip(action.keys, action.block_ids, strict=True):
                        assert self.arena[block] == name
                    assert not set(action.slots) & set(self.disk), "a slot that was not given up"
                    self.stores.append(action)
                case LoadBlocks():
                    self.loads.append(action)
                case ForgetStored():
                    for slot in action.slots:
                        self.disk.pop(slot, None)
        changes = self.holdings.take_changes()
        if changes is None:
            return
        for where, names in (("dram", changes.stored), ("ssd", changes.demoted)):
            self.announced.update(dict.fromkeys(names, where))
        for name in changes.removed:
            self.announced.pop(name, None)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "holdings"):
            return
        pool, tier = self.holdings.pool, self.tier()
        pool.validate()
        tier.validate()
        for name, block in zip(pool.keys(), pool.named(), strict=True):
            assert self.arena[block] == name
        for name, slot in zip(tier.slots.keys(), tier.slots.named(), strict=True):
            assert self.disk[slot] == name
        where = dict.fromkeys(tier.slots.keys(), "ssd") | dict.fromkeys(pool.keys(), "dram")
        assert self.announced == where
        owners = {*self.owners, *self.demotion.owners, *self.promotion.owners}
        assert set(pool.owners()) <= owners and set(tier.slots.owners()) <= owners
        assert len(self.demotion.owners) == len(self.stores) + len(self.hung_stores)
        assert sum(len(store.slots) for store in self.stores) <= 48 // 16

    def teardown(self) -> None:
        """Everything under way ends, and nothing is held."""
        if not hasattr(self, "holdings"):
            return
        for owner in self.owners:
            self.holdings.pool.release(owner)
        for store in self.stores:
            self.demotion.on_ended(StoreEnded(store_id=store.store_id, num_blocks=0))
        for load in self.loads:
            self.promotion.on_ended(LoadEnded(load_id=load.load_id, num_blocks=0))
            self.promotion.let_go(load.load_id)
        for load, _ in self.hung_loads:
            self.promotion.on_returned(load.load_id)
        for store, _ in self.hung_stores:
            self.demotion.on_returned(store.store_id)
        assert not self.holdings.pool.num_held and not self.tier().slots.num_held


TiersMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestTiersMachine = TiersMachine.TestCase


def test_a_block_is_admitted_by_its_second_use() -> None:
    tier = SsdTier(8, 8, "second-use", "lru")
    assert not tier.admits(key(1), reused=False)
    assert tier.admits(key(1), reused=False), "it was dropped once, and came back"
    assert tier.admits(key(2), reused=True)
    assert SsdTier(8, 8, "always", "lru").admits(key(3), reused=False)


def test_the_memory_of_dropped_blocks_is_bounded() -> None:
    tier = SsdTier(8, 8, "second-use", "lru")
    tier.note_dropped(key(n) for n in range(1000))
    assert not tier.admits(key(0), reused=False)
    assert tier.admits(key(1000 - GHOSTS_PER_BLOCK * 16 + 1), reused=False)
    tier.validate()

"""A fake SSD: it keeps block contents when its instance dies, and it is slow and has faults.

It follows the contract of `moonpool.scheduler.actions` exactly. Each store and load ends with one
event and touches blocks at random times until then. It asserts that a slot is forgotten before it
is written again, and that a slot holds the requested key when it is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moonpool.protocol.transfer_events import (
    LoadReturned,
    StoreEnded,
    StoreLost,
    StoreReturned,
    TierPaused,
    TierResumed,
)
from moonpool.scheduler.actions import ForgetStored, LoadBlocks, LookUpBlocks, StoreBlocks
from moonpool.types import BlockId, BlockKey
from tests.sim.loads import LoadOperation
from tests.sim.messenger import GARBAGE
from tests.sim.truth import Content

if TYPE_CHECKING:
    from tests.sim.node import Life


@dataclass
class Stored:
    key: BlockKey
    layers: list[Content]
    flipped: bool = False  # one of the block's slices does not match its checksum


@dataclass
class Disk:
    """Holds the content of one instance's SSD, least recently used first; the content outlives the
    instance."""

    slots: dict[int, Stored] = field(default_factory=dict)

    def index(self) -> list[tuple[int, BlockKey]]:
        return [(slot, stored.key) for slot, stored in self.slots.items()]

    def use(self, slot: int) -> None:
        self.slots[slot] = self.slots.pop(slot)


class DiskDriver:
    """Performs the storage actions of one incarnation of an instance."""

    def __init__(self, life: Life, disk: Disk) -> None:
        self.life = life
        self.disk = disk
        self.lost = False
        self._writing: set[int] = set()
        self._num_hung = 0

    def index(self) -> list[tuple[int, BlockKey]]:
        return self.disk.index()

    def look_up(self, action: LookUpBlocks) -> None:
        raise AssertionError("nobody else uses this disk: there is nothing to ask")

    def lose(self) -> None:
        """Deletes the folder with all of its content."""
        if not self.lost and self.life.alive:
            self.lost = True
            self.disk.slots.clear()
            self.life.world.seen["lost disks"] += 1
            self.life.post(StoreLost(error="the folder vanished"))

    def forget(self, action: ForgetStored) -> None:
        for slot in action.slots:
            self.disk.slots.pop(slot, None)

    def store(self, action: StoreBlocks) -> None:
        assert not self.lost, "a store after the tier was lost"
        assert len(action.keys) == len(action.block_ids) == len(action.slots) > 0
        for slot in action.slots:
            assert slot not in self.disk.slots, "a slot is written before it was forgotten"
            assert slot not in self._writing, "two writes to one slot at a time"
            self._writing.add(slot)
        if self._hangs():
            self._hang_store(action)
        else:
            self._store_next(action, 0)

    def _store_next(self, action: StoreBlocks, index: int) -> None:
        fails = self.lost or self.life.world.chance("disk_failure_rate")
        if index == len(action.slots) or fails:
            self._writing.difference_update(action.slots)
            error = "no space left" if fails and index < len(action.slots) else ""
            # A write may be complete although its report says that it failed.
            num_blocks = index if not error or self.lost else max(index - 1, 0)
            self.life.post(StoreEnded(store_id=action.store_id, num_blocks=num_blocks, error=error))
            return
        layers = range(self.life.num_layers)
        content = [self.life.read(action.block_ids[index], layer) for layer in layers]

        def finish() -> None:
            again = [self.life.read(action.block_ids[index], layer) for layer in layers]
            assert again == content, "a block changed while it was written"
            if not self.lost:
                flipped = self.life.world.chance("flip_rate")
                self.disk.slots[action.slots[index]] = Stored(action.keys[index], content, flipped)
            self._store_next(action, index + 1)

        self.life.later(finish)

    def load(self, action: LoadBlocks) -> None:
        assert not self.lost, "a load after the tier was lost"
        assert len(action.keys) == len(action.block_ids) == len(action.slots) > 0
        for slot, key in zip(action.slots, action.keys, strict=True):
            assert slot not in self._writing, "a slot is read while it is written"
            assert self.disk.slots[slot].key == key, "a slot is read that holds something else"
        load = LoadOperation(self.life, action)
        if self._hangs():
            self._hang_load(load)
            return

        def begin() -> None:
            load.begin()
            self._pump(load, load.slices())

        self.life.later(begin)

    def _hangs(self) -> bool:
        return bool(self.life.world.options.disk_hang_rate) and self.life.world.chance(
            "disk_hang_rate"
        )

    def _hang(self, end: Callable[[], None], come_back: Callable[[], None]) -> None:
        """Lets an operation hang: the operation ends with an error, and the disk returns some time
        later."""
        self._num_hung += 1
        self.life.world.seen["hung disks"] += 1

        def give_up() -> None:
            self.life.post(TierPaused(error="it does not answer"))
            end()
            self.life.later(back)

        def back() -> None:
            come_back()
            self._num_hung -= 1
            if not self._num_hung:
                self.life.post(TierResumed())

        self.life.later(give_up)

    def _hang_load(self, load: LoadOperation) -> None:
        action = load.action

        def come_back() -> None:
            for block_id in action.block_ids:
                for layer in self._layers():
                    self.life.write(block_id, layer, GARBAGE)
            self.life.post(LoadReturned(load_id=action.load_id))

        self._hang(lambda: load.end(error="hung", hung=True), come_back)

    def _hang_store(self, action: StoreBlocks) -> None:
        def come_back() -> None:
            self._writing.difference_update(action.slots)
            for slot in action.slots:
                assert slot not in self.disk.slots, "a slot was written that a hung disk held"
            self.life.post(StoreReturned(store_id=action.store_id))

        ended = StoreEnded(store_id=action.store_id, num_blocks=0, error="hung", hung=True)
        self._hang(lambda: self.life.post(ended), come_back)

    def _layers(self) -> range:
        return range(self.life.num_layers)

    def _pump(self, load: LoadOperation, slices: deque[tuple[int, int]]) -> None:
        action = load.action
        if not slices:
            load.end()
            return
        index, layer = slices.popleft()
        if self.lost or self.life.world.chance("disk_failure_rate", 0.3):
            load.end(error="cannot be read")
            return
        stored = self.disk.slots[action.slots[index]]
        assert stored.key == action.keys[index], "a slot changed while it was read"
        block_id: BlockId = action.block_ids[index]
        if stored.flipped:
            self.life.write(block_id, layer, GARBAGE)
            self.life.world.seen["flips found"] += 1
            self.life.num_damaged += 1
            load.end(corrupt=1)
            return
        load.land(index, layer, stored.layers[layer])
        self.disk.use(action.slots[index])
        self.life.later(lambda: self._pump(load, slices))

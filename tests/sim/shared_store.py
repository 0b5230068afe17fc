"""A fake store that all instances share instead of disks. The store is slow, loses blocks, and
sometimes ends.

Like `disk`, it follows the contract of `moonpool.scheduler.actions` exactly. It may hold blocks
that an instance does not know of, and may have dropped blocks that an instance stored.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from moonpool.protocol.transfer_events import LookUpEnded, StoreEnded
from moonpool.scheduler.actions import ForgetStored, LoadBlocks, LookUpBlocks, StoreBlocks
from moonpool.types import BlockKey
from tests.sim.disk import Stored
from tests.sim.loads import LoadOperation
from tests.sim.messenger import GARBAGE

if TYPE_CHECKING:
    from tests.sim.node import Life

SharedBlocks = dict[BlockKey, Stored]


class SharedStoreDriver:
    """Performs the storage actions of one incarnation of an instance."""

    def __init__(self, life: Life, blocks: SharedBlocks) -> None:
        self.life = life
        self.blocks = blocks

    def index(self) -> list[tuple[int, BlockKey]]:
        return []  # the shared store cannot list its content

    def lose(self) -> None:
        """Drops all content; the store still answers."""
        self.blocks.clear()

    def forget(self, action: ForgetStored) -> None:
        pass  # keeps the content, because other instances may use it

    def look_up(self, action: LookUpBlocks) -> None:
        assert action.keys

        def answer() -> None:
            gone = self.life.world.chance("disk_failure_rate")
            absent = (i for i, key in enumerate(action.keys) if key not in self.blocks)
            found = 0 if gone else next(absent, len(action.keys))
            self.life.world.seen["looked up and found"] += bool(found)
            error = "it is gone" if gone else ""
            self.life.post(LookUpEnded(action.lookup_id, num_blocks=found, error=error))

        self.life.later(answer)

    def store(self, action: StoreBlocks) -> None:
        assert len(action.keys) == len(action.block_ids) == len(action.slots) > 0
        self._store_next(action, 0)

    def _store_next(self, action: StoreBlocks, index: int) -> None:
        world = self.life.world
        if index == len(action.keys) or world.chance("disk_failure_rate"):
            error = "" if index == len(action.keys) else "it is gone"
            self.life.post(StoreEnded(store_id=action.store_id, num_blocks=index, error=error))
            return
        layers = range(self.life.num_layers)
        content = [self.life.read(action.block_ids[index], layer) for layer in layers]

        def finish() -> None:
            again = [self.life.read(action.block_ids[index], layer) for layer in layers]
            assert again == content, "a block changed while it was stored"
            key = action.keys[index]
            if key not in self.blocks:  # if the block is stored already, the first copy stays
                self.blocks[key] = Stored(key, content, world.chance("flip_rate"))
            while len(self.blocks) > world.options.num_slots:
                del self.blocks[next(iter(self.blocks))]
            self._store_next(action, index + 1)

        self.life.later(finish)

    def load(self, action: LoadBlocks) -> None:
        assert len(action.keys) == len(action.block_ids) == len(action.slots) > 0
        load = LoadOperation(self.life, action)

        def begin() -> None:
            load.begin()
            self._pump(load, load.slices())

        self.life.later(begin)

    def _pump(self, load: LoadOperation, slices: deque[tuple[int, int]]) -> None:
        action = load.action
        if not slices:
            load.end()
            return
        index, layer = slices.popleft()
        stored = self.blocks.get(action.keys[index])
        if stored is None or self.life.world.chance("disk_failure_rate", 0.3):
            load.end(error="it has let go of a block")
        elif stored.flipped:
            self.life.write(action.block_ids[index], layer, GARBAGE)
            self.life.world.seen["flips found"] += 1
            self.life.num_damaged += 1
            del self.blocks[stored.key]
            load.end(corrupt=1)
        else:
            load.land(index, layer, stored.layers[layer])
            self.life.later(lambda: self._pump(load, slices))

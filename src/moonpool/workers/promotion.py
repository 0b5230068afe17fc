"""Brings blocks back from the SSD, for works of this instance and for peers that read from it.

A load belongs to the instance, not to who asked first: whoever wants a block that is being loaded
waits for that load, and one that is given up leaves it to the others. A load that fails is a miss:
what did not arrive is computed, and a block that could not be read is forgotten. Where the disk
hangs, the load ends as a miss too, but what the disk may still write to stays held, by
"hung:load:<id>", until it has let go.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from moonpool.kvcache.transfers import LoadEnded
from moonpool.types import BlockId, BlockKey
from moonpool.workers.actions import ForgetStored, LoadBlocks
from moonpool.workers.holdings import Holdings
from moonpool.workers.outbox import Outbox
from moonpool.workers.rest import Rest


@dataclass(frozen=True, slots=True)
class _Load:
    keys: tuple[BlockKey, ...]
    slots: tuple[BlockId, ...]
    block_ids: tuple[BlockId, ...]
    num_sharing: int  # loads under way when it began, itself included


class Promotion:
    """The loads under way. Owners are "load:<id>" in both pools."""

    def __init__(self, holdings: Holdings, outbox: Outbox) -> None:
        self._holdings = holdings
        self._outbox = outbox
        self._loads: dict[str, _Load] = {}
        self._loading: dict[BlockKey, tuple[str, BlockId]] = {}  # the load, and where it goes
        self._rests: dict[str, Rest] = {}  # of those that come by layer
        self._hung: set[str] = set()
        self._num_loads = 0

    @property
    def owners(self) -> set[str]:
        return {_owner(load_id) for load_id in self._loads} | set(map(_hung, self._hung))

    @property
    def num_loads(self) -> int:
        return len(self._loads)

    def num_sharing(self, load_id: str) -> int:
        """Loads that shared the disk when this one began."""
        return self._loads[load_id].num_sharing

    def arriving(self, key: BlockKey, loads: Collection[str]) -> BlockId | None:
        """The block that one of these loads brings `key` into."""
        load_id, block_id = self._loading.get(key, ("", None))
        return block_id if load_id in loads else None

    def note_rest(self, load_id: str, rest: Rest) -> None:
        """Reading has begun."""
        if load_id in self._loads:
            self._rests[load_id] = rest

    def rest(self, load_id: str) -> Rest | None:
        """None: nobody knows yet, or it does not come by layer."""
        return self._rests.get(load_id)

    def size_of(self, load_id: str) -> int:
        """Blocks of a load; 0 if it has ended."""
        load = self._loads.get(load_id)
        return 0 if load is None else len(load.keys)

    def reach(self, keys: Sequence[BlockKey]) -> tuple[int, list[BlockKey]]:
        """How long a run of `keys` is here, in DRAM or on the SSD, and what of it is not in
        DRAM."""
        pool, tier = self._holdings.pool, self._holdings.tier
        absent: list[BlockKey] = []
        for index, key in enumerate(keys):
            if pool.find(key) is not None:
                continue
            if tier is None or (tier.slot_of(key) is None and key not in self._loading):
                return index, absent
            absent.append(key)
        return len(keys), absent

    def load(self, keys: Sequence[BlockKey], by_layer: bool = False) -> set[str] | None:
        """Has `keys`, which `reach` found absent just now, loaded. Returns the loads to wait for;
        None, beginning nothing, if there is no room."""
        tier, loading = self._holdings.tier, self._loading
        assert tier is not None
        waits = {loading[key][0] for key in keys if key in loading}
        new = tuple(key for key in keys if key not in loading)
        if not new:
            return waits
        self._num_loads += 1
        load_id = str(self._num_loads)
        owner = _owner(load_id)
        blocks = self._holdings.pool.allocate(owner, len(new))
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
        self._outbox.do(LoadBlocks(load_id, new, tuple(slots), tuple(blocks), by_layer))
        return waits | {load_id}

    def on_ended(self, event: LoadEnded) -> tuple[BlockKey, ...]:
        """Names what arrived, and returns what did not. All of it is held until `let_go`: those who
        waited take it before."""
        load = self._loads[event.load_id]
        tier, outbox = self._holdings.tier, self._outbox
        assert tier is not None
        for index in range(event.num_blocks):
            depth = tier.slots.depth_of(load.slots[index])
            self._holdings.pool.seal(load.block_ids[index], load.keys[index], depth)
        if event.hung:
            self._hung.add(event.load_id)
        elif event.num_blocks < len(load.keys) and not tier.lost:
            bad = load.slots[event.num_blocks]  # of those behind it, nothing is known
            tier.slots.forget([bad])
            outbox.do(ForgetStored((bad,)))
        outbox.count("loaded_blocks", event.num_blocks)
        outbox.count("loaded_bytes", event.num_bytes)
        outbox.count("corrupt_slices", event.corrupt_slices)
        outbox.count("failed_loads", 1 if event.num_blocks < len(load.keys) else 0)
        outbox.count("hung_loads", 1 if event.hung else 0)
        return load.keys[event.num_blocks :]

    def let_go(self, load_id: str) -> None:
        load = self._loads.pop(load_id)
        self._rests.pop(load_id, None)
        tier = self._holdings.tier
        assert tier is not None
        for key in load.keys:
            del self._loading[key]
        pool, owner = self._holdings.pool, _owner(load_id)
        if load_id in self._hung:
            arrived = [b for b in load.block_ids if pool.key_of(b) is not None]
            pool.release_some(owner, arrived)
            pool.hand_over(owner, _hung(load_id))
            tier.slots.hand_over(owner, _hung(load_id))
        pool.release(owner)
        tier.slots.release(owner)

    def on_returned(self, load_id: str) -> None:
        """What a hung disk held is free."""
        tier = self._holdings.tier
        assert tier is not None
        self._hung.remove(load_id)
        self._holdings.pool.release(_hung(load_id))
        tier.slots.release(_hung(load_id))


def _hung(load_id: str) -> str:
    return f"hung:load:{load_id}"


def _owner(load_id: str) -> str:
    return f"load:{load_id}"

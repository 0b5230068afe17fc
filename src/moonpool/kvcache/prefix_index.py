"""Which instance holds which blocks: the Conductor's global, soft-state index.

Fed by the workers' stored/removed events. Each instance numbers its events, and names its life by
an incarnation; a gap, or an event of another life, makes the index distrust that instance until a
snapshot arrives. Bounded by what the instances can hold: an event can only name blocks that
exist.

A block may be on its holder's SSD only; that is a bit as well, in a set of its own, which costs
nothing where no instance has an SSD tier.

Blocks that are being computed are *expected*: to a later request they are hits on that instance,
because it serves in order, but nobody else can fetch them yet.

Every instance has a row, which is its bit in the sets of holders and its place in the arrays that
`match` returns. A row is free for another instance when its own is removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moonpool.kvcache.copies import Copies, CopyNews
from moonpool.types import BlockKey, InstanceId

Depths = npt.NDArray[np.float64]
"""Whole numbers, as floats because they go into predictions."""
FEW = 8
"""So many rows are visited one by one; more are spread over the array at once."""


@dataclass(slots=True)
class _Announced:
    row: int
    bit: int
    incarnation: int
    num_blocks: int
    next_sequence: int = 0
    in_sync: bool = False
    keys: set[BlockKey] = field(default_factory=set)
    again: dict[BlockKey, int] = field(default_factory=dict)  # expected, and once more, ...


class PrefixMatch(NamedTuple):
    """Blocks of one prompt's prefix, by row: `held` now, and held or expected (`hits`). The two
    are the same array where nothing is expected; none may be written to. `held_in_dram` and
    `hits_in_dram` are how far it goes before the first block that is on the row's SSD only; None
    where no row has any of it there only."""

    held: Depths
    hits: Depths
    deepest: int  # of `held`
    few: tuple[int, ...] = ()  # rows: the largest set of deepest holders that has a FEW at most
    crowd: int = 0  # how deep the next larger set of holders goes; 0: there is none
    held_in_dram: Depths | None = None
    hits_in_dram: Depths | None = None


class PrefixIndex:
    """Longest-prefix match over all instances at once."""

    def __init__(self) -> None:
        self._holders: dict[BlockKey, int] = {}
        self._demoted: dict[BlockKey, int] = {}  # of the holders, those with it on the SSD only
        self._expecting: dict[BlockKey, int] = {}
        self._copies = Copies()
        self._instances: dict[InstanceId, _Announced] = {}
        self._bits: list[int] = []  # by row: the one object that stands for this row alone
        self._free_rows: list[int] = []

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def num_rows(self) -> int:
        """Length of what `match` returns: rows in use, and those free for the next instances."""
        return len(self._bits)

    def add_instance(self, instance_id: InstanceId, incarnation: int, num_blocks: int = 1) -> int:
        """Begins a life with nothing known: a snapshot must come before events count. `num_blocks`
        can be held in DRAM. Returns the instance's row."""
        self.remove_instance(instance_id)
        if self._free_rows:
            row = self._free_rows.pop()
        else:
            row = len(self._bits)
            self._bits.append(1 << row)
        self._instances[instance_id] = _Announced(row, self._bits[row], incarnation, num_blocks)
        return row

    def remove_instance(self, instance_id: InstanceId) -> None:
        """Forgets all of an instance's blocks; none may be expected of it. Unknown instances are
        fine."""
        announced = self._instances.pop(instance_id, None)
        if announced is None:
            return
        self._drop(announced, list(announced.keys))
        self._free_rows.append(announced.row)

    def apply(
        self,
        instance_id: InstanceId,
        incarnation: int,
        sequence: int,
        stored: Iterable[BlockKey],
        removed: Iterable[BlockKey],
        demoted: Iterable[BlockKey] = (),
    ) -> bool:
        """Takes one event: what is in DRAM, nowhere, and on the SSD only from now on. False if a
        snapshot is needed (a gap, another life, or none seen yet); the instance's blocks then count
        for nothing until it comes."""
        announced = self._instances.get(instance_id)
        if announced is None or announced.incarnation != incarnation:
            return False
        if not announced.in_sync or sequence != announced.next_sequence:
            announced.in_sync = False
            self._drop(announced, list(announced.keys))
            return False
        announced.next_sequence += 1
        self._drop(announced, removed)
        self._add(announced, stored)
        self._demote(announced, demoted)
        return True

    def load_snapshot(
        self,
        instance_id: InstanceId,
        incarnation: int,
        next_sequence: int,
        keys: Iterable[BlockKey],
        demoted: Iterable[BlockKey] = (),
    ) -> bool:
        """Replaces all that is known of the instance. False if it is of another life."""
        announced = self._instances.get(instance_id)
        if announced is None or announced.incarnation != incarnation:
            return False
        for key in announced.keys:
            self._copies.note_all_dropped(key, announced.bit)  # it forgot what it was told
        self._drop(announced, list(announced.keys))
        self._add(announced, keys)
        self._demote(announced, demoted)
        announced.next_sequence = next_sequence
        announced.in_sync = True
        return True

    def take_copy_news(self, num_keys: int) -> list[tuple[InstanceId, CopyNews]]:
        """What instances should be told of copies, from the next so many blocks (mutates)."""
        instances = self._instances.items()
        rooms = {one.bit: one.num_blocks for _, one in instances}
        news = self._copies.take_news(self._holders, self._demoted, num_keys, rooms)
        return [(name, news[one.bit]) for name, one in instances if one.bit in news]

    def expect(self, instance_id: InstanceId, keys: Iterable[BlockKey]) -> None:
        """These blocks are going to be computed there; each call needs its `unexpect`, before the
        instance is removed."""
        announced = self._instances[instance_id]
        expecting, bit = self._expecting, announced.bit
        for key in keys:
            others = expecting.get(key)
            if others is None:
                expecting[key] = bit
            elif others & bit:
                announced.again[key] = announced.again.get(key, 0) + 1
            else:
                expecting[key] = others | bit

    def unexpect(self, instance_id: InstanceId, keys: Iterable[BlockKey]) -> None:
        announced = self._instances[instance_id]
        expecting, bit, again = self._expecting, announced.bit, announced.again
        for key in keys:
            if again and key in again:
                again[key] -= 1
                if not again[key]:
                    del again[key]
            elif expecting[key] is bit:
                del expecting[key]
            else:
                self._take_bit(expecting, key, bit)

    def match(self, keys: Sequence[BlockKey]) -> PrefixMatch:
        """How much of the prefix lies where. The sets of instances that still match only shrink
        along the prompt, and change a few times, so only their changes cost anything."""
        holders, expecting = self._holders.get, self._expecting.get
        expects = not self._expecting.keys().isdisjoint(keys)
        held_ends = _shrink(holders(key, 0) for key in keys)
        hit_depths = held_depths = self._spread(held_ends)
        if expects:
            hit_ends = _shrink(holders(key, 0) | expecting(key, 0) for key in keys)
            hit_depths = self._spread(hit_ends)
        deepest = few = crowd = 0
        for alive, depth in reversed(held_ends):
            if alive > 0:
                deepest = deepest or depth
                if alive.bit_count() > FEW:
                    crowd = depth
                    break
                few = alive
        match = PrefixMatch(held_depths, hit_depths, deepest, _rows(few), crowd)
        if not self._demoted or self._demoted.keys().isdisjoint(keys):
            return match
        near = far = self._spread(self._shrink_in_dram(keys, {}))
        if expects:
            near = self._spread(self._shrink_in_dram(keys, self._expecting))
        return match._replace(held_in_dram=far, hits_in_dram=near)

    def holds(self, instance_id: InstanceId, key: BlockKey) -> bool:
        announced = self._instances.get(instance_id)
        return announced is not None and key in announced.keys

    def holders_of(self, key: BlockKey) -> list[tuple[InstanceId, bool]]:
        """Who has the block, and whether on the SSD only. Slow: for people."""
        here, demoted = self._holders.get(key, 0), self._demoted.get(key, 0)
        instances = self._instances.items()
        return [(name, bool(demoted & one.bit)) for name, one in instances if here & one.bit]

    def num_blocks(self, instance_id: InstanceId) -> int:
        announced = self._instances.get(instance_id)
        return len(announced.keys) if announced else 0

    def expected(self, instance_id: InstanceId) -> set[BlockKey]:
        """All that is being computed there. Slow: for checks."""
        bit = self._instances[instance_id].bit
        return {key for key, rows in self._expecting.items() if rows & bit}

    def validate(self) -> None:
        """Asserts that both directions of the index agree."""
        holders: dict[BlockKey, int] = {}
        used = 0
        for announced in self._instances.values():
            assert announced.bit is self._bits[announced.row]
            used |= announced.bit
            for key in announced.keys:
                holders[key] = holders.get(key, 0) | announced.bit
            for key, count in announced.again.items():
                assert count > 0 and self._expecting[key] & announced.bit
        assert holders == self._holders
        for key, demoted in self._demoted.items():
            assert demoted and not demoted & ~holders[key]
        assert all(rows and not rows & ~used for rows in self._expecting.values())
        rows = [announced.row for announced in self._instances.values()]
        assert sorted(rows + self._free_rows) == list(range(len(self._bits)))

    def _shrink_in_dram(
        self, keys: Sequence[BlockKey], expecting: dict[BlockKey, int]
    ) -> list[tuple[int, int]]:
        """As `_shrink`, of who holds the blocks in DRAM or is expected to: it ends with the first
        block that nobody does, which most prompts on SSDs begin with."""
        holders, demoted = self._holders.get, self._demoted.get
        ends: list[tuple[int, int]] = []
        alive, depth = -1, 0
        for key in keys:
            left = alive & holders(key, 0)
            below = demoted(key, 0)
            if below:
                left ^= left & below
            if expecting:
                left |= alive & expecting.get(key, 0)
            if left != alive:
                ends.append((alive, depth))
                alive = left
                if not left:
                    return ends
            depth += 1
        ends.append((alive, depth))
        return ends

    def _spread(self, ends: Sequence[tuple[int, int]]) -> Depths:
        """`ends` are nested sets of rows, largest first, each with the depth it reached."""
        depths = np.zeros(len(self._bits))
        for position, (alive, depth) in enumerate(ends):
            if depth == 0 or not alive:
                continue
            inner = ends[position + 1][0] if position + 1 < len(ends) else 0
            lost = alive ^ inner
            if lost.bit_count() <= FEW:
                for row in _rows(lost):
                    depths[row] = depth
            else:
                depths[self._rows_of(alive)] = depth  # the inner ones are overwritten in turn
        return depths

    def _rows_of(self, alive: int) -> npt.NDArray[np.bool_]:
        num_rows = len(self._bits)
        data = np.frombuffer(alive.to_bytes((num_rows + 7) // 8, "little"), dtype=np.uint8)
        return np.unpackbits(data, count=num_rows, bitorder="little").view(np.bool_)

    def _add(self, announced: _Announced, keys: Iterable[BlockKey]) -> None:
        own, holders, bit = announced.keys, self._holders, announced.bit
        demoted = self._demoted
        shared = []
        for key in keys:
            if key in own:
                if demoted and demoted.get(key, 0) & bit:
                    self._leave(demoted, key, bit)
                    shared.append(key)
                continue
            own.add(key)
            others = holders.get(key)
            if others is None:
                holders[key] = bit
            else:
                holders[key] = others | bit
                shared.append(key)
        self._copies.note(shared)

    def _drop(self, announced: _Announced, keys: Iterable[BlockKey]) -> None:
        own, holders, bit = announced.keys, self._holders, announced.bit
        demoted = self._demoted
        shared = []
        for key in keys:
            if key not in own:
                continue
            own.remove(key)
            if holders[key] is bit:
                del holders[key]
            else:
                self._take_bit(holders, key, bit)
                shared.append(key)
            if demoted and demoted.get(key, 0) & bit:
                self._leave(demoted, key, bit)
        self._copies.note_dropped(shared, bit)

    def _demote(self, announced: _Announced, keys: Iterable[BlockKey]) -> None:
        keys = tuple(keys)
        if not keys:
            return
        self._add(announced, keys)
        demoted, bit = self._demoted, announced.bit
        for key in keys:
            others = demoted.get(key)
            demoted[key] = bit if others is None else others | bit
        self._copies.note_dropped([key for key in keys if self._holders[key] is not bit], bit)

    def _leave(self, sets: dict[BlockKey, int], key: BlockKey, bit: int) -> None:
        if sets[key] is bit:
            del sets[key]
        else:
            self._take_bit(sets, key, bit)

    def _take_bit(self, sets: dict[BlockKey, int], key: BlockKey, bit: int) -> None:
        left = sets[key] ^ bit
        if not left:
            del sets[key]
        elif left.bit_count() == 1:
            # Most blocks have one holder: they share one number instead of having one each.
            sets[key] = self._bits[left.bit_length() - 1]
        else:
            sets[key] = left


def _shrink(sets: Iterable[int]) -> list[tuple[int, int]]:
    """The intersections of the first sets, of the first two and so on: each of them once, with the
    number of sets it goes on for."""
    ends: list[tuple[int, int]] = []
    alive, depth = -1, 0
    for one in sets:
        left = alive & one
        if left != alive:
            ends.append((alive, depth))
            alive = left
            if not left:
                return ends
        depth += 1
    ends.append((alive, depth))
    return ends


def _rows(alive: int) -> tuple[int, ...]:
    rows = []
    while alive:
        bit = alive & -alive
        rows.append(bit.bit_length() - 1)
        alive ^= bit
    return tuple(rows)

"""The Conductor's global, soft-state index of which instance holds which blocks.

The instances' stored and removed events keep the index up to date. Each instance numbers its events
and marks them with its incarnation. A gap in the numbers makes the index drop that instance's
blocks until a snapshot arrives; an event of another incarnation changes nothing. The index is
bounded by what the instances can hold, because events report existing blocks only.

A block may be on its holder's SSD only (*demoted*). Demoted holders are kept in a separate set,
which costs nothing where no instance has an SSD tier.

Blocks that are being computed are *expected*: to a later request they are hits on that instance,
because it serves in order, but no other instance can fetch them yet.

Sets of instances
    Every instance has a *row*: its index in the arrays that `match` returns. Rows of removed
    instances are used again. A set of instances is an int with bit `1 << row` for each member.
    Most blocks have a single holder. All these blocks share the one int object in `_bits[row]`
    instead of having an int each (28 bytes or more per block), and `holders[key]
    is bit` tests for "this instance alone" by identity: one pointer comparison, however many rows
    there are. So every set with one member must be that very object: `_take_bit` puts it back when
    a set shrinks to one member.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moonpool.kvcache.eviction.replicas import ReplicaChanges, ReplicaTracker
from moonpool.types import BlockKey, InstanceId

Depths = npt.NDArray[np.float64]
"""Prefix lengths in blocks, by row: [num_rows]. Floats, because predictions are made from them."""
FEW = 8
"""Up to this many rows are visited one by one; more rows are written to the array at once."""


@dataclass(slots=True)
class _Announced:
    """The blocks that one instance has reported."""

    row: int
    bit: int  # 1 << row, as the shared int object
    incarnation: int
    num_blocks: int
    next_sequence: int = 0
    in_sync: bool = False
    # keys in the order in which they were reported, from which owners follow
    keys: dict[BlockKey, None] = field(default_factory=dict)
    # number of further calls of `expect` for a key
    again: dict[BlockKey, int] = field(default_factory=dict)


class PrefixMatch(NamedTuple):
    """How much of one prompt's prefix each instance has, in blocks by row.

    `held` and `hits` are the same array where nothing is expected. Callers must not write to any of
    the arrays. The `_in_dram` arrays end before the first block that is on the row's SSD only; None
    if no row has any of these blocks on its SSD only.
    """

    held: Depths  # [num_rows], blocks held now
    hits: Depths  # [num_rows], blocks held or expected
    deepest: int  # the greatest length in `held`
    deepest_rows: tuple[int, ...] = ()  # the largest set of deepest holders with at most FEW rows
    crowd_depth: int = 0  # the prefix length of the next larger set; 0 if there is none
    held_in_dram: Depths | None = None
    hits_in_dram: Depths | None = None


class PrefixIndex:
    """Finds the longest cached prefix of a prompt over all instances at once."""

    def __init__(self) -> None:
        self._holders: dict[BlockKey, int] = {}
        self._demoted: dict[BlockKey, int] = {}  # holders that have the block only on the SSD
        self._expecting: dict[BlockKey, int] = {}
        self._replicas = ReplicaTracker()
        self._instances: dict[InstanceId, _Announced] = {}
        self._bits: list[int] = []  # one int object for each row, the set of this row alone
        self._free_rows: list[int] = []

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def num_rows(self) -> int:
        """Length of the arrays that `match` returns: rows in use, and rows that are free for the
        next instances."""
        return len(self._bits)

    @property
    def rows(self) -> dict[InstanceId, int]:
        """The row of each instance."""
        return {name: announced.row for name, announced in self._instances.items()}

    def add_instance(self, instance_id: InstanceId, incarnation: int, num_blocks: int = 1) -> int:
        """Adds an instance, or a new incarnation of one, without blocks. Events of the instance
        count only after a snapshot. `num_blocks` is the size of its DRAM pool. Returns the row of
        the instance."""
        self.remove_instance(instance_id)
        if self._free_rows:
            row = self._free_rows.pop()
        else:
            row = len(self._bits)
            self._bits.append(1 << row)
        self._instances[instance_id] = _Announced(row, self._bits[row], incarnation, num_blocks)
        return row

    def remove_instance(self, instance_id: InstanceId) -> None:
        """Removes an instance, if known, with its blocks. No blocks may be expected of the
        instance."""
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
        """Applies one event, which lists blocks that are now in DRAM, blocks that are gone, and
        blocks that are on the SSD only. Returns False if a snapshot is needed: after a gap or
        before the first snapshot, when the instance's blocks are dropped until it arrives, and for
        an unknown instance or another incarnation, when nothing changes."""
        announced = self._instances.get(instance_id)
        if announced is None or announced.incarnation != incarnation:
            return False
        if not announced.in_sync or sequence != announced.next_sequence:
            announced.in_sync = False
            self._drop(announced, list(announced.keys))
            return False
        announced.next_sequence += 1
        if removed:
            self._drop(announced, removed)
        if stored:
            self._add(announced, stored)
        if demoted:
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
        """Replaces all that is known about the instance's blocks. Returns False, changing nothing,
        for a snapshot of an unknown instance or of another incarnation."""
        announced = self._instances.get(instance_id)
        if announced is None or announced.incarnation != incarnation:
            return False
        for key in announced.keys:
            # the instance dropped all its marks
            self._replicas.note_all_dropped(key, announced.bit)
        self._drop(announced, list(announced.keys))
        self._add(announced, keys)
        self._demote(announced, demoted)
        announced.next_sequence = next_sequence
        announced.in_sync = True
        return True

    def take_replica_changes(self, num_keys: int) -> list[tuple[InstanceId, ReplicaChanges]]:
        """Returns what each instance must be told about replicas, from the oldest changes of up to
        `num_keys` blocks."""
        instances = self._instances.items()
        capacities = {one.bit: one.num_blocks for _, one in instances}
        changes = self._replicas.take_changes(self._holders, self._demoted, num_keys, capacities)
        return [(name, changes[one.bit]) for name, one in instances if one.bit in changes]

    def park(self, instance_id: InstanceId, keys: Iterable[BlockKey]) -> None:
        """Notes that the instance is told to let these blocks leave its DRAM first, whether they
        are spare or not."""
        bit, demoted = self._instances[instance_id].bit, self._demoted
        self._replicas.park((key for key in keys if not demoted.get(key, 0) & bit), bit)

    def unpark(self, instance_id: InstanceId, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Undoes `park`. Returns the blocks without those that the instance knows to be spare."""
        return self._replicas.unpark(keys, self._instances[instance_id].bit)

    def expect(self, instance_id: InstanceId, keys: Iterable[BlockKey]) -> None:
        """Notes that these blocks will be computed on the instance. Each call needs its `unexpect`
        before the instance is removed."""
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
        """Undoes one call of `expect` for these blocks."""
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
        """Returns how much of the prefix each instance has. The set of matching instances only
        shrinks along the prompt, and only a few times, so the search costs time per change, not per
        block."""
        holders, expecting = self._holders.get, self._expecting.get
        expects = not self._expecting.keys().isdisjoint(keys)
        levels = _levels(holders(key, 0) for key in keys)
        hits = held = self._depths(levels)
        if expects:
            hits = self._depths(_levels(holders(key, 0) | expecting(key, 0) for key in keys))
        deepest = deepest_set = crowd_depth = 0
        for matching, depth in reversed(levels):
            if matching > 0:
                deepest = deepest or depth
                if matching.bit_count() > FEW:
                    crowd_depth = depth
                    break
                deepest_set = matching
        match = PrefixMatch(held, hits, deepest, _rows(deepest_set), crowd_depth)
        if not self._demoted or self._demoted.keys().isdisjoint(keys):
            return match
        hits_in_dram = held_in_dram = self._depths(self._levels_in_dram(keys, {}))
        if expects:
            hits_in_dram = self._depths(self._levels_in_dram(keys, self._expecting))
        return match._replace(held_in_dram=held_in_dram, hits_in_dram=hits_in_dram)

    def holds(self, instance_id: InstanceId, key: BlockKey) -> bool:
        """Whether the instance has the block, in DRAM or on its SSD."""
        announced = self._instances.get(instance_id)
        return announced is not None and key in announced.keys

    def holders_of(self, key: BlockKey) -> list[tuple[InstanceId, bool]]:
        """Returns the instances that have the block, and whether each has it on the SSD only. This
        method is slow; use it for inspection only."""
        here, demoted = self._holders.get(key, 0), self._demoted.get(key, 0)
        instances = self._instances.items()
        return [(name, bool(demoted & one.bit)) for name, one in instances if here & one.bit]

    def num_blocks(self, instance_id: InstanceId) -> int:
        """Returns the number of blocks that the instance has reported."""
        announced = self._instances.get(instance_id)
        return len(announced.keys) if announced else 0

    def expected(self, instance_id: InstanceId) -> set[BlockKey]:
        """Returns all blocks that the instance is expected to compute. This method is slow; use it
        for checks only."""
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
        self._replicas.validate(holders, self._demoted)
        assert all(rows and not rows & ~used for rows in self._expecting.values())
        rows = [announced.row for announced in self._instances.values()]
        assert sorted(rows + self._free_rows) == list(range(len(self._bits)))

    def _levels_in_dram(
        self, keys: Sequence[BlockKey], expecting: dict[BlockKey, int]
    ) -> list[Level]:
        """Returns what `_levels` does, for the instances that hold the blocks in DRAM or are
        expected to. Ends at the first block that no instance has in DRAM, often the very first of a
        prompt on SSDs."""
        holders, demoted = self._holders.get, self._demoted.get
        levels: list[Level] = []
        matching, depth = -1, 0
        for key in keys:
            left = matching & holders(key, 0)
            on_ssd = demoted(key, 0)
            if on_ssd:
                left ^= left & on_ssd
            if expecting:
                left |= matching & expecting.get(key, 0)
            if left != matching:
                levels.append((matching, depth))
                matching = left
                if not left:
                    return levels
            depth += 1
        levels.append((matching, depth))
        return levels

    def _depths(self, levels: Sequence[Level]) -> Depths:
        """Returns the depth of each row, from nested sets of rows, the largest first."""
        depths = np.zeros(len(self._bits))
        for position, (matching, depth) in enumerate(levels):
            if depth == 0 or not matching:
                continue
            inner = levels[position + 1][0] if position + 1 < len(levels) else 0
            ended = matching ^ inner
            if ended.bit_count() <= FEW:
                for row in _rows(ended):
                    depths[row] = depth
            else:
                depths[self._mask(matching)] = depth  # smaller sets overwrite larger ones
        return depths

    def _mask(self, members: int) -> npt.NDArray[np.bool_]:
        """Returns the set as booleans by row: [num_rows]."""
        num_rows = len(self._bits)
        data = np.frombuffer(members.to_bytes((num_rows + 7) // 8, "little"), dtype=np.uint8)
        return np.unpackbits(data, count=num_rows, bitorder="little").view(np.bool_)

    def _add(self, announced: _Announced, keys: Iterable[BlockKey]) -> None:
        """Records that the instance has these blocks in DRAM now."""
        own, holders, bit = announced.keys, self._holders, announced.bit
        demoted = self._demoted
        shared = []
        for key in keys:
            if key in own:
                if demoted and demoted.get(key, 0) & bit:
                    self._discard(demoted, key, bit)
                    shared.append(key)
                continue
            own[key] = None
            others = holders.setdefault(key, bit)
            if others is not bit:
                holders[key] = others | bit
                shared.append(key)
        if shared:
            self._replicas.note(shared)

    def _drop(self, announced: _Announced, keys: Iterable[BlockKey]) -> None:
        """Records that the instance does not have these blocks any more."""
        own, holders, bit = announced.keys, self._holders, announced.bit
        if self._replicas.has_parked:
            keys = tuple(keys)
            self._replicas.unpark(keys, bit)
        demoted = self._demoted
        shared = []
        for key in keys:
            if own.pop(key, 0) is not None:
                continue
            if holders[key] is bit:
                del holders[key]
            else:
                self._take_bit(holders, key, bit)
                shared.append(key)
            if demoted and demoted.get(key, 0) & bit:
                self._discard(demoted, key, bit)
        if shared:
            self._replicas.note_dropped(shared, bit)

    def _demote(self, announced: _Announced, keys: Iterable[BlockKey]) -> None:
        """Records that the instance has these blocks on its SSD only."""
        keys = tuple(keys)
        if not keys:
            return
        self._add(announced, keys)
        demoted, bit = self._demoted, announced.bit
        if self._replicas.has_parked:
            self._replicas.unpark(keys, bit)
        for key in keys:
            others = demoted.get(key)
            demoted[key] = bit if others is None else others | bit
        self._replicas.note_dropped([key for key in keys if self._holders[key] is not bit], bit)

    def _discard(self, sets: dict[BlockKey, int], key: BlockKey, bit: int) -> None:
        """Removes the instance from the key's set, and the key when its set is empty."""
        if sets[key] is bit:
            del sets[key]
        else:
            self._take_bit(sets, key, bit)

    def _take_bit(self, sets: dict[BlockKey, int], key: BlockKey, bit: int) -> None:
        """Takes one member out of a set that may have others."""
        left = sets[key] ^ bit
        if not left:
            del sets[key]
        elif left.bit_count() == 1:
            # the shared object of this row (see the module docstring)
            sets[key] = self._bits[left.bit_length() - 1]
        else:
            sets[key] = left


Level = tuple[int, int]
"""A set of instances, and how many blocks of the prefix all members have."""


def _levels(sets: Iterable[int]) -> list[Level]:
    """Returns the distinct intersections of the first set, the first two, and so on: each with the
    number of sets in it. The first intersection is -1, the set of all instances."""
    levels: list[Level] = []
    matching, depth = -1, 0
    for one in sets:
        left = matching & one
        if left != matching:
            levels.append((matching, depth))
            matching = left
            if not left:
                return levels
        depth += 1
    levels.append((matching, depth))
    return levels


def _rows(members: int) -> tuple[int, ...]:
    """Returns the rows in the set, in rising order."""
    rows = []
    while members:  # a generator such as `bits_of` would take twice the time
        bit = members & -members
        rows.append(bit.bit_length() - 1)
        members ^= bit
    return tuple(rows)

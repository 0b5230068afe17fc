"""Which instance holds which blocks: the Conductor's global, soft-state index.

Fed by the workers' stored/removed events. Each instance numbers its events, and names its life by
an incarnation; a gap, or an event of another life, makes the index distrust that instance until a
snapshot arrives. Bounded by what the instances can hold: an event can only name blocks that
exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moonpool.types import BlockKey, InstanceId


@dataclass(slots=True)
class _Announced:
    bit: int
    incarnation: int
    next_sequence: int = 0
    in_sync: bool = False
    keys: set[BlockKey] = field(default_factory=set)


class PrefixIndex:
    """Longest-prefix match over all instances at once, one bit per instance."""

    def __init__(self) -> None:
        self._holders: dict[BlockKey, int] = {}
        self._instances: dict[InstanceId, _Announced] = {}
        self._instance_of_bit: dict[int, InstanceId] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add_instance(self, instance_id: InstanceId, incarnation: int) -> None:
        """Begins a life with nothing known: a snapshot must come before events count."""
        self.remove_instance(instance_id)
        bit = 1
        while bit in self._instance_of_bit:
            bit <<= 1
        self._instance_of_bit[bit] = instance_id
        self._instances[instance_id] = _Announced(bit, incarnation)

    def remove_instance(self, instance_id: InstanceId) -> None:
        """Forgets all of an instance's blocks. Unknown instances are fine."""
        announced = self._instances.pop(instance_id, None)
        if announced is None:
            return
        self._drop(announced, list(announced.keys))
        del self._instance_of_bit[announced.bit]

    def apply(
        self,
        instance_id: InstanceId,
        incarnation: int,
        sequence: int,
        stored: Iterable[BlockKey],
        removed: Iterable[BlockKey],
    ) -> bool:
        """Takes one event. False if a snapshot is needed (a gap, another life, or none seen yet);
        the instance's blocks then count for nothing until it comes."""
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
        return True

    def load_snapshot(
        self,
        instance_id: InstanceId,
        incarnation: int,
        next_sequence: int,
        keys: Iterable[BlockKey],
    ) -> bool:
        """Replaces all that is known of the instance. False if it is of another life."""
        announced = self._instances.get(instance_id)
        if announced is None or announced.incarnation != incarnation:
            return False
        self._drop(announced, list(announced.keys))
        self._add(announced, keys)
        announced.next_sequence = next_sequence
        announced.in_sync = True
        return True

    def match(self, keys: Sequence[BlockKey]) -> dict[InstanceId, int]:
        """Blocks of the prefix that each instance holds; instances that hold none are left out."""
        matched: dict[InstanceId, int] = {}
        alive = -1
        depth = 0
        for depth, key in enumerate(keys):
            holders = self._holders.get(key, 0)
            lost = alive & ~holders if depth else 0
            while lost:
                bit = lost & -lost
                matched[self._instance_of_bit[bit]] = depth
                lost ^= bit
            alive &= holders
            if not alive:
                return matched
        if keys:
            while alive:
                bit = alive & -alive
                matched[self._instance_of_bit[bit]] = depth + 1
                alive ^= bit
        return matched

    def num_blocks(self, instance_id: InstanceId) -> int:
        announced = self._instances.get(instance_id)
        return len(announced.keys) if announced else 0

    def validate(self) -> None:
        """Asserts that both directions of the index agree."""
        rebuilt: dict[BlockKey, int] = {}
        for announced in self._instances.values():
            for key in announced.keys:
                rebuilt[key] = rebuilt.get(key, 0) | announced.bit
        assert rebuilt == self._holders

    def _add(self, announced: _Announced, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            announced.keys.add(key)
            self._holders[key] = self._holders.get(key, 0) | announced.bit

    def _drop(self, announced: _Announced, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            if key not in announced.keys:
                continue
            announced.keys.remove(key)
            left = self._holders[key] & ~announced.bit
            if left:
                self._holders[key] = left
            else:
                del self._holders[key]

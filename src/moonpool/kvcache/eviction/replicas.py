"""Decides which instance owns each replicated block, and which instances must be notified of
changes.

Of several holders of a block, one is its *owner* and keeps it; to the others the block is spare
(`kvcache.eviction.replica_aware`). Each holder owns a share of the blocks in proportion to its
pool, so that a block stays equally long wherever it is owned. If every holder could drop its
replica first, the holders with the most traffic for their pool (a lone decode instance) would drop
replicas that have become the last ones. Consecutive blocks of a prompt with the same holders have
the same owner, because a prefix is matched as a whole on one instance.

`ReplicaOwners` stores nothing about blocks that one instance holds alone, and sends no message
itself. A lost notification makes an instance keep a replica too long; a late one can let it drop a
last copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple
from zlib import crc32

from moonpool.types import BlockKey


class ReplicaChanges(NamedTuple):
    """Changes for one instance, of blocks in its DRAM."""

    spare: list[BlockKey]  # blocks of which another instance owns a replica from now on
    last: list[BlockKey]  # blocks of which no other instance owns a replica any more


class ReplicaOwners:
    """Chooses the owners of replicated blocks, block after block of each prompt. An instance is one
    bit of an int, and a set of instances is the sum of their bits."""

    def __init__(self, capacities: Mapping[int, int]) -> None:
        """`capacities`: number of blocks of each instance's pool, by the instance's bit."""
        self._capacities = capacities
        self._holders = 0  # the set of holders of the preceding block
        self._owner = 0

    def of(self, key: BlockKey, holders: int) -> int:
        """Returns the bit of the block's owner, which is one of `holders`."""
        if holders != self._holders:
            both = holders & self._holders
            same_prompt = both == holders or both == self._holders
            if not (same_prompt and self._owner & holders):
                self._owner = self._drawn(key, list(bits_of(holders)))
            self._holders = holders
        return self._owner

    def _drawn(self, key: BlockKey, holders: Sequence[int]) -> int:
        """Draws one of the holders by the key's checksum, each in proportion to its capacity. (A
        checksum, because the keys of a trace are consecutive numbers.)"""
        left = crc32(key) / (1 << 32) * sum(self._capacities[bit] for bit in holders)
        for bit in holders:
            left -= self._capacities[bit]
            if left < 0:
                return bit
        return holders[-1]


def bits_of(instances: int) -> Iterator[int]:
    """Yields the single bits of a set, the lowest first."""
    while instances:
        bit = instances & -instances
        instances ^= bit
        yield bit


class ReplicaTracker:
    """Follows which replicated blocks changed, and which instances know that a block is spare.
    Instances are bits, as in `PrefixIndex`."""

    def __init__(self) -> None:
        self._changed: dict[BlockKey, None] = {}
        # instances that know that the block is spare, by key
        self._notified: dict[BlockKey, int] = {}
        # instances where the block leaves first for another reason, by key
        self._parked: dict[BlockKey, int] = {}

    def note(self, keys: Iterable[BlockKey]) -> None:
        """Notes that the holders of these blocks changed, and are or were more than one."""
        self._changed.update(dict.fromkeys(keys))

    def note_dropped(self, keys: Iterable[BlockKey], bit: int) -> None:
        """Notes that one of several holders lost these blocks, and with them their marks."""
        notified_of = self._notified
        for key in keys:
            self._changed[key] = None
            notified = notified_of.get(key, 0)
            if notified & bit:
                notified_of[key] = notified ^ bit

    def note_all_dropped(self, key: BlockKey, bit: int) -> None:
        """Like `note_dropped`, for blocks that may never have been spare."""
        if self._notified.get(key, 0) & bit:
            self.note_dropped((key,), bit)

    @property
    def has_parked(self) -> bool:
        """Whether some blocks leave an instance first for another reason than their replicas."""
        return bool(self._parked)

    def park(self, keys: Iterable[BlockKey], bit: int) -> None:
        """Notes that these blocks leave the instance first, even the last replica of a block."""
        parked = self._parked
        for key in keys:
            parked[key] = parked.get(key, 0) | bit

    def unpark(self, keys: Iterable[BlockKey], bit: int) -> list[BlockKey]:
        """Undoes `park`. Returns the blocks that no longer leave the instance first, because they
        are not spare there either."""
        parked, notified = self._parked, self._notified
        found: list[BlockKey] = []
        for key in keys:
            instances = parked.pop(key, 0)
            if instances & ~bit:
                parked[key] = instances & ~bit
            if not notified.get(key, 0) & bit:
                found.append(key)
        return found

    def validate(self, holders: Mapping[BlockKey, int], demoted: Mapping[BlockKey, int]) -> None:
        """Asserts that parked blocks are in the DRAM of their instances. Arguments as in
        `take_changes`."""
        for key, instances in self._parked.items():
            assert instances and not instances & ~(holders.get(key, 0) & ~demoted.get(key, 0))

    def take_changes(
        self,
        holders: Mapping[BlockKey, int],
        demoted: Mapping[BlockKey, int],
        num_keys: int,
        capacities: Mapping[int, int],
    ) -> dict[int, ReplicaChanges]:
        """Returns each instance's new replica states, from the oldest changes of up to `num_keys`
        blocks. `holders` and `demoted` are those of `PrefixIndex`; `capacities`: number of blocks
        of each instance's DRAM pool, by the instance's bit. The result has the instances' bits as
        keys, too."""
        owners = ReplicaOwners(capacities)
        spare: defaultdict[int, list[BlockKey]] = defaultdict(list)
        last: defaultdict[int, list[BlockKey]] = defaultdict(list)
        changed, notified_of, parked_of = self._changed, self._notified, self._parked
        if len(changed) <= num_keys:
            taken, self._changed = changed, {}
        else:
            taken = dict.fromkeys(islice(changed, num_keys))
            for key in taken:
                del changed[key]
        # Most blocks have the holders of the block before, and then its owner, so their lists are
        # equal.
        here_before = notified_before = parked_before = -1
        spare_at = 0
        told: list[list[BlockKey]] = []  # the lists that got the block before
        for key in taken:
            here = holders.get(key, 0)
            if demoted:
                here &= ~demoted.get(key, 0)
            notified, parked = notified_of.pop(key, 0), parked_of.get(key, 0)
            if (here, notified, parked) != (here_before, notified_before, parked_before):
                here_before, notified_before, parked_before = here, notified, parked
                spare_at = here & ~owners.of(key, here) if here & (here - 1) else 0
                told = [spare[bit] for bit in bits_of(spare_at & ~notified)]
                told += [last[bit] for bit in bits_of(notified & here & ~(spare_at | parked))]
            if spare_at:
                notified_of[key] = spare_at
            for keys in told:
                keys.append(key)
        return {bit: ReplicaChanges(spare[bit], last[bit]) for bit in {*spare, *last}}

"""One instance's blocks in several arenas, one for each of its attention workers.

There is a `BlockPool` for each arena, under one numbering: arena 0 has the first blocks, arena 1
the next, and so on. All blocks of a sequence lie in one arena, so that its attention is computed in
one place. A cached prefix therefore ends where the next block lies in another arena. An arena may
be lost with all its content, and come back with the blocks that its attention worker still has.
This module does bookkeeping only and touches no bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain
from typing import Generic, Protocol, TypeVar

from moonpool.kvcache.block_owner import BlockOwner
from moonpool.kvcache.block_pool import BlockPool, PoolChanges
from moonpool.kvcache.eviction.policies import LruEviction
from moonpool.kvcache.eviction.replica_aware import ReplicaAwareEviction
from moonpool.types import BlockId, BlockKey


class SequenceAllocator(Protocol):
    """Allocates blocks for a sequence, wherever its arenas are. With one arena, any available block
    serves any sequence. With several (attention offloading), the blocks that a sequence already has
    decide which arenas its next blocks may come from. Implemented by `OneArena`, and by
    `PartitionedPool` and `SegmentedPool` for several arenas."""

    @property
    def max_sequence_blocks(self) -> int:
        """The most blocks that one sequence can have."""
        ...

    def allocate(
        self, owner: BlockOwner, num_blocks: int, sequence: Sequence[BlockId] = ()
    ) -> list[BlockId] | None:
        """Allocates as `BlockPool.allocate` does, for blocks that continue `sequence`: all blocks
        the sequence has so far, in order."""
        ...

    def can_extend(self, extensions: Iterable[tuple[Sequence[BlockId], int]]) -> bool:
        """Whether all of these sequences, given by their blocks, could get the given number of
        further blocks together."""
        ...

    def makes_room(self, victim: Sequence[BlockId], sequence: Sequence[BlockId]) -> bool:
        """Whether releasing the blocks of `victim` can make room for `sequence` to grow."""
        ...


class OneArena:
    """Makes a plain `BlockPool` a `SequenceAllocator`."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    @property
    def max_sequence_blocks(self) -> int:
        return self._pool.num_blocks

    def allocate(
        self, owner: BlockOwner, num_blocks: int, sequence: Sequence[BlockId] = ()
    ) -> list[BlockId] | None:
        return self._pool.allocate(owner, num_blocks)

    def can_extend(self, extensions: Iterable[tuple[Sequence[BlockId], int]]) -> bool:
        return sum(num_blocks for _, num_blocks in extensions) <= self._pool.num_available

    def makes_room(self, victim: Sequence[BlockId], sequence: Sequence[BlockId]) -> bool:
        return True


CachedBlocks = Sequence[tuple[BlockId, BlockKey]]


class PartitionedPool(BlockPool):
    """A `BlockPool` over several arenas, and the `SequenceAllocator` that uses them.

    Methods without a docstring do what their docstrings in those two classes say. `share`, `guard`,
    `hand_over` and `has_content` are not supported: they serve SSD tiers and overlapped loads,
    which need a single arena.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        make_eviction: Callable[[int], ReplicaAwareEviction] | None = None,
    ) -> None:
        """`sizes`: number of blocks of each arena. `make_eviction(size)` makes the policy of one
        arena; LRU by default."""
        assert sizes
        super().__init__(sum(sizes))
        self.sizes = tuple(sizes)
        self._make_eviction = make_eviction
        self._starts = [0, *accumulate(sizes)]
        self._policies: list[ReplicaAwareEviction] = []
        self._pools = []
        for size in sizes:
            policy, pool = self._new_arena(size)
            self._policies.append(policy)
            self._pools.append(pool)
        self._lost = [False] * len(sizes)
        self._pending = PoolChanges()  # changes of the pools that `restore` has replaced

    def _new_arena(self, size: int) -> tuple[ReplicaAwareEviction, BlockPool]:
        make = self._make_eviction
        policy = ReplicaAwareEviction(LruEviction()) if make is None else make(size)
        return policy, BlockPool(size, policy)

    # Arenas

    def arena_of(self, block_id: BlockId) -> int:
        """Returns the arena in which the block lies."""
        return bisect_right(self._starts, block_id) - 1

    def lose(self, arena: int) -> None:
        """Notes that the arena and all its content are gone: takes all of its keys away. The owners
        of its blocks must release them."""
        pool = self._pools[arena]
        pool.uncache(pool.cached_blocks())
        self._lost[arena] = True

    def restore(self, arena: int, cached: CachedBlocks) -> bool:
        """Notes that the arena is back and still has these full blocks. Returns False, changing
        nothing, while blocks of the lost arena are held."""
        pool = self._pools[arena]
        assert self._lost[arena]
        if pool.owners():
            return False
        self._note_changes(pool)
        self._policies[arena], pool = self._new_arena(self.sizes[arena])
        start = self._starts[arena]
        known = {key for key in (k for _, k in cached) if self.find(key) is not None}
        pool.adopt([(BlockId(b - start), key) for b, key in cached if key not in known])
        self._pools[arena] = pool
        self._lost[arena] = False
        return True

    def is_lost(self, arena: int) -> bool:
        return self._lost[arena]

    @property
    def any_lost(self) -> bool:
        return any(self._lost)

    def _note_changes(self, pool: BlockPool) -> None:
        changes = pool.take_changes()
        self._pending.stored += changes.stored
        self._pending.removed += changes.removed
        self._pending.evicted += changes.evicted

    def policy_of(self, block_id: BlockId) -> tuple[ReplicaAwareEviction, BlockId]:
        """The eviction policy of the block's arena, and the block's number there."""
        arena = self.arena_of(block_id)
        return self._policies[arena], BlockId(block_id - self._starts[arena])

    def policies(self) -> list[ReplicaAwareEviction]:
        return list(self._policies)

    # SequenceAllocator

    @property
    def max_sequence_blocks(self) -> int:
        return max(self.sizes)  # lost arenas count, because they will come back

    def allocate(
        self, owner: BlockOwner, num_blocks: int, sequence: Sequence[BlockId] = ()
    ) -> list[BlockId] | None:
        """A new sequence goes to an arena that has room for it: to the one that must evict fewest
        blocks for it, among equals to the one with the fewest held blocks, and then to the last
        one, which is the local one if there is one."""
        if not num_blocks:
            return []
        if sequence:
            arena = self.arena_of(sequence[-1])
        else:
            arenas = range(len(self._pools))
            arena = max(arenas, key=lambda a: self._room(a, num_blocks))
        if self._lost[arena]:
            return None
        found = self._pools[arena].allocate(owner, num_blocks)
        start = self._starts[arena]
        return None if found is None else [BlockId(b + start) for b in found]

    def can_extend(self, extensions: Iterable[tuple[Sequence[BlockId], int]]) -> bool:
        lacking = [0] * len(self._pools)
        for sequence, num_blocks in extensions:
            if num_blocks:
                lacking[self.arena_of(sequence[-1])] += num_blocks
        return all(
            not lacks or (not lost and lacks <= pool.num_available)
            for lacks, lost, pool in zip(lacking, self._lost, self._pools, strict=True)
        )

    def makes_room(self, victim: Sequence[BlockId], sequence: Sequence[BlockId]) -> bool:
        if not victim or not sequence:
            return True
        return self.arena_of(victim[-1]) == self.arena_of(sequence[-1])

    def _room(self, arena: int, num_blocks: int) -> tuple[bool, int, int, int]:
        """Returns a rank of how well a new sequence of `num_blocks` fits the arena; larger is
        better."""
        pool = self._pools[arena]
        fits = not self._lost[arena] and pool.num_available >= num_blocks
        return fits, min(pool.num_free, num_blocks), -pool.num_held, arena

    # Methods with the meaning that they have in `BlockPool`

    @property
    def num_free(self) -> int:
        return sum(pool.num_free for pool in self._alive())

    @property
    def num_evictable(self) -> int:
        return sum(pool.num_evictable for pool in self._alive())

    @property
    def num_available(self) -> int:
        return self.num_free + self.num_evictable

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_cached(self) -> int:
        return sum(pool.num_cached for pool in self._pools)

    def owners(self) -> dict[BlockOwner, int]:
        counts: dict[BlockOwner, int] = {}
        for pool in self._pools:
            for owner, count in pool.owners().items():
                counts[owner] = counts.get(owner, 0) + count
        return counts

    def keys(self) -> list[BlockKey]:
        return list(chain.from_iterable(pool.keys() for pool in self._pools))

    def cached_blocks(self) -> list[BlockId]:
        return [
            BlockId(b + start)
            for start, pool in zip(self._starts, self._pools, strict=False)
            for b in pool.cached_blocks()
        ]

    def find(self, key: BlockKey) -> BlockId | None:
        for start, pool in zip(self._starts, self._pools, strict=False):
            block = pool.find(key)
            if block is not None:
                return BlockId(block + start)
        return None

    def find_all(self, keys: Iterable[BlockKey]) -> list[BlockId]:
        return [block_id for block_id in map(self.find, keys) if block_id is not None]

    def key_of(self, block_id: BlockId) -> BlockKey | None:
        pool, own = self._own(block_id)
        return pool.key_of(own)

    def is_held(self, block_id: BlockId) -> bool:
        pool, own = self._own(block_id)
        return pool.is_held(own)

    def depth_of(self, block_id: BlockId) -> int:
        pool, own = self._own(block_id)
        return pool.depth_of(own)

    def count_uses(self, block_id: BlockId, num_uses: int) -> None:
        pool, own = self._own(block_id)
        pool.count_uses(own, num_uses)

    def num_uses(self, block_id: BlockId) -> int:
        pool, own = self._own(block_id)
        return pool.num_uses(own)

    def match(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        best: list[BlockId] = []
        for start, pool in zip(self._starts, self._pools, strict=False):
            found = pool.match(keys)
            if len(found) > len(best):
                best = [BlockId(b + start) for b in found]
        return best

    def acquire(self, owner: BlockOwner, block_ids: Iterable[BlockId]) -> None:
        for pool, own in self._by_arena(block_ids):
            pool.acquire(owner, own)

    def cache_block(self, block_id: BlockId, key: BlockKey, depth: int = 0) -> bool:
        pool, own = self._own(block_id)
        if self._lost[self.arena_of(block_id)]:
            return False
        found = self.find(key)
        if found is not None and self.arena_of(found) != self.arena_of(block_id):
            return False  # another arena already has a block with that key
        return pool.cache_block(own, key, depth)

    def cache_run(self, block_ids: Sequence[BlockId], keys: Sequence[BlockKey], depth: int) -> None:
        for offset, (block_id, key) in enumerate(zip(block_ids, keys, strict=True)):
            self.cache_block(block_id, key, depth + offset)

    def withdraw(self, owner: BlockOwner, num_blocks: int) -> list[BlockId]:
        found: list[BlockId] = []
        for start, pool in zip(self._starts, self._pools, strict=False):
            for block in pool.withdraw(owner, num_blocks - len(found)):
                found.append(BlockId(block + start))
        return found

    def uncache(self, block_ids: Iterable[BlockId]) -> None:
        for pool, own in self._by_arena(block_ids):
            pool.uncache(own)

    def adopt(self, cached: Iterable[tuple[BlockId, BlockKey]]) -> list[BlockId]:
        refused: list[BlockId] = []
        by_arena: dict[int, list[tuple[BlockId, BlockKey]]] = {}
        seen: set[BlockKey] = set()
        for block_id, key in cached:
            if key in seen or not 0 <= block_id < self.num_blocks:
                refused.append(block_id)
                continue
            seen.add(key)
            arena = self.arena_of(block_id)
            by_arena.setdefault(arena, []).append((BlockId(block_id - self._starts[arena]), key))
        for arena, own in by_arena.items():
            start = self._starts[arena]
            refused += [BlockId(b + start) for b in self._pools[arena].adopt(own)]
        return refused

    def release(self, owner: BlockOwner) -> None:
        for pool in self._pools:
            pool.release(owner)

    def release_some(self, owner: BlockOwner, block_ids: Sequence[BlockId]) -> None:
        for pool, own in self._by_arena(block_ids):
            pool.release_some(owner, own)

    @property
    def has_changes(self) -> bool:
        waiting = bool(self._pending or self._pending.evicted)
        return waiting or any(pool.has_changes for pool in self._pools)

    def take_changes(self) -> PoolChanges:
        for pool in self._pools:
            self._note_changes(pool)
        changes, self._pending = self._pending, PoolChanges()
        # A key that was lost with an arena may have come back with it.
        both = {*changes.stored} & {*changes.removed}
        if both:
            changes.stored = [k for k in changes.stored if k not in both]
            changes.removed = [k for k in changes.removed if k not in both]
            for key in sorted(both):
                there = self.find(key) is not None
                (changes.stored if there else changes.removed).append(key)
        return changes

    def validate(self) -> None:
        for pool, lost in zip(self._pools, self._lost, strict=True):
            pool.validate()
            assert not lost or not pool.num_cached
        keys = self.keys()
        assert len(set(keys)) == len(keys)

    def _alive(self) -> list[BlockPool]:
        return [p for p, lost in zip(self._pools, self._lost, strict=True) if not lost]

    def _own(self, block_id: BlockId) -> tuple[BlockPool, BlockId]:
        arena = self.arena_of(block_id)
        return self._pools[arena], BlockId(block_id - self._starts[arena])

    def _by_arena(self, block_ids: Iterable[BlockId]) -> list[tuple[BlockPool, list[BlockId]]]:
        found: dict[int, list[BlockId]] = {}
        for block_id in block_ids:
            arena = self.arena_of(block_id)
            found.setdefault(arena, []).append(BlockId(block_id - self._starts[arena]))
        return [(self._pools[arena], own) for arena, own in sorted(found.items())]


class PartitionedReplicaAwareness:
    """The methods of `ReplicaAwareEviction` that the scheduler uses, for blocks in several
    arenas."""

    def __init__(self, pool: PartitionedPool) -> None:
        self._pool = pool

    def mark(self, block_ids: Iterable[BlockId], spare: bool) -> None:
        for block_id in block_ids:
            policy, own = self._pool.policy_of(block_id)
            policy.mark([own], spare)

    def forget_marks(self) -> None:
        for policy in self._pool.policies():
            policy.forget_marks()

    def assign(self, block_ids: Sequence[BlockId], tenant: str, share: float) -> None:
        for block_id in block_ids:
            policy, own = self._pool.policy_of(block_id)
            policy.assign([own], tenant, share)

    def owner_of(self, block_id: BlockId) -> tuple[str, float] | None:
        policy, own = self._pool.policy_of(block_id)
        return policy.owner_of(own)

    def is_spare(self, block_id: BlockId) -> bool:
        policy, own = self._pool.policy_of(block_id)
        return policy.is_spare(own)

    def parent_of(self, block_id: BlockId) -> BlockId | None:
        policy, own = self._pool.policy_of(block_id)
        parent = policy.parent_of(own)
        return None if parent is None else BlockId(parent + block_id - own)

    def let_go_at(self, block_id: BlockId) -> int:
        policy, own = self._pool.policy_of(block_id)
        return policy.let_go_at(own)

    def validate(self) -> None:
        for policy in self._pool.policies():
            policy.validate()


class BlockUser(Protocol):
    """The part of a request that `ArenaTracker` reads."""

    @property
    def block_ids(self) -> Sequence[BlockId]: ...

    @property
    def fetched_blocks(self) -> Sequence[BlockId]: ...

    @property
    def target(self) -> object | None:
        """The instance to which the request's KVCache is streamed, or None."""
        ...

    @property
    def closing(self) -> bool: ...


UserT = TypeVar("UserT", bound=BlockUser)


class ArenaTracker(Generic[UserT]):
    """Tracks which arenas of an instance are lost. A returned arena can be used once no request
    holds blocks from before the loss. Requests that no other instance can take wait for the arena.
    Does nothing if `pool` has one arena only: that arena is lost with the instance."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool if isinstance(pool, PartitionedPool) else None
        self._returning: dict[int, Sequence[tuple[BlockId, BlockKey]]] = {}
        self._parked: list[UserT] = []

    def lose(self, arena: int) -> bool:
        """Takes the keys of all blocks in the arena. Returns False if the arena was lost
        already."""
        self._returning.pop(arena, None)
        if self._pool is None or self._pool.is_lost(arena):
            return False
        self._pool.lose(arena)
        return True

    def bring_back(self, arena: int, cached: Sequence[tuple[BlockId, BlockKey]]) -> None:
        """Notes that the arena is reachable again and still has these full blocks."""
        if self._pool is not None:
            if not self._pool.is_lost(arena):
                # the loss was never reported, and another arena took the place of this one
                self._pool.lose(arena)
            self._returning[arena] = cached

    def run(self) -> None:
        """Makes returned arenas usable once nobody holds blocks of the lost ones. Call this method
        after each event, because holds may have ended."""
        pool = self._pool
        if pool is None:
            return
        for arena, cached in list(self._returning.items()):
            if pool.restore(arena, cached):
                del self._returning[arena]

    def park(self, user: UserT) -> bool:
        """Lets the request wait until no arena is lost. Returns False if no arena is lost."""
        pool = self._pool
        if pool is None or not pool.any_lost:
            return False
        self._parked.append(user)
        return True

    def unpark(self) -> list[UserT]:
        """Returns the parked requests once no arena is lost."""
        if not self._parked or (self._pool is not None and self._pool.any_lost):
            return []
        parked, self._parked = self._parked, []
        return [user for user in parked if not user.closing]

    def touches(self, user: UserT, arena: int) -> bool:
        """Whether the request has blocks in the arena."""
        return self._any_in(user.block_ids, arena) or self._any_in(user.fetched_blocks, arena)

    def survives(self, user: UserT, lost_arena: int) -> bool:
        """Whether this request's share of a step that failed with the arena can be run again."""
        return user.target is None and not self.touches(user, lost_arena)

    def _any_in(self, block_ids: Sequence[BlockId], arena: int) -> bool:
        return self._pool is not None and any(self._pool.arena_of(b) == arena for b in block_ids)

"""One instance's blocks where they lie in several arenas: at its attention workers.

A `BlockPool` per arena, under one numbering: arena 0 has the first blocks, and so on. All blocks of
an owner's sequence lie in one arena, so that its attention is computed in one place; a cached
prefix therefore ends where the next block is in another one. An arena may be lost with all that is
in it, and come back with what its keeper still has. Bookkeeping only: no bytes here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain

from moonpool.kvcache.blocks import BlockPool, PoolChanges
from moonpool.kvcache.lru import LruEviction
from moonpool.kvcache.spare_first import SpareFirst
from moonpool.types import BlockId, BlockKey

Named = Sequence[tuple[BlockId, BlockKey]]


class PartitionedPool(BlockPool):
    """A `BlockPool` to whoever uses it; see there for what each method does."""

    def __init__(
        self, sizes: Sequence[int], make_eviction: Callable[[int], SpareFirst] | None = None
    ) -> None:
        assert sizes
        super().__init__(sum(sizes))
        self.sizes = tuple(sizes)
        self._make_eviction = make_eviction
        self._starts = [0, *accumulate(sizes)]
        self._policies: list[SpareFirst] = []
        self._parts = []
        for size in sizes:
            policy, pool = self._new_part(size)
            self._policies.append(policy)
            self._parts.append(pool)
        self._lost = [False] * len(sizes)
        self._pending = PoolChanges()  # of arenas that have come back since

    def _new_part(self, size: int) -> tuple[SpareFirst, BlockPool]:
        make = self._make_eviction
        policy = SpareFirst(LruEviction()) if make is None else make(size)
        return policy, BlockPool(size, policy)

    # Arenas

    def part_of(self, block_id: BlockId) -> int:
        """The arena in which the block lies."""
        return bisect_right(self._starts, block_id) - 1

    def lose(self, part: int) -> None:
        """The arena is gone with all names in it. Who held blocks of it must let go of them."""
        pool = self._parts[part]
        pool.forget(pool.named())
        self._lost[part] = True

    def restore(self, part: int, named: Named) -> bool:
        """The arena is there again, with these full blocks. False, changing nothing, while somebody
        still holds blocks of what was lost."""
        pool = self._parts[part]
        assert self._lost[part]
        if pool.owners():
            return False
        self._note_changes(pool)
        self._policies[part], pool = self._new_part(self.sizes[part])
        start = self._starts[part]
        known = {key for key in (k for _, k in named) if self.find(key) is not None}
        pool.adopt([(BlockId(b - start), key) for b, key in named if key not in known])
        self._parts[part] = pool
        self._lost[part] = False
        return True

    def is_lost(self, part: int) -> bool:
        return self._lost[part]

    @property
    def any_lost(self) -> bool:
        return any(self._lost)

    def _note_changes(self, pool: BlockPool) -> None:
        changes = pool.take_changes()
        self._pending.stored += changes.stored
        self._pending.removed += changes.removed
        self._pending.evicted += changes.evicted

    def policy_of(self, block_id: BlockId) -> tuple[SpareFirst, BlockId]:
        """Its arena's eviction, and what that calls the block."""
        part = self.part_of(block_id)
        return self._policies[part], BlockId(block_id - self._starts[part])

    def policies(self) -> list[SpareFirst]:
        return list(self._policies)

    # As in BlockPool

    @property
    def largest(self) -> int:
        return max(self.sizes)  # also if that arena is lost: it comes back

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
        return sum(pool.num_cached for pool in self._parts)

    def owners(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for pool in self._parts:
            for owner, count in pool.owners().items():
                counts[owner] = counts.get(owner, 0) + count
        return counts

    def keys(self) -> list[BlockKey]:
        return list(chain.from_iterable(pool.keys() for pool in self._parts))

    def named(self) -> list[BlockId]:
        return [
            BlockId(b + start)
            for start, pool in zip(self._starts, self._parts, strict=False)
            for b in pool.named()
        ]

    def find(self, key: BlockKey) -> BlockId | None:
        for start, pool in zip(self._starts, self._parts, strict=False):
            block = pool.find(key)
            if block is not None:
                return BlockId(block + start)
        return None

    def find_all(self, keys: Iterable[BlockKey]) -> list[BlockId]:
        return [block_id for block_id in map(self.find, keys) if block_id is not None]

    def key_of(self, block_id: BlockId) -> BlockKey | None:
        pool, own = self._own(block_id)
        return pool.key_of(own)

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
        for start, pool in zip(self._starts, self._parts, strict=False):
            found = pool.match(keys)
            if len(found) > len(best):
                best = [BlockId(b + start) for b in found]
        return best

    def has_room(self, needs: Iterable[tuple[Sequence[BlockId], int]]) -> bool:
        lacking = [0] * len(self._parts)
        for block_ids, num_blocks in needs:
            if num_blocks:
                lacking[self.part_of(block_ids[-1])] += num_blocks
        return all(
            not lacks or (not lost and lacks <= pool.num_available)
            for lacks, lost, pool in zip(lacking, self._lost, self._parts, strict=True)
        )

    def together(self, one: Sequence[BlockId], other: Sequence[BlockId]) -> bool:
        return not one or not other or self.part_of(one[-1]) == self.part_of(other[-1])

    def acquire(self, owner: str, block_ids: Iterable[BlockId]) -> None:
        for pool, own in self._by_part(block_ids):
            pool.acquire(owner, own)

    def allocate(
        self, owner: str, num_blocks: int, beside: Sequence[BlockId] = ()
    ) -> list[BlockId] | None:
        if not num_blocks:
            return []
        if beside:
            part = self.part_of(beside[-1])
        else:  # where least is attended to, names counted as room only between equals; the last
            # of several is what is kept at home
            parts = range(len(self._parts))
            part = max(parts, key=lambda p: self._room(p, num_blocks))
        if self._lost[part]:
            return None
        found = self._parts[part].allocate(owner, num_blocks)
        start = self._starts[part]
        return None if found is None else [BlockId(b + start) for b in found]

    def _room(self, part: int, num_blocks: int) -> tuple[bool, int, int, int]:
        pool = self._parts[part]
        fits = not self._lost[part] and pool.num_available >= num_blocks
        return fits, min(pool.num_free, num_blocks), -pool.num_held, part

    def seal(self, block_id: BlockId, key: BlockKey, depth: int = 0) -> bool:
        pool, own = self._own(block_id)
        if self._lost[self.part_of(block_id)]:
            return False
        found = self.find(key)
        if found is not None and self.part_of(found) != self.part_of(block_id):
            return False  # it has that name elsewhere
        return pool.seal(own, key, depth)

    def seal_run(self, block_ids: Sequence[BlockId], keys: Sequence[BlockKey], depth: int) -> None:
        for offset, (block_id, key) in enumerate(zip(block_ids, keys, strict=True)):
            self.seal(block_id, key, depth + offset)

    def withdraw(self, owner: str, num_blocks: int) -> list[BlockId]:
        found: list[BlockId] = []
        for start, pool in zip(self._starts, self._parts, strict=False):
            for block in pool.withdraw(owner, num_blocks - len(found)):
                found.append(BlockId(block + start))
        return found

    def forget(self, block_ids: Iterable[BlockId]) -> None:
        for pool, own in self._by_part(block_ids):
            pool.forget(own)

    def adopt(self, named: Iterable[tuple[BlockId, BlockKey]]) -> list[BlockId]:
        refused: list[BlockId] = []
        by_part: dict[int, list[tuple[BlockId, BlockKey]]] = {}
        seen: set[BlockKey] = set()
        for block_id, key in named:
            if key in seen or not 0 <= block_id < self.num_blocks:
                refused.append(block_id)
                continue
            seen.add(key)
            part = self.part_of(block_id)
            by_part.setdefault(part, []).append((BlockId(block_id - self._starts[part]), key))
        for part, own in by_part.items():
            start = self._starts[part]
            refused += [BlockId(b + start) for b in self._parts[part].adopt(own)]
        return refused

    def release(self, owner: str) -> None:
        for pool in self._parts:
            pool.release(owner)

    def release_some(self, owner: str, block_ids: Sequence[BlockId]) -> None:
        for pool, own in self._by_part(block_ids):
            pool.release_some(owner, own)

    @property
    def has_changes(self) -> bool:
        waiting = bool(self._pending or self._pending.evicted)
        return waiting or any(pool.has_changes for pool in self._parts)

    def take_changes(self) -> PoolChanges:
        for pool in self._parts:
            self._note_changes(pool)
        changes, self._pending = self._pending, PoolChanges()
        # What an arena lost may have come back with it.
        both = {*changes.stored} & {*changes.removed}
        if both:
            changes.stored = [k for k in changes.stored if k not in both]
            changes.removed = [k for k in changes.removed if k not in both]
            for key in sorted(both):
                there = self.find(key) is not None
                (changes.stored if there else changes.removed).append(key)
        return changes

    def validate(self) -> None:
        for pool, lost in zip(self._parts, self._lost, strict=True):
            pool.validate()
            assert not lost or not pool.num_cached
        keys = self.keys()
        assert len(set(keys)) == len(keys)

    def _alive(self) -> list[BlockPool]:
        return [p for p, lost in zip(self._parts, self._lost, strict=True) if not lost]

    def _own(self, block_id: BlockId) -> tuple[BlockPool, BlockId]:
        part = self.part_of(block_id)
        return self._parts[part], BlockId(block_id - self._starts[part])

    def _by_part(self, block_ids: Iterable[BlockId]) -> list[tuple[BlockPool, list[BlockId]]]:
        found: dict[int, list[BlockId]] = {}
        for block_id in block_ids:
            part = self.part_of(block_id)
            found.setdefault(part, []).append(BlockId(block_id - self._starts[part]))
        return [(self._parts[part], own) for part, own in sorted(found.items())]


class PartedSpares:
    """What `SpareFirst` knows, of blocks that lie in several arenas; see there."""

    def __init__(self, pool: PartitionedPool) -> None:
        self._pool = pool

    def mark(self, block_ids: Iterable[BlockId], spare: bool) -> None:
        for block_id in block_ids:
            policy, own = self._pool.policy_of(block_id)
            policy.mark([own], spare)

    def forget_marks(self) -> None:
        for policy in self._pool.policies():
            policy.forget_marks()

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

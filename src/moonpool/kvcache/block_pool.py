"""Keeps track of which owner holds which block of one instance's arena. This class does bookkeeping
only and touches no bytes.

A block is always in exactly one of three states:

    free       no key, no owner               --allocate-->  held
    held       one or more owners             --release-->   evictable if it has a key, else free
    evictable  a key, no owner                --acquire-->   held
                                              --allocate-->  held: its key is taken (eviction)

A block with a key is *cached*, whether held or evictable: a later request with the same prefix can
use it. A cached block is immutable.

An evictable block may also be *withdrawn*: an owner then holds it, and it loses its key when that
hold ends, unless a further owner has acquired it by then. So an eviction victim can be copied to
another tier before its content is gone.

Every hold has a named owner (a request, a peer's read), and `release(owner)` ends all holds of that
owner, so no single hold can be forgotten.

The pool assumes that an owner's blocks belong to one prompt, in the order of that prompt. The
eviction policy learns from that order which block continues which.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moonpool.kvcache.block_owner import BlockOwner
from moonpool.kvcache.eviction.policies import EvictionPolicy, LruEviction
from moonpool.types import BlockId, BlockKey


@dataclass(slots=True)
class PoolChanges:
    """Net changes of the cached keys since the last `take_changes`, in no particular order.
    `evicted`: the keys that `allocate` evicted, in order, including keys that are cached again
    now."""

    stored: list[BlockKey] = field(default_factory=list)
    removed: list[BlockKey] = field(default_factory=list)
    evicted: list[BlockKey] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed)


class BlockPool:
    """The blocks 0 .. num_blocks - 1 of one arena. Methods that change the pool say so in their
    docstrings."""

    def __init__(self, num_blocks: int, eviction: EvictionPolicy | None = None) -> None:
        """`eviction`: the eviction policy, LRU if not given."""
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._evictable: EvictionPolicy = eviction if eviction is not None else LruEviction()
        # the policy's number of evictable blocks, kept here because every event reads it
        self._num_evictable = 0
        self._free: list[BlockId] = []
        # Lists indexed by block. The arrays end at the highest block ever used, because a simulated
        # cluster has many pools, most of them nearly empty.
        self._num_holds: list[int] = []
        self._key_of: list[BlockKey | None] = []
        self._depth_of: list[int] = []  # index of a cached block in its prompt
        # number of acquisitions of a cached block since it got its key
        self._num_uses: list[int] = []
        self._withdrawn: set[BlockId] = set()
        self._block_of: dict[BlockKey, BlockId] = {}
        # held blocks whose key belongs to another block with the same content
        self._twin_key: dict[BlockId, BlockKey] = {}
        self._held_by: dict[BlockOwner, list[BlockId]] = {}
        # Keys since the last report, in order. A key that came and went is not reported.
        self._stored: dict[BlockKey, None] = {}
        self._removed: dict[BlockKey, None] = {}
        self._evicted: list[BlockKey] = []
        self._rekeyed: dict[BlockId, None] | None = None  # None until `watch_keys` is called

    # Counts

    @property
    def num_free(self) -> int:
        """Number of blocks without key and owner."""
        return self.num_blocks - len(self._num_holds) + len(self._free)

    @property
    def num_ever_used(self) -> int:
        """Number of blocks that have had an owner or a key: those with the lowest numbers."""
        return len(self._num_holds)

    @property
    def num_evictable(self) -> int:
        """Number of cached blocks without owner."""
        return self._num_evictable

    @property
    def num_available(self) -> int:
        """Number of blocks that `allocate` can return now: free and evictable ones."""
        return self.num_free + self._num_evictable

    @property
    def num_held(self) -> int:
        """Number of blocks with at least one owner."""
        return len(self._num_holds) - len(self._free) - self._num_evictable

    @property
    def num_cached(self) -> int:
        """Number of blocks with a key, held or not."""
        return len(self._block_of)

    def owners(self) -> dict[BlockOwner, int]:
        """Number of holds of each owner."""
        return {owner: len(blocks) for owner, blocks in self._held_by.items()}

    def named_owners(self) -> dict[str, int]:
        """Returns `owners` under the names that reports use."""
        return {owner.name: num_holds for owner, num_holds in self.owners().items()}

    # Cached blocks. The result of a lookup is valid until the next call that allocates, so acquire
    # the blocks before.

    def keys(self) -> list[BlockKey]:
        """Returns the keys of all cached blocks."""
        return list(self._block_of)

    def cached_blocks(self) -> list[BlockId]:
        """Returns all cached blocks, in the order of `keys`."""
        return list(self._block_of.values())

    def find(self, key: BlockKey) -> BlockId | None:
        """Returns the cached block with this key, or None."""
        return self._block_of.get(key)

    def find_all(self, keys: Iterable[BlockKey]) -> list[BlockId]:
        """Returns the cached blocks with these keys; keys that are not cached are left out."""
        return [block_id for block_id in map(self._block_of.get, keys) if block_id is not None]

    def match(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        """Returns the blocks of the longest cached prefix of `keys`."""
        blocks: list[BlockId] = []
        find = self._block_of.get
        for key in keys:
            block_id = find(key)
            if block_id is None:
                break
            blocks.append(block_id)
        return blocks

    def key_of(self, block_id: BlockId) -> BlockKey | None:
        """Returns the block's key, or None if the block is not cached."""
        return self._key_of[block_id]

    def has_content(self, block_id: BlockId, key: BlockKey) -> bool:
        """Whether `cache_block` was called for this held block with this key, even if another block
        had the key already."""
        return self._key_of[block_id] == key or self._twin_key.get(block_id) == key

    def depth_of(self, block_id: BlockId) -> int:
        """Returns a cached block's index in its prompt, as far as the index is known."""
        return self._depth_of[block_id]

    def num_uses(self, block_id: BlockId) -> int:
        """Returns how often a cached block was acquired since it got its key."""
        return self._num_uses[block_id]

    def count_uses(self, block_id: BlockId, num_uses: int) -> None:
        """Adds uses that a held block had on another instance."""
        self._num_uses[block_id] += num_uses

    # Holds

    def allocate(self, owner: BlockOwner, num_blocks: int) -> list[BlockId] | None:
        """Holds `num_blocks` blocks without keys, evicting cached ones where too few are free.
        Returns None, changing nothing, if too few blocks are available."""
        assert num_blocks >= 0
        if num_blocks > self.num_available:
            return None
        free = self._free
        blocks = [free.pop() for _ in range(min(num_blocks, len(free)))]
        holds = self._num_holds
        for block_id in blocks:
            holds[block_id] = 1
        if len(blocks) < num_blocks:
            blocks.extend(self._first_used(num_blocks - len(blocks)))
        if len(blocks) < num_blocks:
            blocks.extend(self._evict(num_blocks - len(blocks)))
        if blocks:
            self._held_by.setdefault(owner, []).extend(blocks)
        return blocks

    def acquire(self, owner: BlockOwner, block_ids: Iterable[BlockId]) -> None:
        """Adds a hold on each of these cached blocks, which must be in the order of their
        prompt."""
        blocks = list(block_ids)
        if not blocks:
            return
        holds, keys, num_uses = self._num_holds, self._key_of, self._num_uses
        idle = []
        for block_id in blocks:
            assert block_id < len(holds) and keys[block_id] is not None, "only cached blocks"
            if not holds[block_id]:
                idle.append(block_id)
            holds[block_id] += 1
            num_uses[block_id] += 1
        if self._withdrawn:
            self._bring_back(blocks)
        self._evictable.remove(idle)
        self._num_evictable -= len(idle)
        self._evictable.touch(blocks)
        self._held_by.setdefault(owner, []).extend(blocks)

    def share(self, owner: BlockOwner, block_ids: Sequence[BlockId]) -> None:
        """Adds a hold on each of these held blocks without keys; their first owner may still be
        filling them."""
        for block_id in block_ids:
            assert self._num_holds[block_id] > 0 and self._key_of[block_id] is None
            self._num_holds[block_id] += 1
        if block_ids:
            self._held_by.setdefault(owner, []).extend(block_ids)

    def guard(self, owner: BlockOwner, block_ids: Sequence[BlockId]) -> None:
        """Adds a hold that does not count as a use to each of these held, cached blocks."""
        for block_id in block_ids:
            assert self._num_holds[block_id] > 0 and self._key_of[block_id] is not None
            self._num_holds[block_id] += 1
        if block_ids:
            self._held_by.setdefault(owner, []).extend(block_ids)

    def is_held(self, block_id: BlockId) -> bool:
        """Whether a block has an owner."""
        return self._num_holds[block_id] > 0

    def withdraw(self, owner: BlockOwner, num_blocks: int) -> list[BlockId]:
        """Holds up to `num_blocks` of the blocks that would be evicted next, in that order.
        These blocks lose their keys when the hold ends, unless another owner acquires them."""
        blocks = self._pop(min(num_blocks, self._num_evictable))
        for block_id in blocks:
            self._num_holds[block_id] = 1
        self._withdrawn.update(blocks)
        if blocks:
            self._held_by.setdefault(owner, []).extend(blocks)
        return blocks

    def hand_over(self, owner: BlockOwner, heir: BlockOwner) -> None:
        """Moves all holds of `owner`, if any, to `heir`, which must have none yet."""
        assert heir not in self._held_by
        blocks = self._held_by.pop(owner, None)
        if blocks is not None:
            self._held_by[heir] = blocks

    def release(self, owner: BlockOwner) -> None:
        """Ends all holds of `owner`, if any. Later blocks of a prefix become evictable
        first, because a block is useless without its predecessor."""
        blocks = self._held_by.pop(owner, None)
        if blocks is not None:
            self._end_holds(blocks)

    def release_some(self, owner: BlockOwner, block_ids: Sequence[BlockId]) -> None:
        """Ends the owner's holds on these blocks; the owner has one hold on each of them."""
        if not block_ids:
            return
        gone = set(block_ids)
        kept = [block_id for block_id in self._held_by[owner] if block_id not in gone]
        assert len(kept) + len(block_ids) == len(self._held_by[owner])
        if kept:
            self._held_by[owner] = kept
        else:
            del self._held_by[owner]
        self._end_holds(block_ids)

    # Keys

    def cache_block(self, block_id: BlockId, key: BlockKey, depth: int = 0) -> bool:
        """Gives a full, held block the key of its content; `depth` is its index in its
        prompt. Returns False if another block has that key already: this block then stays without a
        key and becomes free when released."""
        assert self._num_holds[block_id] > 0 and self._key_of[block_id] is None
        if key in self._block_of:
            self._twin_key[block_id] = key
            return False
        self._twin_key.pop(block_id, None)
        self._set_keys((block_id,), (key,), (depth,))
        return True

    def cache_run(self, block_ids: Sequence[BlockId], keys: Sequence[BlockKey], depth: int) -> None:
        """Calls `cache_block` for consecutive blocks of a prompt, the first at index `depth`."""
        if len(keys) == 1:
            self.cache_block(block_ids[0], keys[0], depth)
            return
        holds, key_of, twins = self._num_holds, self._key_of, self._twin_key
        for block_id in block_ids:
            assert holds[block_id] > 0 and key_of[block_id] is None
        depths: Sequence[int] = range(depth, depth + len(keys))
        if len(set(keys)) < len(keys) or not self._block_of.keys().isdisjoint(keys):
            block_ids, keys, depths = self._without_twins(block_ids, keys, depths)
        if twins:
            for block_id in block_ids:
                twins.pop(block_id, None)
        if block_ids:
            self._set_keys(block_ids, keys, depths)

    def uncache(self, block_ids: Iterable[BlockId]) -> None:
        """Takes the keys of blocks whose content is void; held blocks stay held. Blocks
        without keys are ignored."""
        for block_id in block_ids:
            if self._key_of[block_id] is None:
                continue
            if block_id in self._withdrawn:
                self._withdrawn.remove(block_id)
            else:
                self._evictable.forget(block_id)
            self._take_keys((block_id,))
            if not self._num_holds[block_id]:
                self._num_evictable -= 1
                self._free.append(block_id)

    def adopt(self, cached: Iterable[tuple[BlockId, BlockKey]]) -> list[BlockId]:
        """Enters blocks that were full before this pool was made, the least recently used first.
        The pool must be unused. Returns the blocks it refuses: outside the pool, or
        with a block or key given twice."""
        assert not self._num_holds
        offered = list(cached)
        ids = [block_id for block_id, _ in offered if 0 <= block_id < self.num_blocks]
        self._grow(max(ids, default=-1) + 1)
        refused = []
        for block_id, key in offered:
            known = 0 <= block_id < self.num_blocks
            if not known or key in self._block_of or self._key_of[block_id] is not None:
                refused.append(block_id)
                continue
            self._set_keys((block_id,), (key,), (0,))
            self._add([block_id], None)
        self._free = [BlockId(b) for b, key in enumerate(self._key_of) if key is None]
        return refused

    @property
    def has_changes(self) -> bool:
        """Whether `take_changes` would return any changes."""
        return bool(self._stored or self._removed or self._evicted)

    def take_changes(self) -> PoolChanges:
        """Returns the net changes of keys since the last call, and clears them."""
        changes = PoolChanges(list(self._stored), list(self._removed), self._evicted)
        self._stored.clear()
        self._removed.clear()
        self._evicted = []
        return changes

    def watch_keys(self) -> None:
        """From now on, `take_rekeyed` returns changes."""
        self._rekeyed = {}

    def take_rekeyed(self) -> list[tuple[BlockId, BlockKey | None]]:
        """Returns the blocks that got or lost a key since the last call, with their present keys,
        and clears the list. Unlike `take_changes`, the list includes a block that lost a key and
        got it again."""
        if not self._rekeyed:
            return []
        blocks, self._rekeyed = self._rekeyed, {}
        return [(block_id, self._key_of[block_id]) for block_id in blocks]

    def validate(self) -> None:
        """Asserts that the sums balance and that every block is in exactly one state."""
        num_used = len(self._num_holds)
        assert num_used == len(self._key_of) == len(self._depth_of) <= self.num_blocks
        holds = [0] * num_used
        for blocks in self._held_by.values():
            for block_id in blocks:
                holds[block_id] += 1
        assert holds == self._num_holds
        assert self._num_evictable == len(self._evictable)
        free = set(self._free)
        assert len(free) == len(self._free)
        for block_id in map(BlockId, range(num_used)):
            states = (block_id in free, holds[block_id] > 0, block_id in self._evictable)
            assert sum(states) == 1, (block_id, states)
            cached = self._key_of[block_id] is not None
            assert not (states[0] and cached)
            assert not (states[2] and not cached)
        block_of = {key: b for b, key in enumerate(self._key_of) if key is not None}
        assert block_of == self._block_of
        assert all(holds[b] > 0 and self._key_of[b] is None for b in self._twin_key)
        assert all(holds[b] == 1 and self._key_of[b] is not None for b in self._withdrawn)

    # Inside

    def _end_holds(self, blocks: Sequence[BlockId]) -> None:
        """Ends one hold on each block. Consecutive blocks of a prompt that become evictable are
        added to the policy as one run."""
        holds, keys, depths, withdrawn = (
            self._num_holds,
            self._key_of,
            self._depth_of,
            self._withdrawn,
        )
        run: list[BlockId] = []  # blocks of one prompt, from the last to the first
        for block_id in reversed(blocks):
            holds[block_id] = left = holds[block_id] - 1
            if not left:
                if withdrawn and block_id in withdrawn:
                    self._withdrawn.remove(block_id)
                    self._take_keys((block_id,))
                if keys[block_id] is not None:
                    # The same test as in `_may_precede`, inlined because it suffices for most
                    # blocks.
                    if run and (before := depths[block_id]) > 0 and depths[run[-1]] <= before:
                        self._add(run[::-1], None)
                        run = []
                    run.append(block_id)
                    continue
                self._free.append(block_id)
            if run:
                precedes = self._may_precede(block_id, run[-1])
                self._add(run[::-1], self._cached_twin(block_id) if precedes else None)
                run = []
            if self._twin_key and not holds[block_id]:
                self._twin_key.pop(block_id, None)
        if run:
            self._add(run[::-1], None)

    def _add(self, run: list[BlockId], parent: BlockId | None) -> None:
        self._evictable.add(run, parent)
        self._num_evictable += len(run)

    def _pop(self, num_blocks: int) -> list[BlockId]:
        blocks = self._evictable.pop(num_blocks)
        self._num_evictable -= len(blocks)
        return blocks

    def _may_precede(self, block_id: BlockId, later: BlockId) -> bool:
        """Whether `later`, the next of its owner's blocks, can continue `block_id` in a prompt. The
        answer is no where an owner took blocks twice: the beginning of a prompt then follows a
        block of its middle."""
        before = self._depth_of[block_id]
        return not before or self._depth_of[later] > before

    def _cached_twin(self, block_id: BlockId) -> BlockId | None:
        """Returns the cached block with this block's content: itself, or the block that has its
        key, or None without such a block."""
        if self._key_of[block_id] is not None:
            return block_id
        key = self._twin_key.get(block_id)
        twin = None if key is None else self._block_of.get(key)
        return None if twin in self._withdrawn else twin

    def _first_used(self, num_blocks: int) -> list[BlockId]:
        """Holds up to `num_blocks` blocks that were never used."""
        start = len(self._num_holds)
        num_blocks = min(num_blocks, self.num_blocks - start)
        self._grow(start + num_blocks)
        for block_id in range(start, start + num_blocks):
            self._num_holds[block_id] = 1
        return [BlockId(b) for b in range(start, start + num_blocks)]

    def _grow(self, num_used: int) -> None:
        missing = num_used - len(self._num_holds)
        self._num_holds.extend([0] * missing)
        self._key_of.extend([None] * missing)
        self._depth_of.extend([0] * missing)
        self._num_uses.extend([0] * missing)

    def _evict(self, num_blocks: int) -> list[BlockId]:
        blocks = self._pop(num_blocks)
        for block_id in blocks:
            self._num_holds[block_id] = 1
        self._evicted += self._take_keys(blocks)
        return blocks

    def _bring_back(self, blocks: Sequence[BlockId]) -> None:
        """Gives withdrawn blocks that came back into use to the policy, which treats them as
        new."""
        for block_id in blocks:
            if block_id in self._withdrawn:
                self._withdrawn.remove(block_id)
                key = self._key_of[block_id]
                assert key is not None
                self._evictable.store((block_id,), (key,), (self._depth_of[block_id],))

    def _without_twins(
        self, block_ids: Sequence[BlockId], keys: Sequence[BlockKey], depths: Sequence[int]
    ) -> tuple[list[BlockId], list[BlockKey], list[int]]:
        """Leaves out blocks whose key another block has, and notes them as twins."""
        block_of, twins = self._block_of, self._twin_key
        new: dict[BlockKey, tuple[BlockId, int]] = {}
        for block_id, key, depth in zip(block_ids, keys, depths, strict=True):
            if key in block_of or key in new:
                twins[block_id] = key
            else:
                new[key] = block_id, depth
        return [one for one, _ in new.values()], list(new), [depth for _, depth in new.values()]

    def _set_keys(
        self, block_ids: Sequence[BlockId], keys: Sequence[BlockKey], depths: Sequence[int]
    ) -> None:
        key_of, depth_of, num_uses = self._key_of, self._depth_of, self._num_uses
        block_of, stored, removed = self._block_of, self._stored, self._removed
        for block_id, key, depth in zip(block_ids, keys, depths, strict=True):
            key_of[block_id] = key
            depth_of[block_id] = depth
            num_uses[block_id] = 0
        block_of.update(zip(keys, block_ids, strict=True))
        if not removed or removed.keys().isdisjoint(keys):
            stored.update(dict.fromkeys(keys))
        else:
            for key in keys:
                if key in removed:
                    del removed[key]
                else:
                    stored[key] = None
        self._evictable.store(block_ids, keys, depths)
        if self._rekeyed is not None:
            self._rekeyed.update(dict.fromkeys(block_ids))

    def _take_keys(self, block_ids: Sequence[BlockId]) -> list[BlockKey]:
        key_of, block_of = self._key_of, self._block_of
        stored, removed = self._stored, self._removed
        taken: list[BlockKey] = []
        if self._rekeyed is not None:
            self._rekeyed.update(dict.fromkeys(block_ids))
        for block_id in block_ids:
            key = key_of[block_id]
            assert key is not None
            key_of[block_id] = None
            del block_of[key]
            if key in stored:
                del stored[key]
            else:
                removed[key] = None
            taken.append(key)
        return taken

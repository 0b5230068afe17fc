"""Who owns which block of one instance's arena. Bookkeeping only: no bytes here.

A block is always in exactly one of three states:

    free     no name, no holder            --allocate-->  held
    held     one or more owners            --release-->   cached if it has a key, else free
    cached   a key, no holder, evictable   --acquire-->   held;  --evicted by allocate--> held anew

A cached block may also be *withdrawn*: it is held, keeps its name, and loses it with that hold,
unless somebody acquired it meanwhile. So a victim can be copied away before it is gone.

Every hold has a named owner (a request, a peer's read), and `release(owner)` ends all of its
holds, so nothing can be forgotten one by one. A sealed block (one with a key) is immutable.

An owner's blocks are taken to be a prompt's, in its order; the eviction policy learns from that
which block continues which.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moonpool.kvcache.eviction import Eviction
from moonpool.kvcache.lru import LruEviction
from moonpool.types import BlockId, BlockKey


@dataclass(slots=True)
class PoolChanges:
    """Names that appeared and vanished since the last `take_changes`, in no particular order;
    `evicted` are those that `allocate` took away, in order, also if they are back."""

    stored: list[BlockKey] = field(default_factory=list)
    removed: list[BlockKey] = field(default_factory=list)
    evicted: list[BlockKey] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed)


class BlockPool:
    """The blocks 0 .. num_blocks - 1 of one arena."""

    def __init__(self, num_blocks: int, eviction: Eviction | None = None) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._evictable: Eviction = eviction if eviction is not None else LruEviction()
        self._free: list[BlockId] = []
        # Tables grow with the blocks ever used: a simulated cluster has many pools, hardly filled.
        self._num_holds: list[int] = []
        self._key_of: list[BlockKey | None] = []
        self._depth_of: list[int] = []  # in its prompt, of a named block
        self._num_uses: list[int] = []  # how often a named block was acquired since it got its name
        self._withdrawn: set[BlockId] = set()
        self._block_of: dict[BlockKey, BlockId] = {}
        self._twin_key: dict[BlockId, BlockKey] = {}  # of held blocks whose name was taken
        self._held_by: dict[str, list[BlockId]] = {}
        # Names since the last report, in order; one that came and went is no news.
        self._stored: dict[BlockKey, None] = {}
        self._removed: dict[BlockKey, None] = {}
        self._evicted: list[BlockKey] = []

    @property
    def largest(self) -> int:
        """Blocks that one sequence can have."""
        return self.num_blocks

    def has_room(self, needs: Iterable[tuple[Sequence[BlockId], int]]) -> bool:
        """Whether each of these sequences could get so many blocks more, all together."""
        return sum(num_blocks for _, num_blocks in needs) <= self.num_available

    def together(self, one: Sequence[BlockId], other: Sequence[BlockId]) -> bool:
        """Whether room that one sequence leaves is of use to the other."""
        return True

    @property
    def num_free(self) -> int:
        """Blocks without name and holder."""
        return self.num_blocks - len(self._num_holds) + len(self._free)

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return self.num_free + len(self._evictable)

    @property
    def num_held(self) -> int:
        return len(self._num_holds) - len(self._free) - len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Blocks with a name, held or not."""
        return len(self._block_of)

    def owners(self) -> dict[str, int]:
        """Number of holds of each owner."""
        return {owner: len(blocks) for owner, blocks in self._held_by.items()}

    def keys(self) -> list[BlockKey]:
        return list(self._block_of)

    def named(self) -> list[BlockId]:
        """Blocks with a name, in the order of `keys`."""
        return list(self._block_of.values())

    def find(self, key: BlockKey) -> BlockId | None:
        """The block of this name; as safe as what `match` returns."""
        return self._block_of.get(key)

    def find_all(self, keys: Iterable[BlockKey]) -> list[BlockId]:
        """Those of the blocks that are here, as `find` would."""
        return [block_id for block_id in map(self._block_of.get, keys) if block_id is not None]

    def key_of(self, block_id: BlockId) -> BlockKey | None:
        return self._key_of[block_id]

    def has_content(self, block_id: BlockId, key: BlockKey) -> bool:
        """Whether a held block was sealed with this key, whether or not it got the name."""
        return self._key_of[block_id] == key or self._twin_key.get(block_id) == key

    def depth_of(self, block_id: BlockId) -> int:
        """A named block's place in its prompt, as far as is known."""
        return self._depth_of[block_id]

    def num_uses(self, block_id: BlockId) -> int:
        """How often a named block was acquired since it got its name."""
        return self._num_uses[block_id]

    def count_uses(self, block_id: BlockId, num_uses: int) -> None:
        """A held block was used elsewhere, before it came here (mutates)."""
        self._num_uses[block_id] += num_uses

    def match(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        """Blocks of the longest run of `keys` held here, from the first key on. Mutates nothing;
        the result is safe only until the next call that allocates: acquire it at once."""
        blocks: list[BlockId] = []
        find = self._block_of.get
        for key in keys:
            block_id = find(key)
            if block_id is None:
                break
            blocks.append(block_id)
        return blocks

    def acquire(self, owner: str, block_ids: Iterable[BlockId]) -> None:
        """Adds a hold on each block; they are in the order of their prompt. Mutates."""
        blocks = list(block_ids)
        if not blocks:
            return
        holds, names, num_uses = self._num_holds, self._key_of, self._num_uses
        idle = []
        for block_id in blocks:
            assert block_id < len(holds) and names[block_id] is not None, "only named blocks"
            if not holds[block_id]:
                idle.append(block_id)
            holds[block_id] += 1
            num_uses[block_id] += 1
        if self._withdrawn:
            self._bring_back(blocks)
        self._evictable.remove(idle)
        self._evictable.touch(blocks)
        self._held_by.setdefault(owner, []).extend(blocks)

    def share(self, owner: str, block_ids: Sequence[BlockId]) -> None:
        """Adds a hold on nameless blocks that somebody holds, and fills perhaps. Mutates."""
        for block_id in block_ids:
            assert self._num_holds[block_id] > 0 and self._key_of[block_id] is None
            self._num_holds[block_id] += 1
        if block_ids:
            self._held_by.setdefault(owner, []).extend(block_ids)

    def allocate(
        self, owner: str, num_blocks: int, beside: Sequence[BlockId] = ()
    ) -> list[BlockId] | None:
        """Holds `num_blocks` nameless blocks, evicting cached ones if need be; all or nothing.
        `beside`: blocks of the sequence that they continue, where that makes a difference."""
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

    def seal(self, block_id: BlockId, key: BlockKey, depth: int = 0) -> bool:
        """Names a held block by its content; `depth` is its place in its prompt. False if another
        block has that name already; then this one stays nameless, and is free again when
        released."""
        assert self._num_holds[block_id] > 0 and self._key_of[block_id] is None
        if key in self._block_of:
            self._twin_key[block_id] = key
            return False
        self._twin_key.pop(block_id, None)
        self._name((block_id,), (key,), (depth,))
        return True

    def seal_run(self, block_ids: Sequence[BlockId], keys: Sequence[BlockKey], depth: int) -> None:
        """As `seal`, of blocks that follow on each other in a prompt, the first at `depth`."""
        if len(set(keys)) < len(keys) or not self._block_of.keys().isdisjoint(keys):
            for block_id, key in zip(block_ids, keys, strict=True):
                self.seal(block_id, key, depth)
                depth += 1
            return
        holds, names = self._num_holds, self._key_of
        for block_id in block_ids:
            assert holds[block_id] > 0 and names[block_id] is None
            if self._twin_key:
                self._twin_key.pop(block_id, None)
        self._name(block_ids, keys, range(depth, depth + len(keys)))

    def withdraw(self, owner: str, num_blocks: int) -> list[BlockId]:
        """Holds up to so many of the blocks that would be evicted next, in that order. They keep
        their names until the hold ends, and beyond it if somebody acquires them before."""
        blocks = self._evictable.pop(min(num_blocks, len(self._evictable)))
        for block_id in blocks:
            self._num_holds[block_id] = 1
        self._withdrawn.update(blocks)
        if blocks:
            self._held_by.setdefault(owner, []).extend(blocks)
        return blocks

    def forget(self, block_ids: Iterable[BlockId]) -> None:
        """Takes the names of blocks whose content is void. Held ones stay held."""
        for block_id in block_ids:
            if self._key_of[block_id] is None:
                continue
            if block_id in self._withdrawn:
                self._withdrawn.remove(block_id)
            else:
                self._evictable.forget(block_id)
            self._take_names((block_id,))
            if not self._num_holds[block_id]:
                self._free.append(block_id)

    def adopt(self, named: Iterable[tuple[BlockId, BlockKey]]) -> list[BlockId]:
        """Names blocks of a pool never used that are full already, the least recently used first.
        Returns those it cannot take: not in the pool, or named twice."""
        assert not self._num_holds
        offered = list(named)
        ids = [block_id for block_id, _ in offered if 0 <= block_id < self.num_blocks]
        self._grow(max(ids, default=-1) + 1)
        refused = []
        for block_id, key in offered:
            known = 0 <= block_id < self.num_blocks
            if not known or key in self._block_of or self._key_of[block_id] is not None:
                refused.append(block_id)
                continue
            self._name((block_id,), (key,), (0,))
            self._evictable.add([block_id], None)
        self._free = [BlockId(b) for b, key in enumerate(self._key_of) if key is None]
        return refused

    def release(self, owner: str) -> None:
        """Ends all holds of `owner` (none is fine). Later blocks of a prefix become evictable
        first, because a block is useless once its predecessor is gone."""
        blocks = self._held_by.pop(owner, None)
        if blocks is not None:
            self._end_holds(blocks)

    def hand_over(self, owner: str, heir: str) -> None:
        """All holds of `owner` (none is fine) are `heir`'s from now on, who has none yet."""
        assert heir not in self._held_by
        blocks = self._held_by.pop(owner, None)
        if blocks is not None:
            self._held_by[heir] = blocks

    def release_some(self, owner: str, block_ids: Sequence[BlockId]) -> None:
        """Ends the owner's holds of these blocks, of which it has one each."""
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

    def _end_holds(self, blocks: Sequence[BlockId]) -> None:
        holds, keys = self._num_holds, self._key_of
        run: list[BlockId] = []  # from the last block of the prompt to the first
        for block_id in reversed(blocks):
            holds[block_id] -= 1
            if not holds[block_id]:
                if block_id in self._withdrawn:
                    self._withdrawn.remove(block_id)
                    self._take_names((block_id,))
                if keys[block_id] is not None:
                    if run and not self._may_precede(block_id, run[-1]):
                        self._evictable.add(run[::-1], None)
                        run = []
                    run.append(block_id)
                    continue
                self._free.append(block_id)
            if run:
                precedes = self._may_precede(block_id, run[-1])
                self._evictable.add(run[::-1], self._named(block_id) if precedes else None)
                run = []
            if self._twin_key and not holds[block_id]:
                self._twin_key.pop(block_id, None)
        if run:
            self._evictable.add(run[::-1], None)

    def _may_precede(self, block_id: BlockId, later: BlockId) -> bool:
        """Whether `later`, next to it among its owner's blocks, may continue it in a prompt: who
        took blocks twice has the beginning of a prompt behind a block of its middle."""
        before = self._depth_of[block_id]
        return not before or self._depth_of[later] > before

    @property
    def has_changes(self) -> bool:
        """Whether `take_changes` would say anything."""
        return bool(self._stored or self._removed or self._evicted)

    def take_changes(self) -> PoolChanges:
        """Net changes of names since the last call."""
        changes = PoolChanges(list(self._stored), list(self._removed), self._evicted)
        self._stored.clear()
        self._removed.clear()
        self._evicted = []
        return changes

    def validate(self) -> None:
        """Asserts that the sums balance and that every block is in exactly one state."""
        num_used = len(self._num_holds)
        assert num_used == len(self._key_of) == len(self._depth_of) <= self.num_blocks
        holds = [0] * num_used
        for blocks in self._held_by.values():
            for block_id in blocks:
                holds[block_id] += 1
        assert holds == self._num_holds
        free = set(self._free)
        assert len(free) == len(self._free)
        for block_id in map(BlockId, range(num_used)):
            states = (block_id in free, holds[block_id] > 0, block_id in self._evictable)
            assert sum(states) == 1, (block_id, states)
            named = self._key_of[block_id] is not None
            assert not (states[0] and named)
            assert not (states[2] and not named)
        names = {key: b for b, key in enumerate(self._key_of) if key is not None}
        assert names == self._block_of
        assert all(holds[b] > 0 and self._key_of[b] is None for b in self._twin_key)
        assert all(holds[b] == 1 and self._key_of[b] is not None for b in self._withdrawn)

    def _first_used(self, num_blocks: int) -> list[BlockId]:
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
        blocks = self._evictable.pop(num_blocks)
        for block_id in blocks:
            self._num_holds[block_id] = 1
        self._evicted += self._take_names(blocks)
        return blocks

    def _bring_back(self, blocks: Sequence[BlockId]) -> None:
        """Withdrawn blocks are used again: to the policy, they are new."""
        for block_id in blocks:
            if block_id in self._withdrawn:
                self._withdrawn.remove(block_id)
                key = self._key_of[block_id]
                assert key is not None
                self._evictable.store((block_id,), (key,), (self._depth_of[block_id],))

    def _name(
        self, block_ids: Sequence[BlockId], keys: Sequence[BlockKey], depths: Sequence[int]
    ) -> None:
        names, depth_of, num_uses = self._key_of, self._depth_of, self._num_uses
        block_of, stored, removed = self._block_of, self._stored, self._removed
        for block_id, key, depth in zip(block_ids, keys, depths, strict=True):
            names[block_id] = key
            depth_of[block_id] = depth
            num_uses[block_id] = 0
            block_of[key] = block_id
            if key in removed:
                del removed[key]
            else:
                stored[key] = None
        self._evictable.store(block_ids, keys, depths)

    def _take_names(self, block_ids: Sequence[BlockId]) -> list[BlockKey]:
        names, block_of = self._key_of, self._block_of
        stored, removed = self._stored, self._removed
        taken: list[BlockKey] = []
        for block_id in block_ids:
            key = names[block_id]
            assert key is not None
            names[block_id] = None
            del block_of[key]
            if key in stored:
                del stored[key]
            else:
                removed[key] = None
            taken.append(key)
        return taken

    def _named(self, block_id: BlockId) -> BlockId | None:
        """The cached block with this one's content: itself, or its twin if its name was taken."""
        if self._key_of[block_id] is not None:
            return block_id
        key = self._twin_key.get(block_id)
        twin = None if key is None else self._block_of.get(key)
        return None if twin in self._withdrawn else twin

"""Evicts blocks that another instance keeps a replica of first, whatever policy is wrapped.

The Conductor marks the *spare* blocks of an instance: another instance has a replica in DRAM, owns
the block, and keeps it longest (`kvcache.eviction.replicas`). The Conductor also marks the blocks
of programs that pause for long or have ended (`conductor.programs`). A prefix is matched as a whole
on one instance, so the last copy of a block is worthless without its predecessors, even if those
have replicas elsewhere. A spare block is therefore *loose*, and may go first, only if every block
that continues it here is loose too. All other blocks are *tight*.

Loose blocks are evicted before all others: the one released longest ago first, and the end of a
prompt before its beginning. So a hot block keeps its replicas for as long as there are colder
blocks. The wrapped policy orders all other blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from moonpool.kvcache.eviction.cache_shares import CacheShareEviction
from moonpool.kvcache.eviction.policies import EvictionPolicy, WrappedEviction
from moonpool.types import BlockId, BlockKey

LIFE = 1 << 32
"""A *life* identifies one content of a block. It is the block id plus LIFE times how often the
block got or lost a key, so it is odd in units of LIFE while the block is cached."""
NO_LIFE = -1


class ReplicaAwareEviction(WrappedEviction):
    """An `EvictionPolicy` that wraps another policy."""

    def __init__(self, policy: EvictionPolicy) -> None:
        super().__init__(policy)
        self._clock = 0  # number of releases of blocks so far
        self._spare: set[BlockId] = set()
        # the loose blocks that are evictable, in the order of eviction
        self._loose: OrderedDict[BlockId, None] = OrderedDict()
        # Lists indexed by block, which grow with the blocks ever used.
        self._lives: list[int] = []
        self._parent: list[int] = []  # the life of the preceding block of the prompt
        self._let_go_at: list[int] = []  # value of `_clock` at the last release
        # number of tight blocks that continue this block in this pool
        self._num_tight: list[int] = []

    def mark(self, block_ids: Iterable[BlockId], spare: bool) -> None:
        """Marks cached blocks as spare, or removes the marks, as the Conductor reports."""
        marked, num_tight = self._spare, self._num_tight
        change = marked.add if spare else marked.discard
        for block_id in block_ids:
            if (block_id in marked) is not spare:
                change(block_id)
                if not num_tight[block_id]:
                    self._turn(block_id, spare)

    def forget_marks(self) -> None:
        """Removes all marks."""
        self.mark(sorted(self._spare), spare=False)

    def assign(self, block_ids: Sequence[BlockId], tenant: str, share: float) -> None:
        """Calls `CacheShareEviction.assign`, if such a policy is wrapped."""
        if isinstance(self._policy, CacheShareEviction):
            self._policy.assign(block_ids, tenant, share)

    def owner_of(self, block_id: BlockId) -> tuple[str, float] | None:
        """Calls `CacheShareEviction.owner_of`, or returns None if no such policy is wrapped."""
        shared = self._policy
        return shared.owner_of(block_id) if isinstance(shared, CacheShareEviction) else None

    def is_spare(self, block_id: BlockId) -> bool:
        """Whether the block is marked as spare."""
        return block_id in self._spare

    def parent_of(self, block_id: BlockId) -> BlockId | None:
        """Returns the cached block before this cached block in its prompt, or None if it is gone or
        unknown."""
        life = self._parent[block_id]
        parent = BlockId(life % LIFE)
        return parent if life != NO_LIFE and self._lives[parent] == life else None

    def let_go_at(self, block_id: BlockId) -> int:
        """Returns when a cached block was last released, counted in blocks released since the
        start."""
        return self._let_go_at[block_id]

    def store(
        self, block_ids: Sequence[BlockId], keys: Sequence[BlockKey], depths: Sequence[int]
    ) -> None:
        num_known = len(self._lives)
        if block_ids and (highest := max(block_ids)) >= num_known:
            num_used = highest + 1
            missing = num_used - num_known
            self._lives.extend(range(num_known, num_used))
            self._parent.extend([NO_LIFE] * missing)
            self._num_tight.extend([0] * missing)
            self._let_go_at.extend([0] * missing)
        lives = self._lives
        for block_id in block_ids:
            lives[block_id] += LIFE
        if self._spare:
            self._spare.difference_update(block_ids)
        self._policy.store(block_ids, keys, depths)

    def add(self, block_ids: Sequence[BlockId], parent: BlockId | None) -> None:
        self._clock += len(block_ids)
        clock, let_go_at = self._clock, self._let_go_at
        parents, lives = self._parent, self._lives
        spare, num_tight = self._spare, self._num_tight
        before = NO_LIFE if parent is None else lives[parent]
        for block_id in block_ids:
            let_go_at[block_id] = clock
            known = parents[block_id]
            if known != before and before != NO_LIFE:
                if known == NO_LIFE:
                    parents[block_id] = before
                    if block_id not in spare or num_tight[block_id]:
                        num_tight[before % LIFE] = after = num_tight[before % LIFE] + 1
                        if after == 1 and before % LIFE in spare:
                            self._turn(BlockId(before % LIFE), False)
                else:
                    self._link(block_id, before)
            before = lives[block_id]
        if spare:
            loose = self._loose
            for block_id in reversed(block_ids):
                if block_id in spare and not num_tight[block_id]:
                    loose[block_id] = None
        self._policy.add(block_ids, parent)

    def remove(self, block_ids: Sequence[BlockId]) -> None:
        if self._loose:
            for block_id in block_ids:
                self._loose.pop(block_id, None)
        self._policy.remove(block_ids)

    def pop(self, num_blocks: int) -> list[BlockId]:
        """Evicts loose blocks first, then those that the wrapped policy chooses. Raises KeyError if
        fewer are evictable."""
        if num_blocks > len(self._policy):
            raise KeyError("fewer blocks are evictable")
        popped: list[BlockId] = []
        refused: list[BlockId] = []
        evict = self._policy.evict
        while self._loose and len(popped) < num_blocks:
            block_id, _ = self._loose.popitem(last=False)
            if evict(block_id):
                # Does the work of `_end_all` in a simple case: a loose block is not counted, and no
                # tight block continues it.
                self._parent[block_id] = NO_LIFE
                self._lives[block_id] += LIFE
                popped.append(block_id)
            else:
                refused.append(block_id)
        chosen = self._policy.pop(num_blocks - len(popped))
        self._end_all(chosen)
        for block_id in reversed(refused):  # refused blocks are still loose, and still first
            if block_id in self._policy and self._is_loose(block_id):
                self._loose[block_id] = None
                self._loose.move_to_end(block_id, last=False)
        return popped + chosen

    def validate(self) -> None:
        """Asserts that the loose blocks are those that follow from the marks and the prompts."""
        num_tight = [0] * len(self._lives)
        cached = [BlockId(b) for b, life in enumerate(self._lives) if life // LIFE % 2]
        assert all(life % LIFE == b for b, life in enumerate(self._lives))
        for block_id in cached:
            parent = self.parent_of(block_id)
            if parent is not None and not self._is_loose(block_id):
                num_tight[parent] += 1
        assert num_tight == self._num_tight
        if isinstance(self._policy, CacheShareEviction):
            self._policy.validate()
        evictable = {block_id for block_id in cached if block_id in self._policy}
        assert set(self._loose) == {block_id for block_id in evictable if self._is_loose(block_id)}

    def _is_loose(self, block_id: BlockId) -> bool:
        return block_id in self._spare and not self._num_tight[block_id]

    def _link(self, block_id: BlockId, life: int) -> None:
        """Makes the block with this life the parent of `block_id`."""
        tight = not self._is_loose(block_id)
        if tight:
            self._count_tight(block_id, -1)
        self._parent[block_id] = life
        if tight:
            self._count_tight(block_id, 1)

    def _turn(self, block_id: BlockId, loose: bool) -> None:
        """Records that a block became loose or tight; the blocks before it in the prompt may
        follow."""
        spare, parents, lives, num_tight = self._spare, self._parent, self._lives, self._num_tight
        while True:
            if not loose:
                self._loose.pop(block_id, None)
            elif block_id in self._innermost:
                self._loose[block_id] = None
            life = parents[block_id]
            block_id = BlockId(life % LIFE)
            if life == NO_LIFE or lives[block_id] != life:
                return
            after = num_tight[block_id] + (-1 if loose else 1)
            num_tight[block_id] = after
            if block_id not in spare or after != (0 if loose else 1):
                return

    def _count_tight(self, block_id: BlockId, change: int) -> None:
        """Adds `change` to the number of tight blocks that continue the block's parent."""
        life = self._parent[block_id]
        if life == NO_LIFE:
            return
        parent = BlockId(life % LIFE)
        if self._lives[parent] == life:
            after = self._num_tight[parent] + change
            self._num_tight[parent] = after
            if parent in self._spare and after == (change > 0):
                self._turn(parent, change < 0)

    def _end(self, block_id: BlockId) -> None:
        self._end_all((block_id,))

    def _end_all(self, block_ids: Sequence[BlockId]) -> None:
        """Ends the lives of blocks that lost their keys. `is_spare` stays as it was until a block
        has another key."""
        spare, num_tight, loose = self._spare, self._num_tight, self._loose
        lives, parents = self._lives, self._parent
        for block_id in block_ids:
            if loose:
                loose.pop(block_id, None)
            life = parents[block_id]
            if life != NO_LIFE:
                if block_id not in spare or num_tight[block_id]:
                    parent = BlockId(life % LIFE)
                    if lives[parent] == life:
                        num_tight[parent] -= 1
                        if not num_tight[parent] and parent in spare:
                            self._turn(parent, True)
                parents[block_id] = NO_LIFE
            num_tight[block_id] = 0
            lives[block_id] += LIFE

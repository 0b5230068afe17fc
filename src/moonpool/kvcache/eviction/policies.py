"""Eviction policies: which cached blocks of one pool are dropped first when room is needed.

`EvictionPolicy` is the contract; this file has `LruEviction`, `LfuEviction` and
`LengthAwareEviction`, and `PredictiveEviction` has a separate file. `make_eviction` makes a policy
by its name. `ReplicaAwareEviction` (replica_aware.py) wraps any of these policies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Protocol

from moonpool.kvcache.eviction.predictive import PredictiveEviction
from moonpool.types import BlockId, BlockKey


class EvictionPolicy(Protocol):
    """Orders the evictable blocks of one `BlockPool`.

    A block is *cached* while it has a key, and *evictable* while it is cached and has no owner.
    The pool calls the policy at each transition of a cached block:

        store    held blocks become cached
        touch    cached blocks are used once more (just after `remove` for those that were idle)
        remove   evictable blocks are held again
        add      cached blocks lost their last holder and become evictable
        pop      the pool needs room: the policy chooses blocks, which lose their keys
        evict    a policy that wraps this one has chosen one block itself
        forget   a cached block, held or evictable, loses its key without having been chosen

    A block's life in the policy begins with `store` and ends with `pop`, `evict` or `forget`; block
    ids are then used again for other content. The pool may return a popped block to the policy by
    another `store`. Block ids lie in [0, num_blocks) and are small integers, so lists indexed by
    block are as good as dicts.

    Cost: these methods run on the instance's scheduling path, once or more per step. Each should
    take amortised O(1) per block passed or returned. State must be bounded by a small multiple of
    the pool's blocks. A policy reads no clock and draws no random numbers: it measures time by the
    blocks that went through the cache, and equal calls give equal evictions on every machine.
    """

    def store(
        self, block_ids: Sequence[BlockId], keys: Sequence[BlockKey], depths: Sequence[int]
    ) -> None:
        """Held blocks become cached under `keys`. `depths[i]` is the block's index in its prompt,
        0 for the first block. All three sequences have equal lengths."""
        ...

    def touch(self, block_ids: Sequence[BlockId]) -> None:
        """A request uses these cached blocks once more, in the order of its prompt. The touched
        blocks are held now; whether they were evictable before makes no difference."""
        ...

    def add(self, block_ids: Sequence[BlockId], parent: BlockId | None) -> None:
        """These cached blocks become evictable: consecutive blocks of one prompt, first block
        first. `parent` is the cached block before the first of them, if the pool knows it."""
        ...

    def remove(self, block_ids: Sequence[BlockId]) -> None:
        """Evictable blocks are held again, and stay cached. Raises KeyError if one was not
        evictable."""
        ...

    def pop(self, num_blocks: int) -> list[BlockId]:
        """Removes and returns `num_blocks` evictable blocks, the first to evict first; the pool
        then takes their keys. Raises KeyError if fewer are evictable."""
        ...

    def evict(self, block_id: BlockId) -> bool:
        """Removes this evictable block as if `pop` had chosen it. Returns False, changing nothing,
        if the policy must keep it because cached blocks continue it."""
        ...

    def forget(self, block_id: BlockId) -> None:
        """A cached block, evictable or held, loses its key because its content is void."""
        ...

    def __len__(self) -> int:
        """Number of evictable blocks."""
        ...

    def __contains__(self, block_id: object) -> bool:
        """Whether the block is evictable."""
        ...


_registered: dict[str, Callable[[int], EvictionPolicy]] = {}


def register_eviction(name: str, make: Callable[[int], EvictionPolicy]) -> None:
    """Adds a policy from outside the package. `make` takes the number of blocks of the pool."""
    _registered[name] = make


def make_eviction(name: str, num_blocks: int) -> EvictionPolicy:
    """Makes the policy that the configuration calls `name`, for a pool of `num_blocks` blocks.
    Raises ValueError for an unknown name."""
    match name:
        case "lru":
            return LruEviction()
        case "lfu":
            return LfuEviction()
        case "length-aware":
            return LengthAwareEviction()
        case "predictive":
            return PredictiveEviction(num_blocks)
    if name in _registered:
        return _registered[name](num_blocks)
    raise ValueError(f"unknown eviction {name!r}; known are lru, lfu, length-aware and predictive")


class LruEviction:
    """Least recently used: evicts the block released longest ago; of one release, the last block
    of the prompt first."""

    def __init__(self) -> None:
        self._order: OrderedDict[BlockId, None] = OrderedDict()

    def store(
        self, block_ids: Sequence[BlockId], keys: Sequence[BlockKey], depths: Sequence[int]
    ) -> None:
        """Does nothing, because only the moment of release counts."""

    def touch(self, block_ids: Sequence[BlockId]) -> None:
        """Does nothing, because only the moment of release counts."""

    def add(self, block_ids: Sequence[BlockId], parent: BlockId | None) -> None:
        order = self._order
        num_before = len(order)
        for block_id in reversed(block_ids):
            order[block_id] = None
        assert len(order) == num_before + len(block_ids), "a block became evictable twice"

    def remove(self, block_ids: Sequence[BlockId]) -> None:
        order = self._order
        for block_id in block_ids:
            del order[block_id]

    def pop(self, num_blocks: int) -> list[BlockId]:
        popitem = self._order.popitem
        return [popitem(last=False)[0] for _ in range(num_blocks)]

    def evict(self, block_id: BlockId) -> bool:
        del self._order[block_id]
        return True

    def forget(self, block_id: BlockId) -> None:
        self._order.pop(block_id, None)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._order


class LfuEviction:
    """Least frequently used: evicts the block with the fewest uses since it was stored; among
    equals, the one released longest ago. The uses of a block are counted until the block is
    evicted."""

    def __init__(self) -> None:
        self._num_uses: dict[BlockId, int] = {}
        self._blocks = RankedBlocks()

    def store(
        self, block_ids: Sequence[BlockId], keys: Sequence[BlockKey], depths: Sequence[int]
    ) -> None:
        self._num_uses.update(dict.fromkeys(block_ids, 1))

    def touch(self, block_ids: Sequence[BlockId]) -> None:
        num_uses = self._num_uses
        for block_id in block_ids:
            num_uses[block_id] += 1

    def add(self, block_ids: Sequence[BlockId], parent: BlockId | None) -> None:
        for block_id in reversed(block_ids):
            self._blocks.add(block_id, self._rank(block_id))

    def remove(self, block_ids: Sequence[BlockId]) -> None:
        for block_id in block_ids:
            self._blocks.remove(block_id)

    def pop(self, num_blocks: int) -> list[BlockId]:
        popped = [self._blocks.pop() for _ in range(num_blocks)]
        for block_id in popped:
            self._drop(block_id)
        return popped

    def evict(self, block_id: BlockId) -> bool:
        self._blocks.remove(block_id)
        self._drop(block_id)
        return True

    def forget(self, block_id: BlockId) -> None:
        if block_id in self._blocks:
            self._blocks.remove(block_id)
        self._drop(block_id)

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._blocks

    def _rank(self, block_id: BlockId) -> Rank:
        """Returns the block's rank; low ranks are evicted first."""
        return self._num_uses[block_id], 0

    def _drop(self, block_id: BlockId) -> None:
        """Drops the data of a block that is no longer cached."""
        del self._num_uses[block_id]


class LengthAwareEviction(LfuEviction):
    """LengthAware (Mooncake v3, Table 1): like LFU, but among equals evicts the block deepest in
    its prompt.

    The paper says only "like LFU, prioritising blocks that occur later in requests". Late blocks
    are evicted first, because without the blocks before them they are useless.
    """

    def __init__(self) -> None:
        super().__init__()
        self._depth: dict[BlockId, int] = {}

    def store(
        self, block_ids: Sequence[BlockId], keys: Sequence[BlockKey], depths: Sequence[int]
    ) -> None:
        super().store(block_ids, keys, depths)
        self._depth.update(zip(block_ids, depths, strict=True))

    def _rank(self, block_id: BlockId) -> Rank:
        return self._num_uses[block_id], -self._depth[block_id]

    def _drop(self, block_id: BlockId) -> None:
        super()._drop(block_id)
        del self._depth[block_id]


Rank = tuple[int, int]


class RankedBlocks:
    """Blocks ordered by rank, the lowest first, and by insertion within a rank. There is one queue
    for each rank in use, and a heap of the ranks in use."""

    def __init__(self) -> None:
        self._queues: dict[Rank, OrderedDict[BlockId, None]] = {}
        self._ranks: list[Rank] = []  # a heap of the keys of `_queues`
        self._rank_of: dict[BlockId, Rank] = {}

    def add(self, block_id: BlockId, rank: Rank) -> None:
        """Appends the block to the queue of its rank."""
        assert block_id not in self._rank_of, "a block became evictable twice"
        queue = self._queues.get(rank)
        if queue is None:
            queue = self._queues[rank] = OrderedDict()
            heappush(self._ranks, rank)
        queue[block_id] = None
        self._rank_of[block_id] = rank

    def remove(self, block_id: BlockId) -> None:
        """Raises KeyError if the block is not here."""
        # An empty queue stays for a while, because the same rank is likely to be needed again.
        del self._queues[self._rank_of.pop(block_id)][block_id]
        if len(self._queues) > 2 * len(self._rank_of) + 64:
            self._queues = {rank: queue for rank, queue in self._queues.items() if queue}
            self._ranks = sorted(self._queues)

    def pop(self) -> BlockId:
        """Removes and returns the first block. Raises KeyError if there is none."""
        while self._ranks:
            queue = self._queues[self._ranks[0]]
            if queue:
                block_id, _ = queue.popitem(last=False)
                del self._rank_of[block_id]
                return block_id
            del self._queues[heappop(self._ranks)]
        raise KeyError("no block is evictable")

    def __len__(self) -> int:
        return len(self._rank_of)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._rank_of


class WrappedEviction(ABC):
    """An `EvictionPolicy` that passes all calls that it does not decide itself to another
    policy."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        # The policy beneath all others knows the evictable blocks.
        self._innermost: EvictionPolicy = (
            policy._innermost if isinstance(policy, WrappedEviction) else policy
        )

    def touch(self, block_ids: Sequence[BlockId]) -> None:
        self._policy.touch(block_ids)

    def evict(self, block_id: BlockId) -> bool:
        gone = self._policy.evict(block_id)
        if gone:
            self._end(block_id)
        return gone

    def forget(self, block_id: BlockId) -> None:
        self._policy.forget(block_id)
        self._end(block_id)

    def __len__(self) -> int:
        return len(self._innermost)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._innermost

    @abstractmethod
    def _end(self, block_id: BlockId) -> None:
        """Drops the data of a block that lost its key."""

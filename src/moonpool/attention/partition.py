"""How the blocks of one instance are shared out among its attention workers: by request or by token
range, where each worker has blocks of its own, or by head, where each has its heads of all blocks.

The numbers of the instance's blocks, and what each worker calls them. Moves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from moonpool.attention.plan import Placement
from moonpool.config import AttentionPartition
from moonpool.engine.ops import SEGMENT, HeadShape
from moonpool.kvcache.layout import BlockLayout
from moonpool.messenger.cut import NOWHERE
from moonpool.types import BlockId, Struct


class HeadRange(Struct, frozen=True):
    """`count` kv heads from `first` on, with the query heads that go with them."""

    first: int
    count: int

    def of_queries(self, q: Tensor, heads: HeadShape) -> Tensor:
        """q: [T, num_heads, head_dim]."""
        group = heads.num_heads // heads.num_kv_heads
        own: Tensor = q[:, self.first * group : (self.first + self.count) * group]
        return own

    def of_keys_values(self, kv: Tensor) -> Tensor:
        """kv: K beside V, [T, 2 * num_kv_heads, head_dim]."""
        both: Tensor = kv.unflatten(1, (2, -1))[:, :, self.first : self.first + self.count]
        return both.contiguous().flatten(1, 2)

    def columns(self, heads: HeadShape) -> slice:
        """Of the output, [T, num_heads * head_dim]."""
        width = heads.num_heads // heads.num_kv_heads * heads.head_dim
        return slice(self.first * width, (self.first + self.count) * width)


def share_heads(num_kv_heads: int, num_workers: int) -> tuple[HeadRange, ...]:
    """As evenly as it goes. Raises ValueError if there are fewer heads than workers."""
    if num_workers > num_kv_heads:
        raise ValueError(
            f"the model has {num_kv_heads} kv heads, too few for {num_workers} attention workers"
            " to share by head: use --attention-partition request or tokens, or fewer workers"
        )
    bounds = [num_kv_heads * w // num_workers for w in range(num_workers + 1)]
    return tuple(HeadRange(a, b - a) for a, b in pairwise(bounds))


def segment_blocks(partition: AttentionPartition, layout: BlockLayout) -> int:
    """Blocks of a sequence that lie together where others of it may lie elsewhere; 0: all do."""
    return SEGMENT // layout.block_tokens if partition == "tokens" else 0


class Partition:
    """Which worker has what of which blocks. An arena is what is lost together."""

    def __init__(self, worker_blocks: Sequence[int], head_ranges: Sequence[HeadRange] = ()) -> None:
        """`worker_blocks`: how many each worker has room for."""
        self.head_ranges = tuple(head_ranges)
        self.num_workers = len(worker_blocks)
        self.sizes = (min(worker_blocks),) if head_ranges else tuple(worker_blocks)
        """Of the arenas."""
        self.placement = Placement(self.sizes)

    def arena_of(self, worker: int) -> int:
        return 0 if self.head_ranges else worker

    def workers_of(self, arena: int) -> range:
        return range(self.num_workers) if self.head_ranges else range(arena, arena + 1)

    def own(self, worker: int, block_ids: Sequence[BlockId]) -> tuple[BlockId, ...]:
        """What the worker calls these blocks; NOWHERE in the place of those it has nothing of."""
        first, end = self._range(worker)
        return tuple(
            BlockId(b - first) if first <= b < end else BlockId(NOWHERE) for b in block_ids
        )

    def shares(self, block_ids: Sequence[BlockId]) -> dict[int, tuple[BlockId, ...]]:
        """The same of all workers that have something of them."""
        if self.head_ranges:
            workers = list(range(self.num_workers))
        else:
            workers = sorted({int(w) for w in self.placement.owners(list(block_ids))})
        return {worker: self.own(worker, block_ids) for worker in workers}

    def runs(self, block_ids: Sequence[BlockId]) -> list[tuple[int, int, tuple[BlockId, ...]]]:
        """Worker, place among these of the first, and own numbers of blocks that lie together."""
        if self.head_ranges:
            return [(w, 0, tuple(block_ids)) for w in range(self.num_workers)]
        owners = [int(w) for w in self.placement.owners(list(block_ids))]
        starts = [i for i, w in enumerate(owners) if not i or owners[i - 1] != w]
        ends = [*starts[1:], len(owners)]
        return [
            (owners[a], a, self.own(owners[a], block_ids[a:b]))
            for a, b in zip(starts, ends, strict=True)
        ]

    def whole(self, worker: int, block_id: BlockId) -> BlockId:
        """The instance's number of a worker's block."""
        return BlockId(block_id + self._range(worker)[0])

    def _range(self, worker: int) -> tuple[int, int]:
        arena = self.arena_of(worker)
        bounds = self.placement.bounds
        return int(bounds[arena]), int(bounds[arena + 1])

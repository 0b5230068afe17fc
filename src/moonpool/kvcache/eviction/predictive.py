"""Predictive eviction: evicts the block with the fewest predicted hits for the space it takes.

The class of a block consists of three facts about its prompt's last visit: how often the block was
used before (for a new block, how often its last known predecessor was, because a session continues
and a shared beginning starts many prompts); how many new blocks the visit added; and whether the
prompt came back without using the block (it was left behind). `survival` learns online how soon
blocks of a class are used again, also from blocks that were evicted and missed: their keys (ghosts)
are remembered for a while.

Consecutive blocks of a visit that have one class are a segment. There is one queue of segments for
each class and range of ages (a cell). The cell with the least worth loses the last block of its
oldest segment. Only the last segments of cached prompts are in queues. A segment enters its queue
when no cached segment continues it, so no block is evicted before the blocks that depend on it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moonpool.kvcache.eviction.survival import AGE_RANGE, MAX_AGE, NUM_AGES, ReuseModel
from moonpool.types import BlockId, BlockKey

GHOSTS_PER_BLOCK = 4
"""Keys of evicted blocks that are remembered, per block of the pool."""
EPOCHS_PER_TURNOVER = 16
"""Epochs in the time in which as many blocks are touched as the pool has: the resolution of
ages."""
MIN_EPOCH_TOUCHES = 32
LEVELS_PER_OCTAVE = 3
"""Worths of one level count as equal, because they differ by less than a third, which is within the
noise. Among equal worths the older block goes first, as with LRU."""
MIN_LESSON_TOUCHES = 1024
"""Least number of touches between two updates of the order of eviction, because an update costs
about a millisecond."""
MEMORY_TURNOVERS = 16
MIN_MEMORY_TOUCHES = 1 << 15
"""How far back the statistics reach: in turnovers of the pool, but at least this many touches."""

LEFT_BEHIND = -1  # a mark in place of the number of uses
CELL_BITS = 24
CELL_MASK = (1 << CELL_BITS) - 1
LEAST_RANK = -(1 << 62)


class _Segment:
    """Blocks [start, end) of `blocks`: consecutive blocks of a prompt, released together."""

    __slots__ = ("blocks", "cell", "class_id", "end", "parent", "released_at", "start")

    def __init__(
        self, blocks: Sequence[BlockId], parent: BlockId | None, class_id: int, released_at: int
    ) -> None:
        self.blocks = blocks
        self.start = 0
        self.end = len(blocks)
        self.parent = parent
        self.class_id = class_id
        self.released_at = released_at
        # the cell whose queue the segment is in; -1 means none, because other segments continue it
        self.cell = -1


class PredictiveEviction:
    """An `EvictionPolicy`; see that class for what each method does."""

    def __init__(self, num_blocks: int) -> None:
        self._epoch_touches = max(MIN_EPOCH_TOUCHES, num_blocks // EPOCHS_PER_TURNOVER)
        period = -(-MIN_LESSON_TOUCHES // self._epoch_touches)
        memory_touches = max(MIN_MEMORY_TOUCHES, MEMORY_TURNOVERS * num_blocks)
        self._model = ReuseModel(period, 1 - period * self._epoch_touches / memory_touches)
        self._max_ghosts = GHOSTS_PER_BLOCK * num_blocks
        self._clock = 0  # touches
        self._epoch_ends = self._epoch_touches
        self._size = 0
        # Lists indexed by block, which grow with the blocks ever used.
        self._keys: list[BlockKey | None] = []
        self._num_uses: list[int] = []
        self._depth: list[int] = []
        self._segment_of: list[_Segment | None] = []
        # number of segments whose parent is this block
        self._num_continuing: dict[BlockId, int] = {}
        self._ghosts: OrderedDict[BlockKey, tuple[int, int, int]] = OrderedDict()
        self._class_ids: dict[tuple[int, int, int], int] = {}
        # queues of segments, by class and range of ages
        self._queues: list[OrderedDict[_Segment, None]] = []
        self._ranks: list[int] = []  # by cell
        self._order: list[int] = []  # ranks of all cells, the least first
        self._ordered = True  # whether both lists are up to date with what was learned
        # lowest rank that may have a segment: no cell with a smaller rank has one
        self._first = LEAST_RANK

    def store(
        self, block_ids: Sequence[BlockId], keys: Sequence[BlockKey], depths: Sequence[int]
    ) -> None:
        if block_ids and (highest := max(block_ids)) >= len(self._keys):
            self._grow(highest + 1)
        key_of, num_uses, depth_of, ghosts = self._keys, self._num_uses, self._depth, self._ghosts
        for block_id, key, depth in zip(block_ids, keys, depths, strict=True):
            key_of[block_id] = key
            depth_of[block_id] = depth
            ghost = ghosts.pop(key, None)
            if ghost is None:
                num_uses[block_id] = 1
            else:
                num_uses[block_id] = 1 + ghost[0]
                self._model.note_reuse(ghost[1], self._age_range(ghost[2]), 1)
            self._clock += 1
            if self._clock >= self._epoch_ends:
                self._tick(0)

    def touch(self, block_ids: Sequence[BlockId]) -> None:
        num_uses = self._num_uses
        for block_id in block_ids:
            num_uses[block_id] += 1
        self._tick(len(block_ids))

    def add(self, block_ids: Sequence[BlockId], parent: BlockId | None) -> None:
        num_uses = self._num_uses
        num_known = len(block_ids)
        while num_known and num_uses[block_ids[num_known - 1]] == 1:
            num_known -= 1
        before = block_ids[num_known - 1] if num_known else parent
        uses_before = num_uses[before] if before is not None else 0
        num_new = len(block_ids) - num_known
        segments = []
        for part in self._alike(block_ids):
            class_id = self._class_of(num_uses[part[0]], uses_before, num_new)
            self._model.note_release(class_id, len(part))
            segment = _Segment(part, parent, class_id, self._clock)
            self._link(segment)
            segments.append(segment)
            parent = part[-1]
        for segment in segments:
            self._enqueue(segment)
        self._size += len(block_ids)

    def remove(self, block_ids: Sequence[BlockId]) -> None:
        """Raises KeyError, whose argument is the block, if a block is not evictable."""
        done = 0
        while done < len(block_ids):
            first = block_ids[done]
            segment = self._segment_of[first] if first < len(self._segment_of) else None
            if segment is None:
                raise KeyError(first)
            if segment.blocks[segment.start] != first:
                segment = self._split(segment, first)
            done += self._remove_front(segment, block_ids, done)

    def pop(self, num_blocks: int) -> list[BlockId]:
        """Raises KeyError if fewer blocks are evictable."""
        if num_blocks > self._size:
            raise KeyError("fewer blocks are evictable")
        if not self._ordered:
            self._rank()
        order, queues = self._order, self._queues
        popped: list[BlockId] = []
        place = bisect_left(order, self._first)
        while len(popped) < num_blocks:
            queue = queues[order[place] & CELL_MASK]
            if not queue:
                place += 1
                continue
            self._first = order[place]
            self._pop_end(next(iter(queue)), num_blocks - len(popped), popped)
            # a segment that other segments continued before is an end now
            if self._first < order[place]:
                place = bisect_left(order, self._first)
        self._size -= num_blocks
        while len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)
        return popped

    def evict(self, block_id: BlockId) -> bool:
        """Raises KeyError if the block is not evictable."""
        segment = self._segment_of[block_id]
        if segment is None:
            raise KeyError(block_id)
        if segment.blocks[segment.end - 1] != block_id or block_id in self._num_continuing:
            return False  # other segments continue this one
        self._pop_end(segment, 1, [])
        self._size -= 1
        return True

    def forget(self, block_id: BlockId) -> None:
        if block_id in self:
            self.remove([block_id])
        self._keys[block_id] = None
        if self._num_continuing.pop(block_id, 0):
            # The block id is used again, and its next content must not wait for the old followers.
            # Rare.
            for segment in set(self._segment_of):
                if segment is not None and segment.parent == block_id:
                    segment.parent = None
            segment = self._segment_of[block_id]
            assert segment is None, "a held block is in no segment"

    def __len__(self) -> int:
        return self._size

    def __contains__(self, block_id: object) -> bool:
        try:
            return self._segment_of[block_id] is not None  # type: ignore[call-overload]
        except (IndexError, TypeError):
            return False  # the block is not in the pool, or was never used

    # Segments

    def _alike(self, block_ids: Sequence[BlockId]) -> list[Sequence[BlockId]]:
        """Splits a run into parts of consecutive blocks that were used equally often."""
        num_uses, depth = self._num_uses, self._depth
        parts = []
        start = 0
        for place in range(1, len(block_ids)):
            block_id, before = block_ids[place], block_ids[place - 1]
            if num_uses[block_id] != num_uses[before] or depth[block_id] != depth[before] + 1:
                parts.append(block_ids[start:place])
                start = place
        if block_ids:
            parts.append(block_ids[start:])
        return parts

    def _pop_end(self, segment: _Segment, num_wanted: int, popped: list[BlockId]) -> None:
        """Moves up to `num_wanted` blocks from the segment's end to `popped`, but no block that
        other segments continue."""
        keys = self._keys
        # All blocks of a segment were used equally often, so they share one ghost.
        num_uses = self._num_uses[segment.blocks[segment.start]]
        ghost = (num_uses, segment.class_id, segment.released_at)
        while num_wanted:
            num_wanted -= 1
            segment.end -= 1
            block_id = segment.blocks[segment.end]
            popped.append(block_id)
            self._segment_of[block_id] = None
            key = keys[block_id]
            assert key is not None
            keys[block_id] = None
            self._ghosts[key] = ghost
            if segment.start == segment.end:
                self._dequeue(segment)
                self._unlink(segment.parent)
                return
            if segment.blocks[segment.end - 1] in self._num_continuing:
                self._dequeue(segment)
                return

    def _remove_front(self, segment: _Segment, block_ids: Sequence[BlockId], done: int) -> int:
        """Removes from the segment's front the blocks that equal `block_ids` from index `done` on;
        returns how many."""
        blocks, place, end = segment.blocks, segment.start, segment.end
        num_left = min(end - place, len(block_ids) - done)
        count = 0
        while count < num_left and blocks[place + count] == block_ids[done + count]:
            self._segment_of[blocks[place + count]] = None
            count += 1
        self._size -= count
        # otherwise the segment was released only to change its owner
        if segment.released_at != self._clock:
            self._model.note_reuse(segment.class_id, self._age_range(segment.released_at), count)
        parent = segment.parent
        segment.start += count
        if segment.start == end:
            self._dequeue(segment)
        else:
            segment.parent = blocks[segment.start - 1]
            self._num_continuing[segment.parent] = self._num_continuing.get(segment.parent, 0) + 1
            self._leave_behind(segment)
        self._unlink(parent)
        return count

    def _leave_behind(self, segment: _Segment) -> None:
        """The prompt came back, but ended or continued differently, so the rest of the segment gets
        a separate class."""
        queued = segment.cell >= 0
        self._dequeue(segment)
        num_left = segment.end - segment.start
        num_uses = self._num_uses[segment.blocks[segment.start]]
        segment.class_id = self._class_of(LEFT_BEHIND, num_uses, num_left)
        segment.released_at = self._clock
        self._model.note_release(segment.class_id, num_left)
        if queued:
            self._enqueue(segment)

    def _split(self, segment: _Segment, first: BlockId) -> _Segment:
        """Divides the segment before block `first`; returns the second part."""
        place = segment.blocks.index(first, segment.start, segment.end)
        rest = _Segment(
            segment.blocks[place : segment.end],
            segment.blocks[place - 1],
            segment.class_id,
            segment.released_at,
        )
        self._dequeue(segment)
        segment.end = place
        self._link(rest)
        self._enqueue(rest)
        return rest

    def _link(self, segment: _Segment) -> None:
        """Enters a new segment into the tables."""
        parent, first = segment.parent, segment.blocks[0]
        # Because depths rise along a prompt, some segment is always continued by no other.
        if parent is not None and self._depth[parent] + 1 == self._depth[first]:
            self._num_continuing[parent] = self._num_continuing.get(parent, 0) + 1
            before = self._segment_of[parent]
            if before is not None and before.blocks[before.end - 1] == parent:
                self._dequeue(before)  # the segment before it was the end of a prompt until now
        else:
            segment.parent = None
        for block_id in segment.blocks:
            self._segment_of[block_id] = segment

    def _unlink(self, parent: BlockId | None) -> None:
        """Removes one segment that continued `parent`."""
        if parent is None:
            return
        left = self._num_continuing.pop(parent) - 1
        if left:
            self._num_continuing[parent] = left
            return
        segment = self._segment_of[parent]
        if segment is not None and segment.blocks[segment.end - 1] == parent:
            self._enqueue(segment)

    def _enqueue(self, segment: _Segment) -> None:
        """Puts the segment into its queue, unless other segments continue it."""
        if segment.blocks[segment.end - 1] in self._num_continuing:
            return
        cell = segment.class_id * NUM_AGES + self._age_range(segment.released_at)
        segment.cell = cell
        self._queues[cell][segment] = None
        if self._ordered and self._ranks[cell] < self._first:
            self._first = self._ranks[cell]

    def _dequeue(self, segment: _Segment) -> None:
        if segment.cell >= 0:
            del self._queues[segment.cell][segment]
            segment.cell = -1

    # Classes and time

    def _class_of(self, num_uses: int, uses_before: int, num_new: int) -> int:
        own = _bucket(num_uses)
        # A block's own history outweighs that of its predecessors.
        before = _bucket(uses_before) if own <= 1 else 0
        name = (own, before, min(num_new.bit_length() // 2, 4))
        class_id = self._class_ids.get(name)
        if class_id is None:
            class_id = self._class_ids[name] = self._model.add_class(own)
            self._queues.extend(OrderedDict() for _ in range(NUM_AGES))
            self._ordered = False
        return class_id

    def _age_range(self, released_at: int) -> int:
        age = (self._clock - released_at) // self._epoch_touches
        return AGE_RANGE[min(age, MAX_AGE)]

    def _tick(self, num_touches: int) -> None:
        self._clock += num_touches
        while self._clock >= self._epoch_ends:
            self._epoch_ends += self._epoch_touches
            learned = self._model.end_epoch()
            self._age_segments()
            if learned:
                self._ordered = False

    def _age_segments(self) -> None:
        for cell in range(len(self._queues) - 1, -1, -1):
            queue = self._queues[cell]
            while queue:
                segment = next(iter(queue))
                age_range = self._age_range(segment.released_at)
                if age_range <= cell % NUM_AGES:
                    break
                del queue[segment]
                segment.cell = segment.class_id * NUM_AGES + age_range
                self._queues[segment.cell][segment] = None
        self._first = LEAST_RANK

    def _rank(self) -> None:
        """Orders the cells by their learned worth; among equals, the older blocks come first. Many
        pools evict nothing for long, so this waits until a block must go."""
        levels = _levels(np.array(self._model.worths()).reshape(-1, NUM_AGES))
        cells = np.arange(levels.size).reshape(levels.shape)
        # One whole number for level, age and cell is compared faster than three numbers.
        ranks = (levels * NUM_AGES - np.arange(NUM_AGES) << CELL_BITS) + cells
        self._ranks = ranks.ravel().tolist()
        self._order = sorted(self._ranks)
        self._ordered, self._first = True, LEAST_RANK

    def _grow(self, num_blocks: int) -> None:
        missing = num_blocks - len(self._keys)
        self._keys.extend([None] * missing)
        self._num_uses.extend([0] * missing)
        self._depth.extend([0] * missing)
        self._segment_of.extend([None] * missing)


def _levels(worths: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Computes levels from the bits of each float, because a logarithm may differ from machine to
    machine."""
    mantissas, exponents = np.frexp(worths)
    parts = ((2 * mantissas - 1) * LEVELS_PER_OCTAVE).astype(np.int64)
    levels = exponents.astype(np.int64) * LEVELS_PER_OCTAVE + parts
    return np.where(worths == 0, -(1 << 16), levels)


def _bucket(num_uses: int) -> int:
    if num_uses <= 4:
        return num_uses
    return 5 if num_uses < 8 else 6 if num_uses < 32 else 7

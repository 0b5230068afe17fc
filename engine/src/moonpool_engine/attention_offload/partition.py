"""How one instance's KVCache and steps are shared out among its attention workers.

Blocks are divided by request or by token range, so that each worker has other blocks, or by head,
so that each worker has its KV heads of all blocks. `Partition` translates the instance's block
numbers to each worker's own. `split_step` makes the share of a step for each worker:

- If all blocks of a sequence are at one worker, that worker computes its whole attention.
- If they are at several workers, each worker computes the attention over the segments whose blocks
  it has. The model worker merges the partial results in the order of its tokens.

Moves no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from moonpool.config.tables import AttentionPartition
from moonpool.protocol.block_layout import BlockLayout
from moonpool.types import BlockId
from moonpool_engine.attention_offload.wire import KvHeadRange, SequenceRows, StepPlan, rows_of
from moonpool_engine.engine.ops import SEGMENT, StepMeta
from moonpool_engine.transfer.reshard import NOWHERE

Numbers = np.ndarray[tuple[int], np.dtype[np.int32]]


class PlacementError(ValueError):
    """Blocks lie where the results of attention cannot be merged."""


class WorkerBlockRanges:
    """Worker w has the blocks `bounds[w] ... bounds[w + 1] - 1`."""

    def __init__(self, num_blocks: tuple[int, ...]) -> None:
        self.bounds = np.cumsum((0, *num_blocks)).astype(np.int64)
        self.num_workers = len(num_blocks)

    def owners(self, block_ids: np.ndarray | list[int]) -> np.ndarray:
        """The worker of each block, in the shape of `block_ids`."""
        owners: np.ndarray = np.searchsorted(self.bounds, block_ids, side="right") - 1
        return owners


def share_heads(num_kv_heads: int, num_workers: int) -> tuple[KvHeadRange, ...]:
    """Shares KV heads out as evenly as possible. Raises ValueError if there are fewer heads than
    workers."""
    if num_workers > num_kv_heads:
        raise ValueError(
            f"the model has {num_kv_heads} kv heads, too few for {num_workers} attention workers"
            " to share by head: use --attention-partition request or tokens, or fewer workers"
        )
    bounds = [num_kv_heads * w // num_workers for w in range(num_workers + 1)]
    return tuple(KvHeadRange(a, b - a) for a, b in pairwise(bounds))


def segment_blocks(partition: AttentionPartition, layout: BlockLayout) -> int:
    """Blocks of one segment, which lie together at one worker; 0 means that all blocks of a
    sequence do."""
    return SEGMENT // layout.block_tokens if partition == "tokens" else 0


class Partition:
    """Which worker has which blocks. An *arena* is memory that is lost as a unit: the memory of a
    worker, or, by head, of all workers together."""

    def __init__(
        self, worker_blocks: Sequence[int], head_ranges: Sequence[KvHeadRange] = ()
    ) -> None:
        """`worker_blocks`: number of blocks that each worker has room for. `head_ranges`: the heads
        of each worker, if blocks are divided by head."""
        self.head_ranges = tuple(head_ranges)
        self.num_workers = len(worker_blocks)
        self.sizes = (min(worker_blocks),) if head_ranges else tuple(worker_blocks)
        """Blocks of each arena."""
        self.placement = WorkerBlockRanges(self.sizes)

    def arena_of(self, worker: int) -> int:
        """The arena that is lost with the worker."""
        return 0 if self.head_ranges else worker

    def workers_of(self, arena: int) -> range:
        """The workers that hold the arena's blocks."""
        return range(self.num_workers) if self.head_ranges else range(arena, arena + 1)

    def own(self, worker: int, block_ids: Sequence[BlockId]) -> tuple[BlockId, ...]:
        """The worker's own numbers of these blocks; NOWHERE for blocks it has no part of."""
        first, end = self._range(worker)
        return tuple(
            BlockId(b - first) if first <= b < end else BlockId(NOWHERE) for b in block_ids
        )

    def shares(self, block_ids: Sequence[BlockId]) -> dict[int, tuple[BlockId, ...]]:
        """Returns `own` of these blocks for each worker that has a part of them."""
        if self.head_ranges:
            workers = list(range(self.num_workers))
        else:
            workers = sorted({int(w) for w in self.placement.owners(list(block_ids))})
        return {worker: self.own(worker, block_ids) for worker in workers}

    def runs(self, block_ids: Sequence[BlockId]) -> list[tuple[int, int, tuple[BlockId, ...]]]:
        """Runs of consecutive blocks at one worker: the worker, the index of the first block, and
        the worker's own numbers."""
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
        """Returns the instance's number of a worker's block; the inverse of `own`."""
        return BlockId(block_id + self._range(worker)[0])

    def _range(self, worker: int) -> tuple[int, int]:
        arena = self.arena_of(worker)
        bounds = self.placement.bounds
        return int(bounds[arena]), int(bounds[arena + 1])


# Shares of a step. T is its number of rows (tokens).

Selection = slice | Tensor
"""Selects rows of a step: by a slice if they are consecutive, which avoids a gather, else by their
numbers."""


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """The part of a step that one worker gets, and where its results go."""

    plan: StepPlan
    queries: Selection  # rows whose Q the worker gets
    stores: Selection  # rows whose K and V the worker stores
    outputs: Selection  # rows whose outputs the worker returns: its first `num_whole` queries
    num_whole: int
    num_partials: int  # number of rows of partial results that the worker returns


@dataclass(frozen=True, slots=True)
class Merge:
    """The R rows of the step that are merged from partials of several segments; see
    `SplitOps.merge`. Partials are numbered as they arrive: by worker, then as each worker's plan
    lists them."""

    rows: Tensor  # [R]
    order: Tensor  # [number of partials], int32: partials of each row, in the order of its segments
    starts: Tensor  # [R + 1], int32: where each row's partials begin in `order`


@dataclass(frozen=True, slots=True)
class StepShares:
    """The shares of a whole step, by worker. Workers with nothing to do are left out."""

    shares: dict[int, WorkerShare]
    merge: Merge | None


class _RowRange:
    """Rows of one sequence, with blocks of one worker: `num_rows` rows from row `first` of the
    step on, which follow `context` tokens of the sequence. `table` is the sequence's block table,
    with -1 for blocks of other segments."""

    __slots__ = ("context", "first", "num_rows", "segment", "table")

    def __init__(
        self, first: int, num_rows: int, context: int, table: Numbers, segment: int = 0
    ) -> None:
        self.first, self.num_rows = first, num_rows
        self.context, self.table, self.segment = context, table, segment


def split_step(
    meta: StepMeta, placement: WorkerBlockRanges, block_tokens: int, epoch: int = 0
) -> StepShares:
    """Splits a step by the workers that have its blocks. Raises PlacementError if a segment of a
    sequence lies at two workers."""
    tables = meta.block_tables.numpy()  # [S, max blocks]
    contexts = meta.context_starts.numpy()  # [S], tokens before the step's
    bounds = meta.row_starts.numpy()  # shape [S + 1]
    owners = placement.owners(tables)  # [S, max blocks]
    needed = -(-(contexts + np.diff(bounds)) // block_tokens)  # [S], blocks in use
    columns = np.arange(tables.shape[1])
    elsewhere = (owners != owners[:, :1]) & (columns < needed[:, None])
    is_split = elsewhere.any(axis=1)  # [S]
    whole: dict[int, list[_RowRange]] = {}
    stores: dict[int, list[_RowRange]] = {}
    parts: dict[int, list[_RowRange]] = {}
    for s in range(meta.num_sequences):
        first, num_rows, context = int(bounds[s]), int(bounds[s + 1] - bounds[s]), int(contexts[s])
        if is_split[s]:
            row = (tables[s], owners[s], int(needed[s]))
            for worker, piece, stored in _segments(first, num_rows, context, row, block_tokens):
                parts.setdefault(worker, []).append(piece)
                if stored is not None:
                    stores.setdefault(worker, []).append(stored)
            continue
        piece = _RowRange(first, num_rows, context, tables[s])
        whole.setdefault(int(owners[s, 0]), []).append(piece)
    shares: dict[int, WorkerShare] = {}
    positions = meta.positions.numpy()
    for worker in sorted({*whole, *parts}):
        base = int(placement.bounds[worker])
        pieces = (whole.get(worker, []), parts.get(worker, []), stores.get(worker, []))
        shares[worker] = _share(*pieces, positions, base, epoch)
    return StepShares(shares, _merge(parts, sorted(shares)))


def for_all(shares: StepShares, num_workers: int) -> StepShares:
    """Copies the same share to each worker, for blocks that are divided by head."""
    assert shares.merge is None
    return StepShares({w: s for s in shares.shares.values() for w in range(num_workers)}, None)


def _segments(
    first: int, num_rows: int, context: int, row: tuple[Numbers, Numbers, int], block_tokens: int
) -> list[tuple[int, _RowRange, _RowRange | None]]:
    """Returns, for each segment of a sequence, its worker, the rows that attend to it, and the rows
    that are stored in it. `row` is the sequence's block table, its owners, and how many of its
    blocks are needed."""
    table, owners, needed = row
    if SEGMENT % block_tokens:
        raise PlacementError(
            f"a sequence lies at several attention workers, but blocks of {block_tokens} tokens do"
            f" not divide segments of {SEGMENT}"
        )
    size, end = SEGMENT // block_tokens, context + num_rows
    found: list[tuple[int, _RowRange, _RowRange | None]] = []
    for segment in range(-(-end // SEGMENT)):
        at = slice(segment * size, min((segment + 1) * size, needed))
        worker = int(owners[at][0])
        if (owners[at] != worker).any():
            raise PlacementError("a segment of a sequence lies at two attention workers")
        own = np.full_like(table, -1)
        own[at] = table[at]
        piece = _RowRange(first, num_rows, context, own, segment)
        begin, stop = max(context, segment * SEGMENT), min(end, (segment + 1) * SEGMENT)
        stored = None
        if begin < stop:
            stored = _RowRange(first + begin - context, stop - begin, begin, own)
        found.append((worker, piece, stored))
    return found


def _share(
    whole: list[_RowRange],
    parts: list[_RowRange],
    stores: list[_RowRange],
    positions: Numbers,
    base: int,
    epoch: int,
) -> WorkerShare:
    """Returns one worker's share: `whole` sequences, `parts` of split ones, and the rows of these
    that the worker stores. `base` is the number of the worker's first block."""
    whole_rows = _row_numbers(whole)
    # The queries of a split sequence are sent once, however many of its segments are here.
    unique = {piece.first: piece for piece in parts}
    part_queries = _row_numbers(list(unique.values()))
    places: dict[int, int] = {}  # first row of Q of each split sequence, by its first row
    place = len(whole_rows)
    for piece in unique.values():
        places[piece.first] = place
        place += piece.num_rows
    part_rows = [np.arange(places[p.first], places[p.first] + p.num_rows) for p in parts]
    queries = np.concatenate((whole_rows, part_queries))
    stored = [*whole, *stores]
    stored_rows = _row_numbers(stored)
    plan = StepPlan(
        stores=_rows(stored, positions, base),
        whole=_rows(whole, positions, base),
        parts=_rows(parts, positions, base),
        segments=np.array([p.segment for p in parts], dtype=np.int32).tobytes(),
        part_rows=_joined(part_rows).astype(np.int32).tobytes(),
        num_queries=len(queries),
        epoch=epoch,
    )
    return WorkerShare(
        plan=plan,
        queries=_selection(queries),
        stores=_selection(stored_rows),
        outputs=_selection(whole_rows),
        num_whole=len(whole_rows),
        num_partials=sum(p.num_rows for p in parts),
    )


def _merge(parts: dict[int, list[_RowRange]], workers: list[int]) -> Merge | None:
    found: dict[int, list[tuple[int, int]]] = {}
    number = 0
    for worker in workers:
        for piece in parts.get(worker, ()):
            for i in range(piece.num_rows):
                found.setdefault(piece.first + i, []).append((piece.segment, number))
                number += 1
    if not found:
        return None
    order = [index for row in sorted(found) for _, index in sorted(found[row])]
    starts = np.cumsum([0, *(len(found[row]) for row in sorted(found))])
    return Merge(
        rows=torch.tensor(sorted(found)),
        order=torch.tensor(order, dtype=torch.int32),
        starts=torch.from_numpy(starts.astype(np.int32)),
    )


def _row_numbers(pieces: list[_RowRange]) -> np.ndarray:
    """The numbers of all rows, in order: [number of rows]."""
    return _joined([np.arange(p.first, p.first + p.num_rows) for p in pieces])


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)


def _selection(rows: np.ndarray) -> Selection:
    first = int(rows[0]) if len(rows) else 0
    if (rows == np.arange(first, first + len(rows))).all():
        return slice(first, first + len(rows))
    return torch.from_numpy(rows)


def _rows(pieces: list[_RowRange], positions: Numbers, base: int) -> SequenceRows:
    """Packs the rows, with the worker's own block numbers."""
    width = max((len(p.table) for p in pieces), default=1)
    tables = np.zeros((len(pieces), width), dtype=np.int32)
    for i, piece in enumerate(pieces):
        tables[i] = np.maximum(piece.table - base, 0)
    return rows_of(
        positions[_row_numbers(pieces)],
        np.cumsum([0, *(p.num_rows for p in pieces)]).astype(np.int32),
        np.array([p.context for p in pieces], dtype=np.int32),
        tables,
    )

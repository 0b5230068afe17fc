"""Which attention worker gets which rows of a step.

A block number names an attention worker and a block of its arena. A sequence all of whose blocks
lie at one worker is attended there; one that lies at several is attended segment by segment, each
where its blocks are, and merged here in the order of its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moonpool.attention.wire import Plan, Rows, rows_of
from moonpool.engine.ops import SEGMENT, StepMeta

Numbers = np.ndarray[tuple[int], np.dtype[np.int32]]


class PlacementError(ValueError):
    """Blocks lie where attention cannot be put together again."""


class Placement:
    """Worker w has the blocks `bounds[w] ... bounds[w + 1] - 1`."""

    def __init__(self, num_blocks: tuple[int, ...]) -> None:
        self.bounds = np.cumsum((0, *num_blocks)).astype(np.int64)
        self.num_workers = len(num_blocks)

    def owners(self, block_ids: np.ndarray | list[int]) -> np.ndarray:
        owners: np.ndarray = np.searchsorted(self.bounds, block_ids, side="right") - 1
        return owners


Selection = slice | Tensor
"""Rows of a step; those that lie together are not gathered one by one."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker is sent of a step, and where what it answers goes."""

    plan: Plan
    queries: Selection  # rows whose Q it gets
    stores: Selection  # rows whose K and V it keeps
    outputs: Selection  # the first of its queries: rows that it answers with outputs
    num_whole: int  # of these
    num_partials: int


@dataclass(frozen=True, slots=True)
class Merge:
    """Rows of the step whose partials come from several segments: see `SplitOps.merge`."""

    rows: Tensor
    order: Tensor
    starts: Tensor


@dataclass(frozen=True, slots=True)
class StepShares:
    shares: dict[int, Share]  # by worker; those with nothing to do are left out
    merge: Merge | None


class _Piece:
    """Rows of one sequence, with blocks of one worker."""

    __slots__ = ("context", "first", "num_rows", "segment", "table")

    def __init__(
        self, first: int, num_rows: int, context: int, table: Numbers, segment: int = 0
    ) -> None:
        self.first, self.num_rows = first, num_rows
        self.context, self.table, self.segment = context, table, segment


def split_step(
    meta: StepMeta, placement: Placement, block_tokens: int, epoch: int = 0
) -> StepShares:
    """Raises PlacementError if a segment of a sequence lies at two workers."""
    tables = meta.block_tables.numpy()
    contexts = meta.context_starts.numpy()
    bounds = meta.row_starts.numpy()
    owners = placement.owners(tables)
    needed = -(-(contexts + np.diff(bounds)) // block_tokens)
    columns = np.arange(tables.shape[1])
    foreign = (owners != owners[:, :1]) & (columns < needed[:, None])
    spread = foreign.any(axis=1)
    whole: dict[int, list[_Piece]] = {}
    stores: dict[int, list[_Piece]] = {}
    parts: dict[int, list[_Piece]] = {}
    for s in range(meta.num_sequences):
        first, num_rows, context = int(bounds[s]), int(bounds[s + 1] - bounds[s]), int(contexts[s])
        if spread[s]:
            row = (tables[s], owners[s], int(needed[s]))
            for worker, piece, kept in _segments(first, num_rows, context, row, block_tokens):
                parts.setdefault(worker, []).append(piece)
                if kept is not None:
                    stores.setdefault(worker, []).append(kept)
            continue
        piece = _Piece(first, num_rows, context, tables[s])
        whole.setdefault(int(owners[s, 0]), []).append(piece)
    shares: dict[int, Share] = {}
    positions = meta.positions.numpy()
    for worker in sorted({*whole, *parts}):
        base = int(placement.bounds[worker])
        pieces = (whole.get(worker, []), parts.get(worker, []), stores.get(worker, []))
        shares[worker] = _share(*pieces, positions, base, epoch)
    return StepShares(shares, _merge(parts, sorted(shares)))


def for_all(shares: StepShares, num_workers: int) -> StepShares:
    """Of blocks of which every worker has its heads: the one share is each one's."""
    assert shares.merge is None
    return StepShares({w: s for s in shares.shares.values() for w in range(num_workers)}, None)


def _segments(
    first: int, num_rows: int, context: int, row: tuple[Numbers, Numbers, int], block_tokens: int
) -> list[tuple[int, _Piece, _Piece | None]]:
    """The worker of each segment of a sequence, its rows' piece, and what of it is stored there."""
    table, owners, needed = row
    if SEGMENT % block_tokens:
        raise PlacementError(
            f"a sequence lies at several attention workers, and blocks of {block_tokens} tokens do"
            f" not fill segments of {SEGMENT}"
        )
    size, end = SEGMENT // block_tokens, context + num_rows
    found: list[tuple[int, _Piece, _Piece | None]] = []
    for segment in range(-(-end // SEGMENT)):
        at = slice(segment * size, min((segment + 1) * size, needed))
        worker = int(owners[at][0])
        if (owners[at] != worker).any():
            raise PlacementError("a segment of a sequence lies at two attention workers")
        own = np.full_like(table, -1)
        own[at] = table[at]
        piece = _Piece(first, num_rows, context, own, segment)
        begin, stop = max(context, segment * SEGMENT), min(end, (segment + 1) * SEGMENT)
        kept = None
        if begin < stop:
            kept = _Piece(first + begin - context, stop - begin, begin, own)
        found.append((worker, piece, kept))
    return found


def _share(
    whole: list[_Piece],
    parts: list[_Piece],
    stores: list[_Piece],
    positions: Numbers,
    base: int,
    epoch: int,
) -> Share:
    whole_rows = _row_numbers(whole)
    # The queries of a sequence in parts are sent once, however many of its segments are here.
    unique = {piece.first: piece for piece in parts}
    part_queries = _row_numbers(list(unique.values()))
    places: dict[int, int] = {}
    place = len(whole_rows)
    for piece in unique.values():
        places[piece.first] = place
        place += piece.num_rows
    part_rows = [np.arange(places[p.first], places[p.first] + p.num_rows) for p in parts]
    queries = np.concatenate((whole_rows, part_queries))
    kept = [*whole, *stores]
    kept_rows = _row_numbers(kept)
    plan = Plan(
        stores=_rows(kept, positions, base),
        whole=_rows(whole, positions, base),
        parts=_rows(parts, positions, base),
        segments=np.array([p.segment for p in parts], dtype=np.int32).tobytes(),
        part_rows=_joined(part_rows).astype(np.int32).tobytes(),
        num_queries=len(queries),
        epoch=epoch,
    )
    return Share(
        plan=plan,
        queries=_selection(queries),
        stores=_selection(kept_rows),
        outputs=_selection(whole_rows),
        num_whole=len(whole_rows),
        num_partials=sum(p.num_rows for p in parts),
    )


def _merge(parts: dict[int, list[_Piece]], workers: list[int]) -> Merge | None:
    """Partials are numbered as they arrive: worker by worker, piece by piece, row by row."""
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


def _row_numbers(pieces: list[_Piece]) -> np.ndarray:
    return _joined([np.arange(p.first, p.first + p.num_rows) for p in pieces])


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)


def _selection(rows: np.ndarray) -> Selection:
    first = int(rows[0]) if len(rows) else 0
    if (rows == np.arange(first, first + len(rows))).all():
        return slice(first, first + len(rows))
    return torch.from_numpy(rows)


def _rows(pieces: list[_Piece], positions: Numbers, base: int) -> Rows:
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

"""A step's sequences as rows: which tokens, at which positions, in which blocks.

Owns the checks that a step can be run at all. Never touches a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moonpool.engine.ops import StepMeta
from moonpool.engine.spec import ModelSpec
from moonpool.engine.step import SequenceStep
from moonpool.kvcache.layout import BlockLayout


class StepError(ValueError):
    """A step the engine cannot run; nothing was computed or written."""


@dataclass(frozen=True, slots=True)
class Rows:
    """token_ids: [T] int64. last: the last row of each sequence [S]."""

    token_ids: Tensor
    meta: StepMeta
    last: NDArray[np.int64]


def plan_rows(
    sequences: Sequence[SequenceStep], spec: ModelSpec, layout: BlockLayout, num_blocks: int
) -> Rows:
    """The rows of a step on an arena of `num_blocks`. Raises `StepError`."""
    if not sequences:
        raise StepError("a step needs at least one sequence")
    counts = np.array([len(s.new_token_ids) for s in sequences])
    starts = np.array([s.start for s in sequences])
    _check(sequences, counts, starts, spec.max_positions)
    bounds = np.zeros(len(sequences) + 1, dtype=np.int64)
    counts.cumsum(out=bounds[1:])
    num_rows = int(bounds[-1])
    if num_rows == len(sequences):
        positions = starts
        token_ids = np.array([s.new_token_ids[0] for s in sequences])
    else:
        positions = np.arange(num_rows) + np.repeat(starts - bounds[:-1], counts)
        everything = chain.from_iterable(s.new_token_ids for s in sequences)
        token_ids = np.fromiter(everything, np.int64, num_rows)
    if token_ids.min() < 0 or token_ids.max() >= spec.vocab_size:
        raise StepError(f"a token id lies outside the vocabulary of {spec.vocab_size}")
    tables = _block_tables(sequences, starts + counts, layout.block_tokens, num_blocks)
    meta = StepMeta(
        positions=torch.from_numpy(positions.astype(np.int32)),
        row_starts=torch.from_numpy(bounds.astype(np.int32)),
        context_starts=torch.from_numpy(starts.astype(np.int32)),
        block_tables=torch.from_numpy(tables),
        num_rows=num_rows,
        num_sequences=len(sequences),
    )
    return Rows(torch.from_numpy(token_ids), meta, bounds[1:] - 1)


def _check(
    sequences: Sequence[SequenceStep],
    counts: NDArray[np.int64],
    starts: NDArray[np.int64],
    max_positions: int,
) -> None:
    if counts.min() < 1:
        request = sequences[int(counts.argmin())].request_id
        raise StepError(f"request {request} has no new token in its step")
    ends = starts + counts
    if starts.min() < 0 or ends.max() > max_positions:
        i = int(ends.argmax()) if starts.min() >= 0 else int(starts.argmin())
        raise StepError(
            f"request {sequences[i].request_id}: tokens {starts[i]}..{ends[i] - 1} do not fit "
            f"the model's context of {max_positions}"
        )


def _block_tables(
    sequences: Sequence[SequenceStep],
    ends: NDArray[np.int64],
    block_tokens: int,
    num_blocks: int,
) -> NDArray[np.int32]:
    needed = (-(-ends // block_tokens)).tolist()
    tables = np.zeros((len(sequences), max(needed)), dtype=np.int32)
    for i, sequence in enumerate(sequences):
        count = needed[i]
        if len(sequence.block_ids) < count:
            raise StepError(
                f"request {sequence.request_id} holds {len(sequence.block_ids)} blocks, its "
                f"step needs {count}"
            )
        tables[i, :count] = sequence.block_ids[:count]
    if tables.min() < 0 or tables.max() >= num_blocks:
        raise StepError(f"a block id lies outside 0..{num_blocks - 1}")
    return tables

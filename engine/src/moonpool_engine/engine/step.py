"""One engine step: its rows (which tokens, at which positions, in which blocks) and its result.

A step mixes prefill chunks and decodes of any lengths; the engine treats both alike. The step's
input is the scheduler's `StepEntry`, one per sequence. `plan_rows` checks that a step can run and
lays its tokens out as rows. This module never touches a block.

The embedding of a prompt is a vector of length 1, made of its final hidden states (`pool`). A sum
over the tokens is carried from chunk to chunk. For a mean embedding, the tokens are added one after
another in float64, so that the bits do not depend on the chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moonpool.protocol.block_layout import BlockLayout
from moonpool.scheduler.actions import StepEntry
from moonpool.types import Token, TokenLogprobs
from moonpool_engine.engine.ops import StepMeta
from moonpool_engine.engine.spec import ModelSpec

EMPTY: Mapping[str, int] = MappingProxyType({})
LayerDone = Callable[[int], None]
"""Called in the engine's thread once a layer's K and V of the whole step are in their blocks."""

BeforeAttend = Callable[[int], Collection[int]]
"""Called in the engine's thread before a layer's attention reads the KVCache of earlier tokens.

The call returns once the layer has arrived, with the indices of the entries for which it never
will. These entries are still computed, with invalid data in their blocks. Computing them changes no
other entry's rows, and the engine draws no token for them.
"""


class StepError(ValueError):
    """The engine cannot run this step; it has computed and written nothing."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """`tokens[i]` belongs to the step's i-th entry; it is None if the entry draws none. `scored`
    has the logprobs of the entries' targets, `pooled` what the entries' next steps need as
    `StepEntry.pooled`."""

    tokens: list[Token | None]
    seconds: float
    scored: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by entry
    pooled: dict[int, bytes] = field(default_factory=dict)  # by entry
    further: dict[int, tuple[Token, ...]] = field(default_factory=dict)
    """Entry -> the tokens after its first, one for each draft that was right."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one step. token_ids: [T] int64. last: [S], the last row of each sequence."""

    token_ids: Tensor
    meta: StepMeta
    last: NDArray[np.int64]


def plan_rows(
    entries: Sequence[StepEntry],
    spec: ModelSpec,
    layout: BlockLayout,
    num_blocks: int,
    adapters: Mapping[str, int] = EMPTY,
) -> Rows:
    """Lays out a step's rows over an arena of `num_blocks`. `adapters`: the number of each LoRA
    adapter, by the adapter's fingerprint. Raises `StepError`."""
    if not entries:
        raise StepError("a step needs at least one sequence")
    counts = np.array([len(entry.new_token_ids) for entry in entries])
    starts = np.array([entry.start for entry in entries])
    _check(entries, counts, starts, spec.max_positions)
    bounds = np.zeros(len(entries) + 1, dtype=np.int64)
    counts.cumsum(out=bounds[1:])
    num_rows = int(bounds[-1])
    if num_rows == len(entries):
        positions = starts
        token_ids = np.array([entry.new_token_ids[0] for entry in entries])
    else:
        positions = np.arange(num_rows) + np.repeat(starts - bounds[:-1], counts)
        everything = chain.from_iterable(entry.new_token_ids for entry in entries)
        token_ids = np.fromiter(everything, np.int64, num_rows)
    if token_ids.min() < 0 or token_ids.max() >= spec.vocab_size:
        raise StepError(f"a token id lies outside the vocabulary of {spec.vocab_size}")
    tables = _block_tables(entries, starts + counts, layout.block_tokens, num_blocks)
    meta = StepMeta(
        positions=torch.from_numpy(positions.astype(np.int32)),
        row_starts=torch.from_numpy(bounds.astype(np.int32)),
        context_starts=torch.from_numpy(starts.astype(np.int32)),
        block_tables=torch.from_numpy(tables),
        num_rows=num_rows,
        num_sequences=len(entries),
        adapters=_adapters(entries, adapters),
        unchecked=tuple(
            i for i, e in enumerate(entries) if e.any_content or e.arriving is not None
        ),
    )
    return Rows(torch.from_numpy(token_ids), meta, bounds[1:] - 1)


def _adapters(entries: Sequence[StepEntry], numbers: Mapping[str, int]) -> tuple[int, ...]:
    if not any(entry.adapter for entry in entries):
        return ()
    unknown = next((e.adapter for e in entries if e.adapter and e.adapter not in numbers), None)
    if unknown is not None:
        raise StepError(f"the LoRA adapter {unknown[:16]} is not loaded here")
    return tuple(numbers[entry.adapter] if entry.adapter else 0 for entry in entries)


def drawing_rows(
    entries: Sequence[StepEntry], drawing: Sequence[int], last: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Returns the rows from which the entries `drawing` draw, in order: the last row of each entry,
    and the rows before its drafts. last: [S] of `Rows`."""
    ends = last[drawing]
    if not any(entries[i].num_drafts for i in drawing):
        return ends
    counts = np.array([1 + entries[i].num_drafts for i in drawing])
    offsets = np.arange(counts.sum()) - np.repeat(counts.cumsum() - 1, counts)
    rows: NDArray[np.int64] = np.repeat(ends, counts) + offsets
    return rows


def first_positions(entries: Sequence[StepEntry], drawing: Sequence[int]) -> list[int]:
    """The place in its sequence of the first token that each of these entries draws."""
    return [
        entries[i].start + len(entries[i].new_token_ids) - entries[i].num_drafts for i in drawing
    ]


def _check(
    entries: Sequence[StepEntry],
    counts: NDArray[np.int64],
    starts: NDArray[np.int64],
    max_positions: int,
) -> None:
    if counts.min() < 1:
        attempt = entries[int(counts.argmin())].attempt_id
        raise StepError(f"attempt {attempt} has no new token in its step")
    ends = starts + counts
    if starts.min() < 0 or ends.max() > max_positions:
        i = int(ends.argmax()) if starts.min() >= 0 else int(starts.argmin())
        raise StepError(
            f"attempt {entries[i].attempt_id}: tokens {starts[i]}..{ends[i] - 1} do not fit "
            f"the model's context of {max_positions}"
        )


def _block_tables(
    entries: Sequence[StepEntry],
    ends: NDArray[np.int64],
    block_tokens: int,
    num_blocks: int,
) -> NDArray[np.int32]:
    """[S, most blocks of a sequence] int32, padded with 0. ends: [S], one past the last token."""
    needed = (-(-ends // block_tokens)).tolist()
    tables = np.zeros((len(entries), max(needed)), dtype=np.int32)
    for i, entry in enumerate(entries):
        count = needed[i]
        if len(entry.block_ids) < count:
            raise StepError(
                f"attempt {entry.attempt_id} holds {len(entry.block_ids)} blocks, but its "
                f"step needs {count}"
            )
        tables[i, :count] = entry.block_ids[:count]
    if tables.min() < 0 or tables.max() >= num_blocks:
        raise StepError(f"a block id lies outside 0..{num_blocks - 1}")
    return tables


def pooled_rows(entry: StepEntry) -> int:
    """How many of the entry's last rows its embedding needs."""
    if entry.pooling == "mean":
        return len(entry.new_token_ids)
    return 1 if entry.pooling == "last" else 0


def pool(entry: StepEntry, states: Tensor) -> bytes | Token:
    """Returns the sum that the next step of the entry continues, or the finished embedding.

    states: [pooled_rows(entry), hidden], any dtype. Raises `ArithmeticError` for states that are
    not finite.
    """
    rows = states.detach().cpu().double().numpy()
    total = np.frombuffer(entry.pooled, dtype="<f8") if entry.start and entry.pooled else None
    if total is None:
        total = np.zeros(rows.shape[1])
    for row in rows:
        total = total + row
    if entry.draw is None:
        return total.astype("<f8").tobytes()
    return _embedding(total)


def pool_last(state: Tensor) -> Token:
    """The embedding that the last token's state [hidden] is. Raises as `pool`."""
    return _embedding(state.detach().cpu().double().numpy())


def _embedding(total: NDArray[np.float64]) -> Token:
    if not np.isfinite(total).all():
        raise ArithmeticError("the hidden states of a prompt contain NaN or infinity")
    # The length does not depend on the number of tokens, so the sum serves for the mean.
    unit = total / max(float(np.sqrt(np.square(total).sum())), 1e-300)
    return Token(0, payload=unit.astype("<f4").tobytes())

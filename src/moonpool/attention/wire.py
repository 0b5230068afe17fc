"""What model worker and attention worker say to each other about one step, layer by layer.

    model worker                                    attention worker
      | -- Plan: whose rows, which blocks ------------> |
      | -- per layer: Q, then KEYS_VALUES ------------> |  attends old tokens, stores, attends
      | <-- per layer: ATTENDED ----------------------- |  how long that took; or FAILED: one line
      | -- ECHO, which comes back as it is -----------> |  (to measure the way)

A message is a header of 16 bytes and a payload; payloads of layers are the bytes of the rows, their
shapes follow from the plan. Nothing else of a model crosses: queries, keys, values, outputs.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from moonpool.engine.ops import StepMeta

HEADER = struct.Struct("<IBxHII")  # engine/native/ring.h has the same
PLAN, Q, KEYS_VALUES, ATTENDED, FAILED, ECHO = range(1, 7)
MAX_PLAN_BYTES = 64 << 20
MAX_TEXT_BYTES = 4096
MAX_ECHO_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Header:
    num_bytes: int
    kind: int
    layer: int
    step: int
    busy_ns: int = 0  # of ATTENDED: what storing and attending took

    def pack(self) -> bytes:
        return HEADER.pack(self.num_bytes, self.kind, self.layer, self.step, self.busy_ns)


class Rows(msgspec.Struct, frozen=True, array_like=True):
    """Rows of some sequences, as in `StepMeta`; int32, in blocks of the attention worker's own."""

    positions: bytes
    row_starts: bytes
    context_starts: bytes
    block_tables: bytes
    num_sequences: int

    def meta(self) -> StepMeta:
        """Raises ValueError where the numbers do not fit each other."""
        tables = _numbers(self.block_tables)
        positions, starts = _numbers(self.positions), _numbers(self.row_starts)
        return StepMeta(
            positions=positions,
            row_starts=starts,
            context_starts=_numbers(self.context_starts),
            block_tables=tables.view(self.num_sequences, len(tables) // max(self.num_sequences, 1)),
            num_rows=len(positions),
            num_sequences=self.num_sequences,
        )


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """One attention worker's share of a step.

    `whole`: sequences that lie here from their first token on; the first rows of Q are theirs, and
    the answer is their output. `parts`: one sequence per segment that lies here, and
    `part_rows` the row of Q of each of their rows; the answer is their partials, after the outputs.
    `stores`: where the rows of K and V go. `epoch`: see `attention.control`. `early`: attend to the
    old tokens as soon as Q is there, else only when K and V are there, too.
    """

    stores: Rows
    whole: Rows
    parts: Rows
    segments: bytes
    part_rows: bytes
    num_queries: int
    epoch: int
    early: bool = True


def rows_of(
    positions: np.ndarray[tuple[int], np.dtype[np.int32]],
    row_starts: np.ndarray[tuple[int], np.dtype[np.int32]],
    context_starts: np.ndarray[tuple[int], np.dtype[np.int32]],
    block_tables: np.ndarray[tuple[int, int], np.dtype[np.int32]],
) -> Rows:
    return Rows(
        positions.tobytes(),
        row_starts.tobytes(),
        context_starts.tobytes(),
        block_tables.tobytes(),
        len(context_starts),
    )


def _numbers(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, np.int32).copy())

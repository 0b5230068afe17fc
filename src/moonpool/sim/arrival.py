"""One request of a workload, as the simulator takes it."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.types import BlockKey


@dataclass(frozen=True, slots=True)
class Arrival:
    """`keys` name the prompt's full blocks, of the pool's size; none are shared where there are
    none."""

    arrived_s: float
    input_tokens: int
    output_tokens: int
    keys: tuple[BlockKey, ...]

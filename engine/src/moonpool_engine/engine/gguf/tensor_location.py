"""Describes where a GGUF file has a tensor of the model."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from moonpool_engine.engine.families.stored import Shape


class TensorLocation(NamedTuple):
    """The tensor with `shape` starts at row `first_row` of the stored tensor `name`.

    A vector is one row."""

    name: str
    stored_shape: Shape
    shape: Shape
    first_row: int = 0
    half: int | None = None  # the first or second half of each head's stored rows

    @property
    def num_rows(self) -> int:
        """Stored rows to read."""
        return prod(self.shape[:-1]) * (1 if self.half is None else 2)

"""Describes where a checkpoint stores a tensor of the model: as a view of a stored tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


class StoredTensor(NamedTuple):
    """A view of the stored tensor `name`, which has `shape`."""

    name: str
    shape: Shape
    take: Callable[[Tensor], Tensor]


def whole(stored: Tensor) -> Tensor:
    """Returns a view of the whole tensor."""
    return stored


def rows(first: int, end: int, stored: Tensor) -> Tensor:
    """Rows first .. end - 1."""
    return stored[first:end]

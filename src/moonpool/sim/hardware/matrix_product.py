"""Computes the time of one matrix product, as a soft maximum of memory and compute time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

SoftMaximum = Callable[[float, float], float]


def soft_maximum(sharpness: int) -> SoftMaximum:
    """Returns the function (a^q + b^q)^(1/q) for q = `sharpness`.

    The function uses no powers, whose last bits differ between machines. Raises ValueError unless q
    is 1, 2, 4 or 8.
    """
    known: dict[int, SoftMaximum] = {1: _soft_1, 2: _soft_2, 4: _soft_4, 8: _soft_8}
    if sharpness not in known:
        raise ValueError(f"the sharpness of a soft maximum must be 1, 2, 4 or 8, not {sharpness}")
    return known[sharpness]


def _soft_1(a: float, b: float) -> float:
    return a + b


def _soft_2(a: float, b: float) -> float:
    return sqrt(a * a + b * b)


def _soft_4(a: float, b: float) -> float:
    a, b = a * a, b * b
    return sqrt(sqrt(a * a + b * b))


def _soft_8(a: float, b: float) -> float:
    a, b = a * a, b * b
    a, b = a * a, b * b
    return sqrt(sqrt(sqrt(a * a + b * b)))


@dataclass(frozen=True, slots=True)
class Product:
    """One device's shard of a matrix product, as coefficients of its time."""

    name: str
    weights_s: float
    memory_s_per_row: float
    compute_s_per_row: float
    launch_s: float
    tile_rows: int
    soft: SoftMaximum

    def memory_s(self, rows: int) -> float:
        """Time to read the weights and move the activations of `rows` rows."""
        return self.weights_s + self.memory_s_per_row * rows

    def compute_s(self, rows: int) -> float:
        """Time of the FLOPs of `rows` rows, rounded up to whole tiles."""
        tile = self.tile_rows
        return self.compute_s_per_row * ((rows + tile - 1) // tile * tile)

    def time_s(self, rows: int) -> float:
        """launch + soft maximum of memory and compute time."""
        return self.launch_s + self.soft(self.memory_s(rows), self.compute_s(rows))

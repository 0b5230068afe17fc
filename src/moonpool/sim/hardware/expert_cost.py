"""The time of a mixture's feed-forward part, with experts shared out whole over the devices.

T tokens with k of E experts each touch E (1 - (1 - k/E)^T) experts. Routing is taken as uniform,
and the fullest device has 1.4 standard deviations more experts and rows than the mean. Every device
has all tokens, so the sum over devices is the layer's usual all-reduce. Only + - * / and sqrt are
used.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from moonpool.sim.hardware.matrix_product import Product

SPREAD = 2.0
"""The variance that the fullest device exceeds the mean by: 1.4 standard deviations."""


@dataclass(frozen=True, slots=True)
class ExpertCost:
    """One layer's experts. `products`: the products of one expert."""

    count: int
    per_token: int
    num_devices: int
    products: tuple[Product, ...]

    def touched(self, tokens: int) -> tuple[float, float]:
        """Experts that the fullest device reads, and the rows that it computes."""
        devices = self.num_devices
        missed = power(1.0 - self.per_token / self.count, tokens)
        experts = self._fullest(self.count * (1.0 - missed))
        rows = self._fullest(float(tokens * self.per_token))
        rows = min(rows, float(tokens * self.per_token))
        return min(experts, -(-self.count // devices), rows), rows

    def _fullest(self, total: float) -> float:
        mean = total / self.num_devices
        return mean + sqrt(SPREAD * mean * (1.0 - 1.0 / self.num_devices))

    def limits_s(self, tokens: int) -> list[tuple[float, float]]:
        """Memory and compute time of each product."""
        experts, rows = self.touched(tokens)
        limits = []
        for product in self.products:
            each = rows / experts
            tiles = int((each + product.tile_rows - 1) // product.tile_rows)
            compute_s = product.compute_s_per_row * product.tile_rows * max(tiles, 1) * experts
            memory_s = product.weights_s * experts + product.memory_s_per_row * rows
            limits.append((memory_s, compute_s))
        return limits

    @property
    def launch_s(self) -> float:
        """Launches of one layer: one for each product, of all experts together."""
        return sum(product.launch_s for product in self.products)

    def time_s(self, tokens: int) -> float:
        """One layer's experts, without launches."""
        return sum(
            product.soft(*pair)
            for product, pair in zip(self.products, self.limits_s(tokens), strict=True)
        )


def power(base: float, exponent: int) -> float:
    """base ** exponent for a whole exponent, by multiplications alone."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result

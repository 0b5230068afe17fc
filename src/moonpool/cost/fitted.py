"""A cost model fitted to measurements of a running engine.

prefill(n, p)   = a + b (n-p) + c (n-p)^2 + d (n-p) p     n prompt tokens, p of them cached
decode(B, ctx)  = e + f B + g ctx                         ctx = sum of the B contexts
transfer(bytes) = h + bytes / bandwidth

The prefill form is the one that fits Mooncake's own testbed within 8 % (FAST'25 Fig. 14).
Coefficients are fitted by non-negative least squares on *relative* errors, so that estimates grow
with every argument and short requests count as much as long ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

from moonpool.types import Struct

Floats = npt.NDArray[np.float64]


class PrefillSample(Struct, frozen=True):
    num_tokens: int
    cached_tokens: int
    seconds: float


class DecodeSample(Struct, frozen=True):
    batch: int
    context_tokens: int
    seconds: float


class FittedCost(Struct, frozen=True):
    """Coefficients of the formulas above; implements `CostModel`."""

    prefill: tuple[float, float, float, float]
    decode: tuple[float, float, float]
    transfer_latency_s: float = 0.002
    shared_memory_bytes_per_s: float = 4e9
    network_bytes_per_s: float = 1e9

    def prefill_s(self, num_tokens: int, cached_tokens: int) -> float:
        a, b, c, d = self.prefill
        new = max(num_tokens - cached_tokens, 0)
        return a + new * (b + c * new + d * cached_tokens)

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        e, f, g = self.decode
        return e + f * batch + g * context_tokens

    def transfer_s(self, num_bytes: int, same_host: bool, num_sharing: int = 1) -> float:
        if num_bytes <= 0:
            return 0.0
        rate = self.shared_memory_bytes_per_s if same_host else self.network_bytes_per_s
        return self.transfer_latency_s + num_bytes * max(num_sharing, 1) / rate


def fit_cost(prefills: Sequence[PrefillSample], decodes: Sequence[DecodeSample]) -> FittedCost:
    """Fits both formulas. Raises ValueError when there is nothing to fit to."""
    if not prefills or not decodes:
        raise ValueError("a cost model needs at least one prefill and one decode measurement")
    new = np.array([s.num_tokens - s.cached_tokens for s in prefills], dtype=np.float64)
    cached = np.array([s.cached_tokens for s in prefills], dtype=np.float64)
    prefill_terms = np.stack([np.ones_like(new), new, new * new, new * cached], axis=1)
    prefill_s = np.array([s.seconds for s in prefills], dtype=np.float64)
    batch = np.array([s.batch for s in decodes], dtype=np.float64)
    context = np.array([s.context_tokens for s in decodes], dtype=np.float64)
    decode_terms = np.stack([np.ones_like(batch), batch, context], axis=1)
    decode_s = np.array([s.seconds for s in decodes], dtype=np.float64)
    a, b, c, d = _fit_non_negative(prefill_terms, prefill_s)
    e, f, g = _fit_non_negative(decode_terms, decode_s)
    return FittedCost(prefill=(a, b, c, d), decode=(e, f, g))


def _fit_non_negative(terms: Floats, seconds: Floats) -> list[float]:
    """Least relative squares with coefficients >= 0: with so few terms, every subset can be
    tried."""
    scaled = terms / seconds[:, None]
    magnitude = np.maximum(np.abs(scaled).max(axis=0), 1e-300)
    scaled = scaled / magnitude
    target = np.ones(len(seconds))
    num_terms = terms.shape[1]
    best_error, best = float("inf"), np.zeros(num_terms)
    for size in range(1, num_terms + 1):
        for subset in combinations(range(num_terms), size):
            columns = list(subset)
            solution = np.linalg.lstsq(scaled[:, columns], target, rcond=None)[0]
            if (solution < 0).any():
                continue
            error = float(((scaled[:, columns] @ solution - target) ** 2).sum())
            if error < best_error - 1e-12:
                best_error, best = error, np.zeros(num_terms)
                best[columns] = solution
    return [float(x) for x in best / magnitude]

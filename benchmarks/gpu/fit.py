"""Fits the cost model's GEMM and attention terms to measured times, and scores other constants.

Pure numpy; `roofline.py` measures. The GEMM model, for T rows through a [K, N] weight:

    t = c0 + ((bytes / (mu BW)) ** q + (2 ceil_tile(T) K N / (phi F)) ** q) ** (1 / q)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moonpool.distributions import interpolated

Array = NDArray[np.float64]

PEAK_FLOPS, PEAK_BYTES_PER_S = 989e12, 4.8e12  # NVIDIA H200 SXM, from its data sheet, dense bf16
TILES = (1, 16, 32, 64, 128, 256)
SOFTNESS = (1, 2, 4, 8)
ELEMENT_BYTES = 2


@dataclass(frozen=True)
class GemmConstants:
    c0_s: float
    mu: float
    phi: float
    tile: int
    q: int


# The constants that the reference suggests for this GPU, which has no fit of its own.
H100_CONSTANTS = GemmConstants(c0_s=6e-6, mu=0.94, phi=0.74, tile=128, q=2)


@dataclass(frozen=True)
class GemmFit:
    """One timed product: [t, k] @ [k, n]."""

    t: int
    k: int
    n: int
    seconds: float


def predict(gemms: list[GemmFit], c: GemmConstants) -> Array:
    t, k, n = (np.array([getattr(g, x) for g in gemms], dtype=np.float64) for x in "tkn")
    return _predict(t, k, n, c)


def _predict(t: Array, k: Array, n: Array, c: GemmConstants) -> Array:
    memory = ELEMENT_BYTES * (k * n + t * (k + n)) / (c.mu * PEAK_BYTES_PER_S)
    rows = np.ceil(t / c.tile) * c.tile
    compute = 2 * rows * k * n / (c.phi * PEAK_FLOPS)
    softened: Array = (memory**c.q + compute**c.q) ** (1 / c.q)
    return c.c0_s + softened


def mape(predicted: Array, measured: Array) -> float:
    return float(np.mean(np.abs(predicted - measured) / measured))


def fit_gemm(gemms: list[GemmFit]) -> list[tuple[float, GemmConstants]]:
    """Returns the best constants for each (tile, q) with their error, the best first."""
    t, k, n = (np.array([getattr(g, x) for g in gemms], dtype=np.float64) for x in "tkn")
    measured = np.array([g.seconds for g in gemms])

    def error(c: GemmConstants) -> float:
        return mape(_predict(t, k, n, c), measured)

    found = []
    for tile in TILES:
        for q in SOFTNESS:
            start = GemmConstants(c0_s=4e-6, mu=0.85, phi=0.75, tile=tile, q=q)
            best = _descend(start, error)
            found.append((error(best), best))
    return sorted(found, key=lambda pair: pair[0])


def _descend(c: GemmConstants, error: Callable[[GemmConstants], float]) -> GemmConstants:
    """Runs a pattern search over c0, mu and phi with shrinking steps."""
    step = {"c0_s": 2e-6, "mu": 0.08, "phi": 0.08}
    low = {"c0_s": 0.0, "mu": 0.2, "phi": 0.2}
    high = {"c0_s": 20e-6, "mu": 1.0, "phi": 1.0}
    best = error(c)
    while step["phi"] > 0.004:
        moved = False
        for name in step:
            for sign in (-1, 1):
                value = min(max(getattr(c, name) + sign * step[name], low[name]), high[name])
                other = replace(c, **{name: value})
                if (score := error(other)) < best:
                    c, best, moved = other, score, True
        if not moved:
            step = {name: size / 2 for name, size in step.items()}
    return c


def layer_errors(
    layers: Iterable[tuple[str, list[tuple[int, int]]]], gemms: list[GemmFit], c: GemmConstants
) -> dict[str, object]:
    """Error of the sum over each layer's products, for each T: mean, 90th percentile, worst."""
    times = {(g.t, g.k, g.n): g.seconds for g in gemms}
    predicted = dict(zip(times, predict(gemms, c), strict=True))
    errors, per_model = [], {}
    for name, shapes in layers:
        own = []
        for t in sorted({g.t for g in gemms}):
            keys = [(t, k, n) for k, n in shapes]
            if all(key in times for key in keys):
                truth = sum(times[key] for key in keys)
                own.append(abs(sum(float(predicted[key]) for key in keys) - truth) / truth)
        per_model[name] = float(np.mean(own))
        errors += own
    return {
        "mape": float(np.mean(errors)),
        "p90": interpolated(sorted(errors), 0.9),
        "worst": float(max(errors)),
        "per_model": per_model,
    }


@dataclass(frozen=True)
class Line:
    """t = c0 + work / (share * peak), by least relative error."""

    c0_s: float
    share: float
    mape: float


def fit_line(work: list[float], seconds: list[float], peak: float) -> Line:
    x, y = np.array(work) / peak, np.array(seconds)
    c0s = np.linspace(0, min(60e-6, float(y.min())), 61)
    shares = np.linspace(0.02, 1.2, 237)
    guess = c0s[:, None, None] + x / shares[:, None]
    errors = np.mean(np.abs(guess - y) / y, axis=2)
    i, j = np.unravel_index(int(errors.argmin()), errors.shape)
    return Line(float(c0s[i]), float(shares[j]), float(errors[i, j]))


def as_dict(c: GemmConstants | Line) -> dict[str, float]:
    return {name: round(x, 10) if isinstance(x, float) else x for name, x in asdict(c).items()}

"""A straight line through points that outliers do not move (Theil and Sen)."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence


def slope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The median of the slopes between all pairs of points of different x, and about how far it may
    be off: half the spread of the middle half of what is found for one round in turn."""
    slopes = [
        (b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2) if a[0] != b[0]
    ]
    xs = dict.fromkeys(x for x, _ in points)
    columns = [[y for at, y in points if at == x] for x in xs]
    singles = []
    for ys in zip(*columns, strict=False):
        ends = list(zip(xs, ys, strict=True))
        pairs = itertools.combinations(ends, 2)
        singles.append(statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs))
    if len(singles) < 2:
        return statistics.median(slopes), 0.0
    low, _, high = statistics.quantiles(singles, n=4)
    return statistics.median(slopes), (high - low) / 2 / len(singles) ** 0.5 * 1.86

"""A straight line through points that outliers do not move (Theil and Sen)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def slope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the median slope between all pairs of points with different x, and its rough error.

    The error is half the spread of the middle half of the slopes of single rounds. Each round has
    one point for each x.
    """
    from scipy.stats import theilslopes

    xs = list(dict.fromkeys(x for x, _ in points))
    columns = [[y for at, y in points if at == x] for x in xs]
    found = float(theilslopes([y for _, y in points], [x for x, _ in points]).slope)
    singles = [float(theilslopes(ys, xs).slope) for ys in zip(*columns, strict=False)]
    if len(singles) < 2:
        return found, 0.0
    low, _, high = statistics.quantiles(singles, n=4)
    return found, (high - low) / 2 / len(singles) ** 0.5 * 1.86

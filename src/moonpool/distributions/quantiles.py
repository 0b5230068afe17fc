"""Quantiles of values that are all there.

Three rules, for three uses:

- Figures of requests take the **nearest rank**: the smallest value with at least that share of the
  values at or below it. It is a value that was measured, and what `Histogram` returns.
- What decides takes the **rank above**: the smallest value with more than that share at or below
  it. Between two values it errs towards the larger, which is the slower or longer one.
- Tables of a trace, and of a few repeated runs, are **interpolated** between neighbours.

Shares are from 0 to 1. `ordered` rises and has a value at least.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Any

_TINY = 1e-9
"""0.07 of 100 values is 7.000000000000001 of them, and means 7."""


def nearest_rank(ordered: Sequence[float], share: float) -> float:
    """The smallest value with at least `share` of all values at or below it."""
    return ordered[max(ceil(share * len(ordered) - _TINY) - 1, 0)]


def nearest_bin(counts: Mapping[int, int], share: float, total: int) -> int:
    """The bin of the nearest rank. `counts` by bin, of which the lower has the smaller values;
    their sum, `total`, is at least 1."""
    left = max(1.0, share * total) - _TINY
    for index in sorted(counts):
        left -= counts[index]
        if left <= 0.0:
            break
    return index


def rank_above(share: float, count: int) -> int:
    """The index, among `count` ordered values, of the first with more than `share` of them at or
    below it; the last where there is none."""
    return min(int(share * count), count - 1)


def interpolated(ordered: Sequence[float], share: float) -> float:
    """The value at this share of the way from the first to the last, between its neighbours."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def percentiles(values: Iterable[float], *percents: int) -> dict[str, float]:
    """The nearest ranks as "p50", "p99" and so on; 0 without values."""
    ordered = sorted(values) or [0.0]
    return {f"p{percent}": nearest_rank(ordered, percent / 100) for percent in percents}


def rounded(value: Any, digits: int = 6) -> float:
    """Rounds to significant digits: printed figures must not depend on a library's last bit."""
    return float(f"{value:.{digits}g}")

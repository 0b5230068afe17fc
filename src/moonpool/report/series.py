"""Sampled series made fit to be drawn: rates of counts, means of windows, shares of busy time."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from moonpool.report.axis import round_time_s
from moonpool.report.svg import Points


def at_edges(points: Points, edges: Sequence[float]) -> list[float]:
    """The series' values at rising instants, straight lines between the samples."""
    values: list[float] = []
    number = 0
    for edge in edges:
        while number + 1 < len(points) and points[number + 1][0] < edge:
            number += 1
        begin_s, begin = points[number]
        end_s, end = points[min(number + 1, len(points) - 1)]
        share = (edge - begin_s) / (end_s - begin_s) if end_s > begin_s else 0.0
        values.append(begin + (end - begin) * min(max(share, 0.0), 1.0))
    return values


def window_edges(points: Points, most: int) -> list[float]:
    """The span of the series in at most so many windows of a round length, none finer than its
    samples. The last may be up to half as long again or as short."""
    begin_s, end_s = points[0][0], points[-1][0]
    if len(points) < 2:
        return [begin_s, begin_s + 1.0]
    span_s = end_s - begin_s
    window_s = round_time_s(span_s / min(most, len(points) - 1) * (1 - 1e-9))
    number = max(round(span_s / window_s), 1)
    return [*(begin_s + n * window_s for n in range(number)), end_s]


def rates(points: Points, edges: Sequence[float]) -> list[tuple[float, float]]:
    """Of a running count: how fast it rose in each window, at the window's middle."""
    values = at_edges(points, edges)
    return [
        ((edges[n] + edges[n + 1]) / 2, (values[n + 1] - values[n]) / (edges[n + 1] - edges[n]))
        for n in range(len(edges) - 1)
    ]


def thinned(points: Points, most: int = 360) -> list[tuple[float, float]]:
    """Means of neighbours, so that there are at most so many; infinite samples are left out."""
    finite = [(x, y) for x, y in points if isfinite(y)]
    size = -(-len(finite) // most)
    if size <= 1:
        return finite
    groups = [finite[n : n + size] for n in range(0, len(finite), size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def busy_shares(points: Points, edges: Sequence[float]) -> tuple[float, ...]:
    """Of a running count of busy seconds: its share of each window.

    Decode steps advanced together are counted when the last of them ends. So what is more than a
    window can hold happened before it, and is carried there.
    """
    values = at_edges(points, edges)
    shares = [0.0] * (len(edges) - 1)
    carried_s = 0.0
    for n in range(len(shares) - 1, -1, -1):
        window_s = edges[n + 1] - edges[n]
        busy_s = values[n + 1] - values[n] + carried_s
        carried_s = max(busy_s - window_s, 0.0)
        shares[n] = min(max(busy_s, 0.0), window_s) / window_s
    return tuple(shares)

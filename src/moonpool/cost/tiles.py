"""What a measured curve of step times over chunk sizes says: the device's tile, and where it is
saturated (SARATHI section 4.3 and Fig. 4)."""

from __future__ import annotations

from collections.abc import Mapping

TILES = (128, 64, 32, 16)  # looked for, largest first
MULTIPLES = (2, 3, 4)
WHOLE_TILE = 0.6
"""A token past a tile's end that costs at least so much of a tile pays for the whole of it. Half
would be the next smaller tile's."""
SATURATED = 0.95  # of the highest throughput

Curve = Mapping[int, float]
"""Seconds of a step by its number of prefill tokens."""


def tile_points() -> tuple[int, ...]:
    """Chunk sizes whose times `find_tile` asks for: the ends of tiles, and one token beyond."""
    ends = {tile * multiple for tile in TILES for multiple in MULTIPLES}
    return tuple(sorted(ends | {end + 1 for end in ends}))


def find_tile(curve: Curve) -> int:
    """The largest tile past each of whose ends one more token costs a whole one; 1 if there is
    none, or the points to tell it are missing."""
    for tile in TILES:
        ends = [tile * multiple for multiple in MULTIPLES]
        if not all(end in curve and end + 1 in curve for end in ends):
            continue
        steps = [(curve[end + 1] - curve[end]) / (curve[end] * tile / end) for end in ends]
        if min(steps) >= WHOLE_TILE:
            return tile
    return 1


def saturation_tokens(curve: Curve, tile_tokens: int = 1) -> int:
    """The smallest measured chunk, in whole tiles, with nearly the highest throughput."""
    rates = {tokens: tokens / seconds for tokens, seconds in curve.items()}
    aligned = {t: rate for t, rate in rates.items() if t % tile_tokens == 0} or rates
    highest = max(aligned.values())
    return min(tokens for tokens, rate in aligned.items() if rate >= SATURATED * highest)

"""What measured step times say beyond a fitted formula. Pure.

Three things: the device's tile and the chunk size at which it is saturated, from the times of
prefill chunks; the time of a decode step by its batch size; and how far single steps depart from
their usual time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import fsum

import msgspec

from moonpool.cost.fitted import DecodeSample, FittedCost

# Prefill chunks: tiles and saturation

TILES = (128, 64, 32, 16)  # tokens; looked for, largest first
MULTIPLES = (2, 3, 4)
WHOLE_TILE = 0.6
"""A token past a tile's end that costs at least this share of a tile pays for all of it. At half,
it would be a token past the end of the next smaller tile."""
SATURATED = 0.95  # share of the highest throughput

Curve = Mapping[int, float]
"""Seconds of a step by its number of prefill tokens."""


def tile_points() -> tuple[int, ...]:
    """Chunk sizes whose times `find_tile` needs: ends of tiles, and one token beyond each."""
    ends = {tile * multiple for tile in TILES for multiple in MULTIPLES}
    return tuple(sorted(ends | {end + 1 for end in ends}))


def find_tile(curve: Curve) -> int:
    """Returns the device's tile in tokens: the largest candidate for which, past each of its
    multiples, one more token costs a whole tile. Returns 1 if there is none or points are missing.
    """
    for tile in TILES:
        ends = [tile * multiple for multiple in MULTIPLES]
        if not all(end in curve and end + 1 in curve for end in ends):
            continue
        steps = [(curve[end + 1] - curve[end]) / (curve[end] * tile / end) for end in ends]
        if min(steps) >= WHOLE_TILE:
            return tile
    return 1


def saturation_tokens(curve: Curve, tile_tokens: int = 1) -> int:
    """Returns the smallest measured chunk of whole tiles whose throughput is at least SATURATED of
    the highest (SARATHI section 4.3 and Fig. 4)."""
    rates = {tokens: tokens / seconds for tokens, seconds in curve.items()}
    aligned = {t: rate for t, rate in rates.items() if t % tile_tokens == 0} or rates
    highest = max(aligned.values())
    return min(tokens for tokens, rate in aligned.items() if rate >= SATURATED * highest)


# Decode steps: time by batch size


def with_decode_curve(cost: FittedCost, samples: Sequence[DecodeSample]) -> FittedCost:
    """Returns `cost` with a decode time that goes through the samples.

    A GEMM's tiles make some rows free and others expensive: a batch of two may cost what one does,
    and sixteen twice what eight do. So where single batch sizes were measured
    (`moonpool profile URL`), base times lie on a broken line through them, and only contexts keep
    a slope: seconds = base(batch) + g context_tokens. A larger batch never takes less: where the
    means fall, neighbours are levelled to their common mean.
    """
    slope_s = _context_slope_s(samples)
    if slope_s is None:
        slope_s = cost.decode[2]
    bases_s: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        bases_s[sample.batch].append(max(sample.seconds - slope_s * sample.context_tokens, 0.0))
    points = [(batch, fsum(found) / len(found)) for batch, found in sorted(bases_s.items())]
    e, f, _ = cost.decode
    return msgspec.structs.replace(cost, decode=(e, f, slope_s), decode_curve=_rising(points))


def _context_slope_s(samples: Sequence[DecodeSample]) -> float | None:
    """Seconds per token of context, from the batch sizes measured with several contexts; None if
    there are none."""
    by_batch: dict[int, list[DecodeSample]] = defaultdict(list)
    for sample in samples:
        by_batch[sample.batch].append(sample)
    products, squares = [], []
    for found in by_batch.values():
        mean_tokens = fsum(s.context_tokens for s in found) / len(found)
        mean_s = fsum(s.seconds for s in found) / len(found)
        for sample in found:
            tokens = (sample.context_tokens - mean_tokens) / mean_s  # relative errors
            products.append(tokens * (sample.seconds - mean_s) / mean_s)
            squares.append(tokens * tokens)
    spread = fsum(squares)
    return max(fsum(products) / spread, 0.0) if spread > 0 else None


def _rising(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Isotonic regression: the nearest points that never fall (pool adjacent violators)."""
    blocks: list[tuple[float, list[int]]] = []
    for batch, seconds in points:
        level, batches = seconds, [batch]
        while blocks and blocks[-1][0] > level:
            before, others = blocks.pop()
            total = before * len(others) + level * len(batches)
            batches = others + batches
            level = total / len(batches)
        blocks.append((level, batches))
    return tuple((batch, level) for level, batches in blocks for batch in batches)


# Variation of single steps

NUM_RATIOS = 32


def equally_likely(ratios: Sequence[float]) -> tuple[float, ...]:
    """Reduces ratios (the time of a single step over its usual time) to NUM_RATIOS equally likely
    values in rising order with the same mean. Empty if there are fewer ratios than that.

    A serving machine runs a head, a client, transfers and a kernel beside the engine. A mean alone
    would make all gaps equal, so no quantile of gaps would be right. A simulation draws from these
    ratios.
    """
    if len(ratios) < NUM_RATIOS:
        return ()
    found = sorted(ratios)
    share = len(found) / NUM_RATIOS
    parts = (found[int(i * share) : int((i + 1) * share)] for i in range(NUM_RATIOS))
    return tuple(fsum(part) / len(part) for part in parts)

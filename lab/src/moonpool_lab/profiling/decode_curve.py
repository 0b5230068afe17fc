"""Fits the time of a decode step by its batch size, through measured points."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import fsum

import msgspec

from moonpool.cost.fitted import DecodeSample, FittedCost


def with_decode_curve(cost: FittedCost, samples: Sequence[DecodeSample]) -> FittedCost:
    """Returns `cost` with a decode time that goes through the samples.

    A GEMM's tiles make some rows free and others expensive: two rows may cost as much as one, and
    sixteen rows twice as much as eight. So if single batch sizes were measured (`moonpool profile
    URL`), base times lie on a broken line through them, and only contexts keep a slope: seconds =
    base(batch) + g context_tokens. In the fit, a larger batch never takes less time: where the
    measured means fall, neighbours get their common mean.
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
    """Returns the seconds per token of context, from the batch sizes measured with several
    contexts, or None if there are none."""
    by_batch: dict[int, list[DecodeSample]] = defaultdict(list)
    for sample in samples:
        by_batch[sample.batch].append(sample)
    products, squares = [], []
    for found in by_batch.values():
        mean_tokens = fsum(s.context_tokens for s in found) / len(found)
        mean_s = fsum(s.seconds for s in found) / len(found)
        for sample in found:
            # The weights make the fit minimise relative errors.
            tokens = (sample.context_tokens - mean_tokens) / mean_s
            products.append(tokens * (sample.seconds - mean_s) / mean_s)
            squares.append(tokens * tokens)
    spread = fsum(squares)
    return max(fsum(products) / spread, 0.0) if spread > 0 else None


def _rising(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Returns the nearest points that never fall (isotonic regression by pool adjacent
    violators)."""
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

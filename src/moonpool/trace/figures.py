"""What a characterisation says of a trace, as one value that `--json` writes.

Shares and ratios lie between 0 and 1. Quantiles are interpolated
linearly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from moonpool.types import Struct


class Spread(Struct, frozen=True):
    """A distribution in five numbers and its mean."""

    mean: float
    p10: float
    p50: float
    p75: float
    p90: float
    p99: float
    max: float


class Lengths(Struct, frozen=True):
    input_tokens: Spread
    output_tokens: Spread
    prompt_per_decode_token: float
    correlation: float  # of input and output, Pearson's
    long_request_share: float  # of requests with more than 32k input tokens
    long_token_share: float  # of input tokens in those


class Arrivals(Struct, frozen=True):
    """`dispersion`: variance over mean of the number of arrivals per window, by window in seconds;
    1 is a Poisson process. Windows of which the trace holds fewer than two are left out."""

    rate_rps: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    gap_cv: float
    dispersion: dict[int, float]


class Blocks(Struct, frozen=True):
    """Sharing of prompt blocks. The hit ratios are those of a cache without limit.

    `lru_hit_ratio`: of one LRU cache, by its capacity in blocks. `chain_violations` counts blocks
    seen after different blocks; where it is not 0, equal ids do not mean equal prefixes.
    """

    block_tokens: int
    references: int
    distinct: int
    never_reused_share: float
    never_reused_full_share: float  # full blocks only
    hit_ratio_blocks: float
    hit_ratio_tokens: float
    mean_request_hit_ratio: float
    no_hit_requests: int
    hottest_references: tuple[int, ...]
    top_share: dict[int, float]  # of all re-references, by number of hottest blocks
    popular_blocks: int  # with 10 references or more
    popularity_slope: float  # of log references over log rank, ranks 10 to 10,000
    reuse_gap_s: Spread | None
    lru_hit_ratio: dict[int, float]
    chain_violations: int


class Turns(Struct, frozen=True):
    """A row whose first two blocks were seen before follows the row that used its last known block.

    `by_index[0]` counts first turns.
    """

    follow_ups: int
    share: float
    by_index: tuple[int, ...]
    max_index: int
    gap_s: Spread | None
    growth_tokens: Spread | None


class TraceFigures(Struct, frozen=True):
    requests: int
    duration_s: float
    lengths: Lengths
    arrivals: Arrivals
    blocks: Blocks | None
    turns: Turns | None


def spread_of(values: Sequence[float]) -> Spread | None:
    """None: there are no values."""
    if not values:
        return None
    ranked = sorted(values)
    at = [_quantile(ranked, share) for share in (0.1, 0.5, 0.75, 0.9, 0.99)]
    return Spread(
        mean=sum(ranked) / len(ranked),
        p10=at[0],
        p50=at[1],
        p75=at[2],
        p90=at[3],
        p99=at[4],
        max=ranked[-1],
    )


def _quantile(ranked: Sequence[float], share: float) -> float:
    place = share * (len(ranked) - 1)
    low = int(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (place - low) * (ranked[high] - ranked[low])


def dispersion(times_s: Iterable[float], window_s: float) -> float | None:
    """Variance over mean of the number of rising `times_s` per whole window since 0. None: there
    are not two windows."""
    counts: Counter[int] = Counter()
    last_s = 0.0
    for time_s in times_s:
        counts[int(time_s // window_s)] += 1
        last_s = time_s
    return dispersion_of_counts(counts, int(last_s // window_s))


def dispersion_of_counts(counts: Counter[int], num_windows: int) -> float | None:
    inside = [counts[number] for number in range(num_windows)]
    if num_windows < 2 or not sum(inside):
        return None
    mean = sum(inside) / num_windows
    return sum((count - mean) ** 2 for count in inside) / num_windows / mean

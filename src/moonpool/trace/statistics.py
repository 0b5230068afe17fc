"""The characterisation of a trace: load, lengths, arrivals, sharing of blocks, turns.

`TraceStatistics` takes rows one by one, in order of time. `TraceStatistics` keeps two lengths and
the gaps of each row, and an entry per distinct block, but never the rows. `TraceFigures` is the
value that `trace info --json` writes: shares and ratios lie between 0 and 1, quantiles are
interpolated linearly. Times must be as in the file, not spread over ticks.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

from moonpool.distributions import interpolated
from moonpool.trace.blocks import LruCurve, TurnTracker
from moonpool.trace.row import TraceError, TraceRow
from moonpool.types import Struct

WINDOWS_S = (10, 60, 300)
LRU_CAPACITIES_BLOCKS = (1_000, 10_000, 30_000, 50_000, 100_000)
LONG_TOKENS = 32 * 1024
_COUNT_S = 10  # the finest window in seconds; all other windows are multiples of it
_POPULAR = 10


class Distribution(Struct, frozen=True):
    """A distribution by its mean, quantiles and maximum."""

    mean: float
    p10: float
    p50: float
    p75: float
    p90: float
    p99: float
    max: float


class Lengths(Struct, frozen=True):
    """Prompt and answer lengths."""

    input_tokens: Distribution
    output_tokens: Distribution
    prompt_per_decode_token: float
    correlation: float  # Pearson's correlation of input and output
    long_request_share: float  # share of requests with more than 32k input tokens
    long_token_share: float  # share of input tokens in these requests


class ArrivalFigures(Struct, frozen=True):
    """Load and burstiness.

    `dispersion` is the variance over the mean of the arrivals per window, by window in seconds; 1
    is a Poisson process. Windows longer than half the trace are left out.
    """

    rate_rps: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    gap_cv: float
    dispersion: dict[int, float]


class Blocks(Struct, frozen=True):
    """Sharing of prompt blocks. Hit ratios are those of an unbounded cache.

    `lru_hit_ratio` is the hit ratio of an LRU cache, by its capacity in blocks. `chain_violations`
    counts blocks that follow different blocks; if it is not 0, equal ids do not mean equal
    prefixes.
    """

    block_tokens: int
    references: int
    distinct: int
    never_reused_share: float
    never_reused_full_share: float  # share of the full blocks that are never reused
    hit_ratio_blocks: float
    hit_ratio_tokens: float
    mean_request_hit_ratio: float
    no_hit_requests: int
    hottest_references: tuple[int, ...]
    top_share: dict[int, float]  # share of all re-references, by number of hottest blocks
    popular_blocks: int  # blocks with 10 references or more
    popularity_slope: float  # slope of log references over log rank, ranks 10 to 10,000
    reuse_gap_s: Distribution | None
    lru_hit_ratio: dict[int, float]
    chain_violations: int


class Turns(Struct, frozen=True):
    """Turns of sessions (see `TurnTracker`). `by_index[0]` counts first turns, and the last of at
    most ten numbers the tenth turns."""

    follow_ups: int
    share: float
    by_index: tuple[int, ...]
    max_index: int
    gap_s: Distribution | None
    growth_tokens: Distribution | None


class TraceFigures(Struct, frozen=True):
    """All figures of one trace. Without hashes, `blocks` and `turns` are None."""

    requests: int
    duration_s: float
    lengths: Lengths
    arrivals: ArrivalFigures
    blocks: Blocks | None
    turns: Turns | None


def spread_of(values: Sequence[float]) -> Distribution | None:
    """Returns the distribution of `values`, or None without values."""
    if not values:
        return None
    ranked = sorted(values)
    at = [interpolated(ranked, share) for share in (0.1, 0.5, 0.75, 0.9, 0.99)]
    return Distribution(
        mean=sum(ranked) / len(ranked),
        p10=at[0],
        p50=at[1],
        p75=at[2],
        p90=at[3],
        p99=at[4],
        max=ranked[-1],
    )


def dispersion(times_s: Iterable[float], window_s: float) -> float | None:
    """Returns variance over mean of the number of `times_s` (rising) per whole window, or None for
    fewer than two windows."""
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


class TraceStatistics:
    """Counts over the rows so far. Plots use its arrays."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.input_tokens = array("q")
        self.output_tokens = array("q")
        self.arrivals_per_window: Counter[int] = Counter()
        self.references: dict[int, int] = {}
        self.reuse_gaps_s = array("f")
        self._last_s = 0.0
        self._gap_sum_s = 0.0
        self._gap_squares_s2 = 0.0
        self._products = 0
        self._tracker = TurnTracker()
        self._turns: Counter[int] = Counter()
        self._turn_gaps_s = array("f")
        self._growth_tokens = array("q")
        self._hit_blocks = 0
        self._hit_tokens = 0
        self._request_hits = 0.0
        self._no_hits = 0
        self._parents: dict[int, int] = {}
        self._violations = 0
        self._partial: set[int] = set()
        self._lru = LruCurve(LRU_CAPACITIES_BLOCKS)

    @property
    def window_s(self) -> int:
        """Returns the window of `arrivals_per_window`."""
        return _COUNT_S

    @property
    def num_rows(self) -> int:
        return len(self.input_tokens)

    def add(self, row: TraceRow) -> None:
        """Counts the next row."""
        gap_s = row.arrived_s - self._last_s if self.num_rows else 0.0
        self._gap_sum_s += gap_s
        self._gap_squares_s2 += gap_s * gap_s
        self._last_s = row.arrived_s
        self.input_tokens.append(row.input_tokens)
        self.output_tokens.append(row.output_tokens)
        self._products += row.input_tokens * row.output_tokens
        self.arrivals_per_window[int(row.arrived_s // _COUNT_S)] += 1
        if row.hash_ids:
            self._count_blocks(row)
            self._lru.add(row)
            self._follow(row)

    def _count_blocks(self, row: TraceRow) -> None:
        references, parents = self.references, self._parents
        parent = -1
        for block in row.hash_ids:
            count = references.get(block, 0)
            references[block] = count + 1
            if count:
                self.reuse_gaps_s.append(self._tracker.last_use_s(block, row.arrived_s))
                self._violations += parents[block] != parent
            else:
                parents[block] = parent
            parent = block
        if row.input_tokens % self.block_tokens and row.input_tokens > self.block_tokens * (
            len(row.hash_ids) - 1
        ):
            self._partial.add(row.hash_ids[-1])

    def _follow(self, row: TraceRow) -> None:
        turn, previous = self._tracker.add(row)
        self._turns[turn.index] += 1
        self._hit_blocks += turn.hit_blocks
        hit_tokens = min(self.block_tokens * turn.hit_blocks, row.input_tokens)
        self._hit_tokens += hit_tokens
        self._request_hits += hit_tokens / row.input_tokens
        self._no_hits += turn.hit_blocks == 0
        if previous is not None:
            self._turn_gaps_s.append(row.arrived_s - previous.arrived_s)
            self._growth_tokens.append(row.input_tokens - previous.input_tokens)

    def figures(self) -> TraceFigures:
        """The figures of the rows so far. Raises TraceError without rows."""
        if not self.num_rows:
            raise TraceError("the trace has no rows, so it has no figures")
        return TraceFigures(
            requests=self.num_rows,
            duration_s=self._last_s,
            lengths=self._lengths(),
            arrivals=self._arrivals(),
            blocks=self._blocks() if self.references else None,
            turns=self._turn_figures() if self.references else None,
        )

    def _lengths(self) -> Lengths:
        num_rows = self.num_rows
        total_in, total_out = sum(self.input_tokens), sum(self.output_tokens)
        squares_in = sum(tokens * tokens for tokens in self.input_tokens)
        squares_out = sum(tokens * tokens for tokens in self.output_tokens)
        covariance = num_rows * self._products - total_in * total_out
        variances = (num_rows * squares_in - total_in**2) * (num_rows * squares_out - total_out**2)
        long = [tokens for tokens in self.input_tokens if tokens > LONG_TOKENS]
        return Lengths(
            input_tokens=_some_spread(self.input_tokens),
            output_tokens=_some_spread(self.output_tokens),
            prompt_per_decode_token=total_in / total_out,
            correlation=covariance / math.sqrt(variances) if variances else 0.0,
            long_request_share=len(long) / num_rows,
            long_token_share=sum(long) / total_in,
        )

    def _arrivals(self) -> ArrivalFigures:
        num_gaps = self.num_rows - 1
        mean_s = self._gap_sum_s / num_gaps if num_gaps else 0.0
        variance = self._gap_squares_s2 / num_gaps - mean_s**2 if num_gaps else 0.0
        duration_s = self._last_s or 1.0
        return ArrivalFigures(
            rate_rps=self.num_rows / duration_s,
            input_tokens_per_s=sum(self.input_tokens) / duration_s,
            output_tokens_per_s=sum(self.output_tokens) / duration_s,
            gap_cv=math.sqrt(max(0.0, variance)) / mean_s if mean_s else 0.0,
            dispersion={
                window_s: found
                for window_s in WINDOWS_S
                if (found := self._dispersion(window_s)) is not None
            },
        )

    def _dispersion(self, window_s: int) -> float | None:
        width = window_s // _COUNT_S
        counts: Counter[int] = Counter()
        for place, count in self.arrivals_per_window.items():
            counts[place // width] += count
        return dispersion_of_counts(counts, int(self._last_s // window_s))

    def _blocks(self) -> Blocks:
        ranked = sorted(self.references.values(), reverse=True)
        total = sum(ranked)
        repeats = max(1, total - len(ranked))
        once = sum(count == 1 for count in ranked)
        full = [count for block, count in self.references.items() if block not in self._partial]
        return Blocks(
            block_tokens=self.block_tokens,
            references=total,
            distinct=len(ranked),
            never_reused_share=once / len(ranked),
            never_reused_full_share=sum(count == 1 for count in full) / max(1, len(full)),
            hit_ratio_blocks=self._hit_blocks / total,
            hit_ratio_tokens=self._hit_tokens / sum(self.input_tokens),
            mean_request_hit_ratio=self._request_hits / self.num_rows,
            no_hit_requests=self._no_hits,
            hottest_references=tuple(ranked[:3]),
            top_share={
                number: sum(count - 1 for count in ranked[:number]) / repeats
                for number in (1, 100, 1_000, 10_000)
            },
            popular_blocks=sum(count >= _POPULAR for count in ranked),
            popularity_slope=_slope(ranked),
            reuse_gap_s=spread_of(self.reuse_gaps_s),
            lru_hit_ratio=self._lru.ratios(),
            chain_violations=self._violations,
        )

    def _turn_figures(self) -> Turns:
        follow_ups = self.num_rows - self._turns[1]
        largest = max(self._turns)
        return Turns(
            follow_ups=follow_ups,
            share=follow_ups / self.num_rows,
            by_index=tuple(self._turns[index] for index in range(1, min(largest, 10) + 1)),
            max_index=largest,
            gap_s=spread_of(self._turn_gaps_s),
            growth_tokens=spread_of(self._growth_tokens),
        )


def _some_spread(values: array[int]) -> Distribution:
    found = spread_of(values)
    assert found is not None, "figures are only made of traces with rows"
    return found


def _slope(ranked: list[int]) -> float:
    """Returns the least-squares slope of log references over log rank, ranks 10 to 10,000, or 0
    without these."""
    ranks = range(10, min(len(ranked), 10_000) + 1)
    points = [(math.log(rank), math.log(ranked[rank - 1])) for rank in ranks]
    if len(points) < 2:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    squares = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / squares

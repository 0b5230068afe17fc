"""Characterises a trace: load, lengths, arrivals, sharing of blocks, turns.

Takes rows one by one, in order of time, and keeps two lengths and the gaps per row and an entry
per distinct block, never the rows. Needs the times as the file has them, to speak of the file.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter

from moonpool.trace.cache_curve import LruCurve
from moonpool.trace.figures import (
    Arrivals,
    Blocks,
    Lengths,
    Spread,
    TraceFigures,
    Turns,
    dispersion_of_counts,
    spread_of,
)
from moonpool.trace.row import TraceError, TraceRow
from moonpool.trace.turns import TurnTracker

WINDOWS_S = (10, 60, 300)
LRU_CAPACITIES_BLOCKS = (1_000, 10_000, 30_000, 50_000, 100_000)
LONG_TOKENS = 32 * 1024
_COUNT_S = 10  # the finest window, of which the others are multiples
_POPULAR = 10


class Character:
    """Everything counted so far. The arrays are what the plots draw."""

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
        """Width of the windows in which `arrivals_per_window` counts."""
        return _COUNT_S

    @property
    def num_rows(self) -> int:
        return len(self.input_tokens)

    def add(self, row: TraceRow) -> None:
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
        if not self.num_rows:
            raise TraceError("a trace without rows has no figures")
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

    def _arrivals(self) -> Arrivals:
        num_gaps = self.num_rows - 1
        mean_s = self._gap_sum_s / num_gaps if num_gaps else 0.0
        variance = self._gap_squares_s2 / num_gaps - mean_s**2 if num_gaps else 0.0
        duration_s = self._last_s or 1.0
        return Arrivals(
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


def _some_spread(values: array[int]) -> Spread:
    found = spread_of(values)
    assert found is not None, "figures are only made of traces with rows"
    return found


def _slope(ranked: list[int]) -> float:
    """Least squares of log references over log rank, ranks 10 to 10,000; 0 where there are none."""
    ranks = range(10, min(len(ranked), 10_000) + 1)
    points = [(math.log(rank), math.log(ranked[rank - 1])) for rank in ranks]
    if len(points) < 2:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    squares = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / squares

"""Tests the characteristics of traces: of small traces against figures computed by hand, and of the
real traces against published figures."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from sample_traces import AZURE, CONVERSATION, needs_azure, needs_conversation

from moonpool.trace.blocks import LruCurve
from moonpool.trace.reader import open_trace
from moonpool.trace.row import TraceError, TraceRow
from moonpool.trace.statistics import TraceFigures, TraceStatistics, dispersion, spread_of


def figures_of(rows: Iterable[TraceRow], block_tokens: int = 512) -> TraceFigures:
    character = TraceStatistics(block_tokens)
    for row in rows:
        character.add(row)
    return character.figures()


def test_quantiles_are_linear() -> None:
    spread = spread_of([4, 1, 3, 2, 5])
    assert spread is not None
    assert (spread.mean, spread.p50, spread.max) == (3, 3, 5)
    assert spread.p90 == pytest.approx(4.6)
    assert spread_of([]) is None


def test_dispersion_counts_whole_windows() -> None:
    assert dispersion([0, 1, 10, 11, 20, 21, 30], 10) == 0.0
    assert dispersion([0, 1, 2, 3, 25, 30], 10) == pytest.approx(26 / 9 / (5 / 3))
    assert dispersion([0, 5], 10) is None


def test_sharing_and_turns_by_hand() -> None:
    figures = figures_of(
        [
            TraceRow(0.0, 1100, 10, (0, 1, 2)),
            TraceRow(4.0, 600, 10, (0, 3)),  # shares only the first block, so it is not a follow-up
            TraceRow(10.0, 1600, 20, (0, 1, 4, 5)),  # this turn follows the first row
            TraceRow(12.0, 1600, 20, (0, 1, 4, 5)),  # repeats the row before
        ]
    )
    blocks, turns = figures.blocks, figures.turns
    assert blocks is not None and turns is not None
    assert (blocks.references, blocks.distinct) == (13, 6)
    assert blocks.never_reused_share == pytest.approx(2 / 6)
    assert blocks.never_reused_full_share == 0.0  # blocks 0, 1 and 4 are full, and all are reused
    assert blocks.hit_ratio_blocks == pytest.approx((0 + 1 + 2 + 4) / 13)
    assert blocks.hit_ratio_tokens == pytest.approx((512 + 1024 + 1600) / 4900)
    assert (blocks.no_hit_requests, blocks.chain_violations) == (1, 0)
    assert blocks.hottest_references == (4, 3, 2)
    assert (turns.follow_ups, turns.by_index, turns.max_index) == (2, (2, 1, 1), 3)
    assert turns.gap_s is not None and turns.gap_s.mean == 6.0
    assert turns.growth_tokens is not None and turns.growth_tokens.max == 500


def test_equal_ids_after_different_ones_are_counted() -> None:
    figures = figures_of([TraceRow(0, 1024, 1, (0, 1)), TraceRow(1, 1024, 1, (2, 1))])
    assert figures.blocks is not None and figures.blocks.chain_violations == 1


def test_one_row_and_none() -> None:
    figures = figures_of([TraceRow(0.0, 5, 1)], 0)
    assert figures.blocks is None and figures.turns is None
    assert figures.arrivals.dispersion == {}
    with pytest.raises(TraceError):
        figures_of([])


def lru_hit_ratios(rows: list[TraceRow], capacities_blocks: list[int]) -> dict[int, float]:
    curve = LruCurve(capacities_blocks)
    for row in rows:
        curve.add(row)
    return curve.ratios()


def test_lru_by_hand() -> None:
    rows = [TraceRow(0, 1024, 1, ids) for ids in ((0, 1), (0, 2), (0, 1), (0, 2))]
    assert lru_hit_ratios(rows, [2, 3]) == {2: 3 / 8, 3: 5 / 8}


def test_a_known_block_behind_an_unknown_one_is_no_hit() -> None:
    assert lru_hit_ratios([TraceRow(0, 1, 1, (1,)), TraceRow(0, 600, 1, (0, 1))], [5]) == {5: 0.0}


@needs_conversation
def test_the_conversation_trace_against_published_figures() -> None:
    figures = figures_of(open_trace(CONVERSATION, spread_ticks=False))
    lengths, arrivals = figures.lengths, figures.arrivals
    assert (figures.requests, round(figures.duration_s)) == (12_031, 3_537)
    of_input, of_output = lengths.input_tokens, lengths.output_tokens
    assert [round(x) for x in (of_input.mean, of_input.p50, of_input.p90, of_input.p99)] == [
        12_035,
        6_909,
        27_367,
        85_400,
    ]
    assert (of_input.max, of_output.max) == (126_195, 2_000)
    assert [of_output.p50, of_output.p90] == [350, 597]
    assert of_output.mean == pytest.approx(343, abs=0.5)
    assert of_output.p99 == pytest.approx(1_119, abs=1)
    assert lengths.correlation == pytest.approx(0.07, abs=0.005)
    assert lengths.long_token_share == pytest.approx(0.329, abs=0.001)
    assert lengths.long_request_share == pytest.approx(0.069, abs=0.001)
    assert arrivals.rate_rps == pytest.approx(3.40, abs=0.005)
    assert arrivals.input_tokens_per_s == pytest.approx(40_937, abs=1)
    assert arrivals.output_tokens_per_s == pytest.approx(1_165, abs=1)
    assert arrivals.gap_cv == pytest.approx(3.03, abs=0.01)
    assert {w: round(x, 1) for w, x in arrivals.dispersion.items()} == {10: 2.1, 60: 2.9, 300: 7.3}


@needs_conversation
def test_the_conversation_traces_sharing_against_published_figures() -> None:
    figures = figures_of(open_trace(CONVERSATION, spread_ticks=False))
    blocks, turns = figures.blocks, figures.turns
    assert blocks is not None and turns is not None
    assert (blocks.references, blocks.distinct) == (288_500, 182_790)
    assert blocks.never_reused_share == pytest.approx(0.758, abs=0.0006)
    assert blocks.never_reused_full_share == pytest.approx(0.742, abs=0.0006)
    assert blocks.hit_ratio_blocks == pytest.approx(0.366, abs=0.0006)
    assert blocks.hit_ratio_tokens == pytest.approx(0.374, abs=0.0006)
    assert blocks.mean_request_hit_ratio == pytest.approx(0.409, abs=0.0006)
    assert blocks.hottest_references[:2] == (12_031, 43)
    assert [round(share, 3) for share in blocks.top_share.values()] == [0.114, 0.138, 0.255, 0.595]
    assert blocks.popular_blocks == 1_341
    assert blocks.popularity_slope == pytest.approx(-0.45, abs=0.006)
    assert blocks.reuse_gap_s is not None
    assert [round(x) for x in (blocks.reuse_gap_s.p50, blocks.reuse_gap_s.p90)] == [114, 519]
    assert {k: round(v, 3) for k, v in blocks.lru_hit_ratio.items()} == {
        1_000: 0.044,
        10_000: 0.211,
        30_000: 0.326,
        50_000: 0.355,
        100_000: 0.364,
    }
    assert blocks.chain_violations == 0
    assert turns.by_index[:6] == (7_373, 2_265, 949, 484, 284, 167)
    assert (turns.follow_ups, turns.max_index) == (4_658, 43)
    assert turns.gap_s is not None and turns.growth_tokens is not None
    assert [round(x) for x in (turns.gap_s.p10, turns.gap_s.p50, turns.gap_s.p99)] == [
        42,
        123,
        1477,
    ]
    assert [round(turns.growth_tokens.p50), round(turns.growth_tokens.p90)] == [454, 4_621]


@needs_azure
def test_the_azure_trace_against_published_figures() -> None:
    figures = figures_of(open_trace(AZURE), 0)
    of_input, of_output = figures.lengths.input_tokens, figures.lengths.output_tokens
    assert (figures.requests, round(figures.duration_s)) == (19_366, 3_502)
    assert figures.arrivals.rate_rps == pytest.approx(5.53, abs=0.005)
    assert (round(of_input.mean), of_input.p50, of_input.max) == (1_155, 1_020, 14_050)
    assert (round(of_output.mean), of_output.p50, of_output.max) == (211, 129, 1_000)
    assert figures.lengths.prompt_per_decode_token == pytest.approx(5.5, abs=0.05)
    assert figures.arrivals.gap_cv == pytest.approx(1.09, abs=0.005)
    assert figures.blocks is None

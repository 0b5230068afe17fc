"""Resampling of sessions: what it keeps and what it changes."""

from __future__ import annotations

from collections import Counter

import pytest

from moonpool.trace.builtin import BUILT_IN
from moonpool.trace.generate import generate
from moonpool.trace.row import TraceRow
from moonpool.trace.transform import SHIFT_S, common_blocks, resample, sessions_of


@pytest.fixture(scope="module")
def rows() -> list[TraceRow]:
    return list(generate(BUILT_IN["conversation"], num_requests=2000, seed=5))


def test_seed_0_is_the_trace(rows: list[TraceRow]) -> None:
    assert resample(rows, 0) == rows


def test_a_seed_gives_one_trace_and_another_seed_another(rows: list[TraceRow]) -> None:
    assert resample(rows, 1) == resample(rows, 1)
    assert resample(rows, 1) != resample(rows, 2)


def test_load_and_order_stay(rows: list[TraceRow]) -> None:
    tokens = sum(row.input_tokens for row in rows)
    for seed in range(1, 6):
        drawn = resample(rows, seed)
        assert len(drawn) == pytest.approx(len(rows), rel=0.15)
        assert sum(row.input_tokens for row in drawn) == pytest.approx(tokens, rel=0.2)
        times = [row.arrived_s for row in drawn]
        assert times == sorted(times) and times[0] >= 0
        assert times[-1] <= rows[-1].arrived_s + 1e-9


def test_sessions_come_as_a_whole_and_copies_share_common_blocks_only() -> None:
    """Two sessions of two turns; block 0 is everybody's."""
    common = [TraceRow(0.1 * i, 512, 1, (0,)) for i in range(200)]
    turns = [
        TraceRow(100.0, 1024, 1, (0, 1)),
        TraceRow(130.0, 1536, 1, (0, 1, 2)),
        TraceRow(140.0, 1024, 1, (0, 3)),
    ]
    rows = [*common, *turns, TraceRow(400.0, 512, 1, (0,))]
    assert common_blocks(rows) == {0}
    sizes = Counter(len(session) for session in sessions_of(rows, common_blocks(rows)))
    assert sizes == {1: 202, 2: 1}
    copies = set()
    for seed in range(1, 40):
        drawn = [row for row in resample(rows, seed) if row.input_tokens == 1536]
        copies.add(len(drawn))
        for row in drawn:
            first = [r for r in resample(rows, seed) if r.hash_ids == row.hash_ids[:2]]
            assert len(first) == 1 and row.hash_ids[0] == 0
            assert row.arrived_s - first[0].arrived_s == pytest.approx(30.0)
            assert abs(row.arrived_s - 130.0) <= SHIFT_S
        assert len({row.hash_ids for row in drawn}) == len(drawn)
    assert {0, 1, 2} <= copies


def test_without_hashes_every_row_is_a_session_unless_it_is_named() -> None:
    rows = [TraceRow(float(i), 10, 1, (), "a" if i % 2 else "") for i in range(10)]
    assert sorted(map(len, sessions_of(rows, frozenset()))) == [1, 1, 1, 1, 1, 5]

"""Tests the index's benchmark: right sums at a small size, and a failure in one line."""

from __future__ import annotations

import pytest

from benchmarks.errors import BenchError
from benchmarks.suite.pool.index import (
    bench_index,
    run_one,
)


def test_rows_have_both_memories_and_times() -> None:
    lines: list[str] = []
    found = bench_index(3000, 10, lines.append)
    assert [row["ssd_share"] for row in found["rows"]] == [0.0, 0.8]
    for row in found["rows"]:
        assert row["held_blocks"] == 3000
        assert 20 < row["traced_block_bytes"] < 1000
        assert 0 < row["match_us"] <= row["match_p99_us"] * 1.01 and row["miss_us"] > 0
    plain, tiered = found["rows"]
    assert tiered["traced_block_bytes"] > plain["traced_block_bytes"]
    assert len(lines) == 2


@pytest.mark.long
def test_what_is_over_a_limit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.suite.pool.index.LIMIT_MATCH_US", 0.0)
    assert not bench_index(600, 3, lambda text: None)["rows"][0]["within_limits"]


@pytest.mark.long
def test_a_run_that_breaks_says_which() -> None:
    with pytest.raises(BenchError, match="600 blocks, 0 instances: "):
        bench_index(600, 0, lambda text: None)
    assert run_one("tracemalloc", 300, 1, 0.0)["held_blocks"] == 300

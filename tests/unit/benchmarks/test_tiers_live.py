"""Tests the live benchmark of tiers: the same conversations for every row, and sums of the reported
counters."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.suite.pool import tiers_live
from benchmarks.suite.pool.tiers_live import (
    INSTANCES,
    OPENING_TOKENS,
    TierSums,
    bench_tiers_live,
    draw_schedule,
    saved_by_tier,
    tier_configs,
)

pytestmark = pytest.mark.long


def test_every_row_has_the_same_conversations_and_one_tier_more() -> None:
    steps = draw_schedule(5, 3)
    assert steps == draw_schedule(5, 3)
    prompts = [prompt for step in steps for prompt in step]
    assert len(prompts) == 15 and all(len(step) <= INSTANCES for step in steps)
    last: dict[tuple[int, ...], list[int]] = {}
    for prompt in prompts:  # each turn's prompt begins with the turns before it
        name = tuple(prompt[OPENING_TOKENS : OPENING_TOKENS + 8])
        assert prompt[: len(last.get(name, []))] == last.get(name, [])
        last[name] = prompt
    rows = dict(tier_configs(512, 1024, 4096))
    assert list(rows) == ["engine memory", "+ DRAM", "+ remote DRAM", "+ SSD"]
    assert set(rows["+ SSD"]) - set(rows["+ remote DRAM"]) == {"--ssd-tokens", "4096"}


def test_what_a_tier_saves_is_counted_request_by_request() -> None:
    with_it, without = TierSums(ttfts_s=[0.1, 0.2, 0.3]), TierSums(ttfts_s=[0.3, 0.4, 0.5])
    assert saved_by_tier(with_it, without) == {"saved_s": 0.2, "saved_error_s": 0.0}
    assert saved_by_tier(without, None)["saved_s"] == 0.0


@pytest.mark.live
def test_a_cluster_with_an_ssd_reads_back_what_its_memory_could_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = (1024, 2048, 32_768)
    rows = list(tier_configs(*sizes))
    monkeypatch.setattr(tiers_live, "tier_configs", lambda *sizes: rows[-1:])
    lines: list[str] = []
    found = bench_tiers_live("random:m30,layers=2", 6, 3, sizes, 60.0, tmp_path, lines.append)
    (row,) = found["rows"]
    assert row["requests"] == 18 and len(lines) == 1
    assert row["hit_ratio"] > 0.2 and row["ssd"] > 0.01
    assert 0 < row["mean_ttft_s"] <= row["p99_ttft_s"]
    assert list(tmp_path.iterdir()) == []

"""The live benchmark of tiers: the same conversations for every row, and sums of what is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.bench import tiers_live
from moonpool.bench.tiers_live import _configs, _talks, bench_tiers_live


def test_every_row_has_the_same_conversations_and_one_tier_more() -> None:
    first, second = _talks(5, 3), _talks(5, 3)
    assert [(t.tokens, t.turns) for t in first] == [(t.tokens, t.turns) for t in second]
    assert {len(t.turns) for t in first} == {3}
    rows = dict(_configs(1024, 4096))
    assert list(rows) == ["nothing kept", "own memory", "+ others' memory", "+ SSD"]
    assert set(rows["+ SSD"]) - set(rows["+ others' memory"]) == {"--ssd-tokens", "4096"}


@pytest.mark.live
def test_a_cluster_with_an_ssd_reads_back_what_its_memory_could_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = list(_configs(2048, 32_768))
    monkeypatch.setattr(tiers_live, "_configs", lambda *sizes: rows[-1:])
    lines: list[str] = []
    found = bench_tiers_live("random:m30,layers=2", 6, 3, 2048, 32_768, tmp_path, lines.append)
    (row,) = found["rows"]
    assert row["requests"] == 18 and len(lines) == 1
    assert row["hit_ratio"] > 0.2 and row["ssd"] > 0.01
    assert 0 < row["mean_ttft_s"] <= row["p99_ttft_s"]
    assert list(tmp_path.iterdir()) == []

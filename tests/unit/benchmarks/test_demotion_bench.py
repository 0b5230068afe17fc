"""Tests that the phases of the benchmark of decodes beside the SSD tier do what their names say."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.errors import BenchError
from benchmarks.suite.pool.demotion import bench_demotion

pytestmark = pytest.mark.long

MODEL = "random:m30,layers=2"


@pytest.mark.long
def test_each_phase_moves_what_it_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # fewer steps, because plain torch is slow
    monkeypatch.setattr("benchmarks.suite.pool.demotion.MIN_STEPS", 3)
    lines: list[str] = []
    found = bench_demotion(MODEL, 2, 1.5, 2, 40_000, tmp_path, lines.append)
    quiet, arrivals, demotion, promotion = found["rows"]
    assert len(lines) == 4
    assert demotion["written_mb_per_s"] > 0.2 and promotion["read_mb_per_s"] > 0.2
    assert quiet["read_mb_per_s"] == arrivals["read_mb_per_s"] == 0
    assert promotion["p99_between"][0] <= promotion["p99_between"][1]
    assert quiet["steps"] >= promotion["steps"], "as many quiet phases as busy ones"
    assert arrivals["written_mb_per_s"] < demotion["written_mb_per_s"] / 4
    assert all(row["p50_s"] <= row["p99_s"] <= row["max_s"] for row in found["rows"])
    assert list(tmp_path.iterdir()) == []


def test_a_run_too_short_to_tell_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.suite.pool.demotion.MIN_STEPS", 100_000)
    with pytest.raises(BenchError, match="let it run longer"):
        bench_demotion(MODEL, 1, 0.2, 1, 1000, tmp_path, lambda text: None)

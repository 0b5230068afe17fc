"""Tests that a small run of the store's benchmark gives every figure, and leaves no file behind."""

from __future__ import annotations

from pathlib import Path

from moonpool_lab.profiling.store_speed import OPERATION_BLOCKS, bench_store


def test_a_small_run_gives_every_figure(tmp_path: Path) -> None:
    said: list[str] = []
    found = bench_store(tmp_path / "new", 0.001, (1,), 1, said.append)
    (run,) = found["runs"]
    assert run["blocks"] == OPERATION_BLOCKS
    assert run["block_bytes"] == 28 * 2 * 8 * 128 * 2
    assert all(rate > 0 for rate in run["best_bytes_per_s"].values())
    assert set(run["ours_over_raw"]) == {"write", "read"}
    assert "GB/s" in said[0]
    assert list((tmp_path / "new").iterdir()) == []

"""Tests how the CPU time of other processes is read from the kernel's counters."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.suite.live.cpu_steal import BackgroundLoad


def write(proc: Path, user: int, idle: int, own: dict[int, int]) -> None:
    (proc / "stat").write_text(f"cpu  {user} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 2 3 4\n")
    for pid, ticks in own.items():
        (proc / str(pid)).mkdir(exist_ok=True)
        fields = ["S", *(["0"] * 10), str(ticks), "0", "0"]
        (proc / str(pid) / "stat").write_text(f"{pid} (a (strange) name) {' '.join(fields)}\n")


def test_what_neither_idled_nor_was_ours(tmp_path: Path) -> None:
    write(tmp_path, 1000, 1000, {7: 100, os.getpid(): 50})
    neighbours = BackgroundLoad([7], tmp_path)
    write(tmp_path, 1600, 1400, {7: 400, os.getpid(): 150})
    assert neighbours.share() == pytest.approx(200 / 1000)


def test_no_counters_no_neighbours(tmp_path: Path) -> None:
    assert BackgroundLoad([1], tmp_path / "nowhere").share() == 0.0


def test_a_process_that_is_gone_counts_for_nothing(tmp_path: Path) -> None:
    write(tmp_path, 1000, 1000, {})
    neighbours = BackgroundLoad([99], tmp_path)
    write(tmp_path, 1100, 1900, {})
    assert neighbours.share() == pytest.approx(0.1)

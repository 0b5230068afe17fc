"""Tests that `bench transfer` moves blocks in every way that it names, and reports a missing part
in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool_lab.profiling import transfer_speed as transfer
from moonpool_lab.profiling.transfer_speed import TransferBenchError, bench_transfer

SIZE = 64 << 10


@pytest.mark.long
def test_every_way_is_measured_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "ARENA_BYTES", 32 * SIZE)
    said: list[str] = []
    found = bench_transfer((SIZE,), 1, None, said.append)
    figures = found["sizes"][str(SIZE)]
    ways = {f"{way} {what}" for way in ("shm", "tcp") for what in ("get", "put")}
    ways |= {f"{way} many" for way in ways}
    assert ways | {"read in place"} < set(figures["gb_per_s"])
    assert set(figures["speed_over"]) == ways
    assert all(rate > 0 for rate in figures["gb_per_s"].values())
    assert figures["speed_over"]["tcp put"].keys() == {"tcp socket put"}
    assert "blocks of 64 KiB" in said[0]
    assert found["flows"]["limited flows"]["4"] > 2 * found["flows"]["limited flows"]["1"]


def test_a_peer_python_that_cannot_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(TransferBenchError, match="nowhere cannot be run"):
        bench_transfer((SIZE,), 1, str(tmp_path / "nowhere"), print)

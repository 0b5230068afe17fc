"""Tests a disk that hangs: a call does not return for any length of time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store_harness import Bench, content_of, key_of, make_layout

from moonpool.protocol.transfer_events import (
    LoadEnded,
    LoadReturned,
    StoreEnded,
    StoreReturned,
    TierPaused,
    TierResumed,
)
from moonpool.types import BlockId
from moonpool_engine.storage import io_threads
from moonpool_engine.storage.store import READ_THREADS
from moonpool_engine.storage.verify import verify_folder

HANG_S = 1.0


class Stuck:
    """Replaces the named call by one that does not return while the gate is closed."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.inside = 0
        call = getattr(os, name)

        def stuck(*args: Any) -> Any:
            self.inside += 1
            self.gate.wait(60)
            return call(*args)

        monkeypatch.setattr(os, name, stuck)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(io_threads, "PAUSE_S", 0.2)
    bench = Bench(tmp_path / "ssd", make_layout(4096), hang_s=HANG_S)
    yield bench
    bench.store.close()


def load(bench: Bench, load_id: str, number: int, block: int) -> None:
    bench.store.load(load_id, (key_of(number),), (number,), (BlockId(block),))


def test_a_hung_read_ends_as_a_miss_and_its_return_is_reported(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.put({number: number for number in range(READ_THREADS + 1)})
    stuck = Stuck("preadv", monkeypatch)
    for number in range(READ_THREADS + 1):  # the last of these loads only waits for a thread
        load(bench, f"l{number}", number, 5 + number)
    assert "has not answered" in bench.event(TierPaused).error
    ended = [bench.event(LoadEnded) for _ in range(READ_THREADS + 1)]
    assert {e.num_blocks for e in ended} == {0}
    inside = {f"l{number}" for number in range(READ_THREADS)}
    assert {e.load_id for e in ended if e.hung} == inside
    load(bench, "refused", 0, 10)  # fails at once, and takes no thread
    assert "has not answered" in bench.event(LoadEnded).error
    assert stuck.inside == READ_THREADS and bench.events.empty()
    stuck.gate.set()
    assert {bench.event(LoadReturned).load_id for _ in inside} == inside
    bench.event(TierResumed)
    assert bench.get({0: 0, 1: 1, 2: 2}).num_blocks == 3


def test_a_hung_write_is_never_found_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.put({0: 0})
    stuck = Stuck("pwritev", monkeypatch)
    bench.fill(3, key_of(5))
    bench.store.store("s5", (key_of(5),), (BlockId(3),), (5,))
    bench.event(TierPaused)
    ended = bench.event(StoreEnded)
    assert (ended.num_blocks, ended.hung) == (0, True)
    bench.fill(3, key_of(99))  # by now, the block belongs to another request
    stuck.gate.set()
    assert bench.event(StoreReturned).store_id == "s5"
    bench.event(TierResumed)
    bench.store.close()
    found = verify_folder(bench.store.folder)
    assert (found.blocks, found.bad_blocks) == (1, 0)
    bench.open()
    assert [slot for slot, _ in bench.stored] == [0]
    size = bench.arena.layout.block_bytes
    assert bytes(bench.arena.buffer[3 * size : 4 * size]) == content_of(key_of(99), size)


def test_a_slow_disk_does_not_count_as_hung(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.put({number: number for number in range(6)})
    call = os.preadv

    def slow(*args: Any) -> Any:
        threading.Event().wait(HANG_S / 3)
        return call(*args)

    monkeypatch.setattr(os, "preadv", slow)
    for number in range(6):  # together, the calls take longer than one call may
        load(bench, f"l{number}", number, number)
    assert all(bench.event(LoadEnded).num_blocks == 1 for _ in range(6))


def test_a_store_closes_while_its_disk_hangs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.put({0: 0})
    stuck = Stuck("preadv", monkeypatch)
    load(bench, "l", 0, 4)
    bench.event(TierPaused)
    bench.event(LoadEnded)
    began_s = time.monotonic()
    bench.store.close()
    assert time.monotonic() - began_s < 50.0, "it waited for a disk that does not answer"
    load(bench, "late", 0, 5)
    assert "closed" in bench.event(LoadEnded).error
    stuck.gate.set()

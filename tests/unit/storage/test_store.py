"""Tests the SSD store: a load of a stored block succeeds or is a miss, each operation ends once,
and a folder is reopened with its blocks."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash
from store_harness import Bench, key_of, make_layout

from moonpool.protocol.transfer_events import LoadEnded, StoreEnded, StoreLost
from moonpool.types import BlockId
from moonpool_engine.storage import segments as segments_module
from moonpool_engine.storage import store as store_module
from moonpool_engine.storage.folder import segment_path, segments_in
from moonpool_engine.storage.verify import clear_folder, verify_folder


@pytest.fixture(params=[256, 4096], ids=["buffered", "direct"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "ssd", make_layout(request.param))
    yield bench
    bench.store.close()


def test_stored_blocks_are_loaded_completely(bench: Bench) -> None:
    pairs = {slot: 100 + slot for slot in (0, 1, 2, 9, 15, 3)}
    ended = bench.put(pairs)
    assert (ended.num_blocks, ended.error) == (6, "")
    assert ended.num_bytes == 6 * bench.arena.layout.block_bytes
    loaded = bench.get(dict(reversed(pairs.items())), first_block=7)
    assert (loaded.num_blocks, loaded.corrupt_slices, loaded.error) == (6, 0, "")
    counts = bench.store.counts()
    assert counts.written_blocks == counts.read_blocks == 6
    assert counts.written_bytes == counts.read_bytes == ended.num_bytes == loaded.num_bytes


def test_aligned_blocks_bypass_the_page_cache(tmp_path: Path) -> None:
    store = Bench(tmp_path / "a", make_layout(4096)).store
    fd = os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT)
    os.close(fd)
    try:
        os.close(os.open(tmp_path / "probe", os.O_RDWR | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no O_DIRECT")
    assert store.disk.direct
    assert not Bench(tmp_path / "b", make_layout(256)).store.disk.direct


def test_a_slot_is_overwritten_in_place(bench: Bench) -> None:
    bench.put({5: 1})
    (path,) = segments_in(bench.store.folder).values()
    size = path.stat().st_size
    bench.put({5: 2})
    assert path.stat().st_size == size
    assert bench.get({5: 2}).num_blocks == 1
    ended = bench.get({5: 1})
    assert (ended.num_blocks, ended.corrupt_slices) == (0, 1)


def test_a_load_counts_up_to_the_first_miss(bench: Bench) -> None:
    bench.put({0: 0, 1: 1, 3: 3})
    ended = bench.get({0: 0, 1: 1, 2: 2, 3: 3})
    assert (ended.num_blocks, ended.num_bytes) == (2, 2 * bench.arena.layout.block_bytes)
    assert "damaged" in ended.error
    assert bench.get({14: 1}).num_blocks == 0  # finds nothing, because this segment was never made


def test_loaded_slices_keep_their_checksums(bench: Bench) -> None:
    bench.put({0: 0, 1: 1})
    flip(bench, 1, bench.store.geometry.header_bytes)  # flips a bit of layer 0
    bench.get({0: 0, 1: 1}, first_block=4)
    sums = bench.arena.checksums
    for layer in range(3):
        content = bench.arena.slice(BlockId(4), layer)
        assert sums.get(BlockId(4), layer) == xxhash.xxh3_64_intdigest(content)
    assert sums.get(BlockId(5), 0) == 0


def test_invalid_calls_raise(bench: Bench) -> None:
    with pytest.raises(ValueError, match="slot 16"):
        bench.store.store("s", (key_of(1),), (BlockId(0),), (16,))
    with pytest.raises(ValueError, match="block 99"):
        bench.store.load("l", (key_of(1),), (0,), (BlockId(99),))
    with pytest.raises(ValueError, match="2 slots"):
        bench.store.load("l", (key_of(1),), (0, 1), (BlockId(0),))
    assert bench.put({}).num_blocks == 0


def test_a_restart_finds_blocks_in_order_of_use(bench: Bench) -> None:
    bench.put({4: 4})
    bench.put({2: 2, 3: 3})
    bench.put({1: 1})
    bench.get({4: 4})
    bench.store.close()
    for _ in range(2):  # also adopts the index that the first restart wrote
        assert [slot for slot, _ in bench.open().stored] == [2, 3, 1, 4]
        assert dict(bench.stored) == {s: key_of(s) for s in (1, 2, 3, 4)}
        bench.store.close()
    bench.open()
    assert bench.get({s: s for s in (1, 2, 3, 4)}).num_blocks == 4


def test_a_forgotten_block_is_not_found_again(bench: Bench) -> None:
    bench.put({slot: slot for slot in range(6)})
    bench.store.forget([0, 4])
    bench.put({4: 40})  # stores the block again, after its key was forgotten
    bench.store.forget([5])
    bench.store.close()
    bench.open()
    assert dict(bench.stored) == {1: key_of(1), 2: key_of(2), 3: key_of(3), 4: key_of(40)}


def test_a_block_that_changed_in_memory_is_detected_when_it_is_read_back(bench: Bench) -> None:
    bench.put({0: 7, 1: 8})
    assert bench.get({0: 7, 1: 8}).num_blocks == 2
    bench.arena.buffer[1] ^= 16  # flips a bit in block 0, whose sums are known since its last load
    bench.store.store("s", (key_of(7), key_of(8)), (BlockId(0), BlockId(1)), (4, 5))
    assert bench.event(StoreEnded).num_blocks == 2
    ended = bench.get({5: 8, 4: 7}, first_block=2)
    assert (ended.num_blocks, ended.corrupt_slices) == (1, 1)


def test_a_damaged_block_is_not_found_again(bench: Bench) -> None:
    bench.put({0: 0, 1: 1})
    flip(bench, 1, bench.store.geometry.header_bytes)
    assert bench.get({1: 1}).corrupt_slices == 1
    bench.store.close()
    assert bench.open().stored == [(0, key_of(0))]


def test_one_block_in_two_slots_is_announced_once(bench: Bench) -> None:
    bench.put({0: 7})
    bench.put({1: 7})
    bench.store.close()
    assert bench.open().stored == [(1, key_of(7))]


def test_a_smaller_tier_keeps_what_fits(bench: Bench) -> None:
    bench.put({slot: slot for slot in (0, 1, 15)})
    count = len(segments_in(bench.store.folder))
    bench.store.close()
    bench.num_slots = 2
    assert dict(bench.open().stored) == {0: key_of(0), 1: key_of(1)}
    assert len(segments_in(bench.store.folder)) < count
    bench.store.close()
    bench.num_slots = 40
    bench.open()
    assert bench.put({39: 39, 1: 8}).num_blocks == 2
    assert bench.get({39: 39, 1: 8}).num_blocks == 2


def test_the_index_stays_small(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool_engine.storage.index._SPARE_RECORDS", 8)
    for i in range(60):
        bench.put({i % 4: i})
        bench.get({i % 4: i})
    assert (bench.store.folder / "index").stat().st_size < 80 + 40 * 20
    bench.store.close()
    assert dict(bench.open().stored) == {i % 4: key_of(i) for i in range(56, 60)}


def test_many_operations_at_once_end_once_each(bench: Bench) -> None:
    keys = [key_of(slot) for slot in range(16)]
    for block, key in enumerate(keys):
        bench.fill(block, key)
    for slot, key in enumerate(keys):
        bench.store.store(f"s{slot}", (key,), (BlockId(slot),), (slot,))
    ended = {bench.event(StoreEnded).store_id for _ in keys}
    assert ended == {f"s{slot}" for slot in range(16)}
    for slot, key in enumerate(keys):
        bench.store.load(f"l{slot}", (key,), (slot,), (BlockId(15 - slot),))
    loads = [bench.event(LoadEnded) for _ in keys]
    assert {e.load_id for e in loads} == {f"l{slot}" for slot in range(16)}
    assert all(e.num_blocks == 1 and not e.error for e in loads)
    assert bench.events.empty()


def test_the_queue_is_bounded_and_close_ends_everything(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    entered = threading.Semaphore(0)
    write = segments_module.Segments.write

    def slow(*arguments: object) -> None:
        entered.release()
        gate.wait(60)
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(segments_module.Segments, "write", slow)
    monkeypatch.setattr(store_module, "MAX_GROUPS_WAITING", 4)
    bench.store.close()
    bench.open()
    for number in range(12):
        bench.store.store(f"s{number}", (key_of(0),), (BlockId(0),), (number,))
        if number < 2:  # there is one operation for each thread
            assert entered.acquire(timeout=60)
    refused = []
    while not bench.events.empty():
        refused.append(bench.event(StoreEnded))
    assert len(refused) == 12 - 2 - 4
    assert all("too slow" in e.error and not e.num_blocks for e in refused)
    threading.Timer(0.2, gate.set).start()
    bench.store.close()
    rest = [bench.event(StoreEnded) for _ in range(6)]
    # the operations that were under way; close() ended the others
    assert sum(e.num_blocks for e in rest) == 2
    assert sum("closed" in e.error for e in rest) == 4
    assert bench.events.empty()


def test_a_full_disk_ends_stores_and_nothing_else(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.put({0: 0})

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    for _ in range(2):
        ended = bench.put({15: 15, 14: 14})
        assert ended.num_blocks == 0
        assert "full" in ended.error
        assert "\n" not in ended.error
    assert len([r for r in caplog.records if "full" in r.message]) == 1
    assert bench.get({0: 0}).num_blocks == 1
    monkeypatch.undo()
    monkeypatch.setattr(store_module, "FULL_PAUSE_S", 0.0)
    bench.store._full_until_s = 0.0
    assert bench.put({15: 15}).num_blocks == 1
    assert bench.events.empty()


def fail_write(bench: Bench) -> None:
    assert bench.put({0: 0}).num_blocks == 0


def fail_reads(bench: Bench) -> None:
    for _ in range(3):
        bench.store.load("l", (key_of(0),), (0,), (BlockId(0),))
        bench.event(LoadEnded)


@pytest.mark.parametrize("act", [fail_write, fail_reads])
def test_a_broken_disk_is_reported_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, act: Callable[[Bench], None]
) -> None:
    bench.put({0: 0})

    def broken(*arguments: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwritev", broken)
    monkeypatch.setattr(os, "preadv", broken)
    lost = []
    put = bench.events.put
    bench.store._post = lambda e: lost.append(e) if isinstance(e, StoreLost) else put(e)
    act(bench)
    assert len(lost) == 1
    assert "Input/output error" in lost[0].error
    monkeypatch.undo()
    while not bench.events.empty():
        bench.events.get()
    assert bench.get({0: 0}).error == bench.put({1: 1}).error == lost[0].error
    assert len(lost) == 1


def test_a_deleted_folder_is_noticed(bench: Bench) -> None:
    bench.put({0: 0})
    for path in bench.store.folder.iterdir():
        path.unlink()
    bench.store.folder.rmdir()
    bench.fill(0, key_of(1))
    bench.store.store("s", (key_of(1),), (BlockId(0),), (1,))
    assert "gone" in bench.event(StoreLost).error
    assert bench.event(StoreEnded).num_blocks == 0


def test_verify_finds_every_damaged_block(bench: Bench) -> None:
    bench.put({slot: slot for slot in range(16)})
    geometry = bench.store.geometry
    bench.store.close()
    good = verify_folder(bench.store.folder)
    assert (good.blocks, good.bad_blocks, good.bad_slices, good.index) == (16, 0, 0, "read")
    assert good.fingerprint == bench.arena.layout.fingerprint.hex()
    flip(bench, 3, 40)  # flips a bit in the header of the slot
    flip(bench, 9, geometry.header_bytes + geometry.slice_bytes + 1)
    found = verify_folder(bench.store.folder)
    assert (found.bad_blocks, found.bad_slices, found.bad_slots) == (2, 2, (3, 9))
    (bench.store.folder / "index").unlink()
    again = verify_folder(bench.store.folder)
    assert (again.blocks, again.bad_slots, again.index) == (15, (9,), "missing")
    bench.open()


def test_clear_deletes_its_own_files_only(bench: Bench) -> None:
    bench.put({0: 0, 15: 15})
    bench.store.close()
    note = bench.store.folder / "note.txt"
    note.write_text("mine")
    assert clear_folder(bench.store.folder) > 0
    assert list(bench.store.folder.iterdir()) == [note]
    note.unlink()
    assert bench.open().stored == []


def flip(bench: Bench, slot: int, offset: int) -> None:
    geometry = bench.store.geometry
    path = segment_path(bench.store.folder, slot // geometry.slots_per_segment)
    with path.open("r+b") as file:
        file.seek(geometry.offset(slot) + offset)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))

"""An SSD folder is truncated or damaged at any byte, and processes are killed at any moment: each
block is right or a miss, never wrong."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_harness import Bench, content_of, key_of, make_layout

from moonpool.protocol.transfer_events import LoadEnded
from moonpool.types import BlockId, BlockKey
from moonpool_engine.storage.folder import INDEX_NAME, segment_path
from moonpool_engine.storage.format import (
    INDEX_HEAD_BYTES,
    RECORD_BYTES,
    FormatError,
    Geometry,
    decode_header,
    decode_index_head,
)
from moonpool_engine.storage.index import open_index
from moonpool_engine.storage.verify import verify_folder
from tests.forked.commands import ForkedCommand

PAIRS = {0: 0, 1: 1, 2: 2}
KILLED_WRITER = Path(__file__).with_name("store_writer.py")


@pytest.fixture(params=[256, 4096], ids=["buffered", "direct"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "ssd", make_layout(request.param), num_slots=3, num_blocks=4)
    bench.put(PAIRS)
    yield bench
    bench.store.close()


def offsets(num_bytes: int, sampled: bool) -> list[int]:
    """Returns all positions, or a few hundred at random if the test would take too long."""
    if not sampled:
        return list(range(num_bytes))
    return sorted(random.Random(1).sample(range(num_bytes), 300))


def try_load(bench: Bench, slot: int) -> LoadEnded:
    """Asserts that the block is right if it is reported as loaded."""
    return bench.get({slot: PAIRS[slot]}, first_block=3)


@pytest.mark.parametrize("each", [False, pytest.param(True, marks=pytest.mark.long)])
def test_any_flipped_byte_of_a_slot_is_a_miss(bench: Bench, each: bool) -> None:
    geometry = bench.store.geometry
    header_end = 96 + 8 * (geometry.num_layers + 1)
    sampled = bench.store.disk.direct or not each
    fd = os.open(segment_path(bench.store.folder, 0), os.O_RDWR)
    for offset in offsets(geometry.slot_bytes, sampled):
        place = geometry.offset(1) + offset
        right = os.pread(fd, 1, place)
        os.pwrite(fd, bytes([right[0] ^ (1 << offset % 8)]), place)
        ended = try_load(bench, 1)
        told = offset - geometry.header_bytes
        matters = offset < header_end or 0 <= told < geometry.block_bytes
        assert ended.num_blocks == (not matters), offset
        assert ended.corrupt_slices == matters
        os.pwrite(fd, right, place)
    assert try_load(bench, 1).num_blocks == 1
    os.close(fd)


def test_a_truncated_segment_loses_only_the_blocks_past_its_end(bench: Bench) -> None:
    geometry = bench.store.geometry
    path = segment_path(bench.store.folder, 0)
    whole = path.read_bytes()
    for size in offsets(len(whole), sampled=True):
        path.write_bytes(whole[:size])
        for slot in PAIRS:
            ended = try_load(bench, slot)
            assert ended.num_blocks == (size >= geometry.offset(slot) + geometry.slot_bytes)
        index, _ = open_index(bench.store.folder, geometry, 3)
        kept = size // geometry.slot_bytes
        assert [slot for slot, _ in index.held()] == list(range(kept))
        index.close()
        (bench.store.folder / INDEX_NAME).unlink()
        index, rebuilt = open_index(bench.store.folder, geometry, 3)
        assert rebuilt
        assert [slot for slot, _ in index.held()] == list(range(kept))
        index.close()
        path.write_bytes(whole)
        index, _ = open_index(bench.store.folder, geometry, 3)
        index.void(PAIRS)
        for slot, number in PAIRS.items():
            index.hold(slot, key_of(number), index.begin(slot))
        index.flush()
        index.close()


@pytest.mark.parametrize("damage", ["cut", "flip", "zero"])
@pytest.mark.parametrize("bench", [256], indirect=True)
def test_an_index_damaged_at_any_byte_names_no_wrong_block(bench: Bench, damage: str) -> None:
    bench.get({0: 0})
    bench.store.forget([1])
    bench.store.close()
    folder, geometry = bench.store.folder, bench.store.geometry
    right = {0: key_of(0), 2: key_of(2)}
    # If the record that forgets block 1 is lost, its content is right, only unwanted.
    stale = {**right, 1: key_of(1)}
    path = folder / INDEX_NAME
    whole = path.read_bytes()
    assert len(whole) > INDEX_HEAD_BYTES + 4 * RECORD_BYTES
    for offset in range(len(whole)):
        if damage == "cut":
            path.write_bytes(whole[:offset])
        elif damage == "flip":
            flipped = bytes([whole[offset] ^ 16])
            path.write_bytes(whole[:offset] + flipped + whole[offset + 1 :])
        else:
            path.write_bytes(whole[:offset] + bytes(len(whole) - offset))
        index, rebuilt = open_index(folder, geometry, 3)
        found = dict(index.held())
        assert found.items() <= stale.items()
        head_lost = offset < {"flip": 72, "cut": 80, "zero": 72}[damage]
        assert rebuilt == head_lost, offset
        if head_lost:
            assert found == stale
        elif damage == "flip":
            assert len(set(right) ^ set(found)) <= 1  # at most one record is lost, and no later one
        index.close()
        again, rebuilt = open_index(folder, geometry, 3)
        assert not rebuilt
        assert dict(again.held()) == found
        again.close()
    path.write_bytes(whole)
    bench.open()
    assert dict(bench.stored) == right


def test_random_bytes_are_never_accepted() -> None:
    rng = random.Random(3)
    layout = make_layout()
    del layout
    for size in (0, 1, 8, 79, 80, 96, 4096):
        for _ in range(50):
            data = rng.randbytes(size)
            with pytest.raises(FormatError):
                decode_header(data)
            with pytest.raises(FormatError):
                decode_index_head(data)
            with pytest.raises(FormatError):  # because the number of layers is absurd
                decode_header(b"moonslot" + data)


@pytest.mark.parametrize("slice_bytes", [256, 4096], ids=["buffered", "direct"])
def test_a_writer_killed_at_any_moment_leaves_only_right_blocks(
    tmp_path: Path, slice_bytes: int
) -> None:
    """The next process must find every block that was stored and not overwritten, and every block
    that it finds must be right. `MOONPOOL_KILL_ROUNDS` sets the number of rounds."""
    rounds = int(os.environ.get("MOONPOOL_KILL_ROUNDS", "6"))
    rng = random.Random(slice_bytes)
    begun: dict[int, int] = {}
    adopted = 0
    for number in range(rounds):
        told, begun = run_and_kill(tmp_path / "ssd", slice_bytes, number, rng.uniform(0.0, 0.25))
        bench = Bench(tmp_path / "ssd", make_layout(slice_bytes), num_slots=64, num_blocks=64)
        found = dict(bench.stored)
        for slot, key_number in told.items():
            if begun[slot] == key_number:
                assert found.get(slot) == key_of(key_number), (number, slot)
        check_all(bench, found)
        bench.store.close()
        assert verify_folder(bench.store.folder).bad_blocks == 0
        adopted += len(found)
    assert adopted > 0


def run_and_kill(
    root: Path, slice_bytes: int, seed: int, live_s: float
) -> tuple[dict[int, int], dict[int, int]]:
    """Returns, by slot, the keys that the writer stored and the keys that it last began to
    store."""
    log = root.parent / "log"
    with log.open("w") as out:
        process = ForkedCommand(
            [str(root), str(slice_bytes), str(seed)],
            out.fileno(),
            out.fileno(),
            script=KILLED_WRITER.read_text(),
            folder=KILLED_WRITER.parent,
        )
        while "ready" not in log.read_text():
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(live_s)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    told: dict[int, int] = {}
    begun: dict[int, int] = {}
    for line in log.read_text().splitlines(keepends=True):
        words = line.split()
        if line.endswith("\n") and words[0] in ("begin", "end"):
            (begun if words[0] == "begin" else told)[int(words[1])] = int(words[2])
    return told, begun


def check_all(bench: Bench, found: dict[int, BlockKey]) -> None:
    """Loads every block found and asserts that it is right."""
    size = bench.arena.layout.block_bytes
    for slot, key in found.items():
        bench.store.load("l", (key,), (slot,), (BlockId(0),))
        ended = bench.event(LoadEnded)
        assert ended.num_blocks == 1, ended
        assert bytes(bench.arena.buffer[:size]) == content_of(key, size)


def test_a_torn_write_is_a_miss_even_if_it_is_still_listed(bench: Bench) -> None:
    """After a power failure, the index may name an older or newer block than the one in the
    slot."""
    geometry: Geometry = bench.store.geometry
    path = segment_path(bench.store.folder, 0)
    whole = path.read_bytes()
    bench.put({1: 99})
    new = path.read_bytes()
    at = geometry.offset(1)
    for written in offsets(geometry.slot_bytes, sampled=True):
        path.write_bytes(whole[:at] + new[at : at + written] + whole[at + written :])
        old = bench.get({1: 1}, first_block=3).num_blocks
        fresh = bench.get({1: 99}, first_block=3).num_blocks
        assert not (old and fresh)
        # the old block stays as long as no byte of the new key has been written
        assert not old or written <= 96
        assert not fresh or written >= geometry.header_bytes + geometry.block_bytes - 1

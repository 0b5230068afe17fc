"""Tests memory that outlives its process: which of its blocks the next process accepts."""

from __future__ import annotations

import logging
import mmap
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.head.memory_files import KeptMemoryFiles
from moonpool.protocol.block_layout import BlockLayout
from moonpool.types import BlockId, BlockKey
from moonpool_engine.storage.block_ledger import BlockLedger
from moonpool_engine.storage.folder import StoreError
from moonpool_engine.storage.kept_memory import HEAD_BYTES, KeptMemory, open_in_folder
from moonpool_engine.transfer.arena import Arena, ArenaError, PeerArenas

LAYOUT = BlockLayout("m", "float32", 16, 3, 2, 8)
NUM_BLOCKS = 16


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path) / "kept"


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "little"))


def content(number: int) -> bytes:
    return random.Random(number).randbytes(LAYOUT.block_bytes)


class Process:
    """An instance's arena and ledger, as one process has them."""

    def __init__(self, memory: KeptMemory, layout: BlockLayout = LAYOUT) -> None:
        fd, ledger = memory.prepare(layout, NUM_BLOCKS)
        self.arena = Arena(layout, NUM_BLOCKS, kept_fd=fd)
        self.ledger = BlockLedger(self.arena, ledger)

    def fill(self, block: int, number: int) -> None:
        self.ledger.note([(BlockId(block), None)])
        self.arena.checksums.forget([BlockId(block)])
        start = block * LAYOUT.block_bytes
        self.arena.buffer[start : start + LAYOUT.block_bytes] = content(number)
        self.ledger.note([(BlockId(block), key(number))])

    def end(self) -> None:
        self.ledger.close()
        self.arena.close()


def open_process(folder: Path, layout: BlockLayout = LAYOUT) -> Process:
    return Process(open_in_folder(folder, "mixed-0"), layout)


def recovered(folder: Path) -> tuple[dict[int, int], int]:
    """Returns the number of each recovered block's key; asserts that the block has this key's
    bytes."""
    process = open_process(folder)
    kept, num_damaged = process.ledger.recover()
    found = {int(block): int.from_bytes(name, "little") for block, name in kept}
    for block, number in found.items():
        start = block * LAYOUT.block_bytes
        assert process.arena.buffer[start : start + LAYOUT.block_bytes] == content(number)
    process.end()
    return found, num_damaged


def test_the_next_process_finds_the_blocks_that_still_have_a_key(folder: Path) -> None:
    process = open_process(folder)
    for block in range(6):
        process.fill(block, 100 + block)
    process.ledger.note([(BlockId(2), None)])  # the block is about to be overwritten
    process.ledger.note([(BlockId(3), None)])
    process.fill(3, 200)
    process.end()
    assert recovered(folder) == ({0: 100, 1: 101, 3: 200, 4: 104, 5: 105}, 0)


def test_files_are_closed_to_others(folder: Path) -> None:
    open_process(folder).end()
    files = list((folder / "mixed-0").iterdir())
    assert sorted(path.name for path in files) == ["arena", "ledger"]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["arena", "ledger"])
def test_a_flipped_bit_costs_its_block(folder: Path, name: str) -> None:
    process = open_process(folder)
    for block in range(4):
        process.fill(block, block + 1)
    process.end()
    row_bytes = 8 * (LAYOUT.num_layers + 4)
    place = 2 * LAYOUT.block_bytes + 77 if name == "arena" else HEAD_BYTES + 2 * row_bytes + 9
    with (folder / "mixed-0" / name).open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))
    assert recovered(folder) == ({0: 1, 1: 2, 3: 4}, 1)
    assert recovered(folder) == ({0: 1, 1: 2, 3: 4}, 0), "the damaged record was voided"


def test_bytes_that_change_while_they_are_hashed_are_not_named(folder: Path) -> None:
    process = open_process(folder)
    hashes = process.ledger._name
    process.fill(0, 1)
    process.ledger.note([(BlockId(0), key(9))])
    process.ledger.close()
    hashes(BlockId(0), key(1), 1)  # acts as if the first task had ended only now
    process.arena.close()
    assert process.ledger._rows[0, 1] == 9


@pytest.mark.parametrize("ruin", ["other model", "damaged head", "truncated"])
def test_a_wrong_file_is_a_cold_start_with_one_line(
    folder: Path, ruin: str, caplog: pytest.LogCaptureFixture
) -> None:
    process = open_process(folder)
    process.fill(0, 1)
    process.end()
    ledger = folder / "mixed-0" / "ledger"
    layout = LAYOUT
    if ruin == "other model":
        layout = BlockLayout("other", "float32", 16, 3, 2, 8)
    elif ruin == "damaged head":
        ledger.write_bytes(b"x" + ledger.read_bytes()[1:])
    else:
        os.truncate(ledger, 100)
    with caplog.at_level(logging.WARNING):
        process = open_process(folder, layout)
    assert not process.ledger.names_any and process.ledger.recover() == ([], 0)
    process.end()
    assert len(caplog.messages) == (0 if ruin == "truncated" else 1)
    assert all("starting cold" in text for text in caplog.messages)


def test_a_smaller_arena_leaves_the_old_one_to_those_who_have_it_mapped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonpool_engine.storage.kept_memory._LOCK_S", 0.1)
    open_process(folder).end()
    path = folder / "mixed-0" / "arena"
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[-1] = 7
        fd, ledger = open_in_folder(folder, "mixed-0").prepare(LAYOUT, NUM_BLOCKS // 4)
        assert path.stat().st_size < len(mapped) == os.fstat(file.fileno()).st_size
        assert os.fstat(file.fileno()).st_blocks == 0, "it keeps no memory"
        assert mapped[-1] == 0  # otherwise: SIGBUS
        with pytest.raises(StoreError, match="in use"):
            open_in_folder(folder, "mixed-0")
        os.close(fd)
        ledger.close()


def test_the_number_of_blocks_is_found_again(folder: Path) -> None:
    open_process(folder).end()
    memory = open_in_folder(folder, "mixed-0")
    assert memory.num_blocks(LAYOUT) == NUM_BLOCKS
    assert memory.num_blocks(BlockLayout("other", "float32", 16, 3, 2, 8)) is None
    memory.close()


def test_two_never_share_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool_engine.storage.kept_memory._LOCK_S", 0.1)
    process = open_process(folder)
    with pytest.raises(StoreError, match="in use by another process"):
        open_in_folder(folder, "mixed-0")
    open_in_folder(folder, "mixed-1").close()
    # A rank or a stage that outlives the instance's first process may still write blocks.
    rank = subprocess.Popen(["/bin/sleep", "60"], pass_fds=[process.arena.fd])
    process.end()
    with pytest.raises(StoreError, match="in use by another process"):
        open_in_folder(folder, "mixed-0")
    rank.kill()
    rank.wait()
    open_in_folder(folder, "mixed-0").close()


def test_a_peer_maps_kept_memory_and_cannot_write_it(folder: Path) -> None:
    process = open_process(folder)
    process.fill(1, 7)
    handed_over = os.dup(process.arena.peer_fd)
    with pytest.raises(OSError):
        os.pwrite(handed_over, b"y", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(handed_over, LAYOUT.block_bytes)
    peer, name = (peers := PeerArenas()).adopt(handed_over, LAYOUT)
    own = Arena(LAYOUT, 2)
    peer.copy(*peer.offsets([(0, 0, 1, 0)]), own, 0, LAYOUT.block_bytes)
    assert own.buffer[: LAYOUT.block_bytes] == content(7)
    peers.release(name)
    process.end()


def test_a_folder_on_a_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not in memory: name a folder of a tmpfs"):
        open_in_folder(tmp_path / "kept", "mixed-0")


def test_too_large_an_arena_is_refused_in_one_line(folder: Path) -> None:
    memory = open_in_folder(folder, "mixed-0")
    with pytest.raises(ArenaError, match="GiB") as caught:
        memory.prepare(LAYOUT, (1 << 50) // LAYOUT.block_bytes)
    assert "\n" not in str(caught.value)
    memory.close()
    assert (folder / "mixed-0" / "arena").stat().st_size == 0


def test_files_without_names_end_with_their_process() -> None:
    files = KeptMemoryFiles()
    process = Process(KeptMemory(*files.paths))
    process.fill(3, 5)
    process.end()
    process = Process(KeptMemory(*files.paths))
    assert process.ledger.recover() == ([(3, key(5))], 0)
    process.end()
    files.close()
    with pytest.raises(StoreError, match="cannot be opened"):
        KeptMemory(*files.paths)


CHURN = """
import itertools, pathlib, sys, time
from tests.unit.storage.test_kept_memory import NUM_BLOCKS, open_process
process = open_process(pathlib.Path(sys.argv[1]))
process.ledger.recover()
print("ready", flush=True)
for number in itertools.count(int(sys.argv[2])):
    process.fill(number % NUM_BLOCKS, number)
    time.sleep(0.0005)  # the thread that hashes gets a turn
"""


@pytest.mark.long
def test_a_process_may_be_killed_at_any_moment(folder: Path) -> None:
    """Every block that is found must have the bytes of its key, which `recovered` asserts."""
    num_found = 0
    rng = random.Random(3)
    for round_ in range(8):
        churn = subprocess.Popen(
            [sys.executable, "-c", CHURN, str(folder), str(1 + 100_000 * round_)],
            stdout=subprocess.PIPE,
        )
        assert churn.stdout is not None and churn.stdout.readline() == b"ready\n"
        with pytest.raises(subprocess.TimeoutExpired):
            churn.wait(0.05 + 0.2 * rng.random())
        churn.send_signal(signal.SIGKILL)
        churn.wait()
        churn.stdout.close()
        num_found += len(recovered(folder)[0])
    assert num_found

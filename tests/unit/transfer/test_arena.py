"""Tests the arena: its limits, its seals and its write protection."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from moonpool.protocol.block_layout import BlockLayout
from moonpool_engine.transfer.arena import Arena, ArenaError, PeerArenas, available_memory_bytes
from moonpool_engine.transfer.touch_ahead import AHEAD_BYTES, STEP_BYTES, may_touch_late

LAYOUT = BlockLayout(
    model_fingerprint="m",
    dtype="float32",
    block_tokens=4,
    num_layers=3,
    num_kv_heads=1,
    head_dim=8,
)


@pytest.fixture
def arena() -> Arena:
    return Arena(LAYOUT, 8)


def test_slices_tile_the_buffer_layer_by_layer(arena: Arena) -> None:
    for block in range(8):
        for layer in range(3):
            arena.slice(block, layer)[:] = bytes([block * 3 + layer]) * LAYOUT.slice_bytes
    expected = np.repeat(np.arange(24, dtype=np.uint8), LAYOUT.slice_bytes)
    assert np.array_equal(np.frombuffer(arena.buffer, np.uint8), expected)


def test_an_arena_larger_than_memory_is_refused_in_one_line() -> None:
    huge = 2 * available_memory_bytes() // LAYOUT.block_bytes
    with pytest.raises(
        ArenaError, match=r"needs [\d.]+ GiB but only [\d.]+ GiB .* lower"
    ) as caught:
        Arena(LAYOUT, huge)
    assert "\n" not in str(caught.value)
    with pytest.raises(ArenaError, match="at least 1 block"):
        Arena(LAYOUT, 0)


def test_the_whole_arena_is_prefaulted(arena: Arena) -> None:
    assert os.fstat(arena.fd).st_blocks * 512 >= arena.num_bytes


def test_a_late_arena_takes_memory_for_blocks_in_use_and_gives_it_back() -> None:
    layout = msgspec.structs.replace(LAYOUT, block_tokens=4096)
    arena = Arena(layout, 4 * STEP_BYTES // layout.block_bytes, sealed=False, late=True)

    def taken() -> int:
        return os.fstat(arena.fd).st_blocks * 512

    assert arena.is_late and taken() == 0
    arena.reach(1)
    until_s = time.monotonic() + 60
    while taken() < AHEAD_BYTES + layout.block_bytes and time.monotonic() < until_s:
        time.sleep(0.01)
    assert AHEAD_BYTES + layout.block_bytes <= taken() < arena.num_bytes
    # writes far beyond the size that was announced first
    arena.slice(arena.num_blocks - 1, 0)[:2] = b"xy"
    assert arena.slice(arena.num_blocks - 1, 0)[:2] == b"xy"
    arena.forget_content()
    # waits, because the other thread may still take the memory that it has begun to take
    while taken() and time.monotonic() < until_s:
        time.sleep(0.01)
        arena.forget_content()
    assert taken() == 0
    arena.seal()
    arena.slice(0, 0)[:1] = b"z"
    arena.forget_content()  # changes nothing, because the arena is sealed
    assert arena.slice(0, 0)[:1] == b"z"
    arena.reach(arena.num_blocks)
    arena.close()


def test_strict_accounting_takes_all_memory_at_the_start(tmp_path: Path) -> None:
    setting = tmp_path / "overcommit_memory"
    for value, late in (("0", True), ("1", True), ("2", False)):
        setting.write_text(f"{value}\n")
        assert may_touch_late(setting) is late
    assert not may_touch_late(tmp_path / "missing")


def test_a_peer_reads_but_can_neither_write_nor_truncate(arena: Arena) -> None:
    arena.slice(5, 1)[:] = b"x" * LAYOUT.slice_bytes
    handed_over = os.dup(arena.fd)
    peers = PeerArenas()
    peer, name = peers.adopt(os.dup(arena.fd), LAYOUT)
    own = Arena(LAYOUT, 2)
    peer.copy(
        *peer.offsets([(0, 1, 5, 0)]),
        own,
        own.block_bytes + 2 * own.slice_bytes,
        LAYOUT.slice_bytes,
    )
    assert own.slice(1, 2) == b"x" * LAYOUT.slice_bytes
    with pytest.raises(PermissionError):
        os.pwrite(handed_over, b"y", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(handed_over, LAYOUT.block_bytes)
    with pytest.raises(PermissionError):
        os.ftruncate(handed_over, 0)
    reopened = f"/proc/self/fd/{handed_over}"
    with pytest.raises(PermissionError), open(reopened, "r+b", buffering=0) as file:
        file.write(b"y")
    os.close(handed_over)
    peers.release(name)


def test_only_mappings_from_before_the_seal_can_write() -> None:
    arena = Arena(LAYOUT, 2, sealed=False)
    with pytest.raises(ArenaError, match="not sealed"):
        PeerArenas().adopt(os.dup(arena.fd), LAYOUT)
    with mmap.mmap(arena.fd, arena.num_bytes) as stage:
        arena.seal()
        stage[arena.block_bytes] = 77
        assert arena.slice(1, 0)[0] == 77
    with pytest.raises(PermissionError):
        mmap.mmap(arena.fd, arena.num_bytes)
    arena.close()


@pytest.mark.long
def test_a_peer_is_mapped_once_and_until_its_last_release(arena: Arena) -> None:
    peers = PeerArenas()
    gc.collect()  # frees memory that earlier tests left behind
    before = len(os.listdir("/proc/self/fd"))
    mapped = mappings()
    first, name = peers.adopt(os.dup(arena.fd), LAYOUT)
    second, _ = peers.adopt(os.dup(arena.fd), LAYOUT)
    assert first is second
    assert mappings() == mapped + 1
    peers.release(name)
    del second
    assert len(peers) == 1
    peers.release(name)
    del first
    gc.collect()
    assert (len(peers), mappings()) == (0, mapped)
    assert len(os.listdir("/proc/self/fd")) == before


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("moonpool-arena")


@pytest.mark.parametrize(("block", "layer"), [(8, 0), (-1, 0), (0, 3), (0, -1), (1 << 60, 0)])
def test_a_slice_the_peer_does_not_have_is_refused(arena: Arena, block: int, layer: int) -> None:
    peer, _ = PeerArenas().adopt(os.dup(arena.fd), LAYOUT)
    with pytest.raises(ArenaError, match="which it lacks"):
        peer.offsets([(0, layer, block, 0)])


def test_a_file_that_is_not_a_sealed_memfd_is_refused(tmp_path: Path) -> None:
    plain = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
    os.ftruncate(plain, LAYOUT.block_bytes)
    with pytest.raises(ArenaError, match="not sealed"):
        PeerArenas().adopt(plain, LAYOUT)
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    os.write(file, b"x" * LAYOUT.block_bytes)
    # refuses an unsealed file, because other users could truncate it
    with pytest.raises(ArenaError, match="not sealed"):
        PeerArenas().adopt(file, LAYOUT)
    for fd in (plain, file):
        with pytest.raises(OSError):
            os.fstat(fd)  # closed, because the descriptor was handed over
    read_end, write_end = os.pipe()
    os.close(write_end)
    with pytest.raises(ArenaError, match="not a memory file"):
        PeerArenas().adopt(read_end, LAYOUT)


def test_close_is_safe_while_a_tensor_uses_the_memory(arena: Arena) -> None:
    array = np.frombuffer(arena.buffer, np.uint8)
    tensor = torch.frombuffer(arena.buffer, dtype=torch.uint8)
    arena.close()
    arena.close()
    gc.collect()
    tensor += 1
    assert int(tensor.sum()) == tensor.numel() == int(array.sum())


def memory_files() -> int:
    """Returns descriptors of files in memory; threads of other tests may open sockets meanwhile."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += "memfd:" in os.readlink(f"/proc/self/fd/{name}")
    return found


@pytest.mark.long
def test_close_frees_the_memory_and_every_descriptor() -> None:
    gc.collect()  # frees memory that earlier tests left behind
    before, mapped_before = memory_files(), mappings()
    Arena(LAYOUT, 8).close()
    gc.collect()
    assert memory_files() == before
    assert mappings() == mapped_before


def test_the_cgroup_limit_counts(tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (cgroup / "a/b").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4000 kB\n")
    (proc / "self/cgroup").write_text("0::/a/b\n")
    assert available_memory_bytes(proc, cgroup) == 4000 * 1024
    (cgroup / "a/memory.max").write_text("1000000\n")
    (cgroup / "a/memory.current").write_text("700000\n")
    (cgroup / "a/memory.stat").write_text("anon 1\ninactive_file 50000\n")
    assert available_memory_bytes(proc, cgroup) == 350000
    (cgroup / "a/memory.max").write_text("max\n")
    assert available_memory_bytes(proc, cgroup) == 4000 * 1024

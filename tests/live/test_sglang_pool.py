"""Tests SGLang's client of the pool of a host, with pages in plain memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moonpool_engine.sglang.page_store import PageStore, Piece
from moonpool_engine.sglang.pool_client import HostPoolClient
from moonpool_engine.vllm.cache_layout import Addresses
from moonpool_engine.vllm.slice_mover import PlainSliceMover, SliceMover, Sums
from tests.live.host_pool import Pool
from tests.live.waiting import wait_until

PAGES, PIECES, PIECE_BYTES = 6, 4, 2048
HASHES = [f"hash {number}" for number in range(PAGES)]


@pytest.fixture
def pool() -> Iterator[Pool]:
    found = Pool("--dram", "16MiB")
    yield found
    found.close()


@pytest.mark.parametrize("sizes", [[128] * PIECES, [2048, 100]])
def test_pieces_that_no_copy_moves_are_named(sizes: list[int], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 256 bytes"):
        HostPoolClient(tmp_path / "none", b"", "m", sizes, PlainSliceMover())


class Memory:
    """Host memory of some pages, which begins at a multiple of 64 bytes."""

    def __init__(self, seed: int | None = None) -> None:
        raw = np.zeros(PAGES * PIECES * PIECE_BYTES + 64, np.uint8)
        start = -raw.ctypes.data % 64
        self.bytes = raw[start : start + PAGES * PIECES * PIECE_BYTES]
        if seed is not None:
            self.bytes[:] = np.random.default_rng(seed).integers(0, 256, len(self.bytes))

    def pieces(self) -> list[list[Piece]]:
        """Returns the pieces of the pages, which may lie far apart, like the layers of a page."""
        at = self.bytes.ctypes.data
        return [
            [(at + (piece * PAGES + page) * PIECE_BYTES, PIECE_BYTES) for piece in range(PIECES)]
            for page in range(PAGES)
        ]


def store(pool: Pool, namespace: bytes = b"n" * 32, mover: SliceMover | None = None) -> PageStore:
    client = HostPoolClient(pool.socket, namespace, "m", [PIECE_BYTES] * PIECES, mover)
    return PageStore(client, {"kv": namespace})


def test_pages_outlive_the_process_and_the_pool(pool: Pool) -> None:
    stored, first = Memory(seed=1), store(pool)
    assert first.leading("kv", HASHES) == 0
    assert first.put("kv", HASHES, stored.pieces()) == [True] * PAGES
    # a page that is there already counts as stored
    assert first.put("kv", HASHES, stored.pieces()) == [True] * PAGES
    wait_until(lambda: first.leading("kv", HASHES) == PAGES)
    first.close()
    pool.kill()
    pool.start()
    second, loaded = store(pool), Memory()
    assert second.leading("kv", [*HASHES[:3], "other"]) == 3
    assert second.get("kv", HASHES, loaded.pieces()) == [True] * PAGES
    assert np.array_equal(loaded.bytes, stored.bytes)
    second.close()


def test_a_changed_page_is_a_miss_and_forgotten(pool: Pool) -> None:
    stored, pages = Memory(seed=1), store(pool)
    pages.put("kv", HASHES, stored.pieces())
    wait_until(lambda: pages.leading("kv", HASHES) == PAGES)
    (arena,) = pool.memory.glob("*/arena")
    data = bytearray(arena.read_bytes())
    at = data.index(stored.bytes[2 * PIECE_BYTES : 3 * PIECE_BYTES].tobytes())
    data[at + 5] ^= 1
    with arena.open("r+b") as file:
        file.write(data)
    assert pages.get("kv", HASHES, Memory().pieces()) == [number != 2 for number in range(PAGES)]
    wait_until(lambda: pages.leading("kv", HASHES) == 2)
    pages.close()


def test_a_pool_that_dies_is_a_miss(pool: Pool) -> None:
    stored, pages = Memory(seed=1), store(pool)
    pages.put("kv", HASHES, stored.pieces())
    pool.kill()
    assert pages.get("kv", HASHES, Memory().pieces()) == [False] * PAGES
    assert pages.put("kv", HASHES, stored.pieces()) == [False] * PAGES
    assert pages.leading("kv", HASHES) == 0
    pages.close()


class InterruptedMover(PlainSliceMover):
    """A mover whose first copy takes longer than the pool lives, so that the client uses another
    pool when the copy ends."""

    def __init__(self, pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
        self._pool, self._caplog, self.num_copies = pool, caplog, 0

    def copy(self, from_addresses: Addresses, to_addresses: Addresses, slice_bytes: int) -> Sums:
        self.num_copies += 1
        if self.num_copies == 1:
            self._pool.kill()
            self._caplog.clear()
            self._pool.start()
            wait_until(lambda: "is used" in self._caplog.text)
        return super().copy(from_addresses, to_addresses, slice_bytes)


def test_a_copy_that_outlasts_its_pool_is_none_of_the_next(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "moonpool.vllm_connector")
    stored, mover = Memory(seed=1), InterruptedMover(pool, caplog)
    pages = store(pool, mover=mover)
    assert pages.put("kv", HASHES, stored.pieces()) == [False] * PAGES
    assert pages.put("kv", HASHES, stored.pieces()) == [True] * PAGES
    assert mover.num_copies == 2
    assert b"does not understand" not in pool.log()
    pages.close()

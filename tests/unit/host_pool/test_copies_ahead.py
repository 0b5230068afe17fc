"""Tests that a pool copies stored blocks to the SSD early, so that blocks that it reads from there
get room without writes."""

from __future__ import annotations

from moonpool.host_pool.block_space import BlockSpace, Finder
from moonpool.protocol.transfer_events import LoadEnded, StoreEnded
from moonpool.scheduler.actions import LoadBlocks, StoreBlocks
from moonpool.types import BlockKey
from tests.unit.host_pool.test_block_space import LAYOUT, take

NUM_BLOCKS, BATCH = 128, 16


class Pool:
    """Holds a space, and a disk that ends writes when the test says so."""

    def __init__(self) -> None:
        self.space = BlockSpace(LAYOUT, NUM_BLOCKS, num_slots=8 * NUM_BLOCKS)
        self.writes: list[StoreBlocks] = []
        self.num_read = 0

    def perform(self) -> None:
        while actions := take(self.space):
            for action in actions:
                if isinstance(action, StoreBlocks):
                    self.writes.append(action)
                elif isinstance(action, LoadBlocks):
                    self.num_read += len(action.keys)
                    self.space.handle(
                        LoadEnded(
                            load_id=action.load_id,
                            num_blocks=len(action.keys),
                            corrupt_slices=0,
                            num_bytes=0,
                            seconds=0.0,
                            error="",
                        )
                    )

    def store(self, number: int, keys: list[BlockKey]) -> None:
        self.space.reserve(number, keys, 0)
        self.space.commit(number)
        self.perform()

    def write(self, most: int) -> int:
        """Ends writes until `most` blocks are written or no write is under way. Returns the number
        of written blocks."""
        num_written = 0
        while self.writes and num_written < most:
            write = self.writes.pop(0)
            num_written += len(write.keys)
            self.space.handle(
                StoreEnded(
                    store_id=write.store_id,
                    num_blocks=len(write.keys),
                    num_bytes=0,
                    seconds=0.0,
                    error="",
                )
            )
            self.perform()
        return num_written


def batches(count: int) -> list[list[BlockKey]]:
    keys = [BlockKey(number.to_bytes(16, "big")) for number in range(1, count * BATCH + 1)]
    return [keys[at : at + BATCH] for at in range(0, len(keys), BATCH)]


def test_reads_cause_no_writes_once_the_disk_has_kept_up() -> None:
    pool, stored = Pool(), batches(4 * NUM_BLOCKS // BATCH)
    for number, keys in enumerate(stored):
        pool.store(number, keys)
        pool.write(BATCH)
    pool.write(NUM_BLOCKS)
    for keys in stored[: NUM_BLOCKS // BATCH]:
        finder = Finder(1, "f")
        pool.space.find(finder, keys)
        pool.perform()
        pool.space.release(finder)
        pool.perform()
        assert pool.write(NUM_BLOCKS) == 0
    assert pool.num_read == NUM_BLOCKS


def test_copies_that_wait_leave_room_for_stores() -> None:
    """Stores must continue although the disk writes nothing."""
    pool = Pool()
    for number, keys in enumerate(batches(20)):
        pool.store(number, keys)
        assert pool.space.present(keys) == [True] * BATCH
        owners = pool.space.pool.owners()
        assert sum(owners.values()) <= NUM_BLOCKS // 4 + NUM_BLOCKS // 16


def test_a_key_that_is_asked_for_twice_is_loaded_once() -> None:
    pool, (keys,) = Pool(), batches(1)
    pool.store(0, keys)
    pool.write(BATCH)
    pool.space.drop(keys)
    finder = Finder(1, "f")
    pool.space.find(finder, [keys[0], keys[0], keys[1]])
    pool.perform()
    assert pool.num_read == 2
    pool.space.release(finder)
    pool.space.validate()

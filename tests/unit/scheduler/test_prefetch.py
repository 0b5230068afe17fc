"""Tests the prefetches of one instance: their bounds, their place after the loads of requests, and
their counters."""

from __future__ import annotations

from msgspec import structs
from test_instance import COST, EOS, LAYOUT, SIZE, Bench, attempt, keys_of, of

from moonpool.protocol.messages import PrefetchBlocks, StartPrefill
from moonpool.protocol.transfer_events import LoadEnded, ReadRequested, StoreEnded
from moonpool.scheduler.actions import LoadBlocks, StoreBlocks, WorkerAction
from moonpool.scheduler.instance import Instance
from moonpool.scheduler.instance_config import InstanceConfig
from moonpool.scheduler.loading.prefetch import BATCH_BLOCKS, MAX_SHARE
from moonpool.types import BlockKey, Role

NUM_BLOCKS = 256


class Disk(Bench):
    """Runs an instance whose writes end immediately, and whose loads end when the test says so."""

    def __init__(self, read_bytes_per_s: float = 1e9) -> None:
        super().__init__(Role.PREFILL)
        config = InstanceConfig(ssd_blocks=4096, chunk_tokens=4096, eviction="predictive")
        cost = structs.replace(COST, ssd_read_bytes_per_s=read_bytes_per_s)
        self.instance = Instance(config, LAYOUT, NUM_BLOCKS, Role.PREFILL, cost, (EOS,))
        self.loads: list[LoadBlocks] = []

    def play(self, actions: list[WorkerAction]) -> None:
        while actions:
            self.loads += of(actions, LoadBlocks)
            more: list[WorkerAction] = []
            for store in of(actions, StoreBlocks):
                more += self.handle(StoreEnded(store.store_id, len(store.keys)))
            actions = more

    def end_load(self) -> LoadBlocks:
        load = self.loads.pop(0)
        self.play(self.handle(LoadEnded(load.load_id, len(load.keys))))
        return load

    def serve(self, first: int, num_blocks: int) -> tuple[BlockKey, ...]:
        """Computes a prompt of this many full blocks."""
        work = attempt(f"w{first}", num_tokens=num_blocks * SIZE, first=first, max_tokens=1)
        self.play(self.handle(StartPrefill(attempt=work)))
        while self.loads:
            self.end_load()
        while self.step is not None:
            self.play(self.end_step())
        return tuple(keys_of(tuple(range(first, first + num_blocks * SIZE))))

    def held(self, keys: tuple[BlockKey, ...]) -> int:
        return len(self.instance.pool.match(keys))


def demoted(**known: float) -> tuple[Disk, tuple[BlockKey, ...]]:
    """Returns an instance with a session of 12 blocks that are on the SSD only."""
    disk = Disk(**known)
    keys = disk.serve(1000, 12)
    for number in range(2, 40):
        disk.serve(1000 * number, 12)
    assert disk.held(keys) == 0
    return disk, keys


def test_a_prefetched_session_is_in_dram_when_its_turn_comes() -> None:
    disk, keys = demoted()
    disk.play(disk.handle(PrefetchBlocks(keys)))
    load = disk.end_load()
    assert load.keys == keys and not load.by_layer
    assert disk.held(keys) == 12
    assert disk.instance.counters["prefetched_blocks"] == 12
    disk.play(disk.handle(StartPrefill(attempt=attempt("next", 12 * SIZE + 2, first=1000))))
    assert not disk.loads, "the turn waits for no load"
    assert disk.instance.counters["used_prefetched_blocks"] == 12


def test_blocks_that_leave_dram_unused_are_wasted() -> None:
    disk, keys = demoted()
    disk.play(disk.handle(PrefetchBlocks(keys)))
    disk.end_load()
    for number in range(50, 90):
        disk.serve(1000 * number, 12)
    assert disk.instance.counters["wasted_prefetched_blocks"] == 12
    assert "used_prefetched_blocks" not in disk.instance.counters


def test_no_batch_begins_while_the_load_of_a_request_runs() -> None:
    disk, keys = demoted()
    other = tuple(keys_of(tuple(range(2000, 2000 + 12 * SIZE))))
    disk.play(disk.handle(ReadRequested(read_id="r", keys=other)))
    assert len(disk.loads) == 1
    disk.play(disk.handle(PrefetchBlocks(keys)))
    assert len(disk.loads) == 1
    assert disk.end_load().keys == other
    assert disk.end_load().keys == keys


def test_a_long_session_is_read_in_batches_within_the_bound() -> None:
    disk = Disk()
    keys = disk.serve(1000, 80)
    for number in range(2, 40):
        disk.serve(1000 * number, 12)
    disk.play(disk.handle(PrefetchBlocks(keys)))
    read = 0
    while disk.loads:
        assert len(disk.loads) == 1
        read += len(disk.end_load().keys)
    assert BATCH_BLOCKS <= read <= NUM_BLOCKS // MAX_SHARE


def test_what_is_in_dram_already_is_not_read() -> None:
    disk, _ = demoted()
    newest = tuple(keys_of(tuple(range(39000, 39000 + 12 * SIZE))))
    disk.play(disk.handle(PrefetchBlocks(newest)))
    assert not disk.loads and "prefetched_blocks" not in disk.instance.counters


def test_a_disk_slower_than_computing_is_not_read() -> None:
    disk, keys = demoted(read_bytes_per_s=1.0)
    disk.play(disk.handle(PrefetchBlocks(keys)))
    assert not disk.loads

"""Tests the contract of every store below DRAM (`TierStore`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tier_harness import NUM_BLOCKS, NUM_SLOTS, Bench, keys_of

from moonpool.protocol.transfer_events import LoadEnded, LookUpEnded, StoreEnded
from moonpool.types import BlockId
from moonpool_engine.storage import job as job_module
from moonpool_engine.storage import store as store_module
from moonpool_engine.storage.mooncake import MooncakeStore
from moonpool_engine.storage.store import open_store
from moonpool_engine.storage.tier_store import SharedStore
from moonpool_engine.transfer.gate import LayerGate
from tests.mooncake_cluster import MooncakeCluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[MooncakeCluster]:
    cluster = MooncakeCluster()
    yield cluster
    cluster.stop()


@pytest.fixture(params=["ssd", "mooncake"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def bench(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    if kind == "ssd":
        bench = Bench(lambda arena, post: open_store(tmp_path, "x", arena, NUM_SLOTS, post))
    else:
        config = request.getfixturevalue("cluster").config
        bench = Bench(lambda arena, post: MooncakeStore(arena, config, "127.0.0.1", post))
    yield bench
    bench.store.close()


def need_shared(bench: Bench) -> None:
    if not bench.store.shared:
        pytest.skip("only its one instance uses it")


def test_stored_blocks_are_loaded(bench: Bench) -> None:
    keys = keys_of("back", 20)
    ended = bench.put(keys)
    assert (ended.num_blocks, ended.num_bytes, ended.error) == (20, 20 * bench.size, "")
    loaded = bench.get(keys)
    assert (loaded.num_blocks, loaded.num_bytes, loaded.error) == (20, 20 * bench.size, "")
    counts = bench.store.counts()
    assert counts.written_blocks == counts.read_blocks == 20
    assert counts.written_bytes == counts.read_bytes == 20 * bench.size
    assert counts.failed_operations == counts.corrupt_slices == 0


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes parts so small that each has one layer."""
    monkeypatch.setattr(job_module, "MIN_PART_BYTES", 4096)


@pytest.fixture
def one_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads one part after the other, so that each is reported."""
    monkeypatch.setattr(store_module, "READ_THREADS", 1)


@pytest.fixture
def parted(small_parts: None, bench: Bench) -> Bench:
    return bench


def test_a_layered_load_reports_progress(one_reader: None, parted: Bench) -> None:
    keys = keys_of("by layer", 20)
    assert parted.put(keys).num_blocks == 20
    gate = LayerGate()
    ended, told = parted.get_by_layer(keys, gate)
    assert (ended.num_blocks, ended.num_bytes, ended.error) == (20, 20 * parted.size, "")
    assert [event.num_layers for event in told] == [0, 1, 2]
    assert gate.wait(2, 0.0), "all of it is here"
    assert parted.store.counts().read_blocks == 20
    assert parted.get(keys).num_blocks == 20, "and as a whole"


def test_parts_of_several_threads_are_reported_in_order(parted: Bench) -> None:
    keys = keys_of("readers", 20)
    parted.put(keys)
    for _ in range(20):
        gate = LayerGate()
        ended, told = parted.get_by_layer(keys, gate)
        assert (ended.num_blocks, ended.error) == (20, "")
        layers = [event.num_layers for event in told]
        assert layers[0] == 0 and layers == sorted(set(layers)) and gate.wait(2, 0.0)


def test_a_layered_load_counts_up_to_the_first_miss(parted: Bench) -> None:
    keys = keys_of("miss by layer", 5)
    parted.put(keys[:3])
    gate = LayerGate()
    ended, told = parted.get_by_layer([*keys[:3], keys[4]], gate)
    assert (ended.num_blocks, [event.num_layers for event in told]) == (3, [0])
    assert ended.error and not gate.wait(0, 0.0)
    gate = LayerGate()
    assert parted.get_by_layer([], gate)[0].num_blocks == 0
    assert gate.wait(0, 0.0), "nothing was to come"


def test_damage_in_a_late_layer_breaks_the_gate_there(one_reader: None, parted: Bench) -> None:
    keys = keys_of("late damage", 4)
    parted.put(keys)
    parted.get(keys)  # loads into the last blocks, whose checksums are known afterwards
    again = keys_of("late damage again", 4)
    blocks = [BlockId(NUM_BLOCKS - 1 - number) for number in range(4)]
    parted.block(blocks[2])[-1] ^= 16  # flips a bit of the last layer
    parted.store.store("s", again, blocks, [10, 11, 12, 13])
    assert parted.event(StoreEnded).num_blocks == 4
    gate = LayerGate()
    ended, told = parted.get_by_layer(again, gate, first_slot=10, right=False)
    assert (ended.num_blocks, ended.corrupt_slices) == (2, 1)
    assert [event.num_layers for event in told] == [0, 1, 2]
    assert gate.wait(1, 0.0) and not gate.wait(2, 0.0)
    if parted.store.shared:
        assert parted.look_up(again).num_blocks == 2


def test_a_block_stored_twice_is_loaded_from_both_slots(bench: Bench) -> None:
    keys = keys_of("twice", 2)
    assert bench.put(keys).num_blocks == bench.put(keys, first_slot=8).num_blocks == 2
    assert bench.get(keys).num_blocks == bench.get(keys, first_slot=8).num_blocks == 2


def test_a_load_counts_up_to_the_first_miss(bench: Bench) -> None:
    keys = keys_of("miss", 5)
    bench.put(keys[:3])
    ended = bench.get([*keys[:3], keys[4]])
    assert (ended.num_blocks, ended.num_bytes) == (3, 3 * bench.size)
    assert ended.error
    assert bench.get([keys[4], keys[0]]).num_blocks == 0


def test_a_look_up_returns_the_number_of_leading_blocks(bench: Bench) -> None:
    need_shared(bench)
    keys = keys_of("run", 9)
    assert bench.look_up(keys).num_blocks == 0
    bench.put(keys[:4])
    bench.put(keys[5:], first_slot=5)
    assert bench.look_up(keys) == LookUpEnded(lookup_id="u", num_blocks=4)
    assert bench.look_up(keys[5:]).num_blocks == 4
    assert bench.look_up([]).num_blocks == 0
    many = keys_of("many", 2000)
    assert bench.look_up([*keys[:4], *many]).num_blocks == 4


def test_a_block_that_changed_in_memory_is_detected_when_it_is_read_back(bench: Bench) -> None:
    keys = keys_of("changed", 2)
    bench.put(keys)
    bench.get(keys)  # loads into the last blocks, whose checksums are known afterwards
    again = keys_of("changed again", 2)
    blocks = [BlockId(NUM_BLOCKS - 1), BlockId(NUM_BLOCKS - 2)]
    bench.block(blocks[1])[7] ^= 16
    bench.store.store("s", again, blocks, [10, 11])
    assert bench.event(StoreEnded).num_blocks == 2
    bench.store.load("l", again, [10, 11], [BlockId(0), BlockId(1)])
    ended = bench.event(LoadEnded)
    assert (ended.num_blocks, ended.corrupt_slices) == (1, 1)
    assert bench.store.counts().corrupt_slices == 1
    if bench.store.shared:
        assert bench.look_up(again).num_blocks == 1, "the damaged block was not deleted"


def test_many_operations_at_once_end_once_each(bench: Bench) -> None:
    keys = keys_of("many at once", 24)
    bench.put(keys)
    blocks = [BlockId(number) for number in range(24)]
    for number, key in enumerate(keys):
        bench.store.store(f"s{number}", [key], [blocks[number]], [24 + number])
        bench.store.load(f"l{number}", [key], [number], [BlockId(24 + number)])
        if isinstance(bench.store, SharedStore):
            bench.store.look_up(f"u{number}", [key])
    count = 72 if bench.store.shared else 48
    ended = [bench.events.get(timeout=60) for _ in range(count)]
    assert len({str(event) for event in ended}) == count
    stores = [event for event in ended if isinstance(event, StoreEnded)]
    loads = [event for event in ended if isinstance(event, LoadEnded)]
    assert len(stores) == len(loads) == 24
    assert all(event.num_blocks == 1 and not event.error for event in [*stores, *loads])
    for number, key in enumerate(keys):
        assert bench.holds(24 + number, key)


def test_invalid_calls_raise(bench: Bench) -> None:
    (key,) = keys_of("wrong", 1)
    with pytest.raises(ValueError, match="block 99"):
        bench.store.load("l", [key], [0], [BlockId(99)])
    with pytest.raises(ValueError, match="slot -1"):
        bench.store.store("s", [key], [BlockId(0)], [-1])
    with pytest.raises(ValueError, match="2 slots"):
        bench.store.load("l", [key], [0, 1], [BlockId(0)])
    assert bench.put([]).num_blocks == 0


def test_operations_on_a_closed_store_end_with_an_error(bench: Bench) -> None:
    keys = keys_of("closed", 2)
    bench.store.close()
    assert bench.put(keys).error
    assert bench.get(keys).error
    if bench.store.shared:
        assert bench.look_up(keys).num_blocks == 0

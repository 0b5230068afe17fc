"""Tests loads from the SSD, fetches from peers, both together, and reads by peers."""

from __future__ import annotations

from typing import Any

import msgspec
from test_instance import COST, EOS, LAYOUT, PEER, SIZE, attempt, keys_of, of, reported

from moonpool.cost.online import MIN_SAMPLES, STEPS_PER_SAMPLE
from moonpool.protocol.messages import (
    Abort,
    AttemptId,
    BlocksChanged,
    BlocksSnapshot,
    PrefillStarted,
    PrefixSource,
    Resync,
    StartPrefill,
)
from moonpool.protocol.transfer_events import (
    FetchEnded,
    LoadEnded,
    ReadEnded,
    ReadRequested,
    StoreEnded,
    StoreLost,
)
from moonpool.scheduler.actions import (
    FetchBlocks,
    ForgetStored,
    GrantRead,
    LoadBlocks,
    RunStep,
    StepEnded,
    StoreBlocks,
    WorkerAction,
    WorkerEvent,
)
from moonpool.scheduler.instance import Instance
from moonpool.scheduler.instance_config import InstanceConfig, InstanceMemory
from moonpool.types import Role, Token

FAST = msgspec.structs.replace(COST, ssd_read_bytes_per_s=1e9)
PROMPT = tuple(range(100, 141))  # has ten full blocks, and one token
KEYS = tuple(keys_of(PROMPT))


class Bench:
    """Makes an instance whose SSD holds the first `num_stored` blocks of PROMPT from an earlier
    run."""

    def __init__(self, num_stored: int = 6, cost: Any = FAST, num_blocks: int = 32) -> None:
        memory = InstanceMemory([(slot, KEYS[slot]) for slot in reversed(range(num_stored))])
        self.round = 0
        config = InstanceConfig(ssd_blocks=64, chunk_tokens=64)
        self.instance = Instance(config, LAYOUT, num_blocks, Role.MIXED, cost, (EOS,), memory)

    def handle(self, event: WorkerEvent) -> list[WorkerAction]:
        actions = self.instance.handle(event, 0.0)
        self.instance.validate()
        return actions

    def start(self, name: str = "w", fetch: PrefixSource | None = None) -> list[WorkerAction]:
        return self.handle(StartPrefill(attempt=attempt(name, token_ids=PROMPT), fetch=fetch))


def loaded(load: LoadBlocks, num_blocks: int | None = None, corrupt: int = 0) -> LoadEnded:
    number = len(load.slots) if num_blocks is None else num_blocks
    return LoadEnded(load_id=load.load_id, num_blocks=number, corrupt_slices=corrupt)


def test_blocks_of_an_earlier_run_are_reported_and_loaded() -> None:
    bench = Bench()
    (snapshot,) = reported(bench.handle(Resync()), BlocksSnapshot)
    assert snapshot.keys == () and set(snapshot.demoted) == set(KEYS[:6])
    actions = bench.start()
    (load,) = of(actions, LoadBlocks)
    assert load.keys == KEYS[:6] and load.slots == tuple(range(6))
    assert not of(actions, RunStep), "the request waits"
    actions = bench.handle(loaded(load))
    (started,) = reported(actions, PrefillStarted)
    assert (started.cached_tokens, started.loaded_tokens) == (6 * SIZE, 6 * SIZE)
    (changes,) = reported(actions, BlocksChanged)
    assert set(changes.stored) == set(KEYS[:6]) and not changes.demoted
    (step,) = of(actions, RunStep)
    assert step.entries[0].start == 6 * SIZE


def test_blocks_that_are_faster_to_compute_are_not_loaded() -> None:
    slow = msgspec.structs.replace(COST, ssd_read_bytes_per_s=1.0)
    actions = Bench(cost=slow).start()
    assert not of(actions, LoadBlocks)
    (step,) = of(actions, RunStep)
    assert step.entries[0].start == 0


def test_a_slow_load_pays_behind_a_queue() -> None:
    """A load that runs during the prefills of other requests delays no request."""
    # the blocks take 0.1 s to read and 0.024 s to compute
    bytes_per_s = 6 * LAYOUT.block_bytes / 0.1
    bench = Bench(
        cost=msgspec.structs.replace(COST, ssd_read_bytes_per_s=bytes_per_s), num_blocks=99
    )
    bench.handle(StartPrefill(attempt=attempt("long", num_tokens=200, first=5000)))
    assert of(bench.start(), LoadBlocks)


def reload(bench: Bench, seconds: float) -> bool:
    """Runs a prompt whose prefix is on the SSD only. Returns whether the prefix was loaded; a load
    takes the given time."""
    bench.round += 1
    actions = bench.start(f"r{bench.round}")
    loads = of(actions, LoadBlocks)
    if loads:
        num_bytes = len(loads[0].slots) * LAYOUT.block_bytes
        ended = msgspec.structs.replace(loaded(loads[0]), seconds=seconds, num_bytes=num_bytes)
        bench.handle(ended)
    bench.handle(Abort(attempt_id=AttemptId(f"r{bench.round}")))
    bench.handle(StepEnded((Token(9),), 0.0))
    bench.instance.pool.uncache(bench.instance.pool.cached_blocks())
    return bool(loads)


def test_a_disk_slower_than_measured_is_read_only_where_that_pays() -> None:
    """By the measured speed, a load should take 0.012 s, but it takes 0.036 s. Computing takes
    0.024 s."""
    bytes_per_s = 6 * LAYOUT.block_bytes / 0.012
    bench = Bench(cost=msgspec.structs.replace(COST, ssd_read_bytes_per_s=bytes_per_s))
    for _ in range(MIN_SAMPLES * STEPS_PER_SAMPLE + 1):
        assert reload(bench, 0.036)
    assert sum(reload(bench, 0.036) for _ in range(31)) == 1, "loads are tried again, but rarely"
    for _ in range(16 * 80):  # the disk is fast again, which only trial loads can show
        reload(bench, 0.012)
    assert all(reload(bench, 0.012) for _ in range(20))


def test_blocks_that_do_not_arrive_are_computed_and_forgotten() -> None:
    bench = Bench()
    (load,) = of(bench.start(), LoadBlocks)
    actions = bench.handle(loaded(load, num_blocks=2, corrupt=1))
    (started,) = reported(actions, PrefillStarted)
    assert (started.cached_tokens, started.loaded_tokens) == (2 * SIZE, 2 * SIZE)
    assert started.corrupt_slices == 1
    assert of(actions, ForgetStored) == [ForgetStored((2,))]
    (changes,) = reported(actions, BlocksChanged)
    assert KEYS[2] in changes.removed and KEYS[3] not in changes.removed
    assert bench.instance.counters["failed_loads"] == 1


def test_two_requests_wait_for_one_load() -> None:
    bench = Bench()
    (load,) = of(bench.start("a"), LoadBlocks)
    assert not of(bench.start("b"), LoadBlocks)
    bench.handle(Abort(attempt_id=AttemptId("a")))
    actions = bench.handle(loaded(load))
    (started,) = reported(actions, PrefillStarted)
    assert (started.attempt_id, started.loaded_tokens) == ("b", 6 * SIZE)


def test_a_load_and_a_fetch_at_once() -> None:
    for load_first in (True, False):
        bench = Bench()
        actions = bench.start(fetch=PrefixSource(source=PEER, num_blocks=9, load_s=2.0))
        (load,), (fetch,) = of(actions, LoadBlocks), of(actions, FetchBlocks)
        assert fetch.keys == list(KEYS[6:9]) and 20.0 < fetch.timeout_s < 25.0
        ends: list[WorkerEvent] = [loaded(load), FetchEnded(fetch_id="w", num_blocks=3)]
        first, last = ends if load_first else reversed(ends)
        assert not reported(bench.handle(first), PrefillStarted)
        (started,) = reported(bench.handle(last), PrefillStarted)
        assert started.cached_tokens == 9 * SIZE
        assert (started.loaded_tokens, started.fetched_tokens) == (6 * SIZE, 3 * SIZE)


def test_a_peers_read_is_granted_after_the_load() -> None:
    bench = Bench()
    actions = bench.handle(ReadRequested(read_id="r", keys=KEYS[2:8]))
    (load,) = of(actions, LoadBlocks)
    assert load.keys == KEYS[2:6] and not of(actions, GrantRead)
    (grant,) = of(bench.handle(loaded(load)), GrantRead)
    assert grant.block_ids == list(load.block_ids)
    bench.handle(ReadEnded(read_id="r"))
    assert bench.instance.pool.owners() == {}


def test_a_peer_that_gives_up_before_is_granted_nothing() -> None:
    bench = Bench()
    (load,) = of(bench.handle(ReadRequested(read_id="r", keys=KEYS)), LoadBlocks)
    bench.handle(ReadEnded(read_id="r", error="it took too long"))
    assert not of(bench.handle(loaded(load)), GrantRead)
    assert bench.instance.pool.owners() == {}


def serve(bench: Bench, number: int) -> list[WorkerAction]:
    """Runs a prompt of five new blocks with an answer of one token."""
    name = f"s{number}"
    prompt = attempt(name, num_tokens=5 * SIZE, first=1000 + 100 * number, max_tokens=1)
    actions = bench.handle(StartPrefill(attempt=prompt))
    (step,) = of(actions, RunStep)
    return actions + bench.handle(StepEnded((Token(7),) * len(step.entries), 0.01))


def test_victims_are_written_before_room_is_needed_and_stay_hits() -> None:
    bench = Bench(num_stored=0, num_blocks=35)
    assert bench.instance.num_blocks == 33, "two blocks may be under write to the SSD"
    actions: list[WorkerAction] = []
    for number in range(7):
        actions = serve(bench, number)
        if of(actions, StoreBlocks):
            break
    (store,) = of(actions, StoreBlocks)
    first = keys_of(tuple(range(1000, 1020)))
    assert store.keys == tuple(first[3:5]), "the last blocks of the oldest prompt, in order"
    assert len(bench.instance.pool.match(first)) == 5
    actions = bench.handle(StoreEnded(store_id=store.store_id, num_blocks=2, num_bytes=2))
    (changes,) = reported(actions, BlocksChanged)
    assert set(changes.demoted) == set(store.keys) and not changes.removed
    assert bench.instance.counters["stored_blocks"] == 2


def test_a_failed_write_is_a_miss() -> None:
    bench = Bench(num_stored=0, num_blocks=35)
    stores = [s for n in range(7) for s in of(serve(bench, n), StoreBlocks)]
    actions = bench.handle(StoreEnded(store_id=stores[0].store_id, num_blocks=1, error="full"))
    (changes,) = reported(actions, BlocksChanged)
    assert changes.demoted == stores[0].keys[:1] and changes.removed == stores[0].keys[1:]
    assert ForgetStored(stores[0].slots[1:]) in of(actions, ForgetStored)
    assert bench.instance.counters["failed_stores"] == 1


def test_serving_goes_on_without_a_lost_tier() -> None:
    bench = Bench()
    (load,) = of(bench.start(), LoadBlocks)
    actions = bench.handle(StoreLost(error="the folder vanished"))
    (changes,) = reported(actions, BlocksChanged)
    assert set(changes.removed) == set(KEYS[:6])
    actions = bench.handle(loaded(load, num_blocks=0))
    assert reported(actions, PrefillStarted)[0].cached_tokens == 0
    assert not of(actions, ForgetStored), "there is no SSD left"
    for number in range(20):
        event = StepEnded((Token(EOS),), 0.01)
        bench.handle(event) if number == 0 else serve(bench, number)
    assert bench.instance.counters["lost_tiers"] == 1


def test_stored_blocks_that_cannot_be_adopted_are_forgotten() -> None:
    config = InstanceConfig(ssd_blocks=64)
    memory = InstanceMemory([(0, KEYS[0]), (99, KEYS[1]), (1, KEYS[0])])
    instance = Instance(config, LAYOUT, 32, Role.MIXED, FAST, (EOS,), memory)
    assert of(instance.handle(Resync(), 0.0), ForgetStored) == [ForgetStored((99, 1))]
    without = Instance(InstanceConfig(), LAYOUT, 32, Role.MIXED, FAST, (EOS,), memory)
    assert of(without.handle(Resync(), 0.0), ForgetStored) == [ForgetStored((0, 99, 1))]

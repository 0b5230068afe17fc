"""What a prefill waits for: loads from the SSD, fetches from peers, both; and peers' reads."""

from __future__ import annotations

from typing import Any

import msgspec
from test_instance import COST, EOS, LAYOUT, PEER, SIZE, keys_of, of, told, work

from moonpool.config import InstanceConfig
from moonpool.cost.learned import FEWEST, SUMMED
from moonpool.kvcache.transfers import (
    FetchEnded,
    LoadEnded,
    ReadEnded,
    ReadRequested,
    StoreEnded,
    StoreLost,
)
from moonpool.types import Role, Token
from moonpool.workers.actions import (
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
from moonpool.workers.instance import Instance
from moonpool.workers.messages import (
    Abort,
    BlocksChanged,
    BlocksSnapshot,
    Fetch,
    PrefillStarted,
    Resync,
    StartPrefill,
    WorkId,
)

FAST = msgspec.structs.replace(COST, ssd_read_bytes_per_s=1e9)
PROMPT = tuple(range(100, 141))  # ten full blocks, and one token
KEYS = tuple(keys_of(PROMPT))


class Bench:
    """An instance whose SSD holds the first `num_stored` blocks of PROMPT from a life before."""

    def __init__(self, num_stored: int = 6, cost: Any = FAST, num_blocks: int = 32) -> None:
        stored = [(slot, KEYS[slot]) for slot in reversed(range(num_stored))]
        self.round = 0
        config = InstanceConfig(ssd_blocks=64, chunk_tokens=64)
        self.instance = Instance(config, LAYOUT, num_blocks, Role.MIXED, cost, (EOS,), stored)

    def handle(self, event: WorkerEvent) -> list[WorkerAction]:
        actions = self.instance.handle(event, 0.0)
        self.instance.validate()
        return actions

    def start(self, name: str = "w", fetch: Fetch | None = None) -> list[WorkerAction]:
        return self.handle(StartPrefill(work=work(name, token_ids=PROMPT), fetch=fetch))


def loaded(load: LoadBlocks, num_blocks: int | None = None, corrupt: int = 0) -> LoadEnded:
    number = len(load.slots) if num_blocks is None else num_blocks
    return LoadEnded(load_id=load.load_id, num_blocks=number, corrupt_slices=corrupt)


def test_what_an_earlier_life_left_is_announced_and_loaded() -> None:
    bench = Bench()
    (snapshot,) = told(bench.handle(Resync()), BlocksSnapshot)
    assert snapshot.keys == () and set(snapshot.demoted) == set(KEYS[:6])
    actions = bench.start()
    (load,) = of(actions, LoadBlocks)
    assert load.keys == KEYS[:6] and load.slots == tuple(range(6))
    assert not of(actions, RunStep), "it waits"
    actions = bench.handle(loaded(load))
    (started,) = told(actions, PrefillStarted)
    assert (started.cached_tokens, started.loaded_tokens) == (6 * SIZE, 6 * SIZE)
    (changes,) = told(actions, BlocksChanged)
    assert set(changes.stored) == set(KEYS[:6]) and not changes.demoted
    (step,) = of(actions, RunStep)
    assert step.entries[0].start == 6 * SIZE


def test_what_is_computed_sooner_than_read_is_not_loaded() -> None:
    slow = msgspec.structs.replace(COST, ssd_read_bytes_per_s=1.0)
    actions = Bench(cost=slow).start()
    assert not of(actions, LoadBlocks)
    (step,) = of(actions, RunStep)
    assert step.entries[0].start == 0


def test_a_slow_load_pays_behind_a_queue() -> None:
    """While others are computed, reading costs nobody anything."""
    bytes_per_s = 6 * LAYOUT.block_bytes / 0.1  # 0.1 s to read, 0.024 s to compute
    bench = Bench(
        cost=msgspec.structs.replace(COST, ssd_read_bytes_per_s=bytes_per_s), num_blocks=99
    )
    bench.handle(StartPrefill(work=work("long", num_tokens=200, first=5000)))
    assert of(bench.start(), LoadBlocks)


def reload(bench: Bench, seconds: float) -> bool:
    """One prompt whose prefix is on the SSD only; whether that was loaded, taking so long."""
    bench.round += 1
    actions = bench.start(f"r{bench.round}")
    loads = of(actions, LoadBlocks)
    if loads:
        num_bytes = len(loads[0].slots) * LAYOUT.block_bytes
        ended = msgspec.structs.replace(loaded(loads[0]), seconds=seconds, num_bytes=num_bytes)
        bench.handle(ended)
    bench.handle(Abort(work_id=WorkId(f"r{bench.round}")))
    bench.handle(StepEnded((Token(9),), 0.0))
    bench.instance.pool.forget(bench.instance.pool.named())
    return bool(loads)


def test_a_disk_slower_than_its_probe_is_read_only_where_that_still_pays() -> None:
    """0.012 s to read by the probe and 0.024 s to compute; but it takes three times as long."""
    bytes_per_s = 6 * LAYOUT.block_bytes / 0.012
    bench = Bench(cost=msgspec.structs.replace(COST, ssd_read_bytes_per_s=bytes_per_s))
    for _ in range(FEWEST * SUMMED + 1):
        assert reload(bench, 0.036)
    assert sum(reload(bench, 0.036) for _ in range(31)) == 1, "tried again, but rarely"
    for _ in range(16 * 80):  # it is fast again, which only what is tried can tell
        reload(bench, 0.012)
    assert all(reload(bench, 0.012) for _ in range(20))


def test_what_does_not_arrive_is_computed_and_forgotten() -> None:
    bench = Bench()
    (load,) = of(bench.start(), LoadBlocks)
    actions = bench.handle(loaded(load, num_blocks=2, corrupt=1))
    (started,) = told(actions, PrefillStarted)
    assert (started.cached_tokens, started.loaded_tokens) == (2 * SIZE, 2 * SIZE)
    assert started.corrupt_slices == 1
    assert of(actions, ForgetStored) == [ForgetStored((2,))]
    (changes,) = told(actions, BlocksChanged)
    assert KEYS[2] in changes.removed and KEYS[3] not in changes.removed
    assert bench.instance.counters["failed_loads"] == 1


def test_two_works_wait_for_one_load() -> None:
    bench = Bench()
    (load,) = of(bench.start("a"), LoadBlocks)
    assert not of(bench.start("b"), LoadBlocks)
    bench.handle(Abort(work_id=WorkId("a")))
    actions = bench.handle(loaded(load))
    (started,) = told(actions, PrefillStarted)
    assert (started.work_id, started.loaded_tokens) == ("b", 6 * SIZE)


def test_a_load_and_a_fetch_at_once() -> None:
    for load_first in (True, False):
        bench = Bench()
        actions = bench.start(fetch=Fetch(source=PEER, num_blocks=9, load_s=2.0))
        (load,), (fetch,) = of(actions, LoadBlocks), of(actions, FetchBlocks)
        assert fetch.keys == list(KEYS[6:9]) and 20.0 < fetch.timeout_s < 25.0
        ends: list[WorkerEvent] = [loaded(load), FetchEnded(fetch_id="w", num_blocks=3)]
        first, last = ends if load_first else reversed(ends)
        assert not told(bench.handle(first), PrefillStarted)
        (started,) = told(bench.handle(last), PrefillStarted)
        assert started.cached_tokens == 9 * SIZE
        assert (started.loaded_tokens, started.fetched_tokens) == (6 * SIZE, 3 * SIZE)


def test_a_peer_is_granted_what_was_on_the_ssd_once_it_is_in_dram() -> None:
    bench = Bench()
    actions = bench.handle(ReadRequested(read_id="r", keys=KEYS[2:8]))
    (load,) = of(actions, LoadBlocks)
    assert load.keys == KEYS[2:6] and not of(actions, GrantRead)
    (grant,) = of(bench.handle(loaded(load)), GrantRead)
    assert grant.block_ids == list(load.block_ids)
    bench.handle(ReadEnded(read_id="r"))
    assert bench.instance.pool.owners() == {}


def test_a_peer_that_gives_up_meanwhile_is_granted_nothing() -> None:
    bench = Bench()
    (load,) = of(bench.handle(ReadRequested(read_id="r", keys=KEYS)), LoadBlocks)
    bench.handle(ReadEnded(read_id="r", error="it took too long"))
    assert not of(bench.handle(loaded(load)), GrantRead)
    assert bench.instance.pool.owners() == {}


def serve(bench: Bench, number: int) -> list[WorkerAction]:
    """A prompt of five blocks of its own, of which only the first token is asked for."""
    name = f"s{number}"
    prompt = work(name, num_tokens=5 * SIZE, first=1000 + 100 * number, max_tokens=1)
    actions = bench.handle(StartPrefill(work=prompt))
    (step,) = of(actions, RunStep)
    return actions + bench.handle(StepEnded((Token(7),) * len(step.entries), 0.01))


def test_victims_are_written_before_room_is_needed_and_stay_hits_meanwhile() -> None:
    bench = Bench(num_stored=0, num_blocks=35)
    assert bench.instance.num_blocks == 33, "two may be under way to the SSD"
    actions: list[WorkerAction] = []
    for number in range(7):
        actions = serve(bench, number)
        if of(actions, StoreBlocks):
            break
    (store,) = of(actions, StoreBlocks)
    first = keys_of(tuple(range(1000, 1020)))
    assert store.keys == tuple(first[3:5]), "the end of the oldest prompt, in its order"
    assert len(bench.instance.pool.match(first)) == 5
    actions = bench.handle(StoreEnded(store_id=store.store_id, num_blocks=2, num_bytes=2))
    (changes,) = told(actions, BlocksChanged)
    assert set(changes.demoted) == set(store.keys) and not changes.removed
    assert bench.instance.counters["stored_blocks"] == 2


def test_a_failed_write_is_a_miss() -> None:
    bench = Bench(num_stored=0, num_blocks=35)
    stores = [s for n in range(7) for s in of(serve(bench, n), StoreBlocks)]
    actions = bench.handle(StoreEnded(store_id=stores[0].store_id, num_blocks=1, error="full"))
    (changes,) = told(actions, BlocksChanged)
    assert changes.demoted == stores[0].keys[:1] and changes.removed == stores[0].keys[1:]
    assert ForgetStored(stores[0].slots[1:]) in of(actions, ForgetStored)
    assert bench.instance.counters["failed_stores"] == 1


def test_serving_goes_on_without_a_lost_tier() -> None:
    bench = Bench()
    (load,) = of(bench.start(), LoadBlocks)
    actions = bench.handle(StoreLost(error="the folder vanished"))
    (changes,) = told(actions, BlocksChanged)
    assert set(changes.removed) == set(KEYS[:6])
    actions = bench.handle(loaded(load, num_blocks=0))
    assert told(actions, PrefillStarted)[0].cached_tokens == 0
    assert not of(actions, ForgetStored), "there is nobody to hear of it"
    for number in range(20):
        event = StepEnded((Token(EOS),), 0.01)
        bench.handle(event) if number == 0 else serve(bench, number)
    assert bench.instance.counters["lost_tiers"] == 1


def test_what_cannot_be_adopted_is_forgotten() -> None:
    stored = [(0, KEYS[0]), (99, KEYS[1]), (1, KEYS[0])]
    config = InstanceConfig(ssd_blocks=64)
    instance = Instance(config, LAYOUT, 32, Role.MIXED, FAST, (EOS,), stored)
    assert of(instance.handle(Resync(), 0.0), ForgetStored) == [ForgetStored((99, 1))]
    without = Instance(InstanceConfig(), LAYOUT, 32, Role.MIXED, FAST, (EOS,), stored)
    assert of(without.handle(Resync(), 0.0), ForgetStored) == [ForgetStored((0, 99, 1))]

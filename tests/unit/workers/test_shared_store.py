"""A store that other instances use too: it is asked before a prompt is computed, and given what is
new at once. Whatever it answers, and whenever, no block is lost, and every work goes on."""

from __future__ import annotations

from typing import Any

from test_arrivals import FAST, KEYS, PROMPT, loaded
from test_instance import EOS, LAYOUT, PEER, SIZE, of, told, work

from moonpool.config import InstanceConfig
from moonpool.kvcache.transfers import LookUpEnded, StoreEnded
from moonpool.types import Role, Token
from moonpool.workers.actions import (
    FetchBlocks,
    LoadBlocks,
    LookUpBlocks,
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
    Fetch,
    PrefillStarted,
    StartPrefill,
    WorkId,
)


class Bench:
    """An instance with such a store, of which it knows nothing yet."""

    def __init__(self, num_blocks: int = 64, cost: Any = FAST) -> None:
        config = InstanceConfig(ssd_blocks=64, chunk_tokens=512, store_shared=True)
        self.instance = Instance(config, LAYOUT, num_blocks, Role.MIXED, cost, (EOS,))

    def handle(self, event: WorkerEvent) -> list[WorkerAction]:
        actions = self.instance.handle(event, 0.0)
        self.instance.validate()
        return actions

    def start(self, name: str = "w", fetch: Fetch | None = None) -> list[WorkerAction]:
        return self.handle(StartPrefill(work=work(name, token_ids=PROMPT), fetch=fetch))

    def found(self, num_blocks: int, name: str = "w", error: str = "") -> list[WorkerAction]:
        return self.handle(LookUpEnded(lookup_id=name, num_blocks=num_blocks, error=error))


def test_what_others_put_there_is_loaded_and_not_put_again() -> None:
    bench = Bench()
    actions = bench.start()
    (asked,) = of(actions, LookUpBlocks)
    assert asked.keys == KEYS[: len(asked.keys)] and len(asked.keys) == len(PROMPT) // SIZE
    assert not of(actions, RunStep), "it waits"
    actions = bench.found(6)
    (changes,) = told(actions, BlocksChanged)
    assert set(changes.demoted) == set(KEYS[:6])
    (load,) = of(actions, LoadBlocks)
    assert load.keys == KEYS[:6]
    actions = bench.handle(loaded(load))
    (started,) = told(actions, PrefillStarted)
    assert (started.cached_tokens, started.loaded_tokens) == (6 * SIZE, 6 * SIZE)
    assert not of(actions, StoreBlocks), "it is there"
    (step,) = of(actions, RunStep)
    assert step.entries[0].start == 6 * SIZE
    actions = bench.handle(StepEnded((Token(EOS),), 0.01))
    stores = of(actions, StoreBlocks)
    while stores:  # a few at a time
        put, stores = stores[0], stores[1:]
        assert put.keys[0] not in KEYS[:6]
        more = bench.handle(StoreEnded(store_id=put.store_id, num_blocks=len(put.keys)))
        stores += of(more, StoreBlocks)
    assert bench.instance.counters["stored_blocks"] == len(PROMPT) // SIZE - 6
    assert not bench.instance.pool.num_held


def test_a_store_that_does_not_answer_rightly_costs_nothing_but_the_wait() -> None:
    bench = Bench()
    bench.start()
    actions = bench.found(0, error="it is gone")
    assert not of(actions, LoadBlocks)
    (step,) = of(actions, RunStep)
    assert step.entries[0].start == 0
    assert bench.instance.counters["failed_lookups"] == 1


def test_others_pass_the_one_that_asks_and_an_aborted_one_asks_for_nobody() -> None:
    bench = Bench()
    bench.start()
    actions = bench.handle(StartPrefill(work=work("short", num_tokens=3)))
    (step,) = of(actions, RunStep)
    assert step.entries[0].work_id == "short"
    bench.handle(Abort(WorkId("w")))
    assert not bench.found(6)
    assert WorkId("w") not in bench.instance.works


def test_where_a_peer_is_named_nobody_is_asked() -> None:
    actions = Bench().start(fetch=Fetch(PEER, 4, 0.0))
    assert of(actions, FetchBlocks) and not of(actions, LookUpBlocks)


def test_what_is_known_to_be_there_is_not_asked_for_again() -> None:
    bench = Bench()
    bench.start("w")
    (load,) = of(bench.found(len(PROMPT) // SIZE), LoadBlocks)
    assert not of(bench.start("v"), LookUpBlocks)
    actions = bench.handle(loaded(load, num_blocks=0))  # the store has let go of them meanwhile
    assert of(actions, RunStep)
    assert of(bench.start("u"), LookUpBlocks)

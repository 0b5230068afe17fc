"""Tests instances that share a store: they look up blocks before a prefill, and write new blocks.

Whatever and whenever the store answers, no block is lost and every attempt continues.
"""

from __future__ import annotations

from typing import Any

from test_instance import EOS, LAYOUT, PEER, SIZE, attempt, of, reported
from test_prefix_loader import FAST, KEYS, PROMPT, loaded

from moonpool.protocol.messages import (
    Abort,
    AttemptId,
    BlocksChanged,
    PrefillStarted,
    PrefixSource,
    StartPrefill,
)
from moonpool.protocol.transfer_events import LookUpEnded, StoreEnded
from moonpool.scheduler.actions import (
    FetchBlocks,
    LoadBlocks,
    LookUpBlocks,
    RunStep,
    StepEnded,
    StoreBlocks,
    WorkerAction,
    WorkerEvent,
)
from moonpool.scheduler.instance import Instance
from moonpool.scheduler.instance_config import InstanceConfig
from moonpool.types import Role, Token


class Bench:
    """Runs an instance with a shared store whose content it does not know."""

    def __init__(self, num_blocks: int = 64, cost: Any = FAST) -> None:
        config = InstanceConfig(ssd_blocks=64, chunk_tokens=512, store_shared=True)
        self.instance = Instance(config, LAYOUT, num_blocks, Role.MIXED, cost, (EOS,))

    def handle(self, event: WorkerEvent) -> list[WorkerAction]:
        actions = self.instance.handle(event, 0.0)
        self.instance.validate()
        return actions

    def start(self, name: str = "w", fetch: PrefixSource | None = None) -> list[WorkerAction]:
        return self.handle(StartPrefill(attempt=attempt(name, token_ids=PROMPT), fetch=fetch))

    def found(self, num_blocks: int, name: str = "w", error: str = "") -> list[WorkerAction]:
        return self.handle(LookUpEnded(lookup_id=name, num_blocks=num_blocks, error=error))


def test_blocks_of_other_instances_are_loaded_and_not_stored_again() -> None:
    bench = Bench()
    actions = bench.start()
    (asked,) = of(actions, LookUpBlocks)
    assert asked.keys == KEYS[: len(asked.keys)] and len(asked.keys) == len(PROMPT) // SIZE
    assert not of(actions, RunStep), "the request waits"
    actions = bench.found(6)
    (changes,) = reported(actions, BlocksChanged)
    assert set(changes.demoted) == set(KEYS[:6])
    (load,) = of(actions, LoadBlocks)
    assert load.keys == KEYS[:6]
    actions = bench.handle(loaded(load))
    (started,) = reported(actions, PrefillStarted)
    assert (started.cached_tokens, started.loaded_tokens) == (6 * SIZE, 6 * SIZE)
    assert not of(actions, StoreBlocks), "the store has it"
    (step,) = of(actions, RunStep)
    assert step.entries[0].start == 6 * SIZE
    actions = bench.handle(StepEnded((Token(EOS),), 0.01))
    stores = of(actions, StoreBlocks)
    while stores:  # each round stores a few blocks
        put, stores = stores[0], stores[1:]
        assert put.keys[0] not in KEYS[:6]
        more = bench.handle(StoreEnded(store_id=put.store_id, num_blocks=len(put.keys)))
        stores += of(more, StoreBlocks)
    assert bench.instance.counters["stored_blocks"] == len(PROMPT) // SIZE - 6
    assert not bench.instance.pool.num_held


def test_a_wrong_answer_costs_only_the_wait() -> None:
    bench = Bench()
    bench.start()
    actions = bench.found(0, error="it is gone")
    assert not of(actions, LoadBlocks)
    (step,) = of(actions, RunStep)
    assert step.entries[0].start == 0
    assert bench.instance.counters["failed_lookups"] == 1


def test_others_pass_a_look_up_and_an_aborted_one_loads_nothing() -> None:
    bench = Bench()
    bench.start()
    actions = bench.handle(StartPrefill(attempt=attempt("short", num_tokens=3)))
    (step,) = of(actions, RunStep)
    assert step.entries[0].attempt_id == "short"
    bench.handle(Abort(AttemptId("w")))
    assert not bench.found(6)
    assert AttemptId("w") not in bench.instance.requests


def test_no_look_up_if_a_peer_is_named() -> None:
    actions = Bench().start(fetch=PrefixSource(PEER, 4, 0.0))
    assert of(actions, FetchBlocks) and not of(actions, LookUpBlocks)


def test_no_look_up_for_blocks_known_to_be_stored() -> None:
    bench = Bench()
    bench.start("w")
    (load,) = of(bench.found(len(PROMPT) // SIZE), LoadBlocks)
    assert not of(bench.start("v"), LookUpBlocks)
    actions = bench.handle(loaded(load, num_blocks=0))  # the store has dropped the blocks meanwhile
    assert of(actions, RunStep)
    assert of(bench.start("u"), LookUpBlocks)

"""Tests copies of blocks on the SSD that are made before the blocks leave DRAM."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from test_instance import COST, EOS, LAYOUT, SIZE, attempt, keys_of, of

from moonpool.protocol.messages import Abort, AttemptId, StartPrefill
from moonpool.protocol.transfer_events import LoadEnded, StoreEnded, StoreLost
from moonpool.scheduler.actions import (
    LoadBlocks,
    RunStep,
    StepEnded,
    StoreBlocks,
    WorkerAction,
    WorkerEvent,
)
from moonpool.scheduler.instance import Instance
from moonpool.scheduler.instance_config import InstanceConfig
from moonpool.types import BlockKey, Role, Token

FAST = msgspec.structs.replace(COST, ssd_read_bytes_per_s=1e9)
PROMPT = tuple(range(100, 100 + 5 * SIZE + 1))
KEYS = tuple(keys_of(PROMPT[: 5 * SIZE]))


class Copier:
    def __init__(self, num_blocks: int = 160, ssd_blocks: int = 64, **options: Any) -> None:
        config = InstanceConfig(
            ssd_blocks=ssd_blocks, chunk_tokens=64, ssd_write_ahead=True, **options
        )
        self.instance = Instance(config, LAYOUT, num_blocks, Role.MIXED, FAST, (EOS,))
        self.stores: list[StoreBlocks] = []
        self.steps: deque[RunStep] = deque()

    def handle(self, event: WorkerEvent) -> list[WorkerAction]:
        actions = self.instance.handle(event, 0.0)
        self.instance.validate()
        self.stores += of(actions, StoreBlocks)
        self.steps += of(actions, RunStep)
        return actions

    def begin(self, name: str, prompt: Sequence[int] = PROMPT) -> None:
        """Computes a prompt. The request then decodes."""
        self.handle(StartPrefill(attempt=attempt(name, token_ids=tuple(prompt), max_tokens=90)))
        self.step()
        self.step()  # the first write may have begun before

    def step(self) -> None:
        self.handle(StepEnded((Token(7),) * len(self.steps.popleft().entries), 0.01))

    def written(self) -> list[BlockKey]:
        """Ends the writes, one after the other, and returns the keys of their blocks."""
        keys: list[BlockKey] = []
        while self.stores:
            store = self.stores.pop(0)
            assert not self.stores, "one write at a time"
            keys += store.keys
            self.handle(StoreEnded(store_id=store.store_id, num_blocks=len(store.keys)))
        return keys


def test_new_blocks_are_copied_once_while_their_request_runs() -> None:
    copier = Copier()
    copier.begin("a")
    assert copier.written() == list(KEYS)
    assert copier.instance.pool.match(KEYS), "they stay in DRAM"
    copier.begin("b")
    assert not set(copier.written()) & set(KEYS)


def test_nothing_is_copied_where_that_is_not_asked_for() -> None:
    copier = Copier()
    config = InstanceConfig(ssd_blocks=64, chunk_tokens=64)
    copier.instance = Instance(config, LAYOUT, 160, Role.MIXED, COST, (EOS,))
    copier.begin("a")
    assert not copier.stores


def test_a_full_ssd_takes_only_blocks_that_were_used() -> None:
    copier = Copier(ssd_blocks=5)
    copier.begin("a", range(500, 500 + 5 * SIZE + 1))
    copier.written()
    copier.begin("b")
    assert copier.written() == []
    copier.begin("c")
    assert copier.written() == list(KEYS)


def test_second_use_admission_holds_for_copies() -> None:
    copier = Copier(ssd_admission="second-use")
    copier.begin("a")
    assert copier.written() == []
    copier.begin("b")
    assert copier.written() == list(KEYS)


def test_copies_wait_while_requests_load() -> None:
    copier = Copier()
    copier.begin("a")
    copier.written()
    copier.handle(Abort(attempt_id=AttemptId("a")))
    copier.step()
    pool = copier.instance.pool
    pool.uncache(pool.cached_blocks())
    actions = copier.handle(StartPrefill(attempt=attempt("b", token_ids=PROMPT)))
    (load,) = of(actions, LoadBlocks)
    copier.begin("c", range(500, 500 + 5 * SIZE + 1))
    assert not copier.stores
    copier.handle(LoadEnded(load_id=load.load_id, num_blocks=len(load.keys)))
    assert copier.written()


def test_a_lost_ssd_frees_what_waited() -> None:
    copier = Copier()
    copier.begin("a")
    copier.begin("b", range(500, 500 + 5 * SIZE + 1))
    copier.handle(StoreLost(error="gone"))
    copier.handle(StoreEnded(store_id=copier.stores[0].store_id, num_blocks=0, error="gone"))
    assert not [o for o in copier.instance.pool.owners() if o.kind in ("ahead", "demote")]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40), st.integers(0, 40))
def test_copies_never_hold_more_than_is_reserved(
    orders: list[tuple[int, bool]], ssd_blocks: int
) -> None:
    copier = Copier(num_blocks=64, ssd_blocks=ssd_blocks)
    for number, (prompt, ends) in enumerate(orders):
        first = 1000 * prompt
        work = attempt(f"r{number}", token_ids=tuple(range(first, first + 5 * SIZE + 1)))
        copier.handle(StartPrefill(attempt=work))
        while copier.steps:
            entries = copier.steps.popleft().entries
            copier.handle(StepEnded((Token(EOS),) * len(entries), 0.01))
        if ends:
            for store in copier.stores:
                copier.handle(StoreEnded(store_id=store.store_id, num_blocks=len(store.keys)))
            copier.stores.clear()
        owners = copier.instance.pool.owners()
        held = sum(n for o, n in owners.items() if o.kind in ("ahead", "demote"))
        assert held <= 64 // 16

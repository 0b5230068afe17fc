"""Tests a space and a group under any order of finds, stores, reads and ends of transfers."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moonpool.host_pool.block_space import BlocksFetched, BlocksFound, BlockSpace
from moonpool.host_pool.pool_group import BlockGroup
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.transfer_events import (
    FetchEnded,
    LoadEnded,
    PeerAddress,
    ReadEnded,
    ReadRequested,
    StoreEnded,
)
from moonpool.scheduler.actions import FetchBlocks, GrantRead, LoadBlocks, StoreBlocks
from moonpool.types import BlockKey, InstanceId

LAYOUT = BlockLayout(
    model_fingerprint="m",
    dtype="bfloat16",
    block_tokens=1,
    num_layers=2,
    num_kv_heads=1,
    head_dim=64,
    inner="vllm",
)
PEER = PeerAddress(
    instance_id=InstanceId("other"), host_id="", unix_name="", tcp_host="h", tcp_port=1
)
NUM_BLOCKS = 12


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "little"))


def prompt(name: int, length: int) -> list[BlockKey]:
    """Returns the keys of one of a few prompts, which share beginnings."""
    return [key(1 + (name % 2 if i < 2 else 10 * name + i)) for i in range(length)]


def take(space: BlockSpace) -> list[Any]:
    actions, _ = space.take()
    return actions


class SpaceMachine(RuleBasedStateMachine):
    """Checks that every find, fetch and read ends once, held blocks keep their keys, and the sums
    are right."""

    def __init__(self) -> None:
        super().__init__()
        self.space = BlockSpace(LAYOUT, NUM_BLOCKS, num_slots=8)
        self.loads: list[LoadBlocks] = []
        self.stores: list[StoreBlocks] = []
        self.fetches: list[FetchBlocks] = []
        self.reads: dict[str, tuple[BlockKey, ...]] = {}
        self.granted: set[str] = set()
        self.finding: dict[str, list[BlockKey]] = {}
        self.found: dict[str, tuple[tuple[int, ...], list[BlockKey]]] = {}
        self.reserved: set[int] = set()
        self.number = 0

    def run(self) -> None:
        for action in take(self.space):
            match action:
                case LoadBlocks():
                    self.loads.append(action)
                case StoreBlocks():
                    self.stores.append(action)
                case FetchBlocks():
                    self.fetches.append(action)
                case GrantRead():
                    assert action.read_id in self.reads
                    assert action.read_id not in self.granted
                    self.granted.add(action.read_id)
                case BlocksFound():
                    keys = self.finding.pop(action.owner)
                    self.found[action.owner] = (tuple(action.block_ids), keys)
                case BlocksFetched():
                    assert action.num_blocks >= 0

    @rule(name=st.integers(0, 3), length=st.integers(1, 6))
    def store(self, name: int, length: int) -> None:
        self.number += 1
        places = self.space.reserve(self.number, prompt(name, length), 0)
        taken = [place for place in places if place is not None]
        assert len(set(taken)) == len(taken) == len(self.space.reserved(self.number))
        self.reserved.add(self.number)
        self.run()

    @rule(data=st.data(), full=st.booleans())
    def end_store(self, data: st.DataObject, full: bool) -> None:
        if not self.reserved:
            return
        number = data.draw(st.sampled_from(sorted(self.reserved)))
        self.reserved.discard(number)
        if full:
            self.space.commit(number)
        else:
            self.space.abandon(number)
        self.run()

    @rule(owner=st.integers(0, 3), name=st.integers(0, 3), length=st.integers(1, 6))
    def find(self, owner: int, name: int, length: int) -> None:
        own = str(owner)
        self.space.release(own)
        self.found.pop(own, None)
        self.finding[own] = prompt(name, length)
        self.space.find(own, self.finding[own])
        self.run()

    @rule(owner=st.integers(0, 3))
    def release(self, owner: int) -> None:
        self.space.release(str(owner))
        self.finding.pop(str(owner), None)
        self.found.pop(str(owner), None)
        self.run()

    @rule(name=st.integers(0, 3), length=st.integers(1, 6))
    def read(self, name: int, length: int) -> None:
        self.number += 1
        read_id = f"r{self.number}"
        self.reads[read_id] = tuple(prompt(name, length))
        self.space.handle(ReadRequested(read_id=read_id, keys=self.reads[read_id]))
        self.run()

    @rule()
    def end_read(self) -> None:
        if self.reads:
            read_id = next(iter(self.reads))
            del self.reads[read_id]
            self.granted.discard(read_id)
            self.space.handle(ReadEnded(read_id=read_id))
            self.run()

    @rule(name=st.integers(0, 3), length=st.integers(1, 6))
    def fetch(self, name: int, length: int) -> None:
        self.number += 1
        self.space.fetch(f"f{self.number}", PEER, prompt(name, length), 1.0)
        self.run()

    @rule(share=st.floats(0, 1))
    def end_fetch(self, share: float) -> None:
        if self.fetches:
            action = self.fetches.pop(0)
            arrived = int(share * len(action.keys))
            self.space.handle(FetchEnded(fetch_id=action.fetch_id, num_blocks=arrived))
            self.run()

    @rule(share=st.floats(0, 1))
    def end_load(self, share: float) -> None:
        if self.loads:
            action = self.loads.pop(0)
            arrived = int(share * len(action.keys))
            self.space.handle(LoadEnded(load_id=action.load_id, num_blocks=arrived))
            self.run()

    @rule(share=st.floats(0, 1))
    def end_write(self, share: float) -> None:
        if self.stores:
            action = self.stores.pop(0)
            written = int(share * len(action.keys))
            self.space.handle(StoreEnded(store_id=action.store_id, num_blocks=written))
            self.run()

    @rule(name=st.integers(0, 3))
    def damage(self, name: int) -> None:
        if not self.found:
            self.space.drop(prompt(name, 6))
            self.run()

    @invariant()
    def balances(self) -> None:
        self.space.validate()
        for blocks, keys in self.found.values():
            for block_id, wanted in zip(blocks, keys, strict=False):
                assert self.space.pool.key_of(block_id) == wanted  # type: ignore[arg-type]


SpaceMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_space = SpaceMachine.TestCase


def two_ranks() -> BlockGroup:
    group = BlockGroup(2)
    group.spaces = {rank: BlockSpace(LAYOUT, NUM_BLOCKS) for rank in (0, 1)}
    return group


def run(group: BlockGroup, now: float = 0.0) -> None:
    for rank, space in group.spaces.items():
        for action in take(space):
            assert isinstance(action, BlocksFound)
            group.on_found(rank, action, now)


def put(space: BlockSpace, number: int, keys: list[BlockKey]) -> None:
    space.reserve(number, keys, 0)
    space.commit(number)


def test_a_block_is_found_if_all_ranks_have_it() -> None:
    group = two_ranks()
    put(group.spaces[0], 1, prompt(0, 4))
    put(group.spaces[1], 1, prompt(0, 2))
    group.find("a", prompt(0, 4), until_s=0.0)
    run(group)
    (found,) = group.take()
    assert found.num_blocks == 2
    assert [len(ids) for ids in found.block_ids] == [2, 2]
    # blocks that only one rank has were dropped
    assert group.spaces[0].pool.named_owners() == {"find:a": 2}
    group.release("a")
    assert not group.spaces[0].pool.owners()


def test_a_find_waits_for_what_others_store() -> None:
    group = two_ranks()
    group.find("a", prompt(0, 2), until_s=5.0)
    run(group)
    assert group.take() == []
    for space in group.spaces.values():
        put(space, 1, prompt(0, 2))
    group.on_blocks()
    run(group, now=1.0)
    (found,) = group.take()
    assert found.num_blocks == 2


def test_a_find_does_not_wait_beyond_its_time() -> None:
    group = two_ranks()
    group.find("a", prompt(0, 2), until_s=5.0)
    run(group)
    group.on_time(5.0)
    (found,) = group.take()
    assert (found.num_blocks, found.block_ids) == (0, ((), ()))


def test_a_group_without_all_ranks_has_nothing() -> None:
    group = BlockGroup(2)
    group.spaces[0] = BlockSpace(LAYOUT, NUM_BLOCKS)
    group.find("a", prompt(0, 2), until_s=9.0)
    (found,) = group.take()
    assert found.num_blocks == 0

"""The block pool against a naive model of it, and the order in which it evicts."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonpool.kvcache.blocks import BlockPool
from moonpool.kvcache.eviction import LruEviction
from moonpool.types import BlockId, BlockKey

NUM_BLOCKS = 6
OWNERS = st.sampled_from(("a", "b", "c"))


def key(name: int) -> BlockKey:
    return BlockKey(name.to_bytes(16, "big"))


class PoolMachine(RuleBasedStateMachine):
    """The model knows only: who holds what, what each block is called, and in which order blocks
    were let go."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holds: dict[str, list[int]] = {}
        self.names: dict[int, BlockKey] = {}
        self.let_go: OrderedDict[int, None] = OrderedDict()
        self.announced: set[BlockKey] = set()

    def held(self) -> set[int]:
        return {block for blocks in self.holds.values() for block in blocks}

    @rule(owner=OWNERS, count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, owner: str, count: int) -> None:
        available = NUM_BLOCKS - len(self.held())
        num_free = available - len(self.let_go)
        blocks = self.pool.allocate(owner, count)
        if count > available:
            assert blocks is None
            return
        assert blocks is not None and len(blocks) == len(set(blocks)) == count
        assert not set(blocks) & self.held()
        evicted = [self.let_go.popitem(last=False)[0] for _ in range(count - num_free)]
        assert [b for b in blocks if b in self.names] == evicted
        for block in evicted:
            del self.names[block]
        self.holds.setdefault(owner, []).extend(blocks)

    @rule(owner=OWNERS, names=st.lists(st.integers(0, 5), max_size=4))
    def match_and_acquire(self, owner: str, names: list[int]) -> None:
        where = {name: block for block, name in self.names.items()}
        expected = []
        for name in names:
            if key(name) not in where:
                break
            expected.append(where[key(name)])
        blocks = self.pool.match([key(name) for name in names])
        assert blocks == expected
        self.pool.acquire(owner, blocks)
        for block in blocks:
            self.let_go.pop(block, None)
        self.holds.setdefault(owner, []).extend(blocks)

    @precondition(lambda self: self.held() - set(self.names))
    @rule(pick=st.integers(0, NUM_BLOCKS), name=st.integers(0, 5))
    def seal(self, pick: int, name: int) -> None:
        nameless = sorted(self.held() - set(self.names))
        block = nameless[pick % len(nameless)]
        taken = key(name) in self.names.values()
        assert self.pool.seal(BlockId(block), key(name)) is not taken
        if not taken:
            self.names[block] = key(name)

    @rule(owner=OWNERS)
    def release(self, owner: str) -> None:
        blocks = self.holds.pop(owner, [])
        self.pool.release(owner)
        for index in reversed(range(len(blocks))):
            block = blocks[index]
            if block not in self.held() and block not in blocks[:index] and block in self.names:
                self.let_go[block] = None

    @rule()
    def take_changes(self) -> None:
        changes = self.pool.take_changes()
        assert set(changes.removed) <= self.announced
        assert not set(changes.stored) & self.announced
        self.announced = self.announced - set(changes.removed) | set(changes.stored)
        assert self.announced == set(self.names.values())

    @invariant()
    def agrees(self) -> None:
        self.pool.validate()
        assert self.pool.num_held == len(self.held())
        assert self.pool.num_available == NUM_BLOCKS - len(self.held())
        assert self.pool.num_cached == len(self.names)
        assert set(self.pool.keys()) == set(self.names.values())
        counts = {owner: len(blocks) for owner, blocks in self.holds.items() if blocks}
        assert self.pool.owners() == counts


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def _fill(pool: BlockPool, owner: str, names: list[int]) -> list[BlockId]:
    blocks = pool.allocate(owner, len(names))
    assert blocks is not None
    for block, name in zip(blocks, names, strict=True):
        pool.seal(block, key(name))
    return blocks


def test_the_tail_of_a_prefix_goes_first() -> None:
    pool = BlockPool(4)
    _fill(pool, "a", [0, 1, 2, 3])
    pool.release("a")
    for left in (3, 2, 1, 0):
        assert pool.allocate("new", 1) is not None
        assert len(pool.match([key(n) for n in range(4)])) == left


def test_the_least_recently_used_prefix_goes_first() -> None:
    pool = BlockPool(4)
    _fill(pool, "a", [0, 1])
    _fill(pool, "b", [2, 3])
    pool.release("a")
    pool.release("b")
    pool.acquire("again", pool.match([key(0), key(1)]))
    pool.release("again")
    pool.allocate("new", 2)
    assert len(pool.match([key(0), key(1)])) == 2
    assert not pool.match([key(2)])


def test_a_held_block_is_never_evicted() -> None:
    pool = BlockPool(2)
    blocks = _fill(pool, "a", [0])
    pool.acquire("reader", blocks)
    pool.release("a")
    assert pool.allocate("b", 2) is None
    assert pool.match([key(0)]) == blocks
    pool.release("reader")
    assert pool.allocate("b", 2) is not None


def test_a_name_that_comes_and_goes_is_no_news() -> None:
    pool = BlockPool(1)
    _fill(pool, "a", [0])
    pool.release("a")
    pool.allocate("b", 1)
    assert not pool.take_changes()


def test_an_owner_that_holds_nothing_is_none() -> None:
    pool = BlockPool(2)
    pool.acquire("reader", [])
    pool.allocate("b", 0)
    assert pool.owners() == {}


def test_free_blocks_cannot_be_acquired() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError):
        pool.acquire("a", [BlockId(0)])


def test_lru_refuses_a_block_twice() -> None:
    order = LruEviction()
    order.add(BlockId(1))
    with pytest.raises(AssertionError):
        order.add(BlockId(1))
    order.remove(BlockId(1))
    with pytest.raises(KeyError):
        order.pop()

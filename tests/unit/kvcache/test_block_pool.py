"""Tests the block pool against a naive model of it, and the order of its evictions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonpool.kvcache.block_owner import BlockOwner
from moonpool.kvcache.block_pool import BlockPool
from moonpool.kvcache.eviction.policies import LruEviction
from moonpool.types import BlockId, BlockKey

NUM_BLOCKS = 6
OWNERS = st.sampled_from(("a", "b", "c"))  # "w" is the owner of withdrawn blocks


def key(name: int) -> BlockKey:
    return BlockKey(name.to_bytes(16, "big"))


class PoolMachine(RuleBasedStateMachine):
    """Compares the pool with a model that has only the owners of blocks, the key of each block, and
    the order of releases."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holds: dict[str, list[int]] = {}
        self.names: dict[int, BlockKey] = {}
        self.let_go: OrderedDict[int, None] = OrderedDict()
        self.withdrawn: set[int] = set()
        self.evicted: list[BlockKey] = []
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
            self.evicted.append(self.names.pop(block))
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
            assert self.pool.num_uses(block)
        self.withdrawn -= set(blocks)
        self.holds.setdefault(owner, []).extend(blocks)

    @rule(count=st.integers(0, 3))
    def withdraw(self, count: int) -> None:
        expected = list(self.let_go)[:count]
        assert self.pool.withdraw("w", count) == expected
        for block in expected:
            del self.let_go[block]
        self.withdrawn |= set(expected)
        if expected:
            self.holds.setdefault("w", []).extend(expected)

    @precondition(lambda self: self.holds.get("w"))
    @rule(data=st.data())
    def release_some_withdrawn(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(self.holds["w"]), unique=True))
        self.pool.release_some("w", [BlockId(block) for block in some])
        self.holds["w"] = [block for block in self.holds["w"] if block not in some]
        self.now_idle(some)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def uncache(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.names)))
        self.pool.uncache([BlockId(block)])
        del self.names[block]
        self.let_go.pop(block, None)
        self.withdrawn.discard(block)

    @precondition(lambda self: self.held() - set(self.names))
    @rule(pick=st.integers(0, NUM_BLOCKS), name=st.integers(0, 5))
    def cache_block(self, pick: int, name: int) -> None:
        nameless = sorted(self.held() - set(self.names))
        block = nameless[pick % len(nameless)]
        taken = key(name) in self.names.values()
        assert self.pool.cache_block(BlockId(block), key(name)) is not taken
        if not taken:
            self.names[block] = key(name)

    @rule(owner=OWNERS)
    def release(self, owner: str) -> None:
        blocks = self.holds.pop(owner, [])
        self.pool.release(owner)
        self.now_idle(blocks)

    def now_idle(self, blocks: list[int]) -> None:
        """Ends these holds in the model."""
        for index in reversed(range(len(blocks))):
            block = blocks[index]
            if block in self.held() or block in blocks[:index]:
                continue
            if block in self.withdrawn:
                self.withdrawn.remove(block)
                del self.names[block]
            elif block in self.names:
                self.let_go[block] = None

    @rule()
    def release_withdrawn(self) -> None:
        self.release("w")

    @rule()
    def take_changes(self) -> None:
        changes = self.pool.take_changes()
        assert set(changes.removed) <= self.announced
        assert not set(changes.stored) & self.announced
        self.announced = self.announced - set(changes.removed) | set(changes.stored)
        assert self.announced == set(self.names.values())
        assert changes.evicted == self.evicted
        self.evicted = []

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
        pool.cache_block(block, key(name))
    return blocks


def test_the_tail_of_a_prefix_is_evicted_first() -> None:
    pool = BlockPool(4)
    _fill(pool, "a", [0, 1, 2, 3])
    pool.release("a")
    for left in (3, 2, 1, 0):
        assert pool.allocate("new", 1) is not None
        assert len(pool.match([key(n) for n in range(4)])) == left


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
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


def test_a_key_that_comes_and_goes_is_not_reported() -> None:
    pool = BlockPool(1)
    _fill(pool, "a", [0])
    pool.release("a")
    pool.allocate("b", 1)
    assert not pool.take_changes()


def test_an_owner_without_holds_is_not_listed() -> None:
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
    order.add([BlockId(1)], None)
    with pytest.raises(AssertionError):
        order.add([BlockId(1)], None)
    order.remove([BlockId(1)])
    with pytest.raises(KeyError):
        order.pop(1)


class Recorder(LruEviction):
    """Records the calls of its methods."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[object, ...]] = []

    def store(
        self, block_ids: Sequence[BlockId], keys: Sequence[BlockKey], depths: Sequence[int]
    ) -> None:
        self.heard += [("store", *named) for named in zip(block_ids, keys, depths, strict=True)]

    def touch(self, block_ids: Sequence[BlockId]) -> None:
        self.heard.append(("touch", list(block_ids)))

    def add(self, block_ids: Sequence[BlockId], parent: BlockId | None) -> None:
        self.heard.append(("add", list(block_ids), parent))
        super().add(block_ids, parent)

    def take(self) -> list[tuple[object, ...]]:
        heard, self.heard = self.heard, []
        return heard


def test_the_policy_gets_keys_uses_and_runs() -> None:
    policy = Recorder()
    pool = BlockPool(8, policy)
    a, b, c = pool.allocate("first", 3) or []
    pool.cache_run([a, b], [key(0), key(1)], 0)
    pool.cache_block(c, key(2), 2)
    assert policy.take() == [("store", x, key(d), d) for d, x in enumerate((a, b, c))]
    pool.acquire("second", [a, b])
    assert policy.take() == [("touch", [a, b])]
    pool.release("first")
    assert policy.take() == [("add", [c], b)]
    pool.release("second")
    assert policy.take() == [("add", [a, b], None)]


def test_a_block_whose_key_was_taken_stands_for_its_twin() -> None:
    """Two prompts with the same beginning are computed at the same time. For the policy, a block
    after the second prompt's copy continues the first prompt's block."""
    policy = Recorder()
    pool = BlockPool(8, policy)
    (first,) = pool.allocate("first", 1) or []
    copy, rest = pool.allocate("second", 2) or []
    assert pool.cache_block(first, key(0), 0)
    assert not pool.cache_block(copy, key(0), 0)
    assert pool.cache_block(rest, key(1), 1)
    pool.validate()
    policy.take()
    pool.release("second")
    assert policy.take() == [("add", [rest], first)]
    pool.validate()
    assert pool.num_available == 7


def test_a_run_that_is_partly_cached_gets_only_the_missing_keys() -> None:
    pool = BlockPool(8)
    (first,) = pool.allocate("first", 1) or []
    others = pool.allocate("second", 4) or []
    assert pool.cache_block(first, key(1), 1)
    pool.cache_run(others, [key(0), key(1), key(2), key(2)], 0)
    pool.validate()
    assert pool.find_all(map(key, range(4))) == [others[0], first, others[2]]
    assert pool.depth_of(others[2]) == 2
    assert pool.has_content(others[1], key(1)) and pool.has_content(others[3], key(2))
    pool.release("first")
    assert pool.allocate("third", 4) is not None  # the block of `first` has lost its key
    pool.cache_run(others[1:2], [key(1)], 1)
    pool.validate()
    assert pool.match([key(0), key(1), key(2)]) == others[:3]


def test_a_key_can_be_set_again_once_its_first_block_is_gone() -> None:
    pool = BlockPool(2)
    (first,) = pool.allocate("first", 1) or []
    (copy,) = pool.allocate("second", 1) or []
    assert pool.cache_block(first, key(0))
    assert not pool.cache_block(copy, key(0))
    pool.release("first")
    assert pool.allocate("third", 1) == [first]
    assert pool.cache_block(copy, key(0), 5)
    pool.validate()
    pool.release("second")
    assert pool.match([key(0)]) == [copy]


def test_a_victim_keeps_its_key_until_it_is_copied() -> None:
    pool = BlockPool(4)
    _fill(pool, "a", [0, 1, 2, 3])
    pool.release("a")
    victims = pool.withdraw("copy", 2)
    assert [pool.key_of(b) for b in victims] == [key(3), key(2)], "the order of eviction"
    assert len(pool.match([key(n) for n in range(4)])) == 4
    assert pool.allocate("new", 3) is None, "they are being read"
    pool.acquire("again", pool.match([key(n) for n in range(3)]))
    pool.release("copy")
    assert len(pool.match([key(n) for n in range(4)])) == 3, "what was used again stays"
    assert (pool.num_free, pool.num_held) == (1, 3)
    pool.validate()


def test_adopted_blocks_are_evicted_least_recently_used_first() -> None:
    pool = BlockPool(6)
    named = [
        (BlockId(block), key(name)) for block, name in ((3, 0), (1, 1), (9, 2), (4, 1), (3, 4))
    ]
    assert pool.adopt(named) == [9, 4, 3], "outside, a name twice, a block twice"
    pool.validate()
    assert (pool.num_free, pool.num_cached) == (4, 2)
    pool.allocate("a", 5)
    assert pool.keys() == [key(1)]


def test_a_large_pool_costs_nothing_until_it_is_used() -> None:
    pool = BlockPool(1 << 40)
    assert pool.num_available == 1 << 40
    blocks = pool.allocate("a", 3)
    assert blocks == [0, 1, 2]
    assert pool.num_held == 3
    pool.release("a")
    pool.validate()
    assert pool.num_available == 1 << 40


def test_a_block_that_loses_its_key_and_gets_it_again_is_told() -> None:
    pool = BlockPool(2)
    assert pool.take_rekeyed() == []
    pool.watch_keys()
    (block,) = pool.allocate("a", 1) or []
    pool.cache_block(block, BlockKey(b"k" * 16))
    assert pool.take_rekeyed() == [(block, b"k" * 16)]
    pool.take_changes()
    pool.uncache([block])
    pool.cache_block(block, BlockKey(b"k" * 16))
    assert not pool.has_changes
    assert pool.take_rekeyed() == [(block, b"k" * 16)]
    pool.release("a")
    pool.allocate("b", 2)
    assert pool.take_rekeyed() == [(block, None)]
    assert pool.take_rekeyed() == []


def test_a_report_names_owners_as_before() -> None:
    pool = BlockPool(8)
    for owner, name in (
        (BlockOwner("work", "r7/1"), "work:r7/1"),
        (BlockOwner("hung:load", "3"), "hung:load:3"),
    ):
        pool.allocate(owner, 2)
        assert pool.named_owners()[name] == 2

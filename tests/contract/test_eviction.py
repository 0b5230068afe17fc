"""Tests the rules that every eviction policy keeps, and the special features of each policy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moonpool.config.tables import EvictionName, choices
from moonpool.kvcache.block_pool import BlockPool
from moonpool.kvcache.eviction.policies import EvictionPolicy, make_eviction
from moonpool.types import BlockId, BlockKey

POLICIES = choices(EvictionName)
NUM_BLOCKS = 12


def key(name: int) -> BlockKey:
    return BlockKey(name.to_bytes(16, "big"))


class PolicyMachine(RuleBasedStateMachine):
    """Tests a policy alone, against sets of held and evictable blocks. The drawn runs need not be
    realistic."""

    @initialize(name=st.sampled_from(POLICIES))
    def begin(self, name: str) -> None:
        self.policy: EvictionPolicy = make_eviction(name, NUM_BLOCKS)
        self.held: list[int] = []
        self.evictable: list[int] = []
        self.nameless = list(range(NUM_BLOCKS))

    @precondition(lambda self: self.nameless)
    @rule(name=st.integers(0, 20), depth=st.integers(0, 4))
    def store(self, name: int, depth: int) -> None:
        block = self.nameless.pop(0)
        self.policy.store([BlockId(block)], [key(name)], [depth])
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        run = data.draw(st.lists(st.sampled_from(self.held), unique=True, min_size=1))
        others = [b for b in self.held if b not in run]
        parent = data.draw(st.sampled_from([None, *others, *self.evictable]))
        self.policy.add([BlockId(b) for b in run], None if parent is None else BlockId(parent))
        self.held = others
        self.evictable += run

    @precondition(lambda self: self.evictable)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self.evictable), unique=True))
        self.policy.remove([BlockId(b) for b in blocks])
        self.policy.touch([BlockId(b) for b in blocks])
        self.evictable = [b for b in self.evictable if b not in blocks]
        self.held += blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data(), times=st.integers(1, 400))
    def touch(self, data: st.DataObject, times: int) -> None:
        block = data.draw(st.sampled_from(self.held))
        for _ in range(times):
            self.policy.touch([BlockId(block)])

    @precondition(lambda self: self.evictable)
    @rule(count=st.integers(0, NUM_BLOCKS))
    def pop(self, count: int) -> None:
        if count > len(self.evictable):
            return
        popped = self.policy.pop(count)
        assert len(popped) == len(set(popped)) == count
        assert set(popped) <= set(self.evictable)
        self.evictable = [b for b in self.evictable if b not in popped]
        self.nameless += popped

    @precondition(lambda self: self.held or self.evictable)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([*self.held, *self.evictable]))
        self.policy.forget(BlockId(block))
        self.held = [b for b in self.held if b != block]
        self.evictable = [b for b in self.evictable if b != block]
        self.nameless.append(block)

    @precondition(lambda self: self.held)
    @rule()
    def only_evictable_blocks_can_be_removed(self) -> None:
        with pytest.raises(KeyError):
            self.policy.remove([BlockId(self.held[0])])

    @precondition(lambda self: hasattr(self, "policy") and not self.evictable)
    @rule()
    def nothing_comes_from_nothing(self) -> None:
        with pytest.raises(KeyError):
            self.policy.pop(1)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "policy"):
            assert len(self.policy) == len(self.evictable)
            inside = [b for b in range(NUM_BLOCKS + 2) if b in self.policy]
            assert inside == sorted(self.evictable)

    def teardown(self) -> None:
        """Asserts that all blocks can be evicted, whatever happened before."""
        if hasattr(self, "policy"):
            assert sorted(self.policy.pop(len(self.evictable))) == sorted(self.evictable)


PolicyMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestPolicyMachine = PolicyMachine.TestCase


def serve(pool: BlockPool, owner: str, names: list[int]) -> int:
    """Serves a prompt of these blocks like an instance, and returns how many of them were
    cached."""
    keys = [key(name) for name in names]
    cached = pool.match(keys)
    pool.acquire(owner, cached)
    new = pool.allocate(owner, min(len(keys) - len(cached), pool.num_available))
    assert new is not None
    for depth, block in enumerate(new, len(cached)):
        pool.cache_block(block, keys[depth], depth)
    return len(cached)


def chain(session: int, turn: int) -> list[int]:
    """Returns the blocks of a prompt in a tree: block 0, then the session's blocks. A tenth of the
    turns leave this path."""
    names = [0, *(1000 * session + place for place in range(1, 4 + 2 * turn))]
    if (session + turn) % 10 == 0:
        names[-1] += 500
    return names


def random_prompts(count: int, seed: int) -> list[list[int]]:
    rng = Random(seed)
    return [chain(rng.randrange(1, 40), rng.randrange(6)) for _ in range(count)]


@pytest.mark.parametrize("name", POLICIES)
def test_held_blocks_stay_whatever_comes(name: str) -> None:
    pool = BlockPool(60, make_eviction(name, 60))
    serve(pool, "keeper", chain(50, 5))
    kept = [key(n) for n in chain(50, 5)]
    for number, names in enumerate(random_prompts(400, seed=1)):
        owners = (f"p{number}", f"p{number - 2}")
        serve(pool, owners[0], names)
        pool.release(owners[1])
        assert len(pool.match(kept)) == len(kept)
        if number % 20 == 0:
            pool.validate()


@pytest.mark.parametrize("name", POLICIES)
def test_one_history_gives_one_order(name: str) -> None:
    def run() -> list[int]:
        pool = BlockPool(100, make_eviction(name, 100))
        hits = []
        for names in random_prompts(1500, seed=2):
            hits.append(serve(pool, "a", names))
            pool.release("a")
        return [*hits, *(pool.allocate("rest", 100) or [])]

    assert run() == run()


PRINT_ORDER = """
from tests.contract.test_eviction import random_prompts, serve
from moonpool.kvcache.block_pool import BlockPool
from moonpool.kvcache.eviction.policies import make_eviction
pool = BlockPool(100, make_eviction("predictive", 100))
for names in random_prompts(1500, seed=2):
    serve(pool, "a", names)
    pool.release("a")
print(pool.allocate("rest", 100))
"""


@pytest.mark.long
def test_the_order_does_not_hang_on_the_hash_seed() -> None:
    orders = [
        subprocess.run(
            [sys.executable, "-c", PRINT_ORDER],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert orders[0] == orders[1]
    assert len(orders[0]) > 100


def size_of(thing: object, seen: set[int] | None = None) -> int:
    """Returns the number of objects reachable from an object, as a measure of memory that is equal
    on all machines."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, type | Callable):  # type: ignore[arg-type]
        return 0
    seen.add(id(thing))
    parts: list[object] = []
    if isinstance(thing, dict):
        parts = [*thing.keys(), *thing.values()]
    elif isinstance(thing, list | tuple):
        parts = list(thing)
    for slot in getattr(type(thing), "__slots__", ()):
        parts.append(getattr(thing, slot, None))
    parts.extend(getattr(thing, "__dict__", {}).values())
    return 1 + sum(size_of(part, seen) for part in parts)


@pytest.mark.parametrize("name", POLICIES)
def test_memory_is_bounded_by_the_pool(name: str) -> None:
    policy = make_eviction(name, 50)
    pool = BlockPool(50, policy)
    sizes = []
    for number in range(6000):
        # New prompts come all the time, and one block is used ever more often.
        serve(pool, "a", [0, *(1 + 5 * number + place for place in range(5))])
        pool.release("a")
        if number % 1000 == 999:
            sizes.append(size_of(policy))
    assert max(sizes[1:]) < 1.5 * sizes[1] + 200


@pytest.mark.parametrize("name", POLICIES)
def test_a_first_block_in_constant_use_is_never_missed(name: str) -> None:
    pool = BlockPool(50, make_eviction(name, 50))
    for number in range(2000):
        hits = serve(pool, "a", [0, *(1 + 7 * number + place for place in range(7))])
        pool.release("a")
        assert hits == (number > 0)


def test_predictive_never_keeps_a_block_without_its_predecessor() -> None:
    pool = BlockPool(80, make_eviction("predictive", 80))
    prompts = random_prompts(3000, seed=3)
    before = {child: parent for names in prompts for parent, child in pairwise(names)}
    for number, names in enumerate(prompts):
        serve(pool, f"p{number}", names)
        # Two prompts are held at a time, so that segments split and join.
        pool.release(f"p{number - 1}")
        if number % 10 == 0:
            cached = {int.from_bytes(k, "big") for k in set(pool.keys())}
            assert all(before[n] in cached for n in cached if n)


def test_lfu_keeps_what_was_used_most_and_length_aware_the_shallow() -> None:
    for name, first_gone in (("lfu", 10), ("length-aware", 22)):
        pool = BlockPool(6, make_eviction(name, 6))
        for names in ([1, 2], [1, 2], [10], [20, 21, 22]):
            serve(pool, "a", names)
            pool.release("a")
        pool.allocate("b", 1)
        everything = {key(n) for n in (1, 2, 10, 20, 21, 22)}
        assert everything - set(pool.keys()) == {key(first_gone)}


def test_unknown_policies_are_named() -> None:
    with pytest.raises(ValueError, match="unknown eviction 'fifo'; known are lru"):
        make_eviction("fifo", 10)

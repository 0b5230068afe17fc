"""Blocks with a replica elsewhere are evicted first, unless a block that must stay continues
them."""

from __future__ import annotations

from random import Random

import pytest

from moonpool.kvcache.block_pool import BlockPool
from moonpool.kvcache.eviction.policies import make_eviction
from moonpool.kvcache.eviction.replica_aware import ReplicaAwareEviction
from moonpool.types import BlockId, BlockKey

POLICIES = ("lru", "lfu", "length-aware", "predictive")


def key(name: int) -> BlockKey:
    return BlockKey(name.to_bytes(16, "big"))


class Cache:
    """Holds a pool whose prompts are lists of numbers."""

    def __init__(self, num_blocks: int, policy: str = "lru") -> None:
        self.spares = ReplicaAwareEviction(make_eviction(policy, num_blocks))
        self.pool = BlockPool(num_blocks, self.spares)

    def use(self, *names: int) -> bool:
        """Caches and releases a prompt; returns False if there was no room."""
        keys = [key(name) for name in names]
        held = self.pool.match(keys)
        self.pool.acquire("p", held)
        new = self.pool.allocate("p", len(keys) - len(held))
        for depth, block_id in enumerate(new or (), len(held)):
            self.pool.cache_block(block_id, keys[depth], depth)
        self.pool.release("p")
        return new is not None

    def mark(self, *names: int, spare: bool = True) -> None:
        found = [self.pool.find(key(name)) for name in names]
        self.spares.mark([b for b in found if b is not None], spare)

    def has(self, *names: int) -> list[int]:
        return [name for name in names if self.pool.find(key(name)) is not None]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_spare_block_is_evicted_before_an_older_last_copy(policy: str) -> None:
    cache = Cache(8, policy)
    cache.use(1, 2)
    cache.use(3, 4)
    cache.use(5, 6)
    cache.mark(3, 4)
    cache.use(7, 8)
    cache.use(9, 10)
    assert cache.has(1, 2, 3, 4) == [1, 2]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_spare_prefix_stays_while_a_last_copy_continues_it(policy: str) -> None:
    cache = Cache(9, policy)
    cache.use(1, 2, 3)
    cache.use(4, 5, 6, 7)
    cache.mark(1, 2)
    cache.mark(4, 5, 6, 7)
    cache.use(8, 9, 10, 11)
    assert cache.has(1, 2, 3, 4, 5, 6, 7) == [1, 2, 3, 4, 5]
    cache.use(12, 13)
    cache.mark(3)
    cache.use(14, 15)
    assert cache.has(1, 2, 3, 4, 5) == [1], "the end of the prompt first"


def test_a_block_that_became_the_last_copy_stays() -> None:
    cache = Cache(6)
    cache.use(1, 2)
    cache.use(3, 4)
    cache.mark(3, 4)
    cache.mark(3, 4, spare=False)
    cache.use(5, 6)
    cache.use(7, 8)
    assert cache.has(1, 2, 3, 4) == [3, 4]


def test_of_spare_blocks_the_one_released_longest_ago_is_evicted() -> None:
    cache = Cache(6)
    cache.use(1, 2)
    cache.use(3, 4)
    cache.use(5, 6)
    cache.mark(1, 2, 3, 4)
    cache.use(1, 2)
    cache.use(7, 8)
    assert cache.has(1, 2, 3, 4, 5, 6) == [1, 2, 5, 6]


def test_a_key_that_comes_back_is_not_spare_until_marked_again() -> None:
    cache = Cache(4)
    cache.use(1, 2)
    cache.mark(1, 2)
    cache.use(3, 4)
    cache.use(5, 6)
    assert not cache.has(1, 2)
    cache.use(1, 2)
    found = [cache.pool.find(key(name)) for name in (1, 2)]
    assert not any(cache.spares.is_spare(BlockId(b)) for b in found if b is not None)


@pytest.mark.parametrize("policy", POLICIES)
def test_marks_are_consistent_after_random_operations(policy: str) -> None:
    rng = Random(7)
    cache = Cache(12, policy)
    for _ in range(3000):
        match rng.randrange(6):
            case 0 | 1 | 2:
                start, length = rng.randrange(6), rng.randint(1, 6)
                cache.use(*(100 * start + depth for depth in range(length)))
            case 3 | 4:
                names = [100 * rng.randrange(6) + depth for depth in range(rng.randint(1, 6))]
                cache.mark(*names, spare=rng.random() < 0.7)
            case 5:
                victims = cache.pool.withdraw("w", rng.randrange(3))
                if victims and rng.random() < 0.5:
                    cache.pool.acquire("q", victims[:1])
                    cache.pool.release("q")
                elif rng.random() < 0.3:
                    cache.pool.uncache(victims)
                cache.pool.release("w")
        cache.pool.validate()
        cache.spares.validate()

"""Tests shares of a pool: blocks of tenants above their share are evicted first. Otherwise, the
order is that of a pool without shares."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.kvcache.block_pool import BlockPool
from moonpool.kvcache.eviction.cache_shares import CacheShareEviction
from moonpool.kvcache.eviction.policies import make_eviction
from moonpool.kvcache.eviction.replica_aware import ReplicaAwareEviction
from moonpool.types import BlockId, BlockKey

POLICIES = ("lru", "lfu", "length-aware", "predictive")


def keys_of(tenant: str, prompt: int, length: int) -> list[BlockKey]:
    return [BlockKey(f"{tenant}{prompt:05}{depth:05}".encode()) for depth in range(length)]


@dataclass
class Cache:
    """A pool, and requests of tenants that use it."""

    policy: str
    num_blocks: int
    shares: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        inner = make_eviction(self.policy, self.num_blocks)
        self.eviction = CacheShareEviction(inner, self.num_blocks)
        self.pool = BlockPool(self.num_blocks, ReplicaAwareEviction(self.eviction))
        self.num_runs = 0

    def run(self, tenant: str, prompt: int, length: int) -> int:
        """Runs a request of this prompt; returns how many blocks were cached."""
        self.num_runs += 1
        owner, keys = f"r{self.num_runs}", keys_of(tenant, prompt, length)
        found = self.pool.match(keys)
        self.pool.acquire(owner, found)
        new = self.pool.allocate(owner, length - len(found))
        assert new is not None
        self.pool.cache_run(new, keys[len(found) :], len(found))
        share = self.shares.get(tenant)
        if share is not None:
            self.eviction.assign(found + new, tenant, share)
        self.pool.release(owner)
        self.pool.validate()
        self.eviction.validate()
        return len(found)

    def num_cached(self, tenant: str) -> int:
        cached = self.pool.keys()
        return sum(key.startswith(tenant.encode()) for key in cached)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_flood_with_a_share_leaves_the_others_blocks(policy: str) -> None:
    cache = Cache(policy, 100, {"f": 0.3})
    cache.run("a", 0, 40)
    for prompt in range(50):
        cache.run("f", prompt, 20)
    assert cache.run("a", 0, 40) == 40
    assert cache.num_cached("f") == 60, "what others do not need"
    cache.run("a", 1, 30)
    assert cache.num_cached("f") == 30
    assert cache.num_cached("a") == 70


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_share_the_flood_takes_all(policy: str) -> None:
    cache = Cache(policy, 100)
    cache.run("a", 0, 40)
    for prompt in range(50):
        cache.run("f", prompt, 20)
    assert cache.run("a", 0, 40) < 40


def test_the_oldest_prompt_of_the_flood_goes_first() -> None:
    cache = Cache("lru", 60, {"f": 0.25})
    for prompt in range(3):
        cache.run("f", prompt, 20)
    cache.run("a", 0, 15)
    assert cache.pool.match(keys_of("f", 0, 20)) == cache.pool.match(keys_of("f", 0, 5))
    assert cache.run("f", 2, 20) == 20


def test_an_owner_is_known_until_the_block_is_used_again() -> None:
    cache = Cache("lru", 4, {"f": 0.5})
    cache.run("f", 0, 4)
    (block,) = cache.pool.withdraw("demote", 1)
    assert cache.eviction.owner_of(block) == ("f", 0.5)
    cache.pool.release("demote")
    assert cache.eviction.owner_of(block) == ("f", 0.5)
    cache.run("a", 0, 1)
    assert cache.eviction.owner_of(block) is None


@settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    shares=st.dictionaries(st.sampled_from("abc"), st.sampled_from((0.05, 0.3, 0.8))),
    runs=st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(0, 5), st.integers(1, 12)), max_size=60
    ),
)
def test_the_counts_are_those_of_the_pool(
    policy: str, shares: dict[str, float], runs: list[tuple[str, int, int]]
) -> None:
    cache, plain = Cache(policy, 30, shares), Cache(policy, 30)
    for run in runs:
        before = {tenant: cache.num_cached(tenant) for tenant in "abcd"}
        cache.run(*run)
        plain.run(*run)
        for tenant, share in shares.items():
            is_within = before[tenant] <= int(share * 30)
            if tenant == run[0] or not is_within or cache.num_cached(tenant) == before[tenant]:
                continue
            # If the tenant lost blocks within its share, no other tenant may have been above its
            # share.
            for other in shares.keys() - {run[0]}:
                assert cache.num_cached(other) <= int(shares[other] * 30)
    if not shares:
        assert cache.pool.keys() == plain.pool.keys(), "as without the policy"


def test_the_pool_asks_for_more_than_there_is() -> None:
    cache = Cache("predictive", 10, {"f": 0.1})
    cache.run("f", 0, 5)
    with pytest.raises(KeyError):
        cache.eviction.pop(6)
    assert [cache.pool.key_of(BlockId(b)) for b in cache.pool.cached_blocks()]

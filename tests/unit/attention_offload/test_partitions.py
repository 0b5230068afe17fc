"""Tests blocks in several arenas: their common numbers, sequences that stay together, and arenas
that are lost and restored."""

from __future__ import annotations

import random

from moonpool.scheduler.attention_pools.partitions import PartitionedPool
from moonpool.types import BlockId, BlockKey


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def cached(pool: PartitionedPool, owner: str, numbers: list[int]) -> list[BlockId]:
    blocks = pool.allocate(owner, len(numbers))
    assert blocks is not None
    for depth, (block, number) in enumerate(zip(blocks, numbers, strict=True)):
        assert pool.cache_block(block, key(number), depth)
    return blocks


def test_a_sequence_lies_in_one_arena_and_continues_there() -> None:
    pool = PartitionedPool([4, 6])
    first = pool.allocate("a", 3)
    assert first is not None
    # of arenas with equal room, the last one is taken
    assert {pool.arena_of(b) for b in first} == {1}
    more = pool.allocate("a", 3, first)
    assert more is not None
    assert {pool.arena_of(b) for b in more} == {1}
    assert pool.allocate("a", 1, first) is None  # fails although the other arena has room
    assert pool.allocate("b", 5) is None
    assert pool.num_available == 4
    assert pool.max_sequence_blocks == 6
    pool.release("a")
    assert pool.num_available == 10
    pool.validate()


def test_a_small_arena_is_held_as_much_as_a_large_one_until_it_is_full() -> None:
    pool = PartitionedPool([12, 4])
    found = []
    for owner in "abcdefg":
        blocks = pool.allocate(owner, 2)
        assert blocks is not None
        found.append(pool.arena_of(blocks[0]))
    assert found == [1, 0, 1, 0, 0, 0, 0]
    pool.validate()


def test_a_prefix_is_the_longest_of_one_arena() -> None:
    pool = PartitionedPool([4, 4])
    blocks = cached(pool, "a", [1, 2])
    others = pool.allocate("b", 3)
    assert others is not None
    assert pool.arena_of(others[0]) != pool.arena_of(blocks[0])
    # the other arena has a block with this key already
    assert not pool.cache_block(others[0], key(1))
    assert pool.cache_block(others[2], key(3))
    keys = [key(1), key(2), key(3)]
    assert pool.match(keys) == blocks
    assert pool.find(key(3)) == others[2]
    pool.release("a")
    pool.release("b")
    pool.acquire("c", [*blocks, others[2]])
    assert pool.owners() == {"c": 3}
    pool.validate()


def test_a_lost_arena_loses_its_keys_and_can_come_back_with_some() -> None:
    pool = PartitionedPool([4, 4])
    a = cached(pool, "a", [1, 2])
    b = cached(pool, "b", [3])
    lost = pool.arena_of(a[0])
    pool.take_changes()
    pool.lose(lost)
    assert pool.is_lost(lost)
    assert pool.take_changes().removed == [key(1), key(2)]
    assert pool.match([key(1)]) == []
    assert pool.num_available == 3
    assert not pool.cache_block(a[1], key(9))  # the step had begun before the loss
    start = 4 * lost
    again = [(BlockId(start + 3), key(1)), (BlockId(start), key(3))]
    assert not pool.restore(lost, again)  # fails, because a request still holds the lost blocks
    pool.release("a")
    assert pool.restore(lost, again)
    assert pool.match([key(1)]) == [start + 3]
    assert pool.find(key(3)) == b[0]  # the worker has this block already
    assert pool.take_changes().stored == [key(1)]
    assert pool.num_available == 7
    pool.validate()


def test_keys_lost_and_restored_between_reports_are_not_reported() -> None:
    pool = PartitionedPool([4, 4])
    (block,) = cached(pool, "a", [1])
    pool.release("a")
    pool.take_changes()
    pool.lose(pool.arena_of(block))
    assert pool.restore(pool.arena_of(block), [(block, key(1))])
    changes = pool.take_changes()
    assert changes.stored == [key(1)]
    assert changes.removed == []


def test_sums_balance_after_random_operations() -> None:
    rng = random.Random(5)
    starts = (0, 7, 12)
    pool = PartitionedPool([7, 5, 9])
    held: dict[str, list[BlockId]] = {}
    fresh = iter(range(100_000))
    told: set[BlockKey] = set()
    for turn in range(3000):
        match rng.randrange(7):
            case 0 | 1:
                owner = f"o{turn}"
                blocks = pool.allocate(owner, rng.randrange(1, 5))
                if blocks:
                    held[owner] = blocks
                    assert len({pool.arena_of(b) for b in blocks}) == 1
            case 2 if held:
                owner = rng.choice(sorted(held))
                more = pool.allocate(owner, rng.randrange(3), held[owner])
                held[owner] += more or []
            case 3 if held:
                block = rng.choice(held[rng.choice(sorted(held))])
                if pool.key_of(block) is None:
                    pool.cache_block(block, key(next(fresh)))
            case 4 | 5 if held:
                owner = rng.choice(sorted(held))
                pool.release(owner)
                del held[owner]
            case 6:
                part = rng.randrange(3)
                if not pool.is_lost(part):
                    pool.lose(part)
                pool.restore(part, [(BlockId(starts[part]), key(next(fresh)))])
        changes = pool.take_changes()
        assert not told & {*changes.stored} - {*changes.removed}
        told = (told - {*changes.removed}) | {*changes.stored}
        assert told == {*pool.keys()}
        pool.validate()

"""Tests blocks in several arenas, where each segment of a sequence lies in one arena."""

from __future__ import annotations

import random

from moonpool.scheduler.attention_pools.segments import SegmentedPool
from moonpool.types import BlockId, BlockKey


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def arenas_of(pool: SegmentedPool, blocks: list[BlockId]) -> list[int]:
    return [pool.arena_of(block) for block in blocks]


def test_a_long_sequence_uses_all_arenas_and_segments_stay_together() -> None:
    pool = SegmentedPool([8, 8], 4)
    blocks = pool.allocate("a", 3)
    assert blocks is not None
    for _ in range(13):
        blocks += pool.allocate("a", 1, blocks) or []
    assert len(blocks) == pool.max_sequence_blocks == 16
    for first in range(0, 16, 4):
        assert len({*arenas_of(pool, blocks[first : first + 4])}) == 1
    assert [arenas_of(pool, blocks).count(arena) for arena in (0, 1)] == [8, 8]
    assert pool.allocate("a", 1, blocks) is None
    pool.validate()


def test_a_begun_segment_continues_in_its_arena_or_not_at_all() -> None:
    pool = SegmentedPool([4, 8], 4)
    blocks = pool.allocate("a", 2)
    assert blocks is not None
    assert {*arenas_of(pool, blocks)} == {1}
    assert pool.allocate("b", 6, ()) is not None  # gets a whole segment, and two blocks of another
    assert pool.num_available == 4
    more = pool.allocate("a", 2, blocks)
    assert more is not None
    assert {*arenas_of(pool, more)} == {1}
    # fails, because no arena has this many blocks together
    assert pool.allocate("a", 3, [*blocks, *more]) is None
    assert pool.num_available == 2
    assert pool.owners() == {"a": 4, "b": 6}


def test_a_prefix_continues_in_another_arena_only_at_a_segments_end() -> None:
    pool = SegmentedPool([8, 8], 2)
    blocks = pool.allocate("a", 5)
    assert blocks is not None
    for depth, block in enumerate(blocks):
        assert pool.cache_block(block, key(depth), depth)
    keys = [key(i) for i in range(6)]
    assert pool.match(keys) == blocks
    pool.uncache([blocks[1]])
    assert pool.match(keys) == blocks[:1]
    # begins with the second block of a segment whose first block is elsewhere
    other = pool.allocate("b", 8)
    assert other is not None
    elsewhere = next(i for i in (1, 3, 5, 7) if pool.arena_of(other[i]) != pool.arena_of(blocks[0]))
    assert pool.cache_block(other[elsewhere], key(1), 1)
    assert pool.match(keys) == blocks[:1]


def test_can_extend_never_overestimates() -> None:
    rng = random.Random(7)
    for _ in range(300):
        sizes = [rng.randrange(1, 12) for _ in range(rng.randrange(1, 4))]
        pool = SegmentedPool(sizes, rng.randrange(1, 5))
        held: dict[str, list[BlockId]] = {}
        for turn in range(30):
            match rng.randrange(4):
                case 0:
                    blocks = pool.allocate(f"o{turn}", rng.randrange(1, 7))
                    if blocks:
                        held[f"o{turn}"] = blocks
                case 1 if held:
                    owner = rng.choice(sorted(held))
                    held[owner] += pool.allocate(owner, rng.randrange(3), held[owner]) or []
                case 2 if held:
                    owner = rng.choice(sorted(held))
                    pool.release(owner)
                    del held[owner]
                case 3:
                    arena = rng.randrange(len(sizes))
                    if pool.is_lost(arena):
                        pool.restore(arena, ())
                    else:
                        pool.lose(arena)
            for blocks in held.values():
                for first in range(0, len(blocks), pool.segment_blocks):
                    segment = blocks[first : first + pool.segment_blocks]
                    assert len({*arenas_of(pool, segment)}) == 1
            pool.validate()
        needs = [(blocks, rng.randrange(4)) for blocks in held.values()]
        if pool.can_extend(needs):
            for (owner, blocks), (_, count) in zip(held.items(), needs, strict=True):
                assert pool.allocate(owner, count, blocks) is not None

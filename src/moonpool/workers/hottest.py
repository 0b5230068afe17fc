"""Which prefixes an instance uses most: for those who ask, and for those who take them over."""

from __future__ import annotations

from heapq import nlargest

from moonpool.kvcache.blocks import BlockPool
from moonpool.types import BlockId, BlockKey
from moonpool.workers.holdings import Holdings
from moonpool.workers.messages import HotPrefix


def hottest(
    holdings: Holdings, num_blocks: int, lost_with_it: bool = False
) -> tuple[HotPrefix, ...]:
    """Prefixes of so many blocks in all, the most used first, of equals the one used last. What
    continues a prefix and is used as often is listed with it, not beside it. With `lost_with_it`,
    none that ends with blocks which others can load from a shared store. Mutates nothing."""
    pool, spares = holdings.pool, holdings.spares

    def heat(block_id: BlockId) -> tuple[int, int, int]:
        return pool.num_uses(block_id), spares.let_go_at(block_id), pool.depth_of(block_id)

    listed: set[BlockId] = set()
    found: list[HotPrefix] = []
    for block_id in nlargest(num_blocks, pool.named(), key=heat):
        if num_blocks <= 0:
            break
        if block_id in listed or (lost_with_it and holdings.is_shared(_key(pool, block_id))):
            continue
        chain = _chain(holdings, block_id)
        if not chain or len(chain) > num_blocks:
            continue
        num_blocks -= len(chain)
        listed.update(chain)
        keys = tuple(_key(pool, block) for block in chain)
        found.append(HotPrefix(keys, pool.num_uses(block_id)))
    return tuple(found)


def _chain(holdings: Holdings, block_id: BlockId) -> list[BlockId]:
    """From the prompt's first block to this one; empty if some is missing, or not known."""
    chain: dict[BlockId, None] = {}
    place: BlockId | None = block_id
    while place is not None:
        if place in chain:
            return []  # what was adopted has no known place, so links may contradict each other
        chain[place] = None
        place = holdings.spares.parent_of(place)
    first_to_last = list(reversed(chain))
    return [] if holdings.pool.depth_of(first_to_last[0]) else first_to_last


def _key(pool: BlockPool, block_id: BlockId) -> BlockKey:
    key = pool.key_of(block_id)
    assert key is not None
    return key

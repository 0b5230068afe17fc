"""Copies prefixes from one instance to another before a request needs them there: the hottest ones
of an instance that leaves the cluster, and hot ones of which the Conductor wants a replica.

`hottest` lists the most used prefixes of an instance. `KvHandover` runs at the receiving instance:
it fetches a prefix into free blocks, or in place of blocks that are used less. No request waits for
such a fetch. The fetch ends with one `PrefixTakenOver` report, and the blocks that arrived are
cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import nlargest

from moonpool.kvcache.block_owner import EVICTION, BlockOwner
from moonpool.kvcache.block_pool import BlockPool
from moonpool.protocol.messages import HotPrefix, PrefixTakenOver, TakeOverPrefix
from moonpool.protocol.transfer_events import FetchEnded
from moonpool.scheduler.actions import ActionBuffer, FetchBlocks
from moonpool.scheduler.kv_cache_manager import KVCacheManager
from moonpool.types import BlockId, BlockKey

MAX_SHARE = 4
"""A takeover uses at most this fraction (1 / MAX_SHARE) of the pool's blocks."""


def hottest(
    kv_cache: KVCacheManager, num_blocks: int, lost_with_it: bool = False
) -> tuple[HotPrefix, ...]:
    """Returns the most used prefixes, of `num_blocks` blocks in total. Among equally used prefixes,
    the one used last comes first. An equally used continuation of a prefix is part of the same
    entry.

    With `lost_with_it`, leaves out prefixes whose last block a shared store holds. Changes nothing.
    """
    pool, spares = kv_cache.pool, kv_cache.spares

    def heat(block_id: BlockId) -> tuple[int, int, int]:
        return pool.num_uses(block_id), spares.let_go_at(block_id), pool.depth_of(block_id)

    listed: set[BlockId] = set()
    found: list[HotPrefix] = []
    for block_id in nlargest(num_blocks, pool.cached_blocks(), key=heat):
        if num_blocks <= 0:
            break
        if block_id in listed or (lost_with_it and kv_cache.is_shared(_key(pool, block_id))):
            continue
        chain = _chain(kv_cache, block_id)
        if not chain or len(chain) > num_blocks:
            continue
        num_blocks -= len(chain)
        listed.update(chain)
        keys = tuple(_key(pool, block) for block in chain)
        found.append(HotPrefix(keys, pool.num_uses(block_id)))
    return tuple(found)


def _chain(kv_cache: KVCacheManager, block_id: BlockId) -> list[BlockId]:
    """Returns the blocks from the prompt's first block to this one, or none if one of them is
    missing or unknown."""
    chain: dict[BlockId, None] = {}
    place: BlockId | None = block_id
    while place is not None:
        if place in chain:
            return []  # blocks adopted at start have no known position: links may form a cycle
        chain[place] = None
        place = kv_cache.spares.parent_of(place)
    first_to_last = list(reversed(chain))
    return [] if kv_cache.pool.depth_of(first_to_last[0]) else first_to_last


def _key(pool: BlockPool, block_id: BlockId) -> BlockKey:
    key = pool.key_of(block_id)
    assert key is not None
    return key


@dataclass(frozen=True, slots=True)
class _Takeover:
    owner: BlockOwner  # the owner's name is also the id of the fetch; no attempt has such an id
    command: TakeOverPrefix
    keys: tuple[BlockKey, ...]  # keys of the blocks to fetch
    blocks: tuple[BlockId, ...]
    depth: int  # position of the first fetched block in the prompt
    full: bool


class KvHandover:
    """The takeovers in progress, by the ids of their fetches."""

    def __init__(self, kv_cache: KVCacheManager, actions_out: ActionBuffer) -> None:
        self._kv_cache = kv_cache
        self._actions_out = actions_out
        self._takeovers: dict[str, _Takeover] = {}
        self._num_begun = 0

    @property
    def owners(self) -> set[BlockOwner]:
        """Returns all owners of holds for takeovers."""
        return {takeover.owner for takeover in self._takeovers.values()}

    def has(self, fetch_id: str) -> bool:
        """Whether a fetch belongs to a takeover."""
        return fetch_id in self._takeovers

    def begin(self, command: TakeOverPrefix) -> None:
        """Fetches the missing blocks of a prefix, as far as there is room."""
        pool = self._kv_cache.pool
        self._num_begun += 1
        owner = BlockOwner("takeover", str(self._num_begun))
        held = pool.match(command.keys)
        missing = command.keys[len(held) :]
        pool.acquire(owner, held)
        num_blocks = min(len(missing), pool.num_blocks // MAX_SHARE)
        num_blocks = min(num_blocks, self._make_room(num_blocks, command.num_uses))
        blocks = self._kv_cache.sequences.allocate(owner, num_blocks, held)
        while num_blocks and not blocks:  # the free blocks may lie in several arenas
            num_blocks //= 2
            blocks = self._kv_cache.sequences.allocate(owner, num_blocks, held)
        full = num_blocks < len(missing)
        if not blocks:
            pool.release(owner)
            self._actions_out.report(
                PrefixTakenOver(number=command.number, num_blocks=0, full=full)
            )
            return
        keys = missing[:num_blocks]
        takeover = _Takeover(owner, command, keys, tuple(blocks), len(held), full)
        self._takeovers[owner.name] = takeover
        self._actions_out.perform(
            FetchBlocks(owner.name, command.source, keys, blocks, command.timeout_s)
        )

    def on_fetch_ended(self, event: FetchEnded) -> None:
        """Caches the blocks that arrived, with the number of uses they had at the source."""
        takeover = self._takeovers.pop(event.fetch_id)
        pool, actions_out = self._kv_cache.pool, self._actions_out
        for offset in range(event.num_blocks):
            block_id = takeover.blocks[offset]
            if pool.cache_block(block_id, takeover.keys[offset], takeover.depth + offset):
                pool.count_uses(block_id, takeover.command.num_uses)
        pool.release(takeover.owner)
        actions_out.count("taken_over_blocks", event.num_blocks)
        actions_out.count("corrupt_slices", event.corrupt_slices)
        actions_out.count("fetched_bytes", event.num_bytes)
        actions_out.count("failed_fetches", 1 if event.error else 0)
        actions_out.report(
            PrefixTakenOver(
                number=takeover.command.number,
                num_blocks=event.num_blocks,
                full=takeover.full,
                error=event.error,
            )
        )

    def _make_room(self, num_blocks: int, num_uses: int) -> int:
        """Evicts blocks until `num_blocks` are free, but none that is used at least `num_uses`
        times. Returns the number of free blocks."""
        pool = self._kv_cache.pool
        while pool.num_free < num_blocks:
            victims = pool.withdraw(EVICTION, 1)
            if not victims:
                break
            if pool.num_uses(victims[0]) >= num_uses:
                pool.acquire(EVICTION, victims)  # the block stays cached after this hold
                pool.release(EVICTION)
                break
            pool.release(EVICTION)
        return pool.num_free

"""Keeps track of which arenas of an instance are lost, and when a returned arena can be used.

An arena is used again only once no request holds blocks of the lost one. Requests that no other
instance can take wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from moonpool.kvcache.block_pool import BlockPool
from moonpool.scheduler.attention_pools.partitions import PartitionedPool
from moonpool.types import BlockId, BlockKey


class BlockUser(Protocol):
    """The part of a request that `ArenaTracker` reads."""

    @property
    def block_ids(self) -> Sequence[BlockId]: ...

    @property
    def fetched_blocks(self) -> Sequence[BlockId]: ...

    @property
    def target(self) -> object | None:
        """The target to which its KVCache is streamed, or None."""
        ...

    @property
    def closing(self) -> bool: ...


UserT = TypeVar("UserT", bound=BlockUser)


class ArenaTracker(Generic[UserT]):
    """Does nothing if `pool` has one arena only: that arena is lost with the instance."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool if isinstance(pool, PartitionedPool) else None
        self._returning: dict[int, Sequence[tuple[BlockId, BlockKey]]] = {}
        self._parked: list[UserT] = []

    def lose(self, arena: int) -> bool:
        """Takes the keys of all blocks in the arena. Returns False if it was lost
        already."""
        self._returning.pop(arena, None)
        if self._pool is None or self._pool.is_lost(arena):
            return False
        self._pool.lose(arena)
        return True

    def bring_back(self, arena: int, cached: Sequence[tuple[BlockId, BlockKey]]) -> None:
        """Notes that the arena is reachable again and still has these full blocks."""
        if self._pool is not None:
            if not self._pool.is_lost(arena):
                self._pool.lose(arena)  # the loss was never reported: another arena took its place
            self._returning[arena] = cached

    def run(self) -> None:
        """Restores what can be restored. Call it after each event: holds may have
        ended."""
        pool = self._pool
        if pool is None:
            return
        for arena, cached in list(self._returning.items()):
            if pool.restore(arena, cached):
                del self._returning[arena]

    def park(self, user: UserT) -> bool:
        """Lets the request wait until no arena is lost. Returns False if none is."""
        pool = self._pool
        if pool is None or not pool.any_lost:
            return False
        self._parked.append(user)
        return True

    def unpark(self) -> list[UserT]:
        """Returns the parked requests once no arena is lost."""
        if not self._parked or (self._pool is not None and self._pool.any_lost):
            return []
        parked, self._parked = self._parked, []
        return [user for user in parked if not user.closing]

    def touches(self, user: UserT, arena: int) -> bool:
        """Whether the request has blocks in the arena."""
        return self._any_in(user.block_ids, arena) or self._any_in(user.fetched_blocks, arena)

    def survives(self, user: UserT, lost_arena: int) -> bool:
        """Whether this request's share of a step that failed with the arena can be run again."""
        return user.target is None and not self.touches(user, lost_arena)

    def _any_in(self, block_ids: Sequence[BlockId], arena: int) -> bool:
        return self._pool is not None and any(self._pool.arena_of(b) == arena for b in block_ids)

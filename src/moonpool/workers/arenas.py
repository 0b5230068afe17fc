"""The arenas of an instance whose blocks lie in several: which are lost, and when one is back.

An arena is used again only when nobody holds blocks of what was lost. Works that no other instance
can take wait for it.
"""

from __future__ import annotations

from moonpool.kvcache.partitions import PartitionedPool
from moonpool.types import BlockId
from moonpool.workers.actions import ArenaBack
from moonpool.workers.active import ActiveWork
from moonpool.workers.holdings import Holdings


class Arenas:
    """Does nothing where there is one arena only: it is lost with the instance."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._returning: dict[int, ArenaBack] = {}
        self._parked: list[ActiveWork] = []

    @property
    def _pool(self) -> PartitionedPool | None:
        pool = self._holdings.pool
        return pool if isinstance(pool, PartitionedPool) else None

    def lose(self, arena: int) -> bool:
        """False if that is known."""
        self._returning.pop(arena, None)
        if self._pool is None or self._pool.is_lost(arena):
            return False
        self._pool.lose(arena)
        return True

    def bring_back(self, event: ArenaBack) -> None:
        if self._pool is not None:
            if not self._pool.is_lost(event.arena):
                self._pool.lose(event.arena)  # nobody told us that it was another one meanwhile
            self._returning[event.arena] = event

    def run(self) -> None:
        """To be called after each event: some holds may have ended."""
        pool = self._pool
        if pool is None:
            return
        for arena, event in list(self._returning.items()):
            if pool.restore(arena, event.named):
                del self._returning[arena]

    def park(self, active: ActiveWork) -> bool:
        """The work waits for room that is lost at present; False if none is."""
        pool = self._pool
        if pool is None or not pool.any_lost:
            return False
        self._parked.append(active)
        return True

    def unpark(self) -> list[ActiveWork]:
        """Works that need wait no longer."""
        if not self._parked or (self._pool is not None and self._pool.any_lost):
            return []
        parked, self._parked = self._parked, []
        return [active for active in parked if not active.closing]

    def touches(self, active: ActiveWork, arena: int) -> bool:
        """Whether the work has blocks in it."""
        return self._any_in(active.block_ids, arena) or self._any_in(active.fetched_blocks, arena)

    def survives(self, active: ActiveWork, lost_arena: int) -> bool:
        """Whether a step that failed with the arena can be run again as far as this work goes."""
        return active.target is None and not self.touches(active, lost_arena)

    def _any_in(self, block_ids: list[BlockId], arena: int) -> bool:
        return self._pool is not None and any(self._pool.part_of(b) == arena for b in block_ids)

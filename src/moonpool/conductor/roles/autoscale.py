"""How many instances of each role the load wants. Starts and stops none.

The wanted number of a pool is its demand (`role_balance`), in instances, over the share of their
time that instances should be busy. More instances are wanted as soon as the demand of the short or
of the long window says so, for a new instance takes minutes to boot. The number falls only after
the demand has been lower for a whole window, to what the highest demand in that window needed.
"""

from __future__ import annotations

from collections import deque
from math import ceil, isfinite

from moonpool.conductor.actions import InstancesWanted
from moonpool.conductor.instance_table import InstanceTable
from moonpool.conductor.roles.role_balance import RoleBalance

CHECK_S = 2.0
SLACK = 0.02
"""Demand may exceed what fewer instances should serve by this share of an instance."""
MOST_WANTED = 10_000


class Autoscale:
    """Tracks the number of instances wanted over time. At least one instance of each role is
    wanted."""

    def __init__(self, balance: RoleBalance, target_load: float, window_s: float) -> None:
        """`target_load`: share of its time that each instance should be busy."""
        self.wanted: InstancesWanted | None = None  # None if too few requests have come so far
        self._balance = balance
        self._target_load = target_load
        self._prefill, self._decode = _Pool(window_s), _Pool(window_s)
        self._next_check_s = 0.0

    def tick(self, table: InstanceTable, now: float) -> list[InstancesWanted]:
        """Checks the demand every few seconds; returns the numbers wanted if they have changed."""
        if now < self._next_check_s:
            return []
        self._next_check_s = now + CHECK_S
        demand = self._balance.demand(table, now)
        if demand is None:
            return []
        before, self.wanted = self.wanted, self._want(demand, now)
        return [self.wanted] if self.wanted != before else []

    def _want(self, demand: tuple[float, float], now: float) -> InstancesWanted:
        prefill, decode = (
            pool.most(self._count(each), now)
            for pool, each in zip((self._prefill, self._decode), demand, strict=True)
        )
        return InstancesWanted(prefill, decode)

    def _count(self, demand: float) -> int | None:
        """Returns how many instances meet the demand, or None if the pool has no instance, from
        whose costs the number could be computed."""
        if not isfinite(demand):
            return None
        return min(max(ceil(demand / self._target_load - SLACK), 1), MOST_WANTED)


class _Pool:
    """The highest number wanted within the window, kept as a queue of falling numbers."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._asked: deque[tuple[float, int]] = deque()

    def most(self, count: int | None, now: float) -> int:
        """Adds a number, or the newest one again if it is unknown; returns the highest one of the
        window."""
        asked = self._asked
        if count is None:
            count = asked[-1][1] if asked else 1
        while asked and asked[-1][1] <= count:
            asked.pop()
        asked.append((now, count))
        while asked[0][0] < now - self._window_s:
            asked.popleft()
        return asked[0][1]

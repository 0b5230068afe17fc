"""Starts and ends simulated instances as the Conductor wants them (`conductor.roles.autoscale`).

An instance that is started joins after its boot time, and costs money from its start. An instance
that is no longer needed drains and leaves. An instance that restarts counts as present. Boots are
not interrupted: if an instance is no longer wanted when it joins, it drains at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from moonpool.conductor.actions import DrainRequested, InstancesWanted
from moonpool.conductor.state import InstanceState
from moonpool.types import InstanceId, Role

SCALED_ROLES = (Role.PREFILL, Role.DECODE)


class Scaling:
    """Counts the instances that boot and the instances that are present."""

    def __init__(
        self,
        states: dict[InstanceId, InstanceState],
        boot: Callable[[Role], None],
        drain: Callable[[DrainRequested], None],
        drain_s: float,
    ) -> None:
        """`states` has the Conductor's instances. `boot` must lead to a later call of `booted`."""
        self.num_boots: Counter[Role] = Counter()
        self.num_drains: Counter[Role] = Counter()
        self._states = states
        self._boot = boot
        self._drain = drain
        self._drain_s = drain_s
        self._booting: Counter[Role] = Counter()
        self._wanted: InstancesWanted | None = None

    def want(self, wanted: InstancesWanted) -> None:
        """Starts missing instances and drains surplus instances."""
        self._wanted = wanted
        for role, number in zip(SCALED_ROLES, (wanted.prefill, wanted.decode), strict=True):
            self._scale(role, number)

    def booted(self, role: Role) -> None:
        """Notes that an instance has joined."""
        self._booting[role] -= 1
        if self._wanted is not None:
            self.want(self._wanted)

    def _scale(self, role: Role, wanted: int) -> None:
        states = [s for s in self._states.values() if s.info.role is role]
        serving = [s for s in states if s.drain is None]
        returning = sum(s.drain is not None and s.drain.returns for s in states)
        present = len(serving) + returning + self._booting[role]
        for _ in range(wanted - present):
            self._booting[role] += 1
            self.num_boots[role] += 1
            self._boot(role)
        idlest = sorted(serving, key=lambda s: (len(s.prefills) + len(s.decodes), s.row))
        for state in idlest[: max(min(present - wanted, len(serving) - 1), 0)]:
            self.num_drains[role] += 1
            self._drain(DrainRequested(state.info.instance_id, self._drain_s, "autoscale"))

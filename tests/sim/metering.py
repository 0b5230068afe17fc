"""Checks rules that the metrics of a run's heads must keep, whatever happens.

The metrics of a new head begin at 0, and must leave out what its instances counted for the earlier
head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.api.metrics.labels import FAILURES, REFUSALS
from moonpool.api.metrics.server_metrics import ServerMetrics
from moonpool.conductor.state import InstanceState
from moonpool.head.watch.metrics_collector import MetricsCollector
from moonpool.protocol.messages import InstanceInfo
from moonpool.request_record import RequestRecord
from moonpool.types import InstanceId
from tests.sim.member import Member

if TYPE_CHECKING:
    from tests.sim.world import World

KNOWN = {"moonpool:requests_failed": FAILURES, "moonpool:requests_rejected": REFUSALS}


class Metering:
    """Follows one run. Instances report their counters at each join and before each loss."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._members: list[Member] = []
        self._corrupt_slices = 0.0  # the sum of the counts of earlier heads
        self._were_lost = False
        self._begin(set())

    def _begin(self, inherited: set[InstanceId]) -> None:
        self._metrics = ServerMetrics("fake")
        self._collector = MetricsCollector(self._metrics)
        self._inherited = inherited
        self._num_ended = 0

    def on_new_head(self, expected: set[InstanceId]) -> None:
        self.check()
        self._corrupt_slices += self._value("moonpool:corrupt_slices")
        self._were_lost = True
        self._begin(expected)

    def on_joined(self, member: Member, info: InstanceInfo) -> None:
        if member not in self._members:
            self._members.append(member)
        self._collector.instance_joined(info, info.instance_id in self._inherited)
        self._inherited.discard(info.instance_id)
        self.on_load(member)

    def on_load(self, member: Member) -> None:
        state = self._world.conductor.instances.get(member.instance_id)
        load = member.instance.load()
        if state is None:
            state = InstanceState(member.info(), 0, member.role)
        self._collector.instance_load(state, load)

    def on_loss(self, member: Member) -> None:
        self._were_lost = True
        if member.joined:
            self.on_load(member)

    def on_ended(self, record: RequestRecord) -> None:
        self._num_ended += 1
        self._collector.request_ended(record, self._world.clock.now)

    def check(self) -> None:
        """Asserts that every ended request is counted once, with a reason that is known beforehand,
        so that alerts can use it."""
        counted = sum(
            sum(self._metrics.values(name).values()) for name in ("vllm:request_success", *KNOWN)
        )
        assert counted == self._num_ended, f"{counted} of {self._num_ended} ends are counted"
        for name, known in KNOWN.items():
            found = {label for label, n in self._metrics.values(name).items() if n}
            assert found <= set(known), f"{name} has {found - set(known)}, which are not known"
        restarts = sum(self._metrics.values("moonpool:instance_restarts").values())
        assert restarts <= len(self._members)

    def check_end(self) -> None:
        for member in self._members:
            if member.alive and member.joined:
                self.on_load(member)
        self.check()
        found = self._corrupt_slices + self._value("moonpool:corrupt_slices")
        damaged = sum(getattr(member, "num_damaged", 0) for member in self._members)
        assert found <= damaged, f"{found} slices are counted as corrupt, {damaged} were"
        assert self._were_lost or found == damaged

    def _value(self, name: str) -> float:
        return self._metrics.values(name)[""]

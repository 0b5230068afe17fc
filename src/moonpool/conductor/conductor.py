"""The Conductor: Mooncake's global scheduler, as a state machine.

`handle(event, now)` takes arrivals, reports and losses, and returns commands and answers. This file
routes the events, and owns the instances: their joins, their blocks, their departures.
`request_lifecycle` owns the requests, and the policies (`placement`, `admission`) choose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from moonpool.conductor.actions import (
    Announce,
    CacheDropRequested,
    ConductorAction,
    ConductorEvent,
    DeadlineMoved,
    DrainRequested,
    HotRequested,
    InstanceCrashed,
    InstanceForgotten,
    InstanceJoined,
    InstanceLost,
    InstancesExpected,
    InstancesLaunched,
    Relaunch,
    Reported,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    Send,
    Tick,
)
from moonpool.conductor.admission.check import AdmissionCheck
from moonpool.conductor.admission.goodput import GoodputModel
from moonpool.conductor.attempt_planner import AttemptPlanner, Policies
from moonpool.conductor.cluster_state import ClusterState
from moonpool.conductor.draining import Draining
from moonpool.conductor.forecast.cost_estimator import CostEstimator
from moonpool.conductor.forecast.decode_forecast import Forecast, IntervalForecast, SurvivalForecast
from moonpool.conductor.forecast.output_predictor import LengthPredictor, OutputPredictor
from moonpool.conductor.observers import ClusterObserver, Observers
from moonpool.conductor.placement.prefetching import Prefetching
from moonpool.conductor.placement.replication import ReplicaMarks, Replication
from moonpool.conductor.programs.keeper import ProgramKeeper
from moonpool.conductor.programs.programs import Programs
from moonpool.conductor.request_lifecycle import RequestLifecycle
from moonpool.conductor.roles.role_switching import RoleSwitching
from moonpool.conductor.state import InstanceState, TrackedRequest
from moonpool.conductor.waiting.fair_share import FairShare
from moonpool.conductor.waiting.rules import WaitRules
from moonpool.config.slo import ASSUMED_TBT_S, ASSUMED_TTFT_S
from moonpool.config.tables import ADMISSIONS, PLACEMENTS, ConductorConfig
from moonpool.protocol.messages import (
    AdaptersLoaded,
    BlocksChanged,
    BlocksSnapshot,
    CostMeasured,
    DropCachedBlocks,
    HotPrefixes,
    InstanceInfo,
    InstanceLoad,
    LeaveRequested,
    ListHot,
    PrefixTakenOver,
    Report,
    Resync,
    RoleChanged,
    StepTokens,
)
from moonpool.types import InstanceId, RequestId, Role, Slo

DEFAULT_SLO = Slo(ttft_s=ASSUMED_TTFT_S, tbt_s=ASSUMED_TBT_S)
MAX_WITHIN_S = 3600.0
OPERATOR_LIST = 0
"""The number of a list of hot prefixes that was requested by the API, and not by a drain."""


class PoolLoads(NamedTuple):
    """Predicted latency over the default SLO, as the mean over a pool's instances. A decode
    instance counts with the used share of its memory where that is higher."""

    prefill: float
    decode: float  # load of the requests that decode now
    # load after the mean TTFT, when a prefill that is placed now should have ended
    decode_projected: float


class Conductor:
    """The Conductor is the global state machine of the cluster."""

    def __init__(
        self,
        config: ConductorConfig,
        incarnation: str = "",
        default_slo: Slo = DEFAULT_SLO,
        policies: Policies | None = None,
        tenant_weights: Mapping[str, float] | None = None,
        tenant_caches: Mapping[str, float] | None = None,
    ) -> None:
        """`incarnation`: part of all attempt ids, which tells them from those of an earlier
        Conductor of this cluster. `default_slo`: the unit of `loads`; its TBT is also the limit by
        which chunks are sized and roles are balanced. `policies`: those that the config names by
        module and class (see `plugins.policies`). `tenant_weights`: shares of an overloaded cluster
        by tenant, 1 for the others. `tenant_caches`: shares of each instance's cache that tenants
        may have, 1 for the others."""
        policies = policies or Policies()
        assert policies.placement is not None or config.placement in PLACEMENTS
        assert policies.admission is not None or config.admission in ADMISSIONS
        self.default_slo = default_slo
        by_length = config.decode_prediction == "length"
        self.forecast: Forecast = IntervalForecast() if by_length else SurvivalForecast()
        # `inline_chunks` is off where instances do not size chunks (`Config.for_conductor`).
        sizes_chunks = config.inline_chunks
        state = ClusterState(self.forecast, default_slo.tbt_s, sizes_chunks, incarnation)
        self.cluster_state = state
        # All parts of the Conductor change these three objects, and drivers read them.
        self.index = state.index
        self.instance_table = state.instance_table
        self.instances = state.instances
        self._actions: list[ConductorAction] = []
        shares = FairShare(tenant_weights, tenant_caches)
        wait_rules = WaitRules(state, shares, config.admission != "none")
        keeper = ProgramKeeper(config.programs, state, wait_rules.waiting, self._actions)
        self.roles = RoleSwitching(config, state, default_slo)
        self.drains = Draining(state)
        self.cost_estimator = CostEstimator(state, config.learning, self.forecast.error)
        self.goodput = GoodputModel(self.instance_table, config.learning, config.decode_wait)
        self.output_predictor = (LengthPredictor if by_length else OutputPredictor)(state)
        self.replication = Replication(state) if config.replicate else None
        options: tuple[ClusterObserver | None, ...] = (
            Prefetching(state) if config.prefetch else None,
            self.replication,
            ReplicaMarks(self.index) if config.spare_copies_first else None,
        )
        self._observers = Observers(
            [
                self.cost_estimator,
                shares,
                keeper,
                wait_rules.retries,
                wait_rules.rooms,
                self.roles,
                self.drains,
                *filter(None, options),
                self.output_predictor,
                self.goodput,
            ]
        )
        admission = AdmissionCheck(
            config, policies.admission, state, self.cost_estimator, self.goodput
        )
        self._planner = AttemptPlanner(config, policies, state, self.output_predictor, admission)
        self._lifecycle = RequestLifecycle(
            self._planner, state, wait_rules, keeper, self._observers, self._actions
        )
        self._launched: set[InstanceId] = set()

    def watch(self, on_work: Callable[[RequestId | None], None]) -> None:
        """`on_work` is called with a request's id before it is planned, and with None after that.
        `on_work` must change nothing here. A driver uses it to note the request that it is
        processing, in case the process crashes.
        """
        self._lifecycle.on_work = on_work

    @property
    def lifecycle(self) -> RequestLifecycle:
        """Moves the requests from their arrival to their end."""
        return self._lifecycle

    @property
    def requests(self) -> dict[RequestId, TrackedRequest]:
        """The requests under way."""
        return self._lifecycle.requests

    @property
    def num_waiting(self) -> int:
        """Requests that wait for an instance or for room."""
        return len(self._lifecycle.waiting)

    @property
    def programs(self) -> Programs:
        """The programs (agents) that are under way."""
        return self._lifecycle.keeper.programs

    @property
    def num_programs_waiting(self) -> int:
        """New programs that wait until others have ended."""
        return len(self._lifecycle.keeper.door)

    @property
    def num_pauses(self) -> int:
        """Number of answers that were paused in favour of another tenant's request."""
        return self._lifecycle.num_pauses

    @property
    def is_busy(self) -> bool:
        """Whether a request or the drain of an instance is under way. If neither is under way, a
        tick may be late."""
        states = self.instances.values()
        return bool(self.requests) or any(state.drain is not None for state in states)

    @property
    def expected(self) -> dict[InstanceId, Role]:
        """The instances that are up or should soon be, with their roles."""
        up = {name: state.info.role for name, state in self.instances.items()}
        return self._lifecycle.waiting.lost | up

    def handle(self, event: ConductorEvent, now: float) -> list[ConductorAction]:
        match event:
            case Reported():
                self._on_report(event.instance_id, event.report, now)
            case RequestArrived():
                self._lifecycle.arrive(event.request, now, event.delivered)
            case RequestCancelled():
                self._lifecycle.cancel(event.request_id, event.reason, now)
            case RequestFinished():
                self._lifecycle.finish(event.request_id, event.reason, event.num_tokens, now)
            case DeadlineMoved():
                self._lifecycle.move_deadline(event.request_id, event.deadline_s)
            case InstancesExpected():
                self._lifecycle.waiting.expect(event.roles)
            case InstancesLaunched():
                self._launched = set(event.instance_ids)
            case InstanceJoined():
                self._on_instance_joined(event.info, now)
            case InstanceLost():
                self._on_instance_lost(event.instance_id, event.reason, now)
            case InstanceCrashed():
                self._lifecycle.on_instance_crashed(event.instance_id, now)
            case InstanceForgotten():
                self._lifecycle.waiting.note_joined(event.instance_id)
                self._lifecycle.place_waiting(now)
            case DrainRequested():
                self._drain(event.instance_id, event.within_s, event.why, now, event.returns)
            case HotRequested():
                command = ListHot(number=OPERATOR_LIST, num_blocks=event.num_blocks)
                self._actions += [Send(instance_id, command) for instance_id in self.instances]
            case CacheDropRequested():
                drop = DropCachedBlocks()
                self._actions += [Send(instance_id, drop) for instance_id in self.instances]
            case Tick():
                self._on_tick(now)
        self._lifecycle.place_into_freed_room(now)
        actions = self._actions.copy()
        self._actions.clear()
        return actions

    @property
    def lack(self) -> str:
        """Names the role that no instance has, and how to get one; "" if requests are served."""
        roles = [state.role for state in self.instances.values()]
        lost = self._lifecycle.waiting.lost
        for name, other in (("prefill", Role.DECODE), ("decode", Role.PREFILL)):
            if any(role is not other for role in roles):
                continue
            expected = [instance_id for instance_id, role in lost.items() if role is not other]
            if expected:
                return f"no {name} instance is up: {', '.join(expected[:4])} should be back soon"
            return f"no {name} instance is up: {_how_to_start(f'{name}s')}"
        return ""

    def loads(self, now: float) -> PoolLoads:
        """How loaded both pools are; cheap enough for every scrape and sample."""
        slo, table = self.default_slo, self.instance_table
        projected = self.forecast.project(now + self._lifecycle.mean_ttft_s.value, now)
        return PoolLoads(
            table.prefill_load(slo, now),
            table.decode_load(slo),
            table.spread_decode_load(slo, *table.without_remainders(*projected)),
        )

    def validate(self) -> None:
        """Asserts that reservations and requests agree in both directions."""
        self._lifecycle.validate()
        for validate in self._observers.validate:
            validate()

    # Instances

    def _on_instance_joined(self, info: InstanceInfo, now: float) -> None:
        if info.instance_id in self.instances:
            self._on_instance_lost(info.instance_id, "it joined again", now)
        self._resync(self.cluster_state.join(info))
        self._actions += self.roles.assign_roles()
        self._lifecycle.waiting.note_joined(info.instance_id)
        self._lifecycle.place_waiting(now)

    def _resync(self, state: InstanceState) -> None:
        """Requests a snapshot of all blocks, once until it arrives."""
        if not state.resyncing:
            state.resyncing = True
            self._actions.append(Send(state.info.instance_id, Resync()))

    def _on_instance_lost(self, instance_id: InstanceId, reason: str, now: float) -> None:
        state = self.cluster_state.leave(instance_id)
        if state is None:
            return
        self._lifecycle.waiting.note_lost(state)
        self._actions += self.roles.on_lost(state, now)
        self._actions += self.drains.on_lost(state)
        self._lifecycle.on_instance_lost(state, reason, now)

    def _on_report(self, instance_id: InstanceId, report: Report, now: float) -> None:
        state = self.instances.get(instance_id)
        if state is None:
            return
        match report:
            case StepTokens():
                self._lifecycle.on_step_tokens(state, report, now)
            case BlocksChanged():
                if not self.index.apply(
                    instance_id,
                    state.info.incarnation,
                    report.sequence,
                    report.stored,
                    report.removed,
                    report.demoted,
                ):
                    self._resync(state)
                elif report.demoted:
                    for demoted in self._observers.blocks_demoted:
                        demoted(report.demoted, now)
            case BlocksSnapshot():
                state.resyncing = False
                if self.index.load_snapshot(
                    instance_id,
                    state.info.incarnation,
                    report.next_sequence,
                    report.keys,
                    report.demoted,
                ):
                    self._lifecycle.keeper.marks_dropped(state)
            case InstanceLoad():
                state.load = report
            case CostMeasured():
                self.cost_estimator.take_profile(state, report.cost)
                if (at := report.address) is not None:  # of a pool, which keeps prefixes
                    self.instance_table.set_host(state.row, at.host_id)
                    state.info = msgspec.structs.replace(
                        state.info, address=at, caches_prefixes=True
                    )
            case AdaptersLoaded():
                names = tuple(adapter.name for adapter in report.adapters)
                state.info = msgspec.structs.replace(state.info, adapters=names)
            case RoleChanged():
                self._actions += self.roles.on_role_changed(state, report.role, now)
            case HotPrefixes():
                if report.number == OPERATOR_LIST:
                    state.hot = report
                else:
                    self._actions += self.drains.on_hot(state, report, now)
            case PrefixTakenOver():
                for taken in self._observers.prefix_taken:
                    self._actions += taken(report, now)
            case LeaveRequested():
                self._on_leave_requested(state, report.within_s, now)
            case _:
                self._lifecycle.on_report(report, instance_id, now)

    def _on_leave_requested(self, state: InstanceState, within_s: float, now: float) -> None:
        """Lets an instance leave whose process received a signal to end. The last instance of its
        role is replaced, if its launcher can do that."""
        name, what = state.info.instance_id, self.drains.sole_work(state)
        returns = bool(what) and name in self._launched
        if state.drain is None and what:
            text = f"{name} was told to end, and is the last instance that {what}"
            if returns:
                self._actions.append(Relaunch(name))
                text += ": another one takes its place. To end the server, stop it as a whole"
            else:
                text += f": requests are refused until another one joins ({_how_to_start(what)})"
            self._actions.append(Announce(text, is_warning=True))
        self._drain(name, within_s, "it was told to end", now, returns)

    def _drain(
        self,
        instance_id: InstanceId,
        within_s: float,
        why: str,
        now: float,
        returns: bool = False,
    ) -> None:
        """Starts an instance's departure. Ignores unknown instances."""
        state = self.instances.get(instance_id)
        if state is None:
            return
        self._actions += self.roles.give_up(state, now)
        within_s = min(max(within_s, 0.0), MAX_WITHIN_S)
        self._actions += self.drains.begin(state, within_s, why, now, returns)
        self._actions += self.roles.assign_roles()
        if returns:
            self._lifecycle.waiting.expect({instance_id: state.info.role})

    def _on_tick(self, now: float) -> None:
        at_s = now + self._lifecycle.mean_ttft_s.value
        self.forecast.note_projection(at_s, self.forecast.project(at_s, now)[0])
        self._lifecycle.expire(now)
        self._lifecycle.place_waiting(now)
        for tracked in self.drains.to_move(now):
            self._lifecycle.move(tracked, now)
        for tick in self._observers.tick:
            self._actions += tick(now)


def _how_to_start(what: str) -> str:
    """`what`: the missing work, "prefills" or "decodes"."""
    role = what.removesuffix("s")
    return f"start one: moonpool worker --role {role} --head HOST:PORT, or list a server for it"

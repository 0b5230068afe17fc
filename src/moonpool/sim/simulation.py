"""Drives the Conductor and the instances of a cluster in virtual time, by a trace.

This driver decides nothing. It carries commands from the Conductor to the nodes and reports back,
each with the latency of the control network. Arrivals are read one by one, so a trace may be larger
than memory. The same seed gives the same run, event for event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf
from random import Random

from moonpool.conductor.actions import (
    Announce,
    ConductorEvent,
    Deliver,
    DrainRequested,
    InstanceJoined,
    InstanceLost,
    InstancesWanted,
    Refuse,
    Reported,
    RequestArrived,
    RequestEnded,
    Send,
    Tick,
)
from moonpool.conductor.attempt_planner import POLICY_ERROR
from moonpool.conductor.conductor import Conductor
from moonpool.config.tables import Config, ConfigError
from moonpool.plugins.policies import load_eviction, load_policies
from moonpool.protocol.messages import AttemptId, InstanceInfo, Report
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.request_record import RequestRecord
from moonpool.scheduler.instance import Instance
from moonpool.scheduler.instance_config import InstanceConfig, InstanceMemory, instance_config
from moonpool.sim.clients import Clients
from moonpool.sim.clock import Clock, Priority
from moonpool.sim.drafter import Acceptance, SimDrafter
from moonpool.sim.engine import EOS_TOKEN_ID, EngineTraits, SimEngine
from moonpool.sim.hardware.build import Hardware, NodeHardware
from moonpool.sim.metrics import Collector, Timeline
from moonpool.sim.network import Link, Network
from moonpool.sim.perturbation import Perturbation, StepFactor
from moonpool.sim.scaling import Scaling
from moonpool.sim.settings import USUAL_SETTINGS, SimulationSettings
from moonpool.sim.sim_instance import SimInstance
from moonpool.sim.transfers import NodeLinks, SimMessenger
from moonpool.sim.workload import Arrival
from moonpool.types import InstanceId, Request, RequestId, Role, SamplingParams

IDLE_S = 600.0
"""After this time without a request, every second tick runs; after twice the time, every third."""
TICK_S = 1.0
DRAIN_S = 60.0
MAX_REPEATS = 256
MAX_ANSWER_TOKENS = 1 << 20  # the engine ends answers earlier, at the trace's lengths
POOL_SERIES = (
    "prefill_load",
    "decode_load",
    "decode_projected",
    "prefill_queued",
    "decode_running",
    "held_tokens",
    "arrived",
    "rejected",
    "completed",
    "effective",
)


class Simulation:
    """One run: construct, call `run` once, then read `collector`, `nodes` and `timeline`."""

    def __init__(
        self,
        config: Config,
        hardware: Hardware,
        settings: SimulationSettings = USUAL_SETTINGS,
    ) -> None:
        """Raises ConfigError for an unknown instance name, or a policy that cannot be loaded."""
        self.config = config
        self.hardware = hardware
        self.settings = settings
        self.seed = config.conductor.seed if settings.seed is None else settings.seed
        self._acceptance = Acceptance(config.hardware.draft_acceptance, self.seed)
        self.clock = Clock()
        self.network = Network(self.clock)
        self._slo = config.slo.usual
        load_eviction(config.pool.eviction, settings.objects)
        self.conductor = Conductor(
            config.for_conductor(),
            default_slo=self._slo,
            policies=load_policies(config.conductor, settings.objects),
            tenant_weights=settings.tenant_share,
            tenant_caches=settings.tenant_cache,
        )
        self._on_end: Callable[[RequestRecord], None] | None = None
        self.collector = Collector()
        self.nodes: dict[InstanceId, SimInstance] = {}
        self.past_nodes: list[SimInstance] = []  # instances that a restart replaced
        self.last_arrival_s = self.last_end_s = 0.0
        self.announced: list[tuple[float, str]] = []
        self.wanted: list[tuple[float, int, int]] = []  # entries are (seconds, prefill, decode)
        self.timeline = Timeline(POOL_SERIES, settings.sample_s)
        self._perturbation = Perturbation(settings.noise, settings.slow, settings.recorded)
        self._latency_s = hardware.control_latency_s
        self._rng = Random(self.seed)
        self._messengers: dict[InstanceId, SimMessenger] = {}
        self._links: dict[InstanceId, NodeLinks] = {}
        # the keys are str, because a `RequestId` would cost a call
        self._num_output_tokens: dict[str, int] = {}
        self._num_prompt_tokens: dict[str, int] = {}
        self._tick_s, self._busy_s = inf, 0.0
        self.clients = self._clients()
        self._add_nodes()
        self._check_names([*settings.slow, *settings.drain, *settings.restart])
        count = config.cluster
        self._next_number = {Role.PREFILL: count.prefill, Role.DECODE: count.decode}
        self.scaling = Scaling(self.conductor.instances, self._boot, self._post, DRAIN_S)
        self._returning: set[InstanceId] = set()
        self._plan_drains(settings.drain, returns=False)
        self._plan_drains(settings.restart, returns=True)
        sampled = tuple(list(self.nodes)[: settings.node_series])
        self.node_timeline = Timeline(sampled, settings.sample_s)

    def _clients(self) -> Clients:
        block_tokens = self.hardware.layout.block_tokens
        return Clients(self.clock, self._arrive, block_tokens, self.settings.most_programs)

    def run(
        self,
        arrivals: Iterable[Arrival],
        on_end: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        """Simulates until all requests have ended. Arrivals must be in order of time. `on_end` gets
        the record of each ended request."""
        self._on_end = on_end
        self.clients.start(iter(arrivals))
        self.clock.after(0.0, Priority.TICK, self._sample)
        self.clock.run()
        for name, node in self.nodes.items():
            node.note_occupation()
            if name in self.conductor.instances:
                node.note_role(self.last_end_s)

    # Departures

    def _plan_drains(self, instants: Mapping[str, float], returns: bool) -> None:
        for name, at_s in instants.items():
            self.clock.at(at_s, Priority.FAULT, self._drain, InstanceId(name), returns)

    def _drain(self, instance_id: InstanceId, returns: bool) -> None:
        refusal = self.conductor.drains.why_not(instance_id, returns)
        if refusal:
            self.announced.append((self.clock.now, f"drain: {refusal}"))
            return
        if returns:
            self._returning.add(instance_id)
        why = "simulated restart" if returns else "simulated drain"
        self._post(DrainRequested(instance_id, DRAIN_S, why, returns))
        self._keep_ticking()

    def _depart(self, instance_id: InstanceId, role: Role, number: int) -> None:
        """Reports the departure to the Conductor, and restarts the instance if it is to return."""
        lost = InstanceLost(instance_id, "it left")
        self.clock.after(self._latency_s, Priority.MESSAGE, self._post, lost)
        if instance_id in self._returning:
            self._returning.remove(instance_id)
            self.clock.after(
                self._latency_s, Priority.MESSAGE, self._replace, instance_id, role, number
            )

    def _replace(self, instance_id: InstanceId, role: Role, number: int) -> None:
        self.past_nodes.append(self.nodes[instance_id])
        self._add_node(instance_id, role, number, self.nodes[instance_id].info.incarnation + 1)

    def _boot(self, role: Role) -> None:
        self.clock.after(self.settings.boot_s, Priority.FAULT, self._booted, role)

    def _booted(self, role: Role) -> None:
        number = self._next_number[role]
        self._next_number[role] += 1
        self._add_node(InstanceId(f"{role.value}-{number}"), role, number)
        self.scaling.booted(role)
        self._keep_ticking()

    # Building

    def _add_nodes(self) -> None:
        cluster = self.config.cluster
        for role, count in (
            (Role.PREFILL, cluster.prefill),
            (Role.DECODE, cluster.decode),
            (Role.MIXED, cluster.mixed),
        ):
            for number in range(count):
                self._add_node(InstanceId(f"{role.value}-{number}"), role, number)

    def _check_names(self, names: list[str]) -> None:
        for name in names:
            if name not in self.nodes:
                known = f"{next(iter(self.nodes))} to {list(self.nodes)[-1]}"
                raise ConfigError(f"there is no instance {name!r}: use a name from {known}")

    def _add_node(
        self, instance_id: InstanceId, role: Role, number: int, incarnation: int = 1
    ) -> None:
        hardware = self._perturbation.hardware(self.hardware.of_role(role), role, number)
        draft = hardware.draft if role.decodes else None
        instance = Instance(
            self._instance_config(hardware),
            self.hardware.layout,
            hardware.num_blocks,
            role,
            hardware.estimate,
            (EOS_TOKEN_ID,),
            InstanceMemory(arenas=hardware.arenas),
            draft_model=None if draft is None else draft.place,
        )
        host = "one machine" if self.hardware.is_one_machine else instance_id
        info = InstanceInfo(
            instance_id=instance_id,
            role=role,
            incarnation=incarnation,
            address=PeerAddress(instance_id, host, "", "", 0),
            layout=self.hardware.layout,
            num_blocks=instance.num_blocks,
            cost=hardware.estimate,
            pid=0,
            host=host,
            engine_tokens=hardware.engine_tokens,
            chunk_tokens=self.config.engine.chunk_tokens,
            num_stages=hardware.ground_truth.num_stages,
            largest_blocks=min(instance.max_sequence_blocks, instance.num_blocks),
        )
        node = SimInstance(
            self.clock,
            info,
            instance,
            lambda report: self._report(instance_id, report),
            lambda: self._depart(instance_id, role, number),
        )
        engine = SimEngine(
            self.clock,
            hardware.ground_truth,
            self._output_of,
            self._prompt_of,
            node.post,
            self._step_factor(instance_id, role, number, hardware),
            self._note_prefill,
            EngineTraits(hardware.domain, self._acceptance, self._drafter(role, hardware)),
        )
        links = self._links.get(instance_id)
        if links is None:
            links = self._links[instance_id] = self._add_links(instance_id, hardware)
        messenger = SimMessenger(
            instance_id,
            self.network,
            links,
            self.hardware.layout,
            self._latency_s,
            self.settings.layer_wise,
            node.post,
            self._messengers,
        )
        node.attach(engine, messenger)
        self.nodes[instance_id] = node
        self._post(InstanceJoined(info))

    def _drafter(self, role: Role, hardware: NodeHardware) -> SimDrafter | None:
        if hardware.draft is None or not role.decodes:
            return None
        return SimDrafter(hardware.draft.ground_truth, self._acceptance, self._output_of)

    def _add_links(self, instance_id: InstanceId, hardware: NodeHardware) -> NodeLinks:
        def add(name: str, bytes_per_s: float) -> Link:
            return self.network.add_link(f"{instance_id} {name}", bytes_per_s)

        ssd = bool(hardware.num_slots)
        return NodeLinks(
            nic_in=add("in", hardware.nic_bytes_per_s),
            nic_out=add("out", hardware.nic_bytes_per_s),
            pcie=add("pcie", hardware.pcie_bytes_per_s),
            ssd_read=add("ssd-read", hardware.ssd_read_bytes_per_s) if ssd else None,
            ssd_write=add("ssd-write", hardware.ssd_write_bytes_per_s) if ssd else None,
        )

    def _instance_config(self, hardware: NodeHardware) -> InstanceConfig:
        return instance_config(
            self.config.engine,
            self.config.pool,
            self.config.slo,
            self.config.conductor.learning,
            hardware.ground_truth.num_stages,
            ssd_blocks=hardware.num_slots,
            store_shared=False,
            engine_tokens=hardware.engine_tokens,
            layer_wise_load=self.settings.layer_wise,
            # Where instances slow each other down, a step's time depends on which others compute.
            max_repeats=MAX_REPEATS if hardware.steady else 1,
            kept_tokens=hardware.kept_tokens,
        )

    def _step_factor(
        self, instance_id: InstanceId, role: Role, number: int, hardware: NodeHardware
    ) -> StepFactor:
        """Returns the factor of a step's time, from departures and contention of instances."""
        factor_of_step = self._perturbation.step_factor(instance_id, role, number, self._rng)
        if hardware.steady:
            return factor_of_step
        contention, (alone, contended, beginning) = hardware.contention, hardware.decode_spread

        def factor(prefills: bool, begins: bool) -> float:
            busy = sum(n.engine.busy for name, n in self.nodes.items() if name != instance_id)
            slower = contention[0] if prefills else contention[1]
            value = factor_of_step(prefills, begins) * (
                1.0 + (slower - 1.0) * busy / max(len(self.nodes) - 1, 1)
            )
            ratios = beginning if begins else contended if busy else alone
            if ratios and not prefills:
                value *= ratios[int(self._rng.random() * len(ratios))]
            return value

        return factor

    # Requests

    def _arrive(self, request_id: RequestId, arrival: Arrival) -> None:
        now = self.clock.now
        self.last_arrival_s = now
        self._num_output_tokens[request_id] = arrival.output_tokens
        self._num_prompt_tokens[request_id] = arrival.input_tokens
        max_tokens = arrival.output_tokens if self.settings.capped_answers else MAX_ANSWER_TOKENS
        slo_class = self.config.slo.class_of(arrival.slo_class, arrival.tenant)
        request = Request(
            request_id=request_id,
            token_ids=range(arrival.input_tokens),
            sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
            slo=self._slo if slo_class is None else slo_class.slo,
            arrived_s=now,
            deadline_s=now + self.config.api.request_timeout_s,
            use_cache=self.config.pool.prefix_caching,
            keys=arrival.keys,
            tenant=arrival.tenant,
            priority=arrival.priority,
            program=arrival.program,
        )
        if self.hardware.front_s:
            self.clock.after(
                self.hardware.front_s, Priority.MESSAGE, self._post, RequestArrived(request)
            )
        else:
            self._post(RequestArrived(request))
        self._keep_ticking()

    def _output_of(self, attempt_id: AttemptId) -> int:
        """Returns the true length of an attempt's answer, or 1 if its request has ended."""
        return self._num_output_tokens.get(attempt_id.partition("/")[0], 1)

    def _prompt_of(self, attempt_id: AttemptId) -> int:
        """Returns the prompt length of an attempt's request, or 0 if the request has ended."""
        return self._num_prompt_tokens.get(attempt_id.partition("/")[0], 0)

    def _note_prefill(self, attempt_id: AttemptId, seconds: float) -> None:
        request_id = _request_of(attempt_id)
        if request_id in self._num_output_tokens:
            self.collector.note_prefill(request_id, seconds)

    # Messages

    def _report(self, instance_id: InstanceId, report: Report) -> None:
        event = Reported(instance_id, report)
        self.clock.after(self._latency_s, Priority.MESSAGE, self._post, event)

    def _post(self, event: ConductorEvent) -> None:
        for action in self.conductor.handle(event, self.clock.now):
            match action:
                case Deliver():
                    pass  # nobody reads the tokens of a simulated answer
                case Send():
                    self.clock.after(
                        self._latency_s,
                        Priority.MESSAGE,
                        self.nodes[action.instance_id].post,
                        action.command,
                    )
                case Refuse():
                    name, refusal = action.request_id, action.refusal
                    if refusal.reason == POLICY_ERROR:
                        raise ConfigError(self.announced[-1][1])
                    self.collector.note_refused(name, refusal.status, refusal.reason)
                    self.clients.note_refused(name, refusal.status, refusal.retry_after_s)
                case RequestEnded():
                    self._end(action)
                case Announce():
                    self.announced.append((self.clock.now, action.text))
                case InstancesWanted():
                    self.wanted.append((self.clock.now, action.prefill, action.decode))
                    self.scaling.want(action)

    def _end(self, ended: RequestEnded) -> None:
        record = ended.record
        self.last_end_s = self.clock.now
        del self._num_output_tokens[record.request_id]
        del self._num_prompt_tokens[record.request_id]
        if not self.clients.end(record):
            self.collector.forget(record.request_id)
            return
        self.collector.note_ended(record, record.slo.class_name)
        if self._on_end is not None:
            self._on_end(record)

    # Time

    @property
    def _working(self) -> bool:
        clients = self.clients
        return clients.has_more or clients.in_pause or bool(self._num_output_tokens)

    def _keep_ticking(self) -> None:
        """Ticks only while requests or drains are pending, because a trace may pause for years.
        While all programs pause, ticks become rarer with time, until the next call."""
        now = self.clock.now
        scales = self.config.conductor.autoscale and self.clients.has_more
        # the states are read only where no request is under way
        states = self.conductor.instances.values()
        if self._num_output_tokens or scales or any(state.drain for state in states):
            self._busy_s = now
        elif not self.clients.in_pause:
            return
        num_ticks = max((now - self._busy_s) // IDLE_S, 1.0)
        next_s = (now // TICK_S + num_ticks) * TICK_S
        if next_s < self._tick_s:
            self._tick_s = next_s
            self.clock.at(next_s, Priority.TICK, self._tick)

    def _tick(self) -> None:
        if self.clock.now != self._tick_s:
            return  # an earlier tick took the place of this tick
        self._tick_s = inf
        self._post(Tick())
        self._keep_ticking()

    def _sample(self) -> None:
        now = self.clock.now
        loads = self.conductor.loads(now)
        collector = self.collector
        queued = running = held = 0
        for node in self.nodes.values():
            instance = node.instance
            held += instance.pool.num_held
            if node.role is not Role.PREFILL:
                running += instance.num_running
            if node.role is not Role.DECODE:
                queued += instance.num_queued
        self.timeline.add(
            now,
            (
                loads.prefill,
                loads.decode,
                loads.decode_projected,
                queued,
                running,
                held * self.hardware.layout.block_tokens,
                self.clients.num_sent,
                sum(collector.rejected.values()),
                collector.num_completed,
                collector.num_effective,
            ),
        )
        names = self.node_timeline.names
        busy = [self.nodes[InstanceId(name)].engine.busy_s for name in names]
        self.node_timeline.add(now, tuple(busy))
        if self._working:
            self.clock.after(self.timeline.interval_s, Priority.TICK, self._sample)


def _request_of(attempt_id: AttemptId) -> RequestId:
    return RequestId(attempt_id[: attempt_id.index("/")])

"""Runs one seed: a Conductor, instances, clients and faults.

The run checks its invariants at every event and at the end.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter

from moonpool.conductor.actions import (
    Announce,
    ConductorEvent,
    Deliver,
    DrainRequested,
    InstanceJoined,
    InstanceLost,
    InstancesExpected,
    Refuse,
    Reported,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    RequestFinished,
    Send,
    Tick,
)
from moonpool.conductor.conductor import DEFAULT_SLO, Conductor
from moonpool.config.tables import ConductorConfig
from moonpool.cost.fitted import FittedCost
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.messages import (
    AttemptFailed,
    AttemptId,
    DecodeAccepted,
    InstanceInfo,
    LeaveCluster,
    PrefillDone,
    PrefillStarted,
    Report,
    Resync,
    TransferDone,
)
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.refusal import Refusal
from moonpool.scheduler.instance_config import InstanceConfig, steps_in_flight
from moonpool.types import BlockKey, FinishReason, InstanceId, Request, RequestId, Role, Slo
from moonpool.vllm.nominal_layout import layout_of
from tests.sim.clock import Clock, Link
from tests.sim.disk import Disk, DiskDriver
from tests.sim.endings import check_ending
from tests.sim.fairness import Fairness
from tests.sim.member import Member
from tests.sim.messenger import FetchOperation, StreamOperation
from tests.sim.metering import Metering
from tests.sim.node import Life
from tests.sim.options import Options, draw_options
from tests.sim.pauses import Pauses
from tests.sim.promises import Promises
from tests.sim.shared_store import SharedBlocks
from tests.sim.truth import EOS, Truth
from tests.sim.vllm_node import VllmLife
from tests.sim.vllm_server import VllmServer
from tests.sim.workload import make_workload

MAX_EVENTS = 200_000
FAULTS_END_S = 5.0
TICK_S = 0.25
TIGHT_SLO = Slo(ttft_s=30.0, tbt_s=0.05)
"""An SLO whose TBT a decode step meets, and a step with a tile of 32 tokens does not."""
ONCE_PER_WORK = (PrefillStarted, PrefillDone, DecodeAccepted, TransferDone, AttemptFailed)


class World:
    def __init__(self, seed: int, options: Options | None = None) -> None:
        self.clock = Clock(seed)
        self.options = options or draw_options(self.clock.rng)
        self.eos = EOS
        opts = self.options
        self.layout = BlockLayout(
            model_fingerprint="fake",
            dtype="float32",
            block_tokens=opts.block_tokens,
            num_layers=opts.num_layers,
            num_kv_heads=1,
            head_dim=4,
        )
        self.cost = FittedCost(
            prefill=(0.001, 0.002, 0.0, 0.0001),
            decode=(0.005, 0.002, 0.0001),
            tile_tokens=32 if opts.splits_mixed else 1,
            transfer_latency_s=0.0001 if opts.transfer_is_cheap else 10.0,
            ssd_read_bytes_per_s=(1e9 if opts.loading_is_cheap else 1.0) if opts.num_slots else 0.0,
        )
        self.instance_config = InstanceConfig(
            chunk_tokens=opts.chunk_tokens,
            max_sequences=opts.max_sequences,
            max_repeats=opts.max_repeats if opts.num_stages == 1 else 1,
            max_steps_in_flight=steps_in_flight(opts.num_stages),
            micro_batches=opts.num_stages,
            prefix_caching=opts.prefix_caching,
            eviction=opts.eviction,  # type: ignore[arg-type]
            layer_wise_load=opts.layer_wise_load,
            ssd_blocks=opts.num_slots,
            ssd_admission=opts.ssd_admission,  # type: ignore[arg-type]
            store_shared=opts.store_shared,
        )
        self.vllm_servers: dict[str, VllmServer] = {}
        if opts.engine == "vllm":
            self.layout = layout_of("fake", VllmServer(self, "").facts())
        self._num_heads = 0
        self.conductor = self._new_conductor()
        self.head_is_up = True
        self.truths: dict[RequestId, Truth] = {}
        self.old_members: set[InstanceId] = set()
        self.head_is_old = False
        self.lives: dict[InstanceId, Life | VllmLife] = {}
        self.disks: dict[InstanceId, Disk] = {}
        self.shared_blocks: SharedBlocks = {}
        self.operations: list[FetchOperation | StreamOperation] = []
        self.answers: dict[RequestId, list[Deliver]] = {}
        self.refusals: dict[RequestId, Refusal] = {}
        self.ended: dict[RequestId, RequestEnded] = {}
        self.cancelled: set[RequestId] = set()
        self.stops = self._draw_stops(seed)
        self.stopped: set[RequestId] = set()
        self.lost_with_head: set[RequestId] = set()
        # requests that outlived a head, with the number of their tokens at that time
        self.kept: dict[RequestId, int] = {}
        self._missed: list[ConductorEvent] = []  # requests that clients sent while no head was up
        self.seen: Counter[str] = Counter()
        self._told: set[tuple[Member, type, AttemptId]] = set()
        self._num_lives = 0
        self._digest = hashlib.sha256()
        # the channels that the head considers open
        self._channels: dict[InstanceId, tuple[Member, Link]] = {}
        self.promises = Promises(self)
        self.metering = Metering(self)
        self.pauses = Pauses(self)
        self._start()

    def _new_conductor(self) -> Conductor:
        self._num_heads += 1
        conductor = Conductor(
            incarnation=str(self._num_heads) if self.options.keeps_streams else "",
            tenant_weights=dict(self.options.tenants),
            tenant_caches={"b": 0.25, "c": 0.05},
            default_slo=TIGHT_SLO if self.options.splits_mixed else DEFAULT_SLO,
            config=ConductorConfig(
                admission=self.options.admission,  # type: ignore[arg-type]
                placement=self.options.placement,  # type: ignore[arg-type]
                decode_prediction=self.options.decode_prediction,  # type: ignore[arg-type]
                inline_prefill=self.options.inline_prefill,
                kvcache_balancing_threshold=self.options.threshold,
                role_balance=self.options.role_balance,  # type: ignore[arg-type]
                role_balance_window_s=1.0,
            ),
        )
        if self.options.books_little:
            conductor.output_predictor.lengths.mean.value = 1.0
        self.fairness = Fairness(self, conductor)
        return conductor

    def _draw_stops(self, seed: int) -> dict[int, float]:
        """Draws for some runs which answers end by stop strings, which only the API finds: after
        how many tokens, and how long after the API has them. The draws of other faults do not
        depend on this draw."""
        rng = random.Random(f"stop strings of seed {seed}")
        if rng.random() < 0.7:
            return {}
        lengths = [rng.randint(1, 12) for _ in range(4)]
        return {length: rng.choice((0.0, 0.005, 0.3)) for length in lengths}

    # Services for the nodes:

    def chance(self, rate: str, factor: float = 1.0) -> bool:
        if self.clock.now > FAULTS_END_S:
            return False
        happens = self.clock.rng.random() < getattr(self.options, rate) * factor
        self.seen[rate] += happens
        return happens

    def truth_of(self, attempt_id: AttemptId) -> Truth:
        return self.truths[RequestId(attempt_id.rpartition("/")[0])]

    def disk_of(self, instance_id: InstanceId) -> Disk:
        return self.disks.setdefault(instance_id, Disk())

    def vllm_server_of(self, instance_id: InstanceId) -> VllmServer:
        if instance_id not in self.vllm_servers:
            self.vllm_servers[instance_id] = VllmServer(self, instance_id)
        return self.vllm_servers[instance_id]

    def find_life(self, address: PeerAddress) -> Life | None:
        life = self.lives[address.instance_id]
        assert isinstance(life, Life), "a vLLM server moves its blocks by itself"
        return life if life.alive and life.number == address.tcp_port else None

    def note(self, who: str, what: object) -> None:
        """Adds an event to the run's fingerprint: equal seeds must give equal runs."""
        self.seen[type(what).__name__] += 1
        self._digest.update(f"{self.clock.now:.9f} {who} {type(what).__name__};".encode())

    @property
    def fingerprint(self) -> str:
        return self._digest.hexdigest()

    # Events of the head:

    def on_joined(self, life: Member, info: InstanceInfo, down: Link) -> None:
        if self.pauses.defer(lambda: self.on_joined(life, info, down)):
            return
        life.joined = True
        if not self.head_is_up:
            life.lose_head()
            return
        self._channels[life.instance_id] = (life, down)
        self.pauses.on_heard(life.instance_id)
        self.promises.on_joined(life.instance_id)
        self.post(InstanceJoined(info))
        self.metering.on_joined(life, info)

    def on_report(self, life: Member, report: Report) -> None:
        if self.pauses.defer(lambda: self.on_report(life, report)):
            return
        self.pauses.on_heard(life.instance_id)
        if isinstance(report, ONCE_PER_WORK):
            told = (life, type(report), report.attempt_id)
            assert told not in self._told, f"told twice: {told}"
            self._told.add(told)
        self.post(Reported(life.instance_id, report))

    def on_beat(self, life: Member) -> None:
        if not self.pauses.defer(lambda: self.on_beat(life)):
            self.pauses.on_heard(life.instance_id)

    def members(self) -> dict[InstanceId, Member]:
        """Returns the instances to which the head has a connection, as far as it knows."""
        return {name: life for name, (life, _) in self._channels.items()}

    def forget_channel(self, life: Member) -> None:
        del self._channels[life.instance_id]

    def on_link_cut(self, life: Member, down: Link) -> None:
        """Lets the head notice the cut some time later, unless the instance has joined again by
        then."""

        def notice() -> None:
            if self.pauses.defer(notice):
                return
            if self._channels.get(life.instance_id) == (life, down):
                del self._channels[life.instance_id]
                self.post(InstanceLost(life.instance_id, "the connection broke"))

        self.clock.after(self.clock.rng.random() * 0.5, notice)

    def on_died(self, life: Member) -> None:
        for operation in self.operations:
            ends = (operation.life, getattr(operation, "source", None))
            if life in ends or getattr(operation, "receiver", None) is life:
                operation.on_died(life)
        self.clock.after(self.clock.rng.random() * 2, lambda: self._begin_life(life))

    def post(self, event: ConductorEvent) -> None:
        if not self.head_is_up:
            if isinstance(event, RequestArrived | RequestCancelled):
                self._missed.append(event)  # the client sends it again later
            return
        if self.pauses.defer(lambda: self.post(event)):
            return
        self.note("head", event)
        if isinstance(event, RequestFinished) and event.request_id in self.conductor.requests:
            self.stopped.add(event.request_id)
        arrived = event.request if isinstance(event, RequestArrived) else None
        yields = arrived is not None and self.fairness.must_wait(arrived)
        actions = self.conductor.handle(event, self.clock.now)
        self.conductor.validate()
        states = self.conductor.instances.values()
        self.seen["separate roles"] += any(state.role is not state.info.role for state in states)
        if arrived is not None and yields and event.delivered is None:
            self.fairness.check_arrival(arrived, actions)
        for action in actions:
            self.note("head", action)
            match action:
                case Send():
                    self._send(action)
                case Deliver():
                    self._on_deliver(action)
                case Refuse():
                    assert action.request_id not in self.refusals
                    assert action.request_id not in self.ended
                    self.refusals[action.request_id] = action.refusal
                case RequestEnded():
                    assert action.record.request_id not in self.ended, "ended twice"
                    self.ended[action.record.request_id] = action
                    self.promises.on_ended(action.record.request_id)
                    self.metering.on_ended(action.record)
                case Announce():
                    for word in (" is a ", " stays ", " was lost ", " has left"):
                        self.seen[f"role{word}"] += word in action.text

    def _send(self, send: Send) -> None:
        life, down = self._channels[send.instance_id]
        if isinstance(send.command, Resync):
            self.promises.on_resync(send.instance_id)
        elif isinstance(send.command, LeaveCluster):
            self.promises.on_leave(self.conductor, send.instance_id)
        life.receive(down, send.command)

    def _on_deliver(self, deliver: Deliver) -> None:
        assert deliver.request_id not in self.ended, "an answer continues after its end"
        so_far = self.answers.setdefault(deliver.request_id, [])
        assert not any(d.finish for d in so_far)
        so_far.append(deliver)
        truth = self.truths[deliver.request_id]
        tokens = tuple(t.token_id for d in so_far for t in d.tokens)
        assert tokens == truth.answer[: len(tokens)], f"{deliver.request_id}: wrong tokens"
        if deliver.finish is not None:
            assert tokens == truth.answer and deliver.finish is truth.finish
            return
        before = len(tokens) - len(deliver.tokens)
        for length, after_s in self.stops.items():
            if before < length <= len(tokens):
                finished = RequestFinished(deliver.request_id, FinishReason.STOP, length)
                self.clock.after(after_s, lambda f=finished, n=self._num_heads: self._stop(f, n))
                break

    def _stop(self, finished: RequestFinished, head: int) -> None:
        """Ends an answer of which the API has found a stop string. The API is part of the head, and
        ends with it."""
        if head == self._num_heads:
            self.post(finished)

    # Start and end of a run:

    def _start(self) -> None:
        opts, rng = self.options, self.clock.rng
        self.head_is_old = opts.head_is_old
        roles = (
            (Role.PREFILL, opts.num_prefill),
            (Role.DECODE, opts.num_decode),
            (Role.MIXED, opts.num_mixed),
        )
        for role, count in roles:
            for number in range(count):
                name = InstanceId(f"{role.value}{number}")
                if opts.num_upgrades and rng.random() < 0.7:
                    self.old_members.add(name)
                self._begin_life(None, name, role)
        for truth, at_s in make_workload(opts, rng):
            request_id = truth.request.request_id
            self.truths[request_id] = truth
            self.clock.after(at_s, lambda r=truth.request: self.post(RequestArrived(r)))
            if rng.random() < opts.cancel_rate:
                cancel_s = at_s + rng.random() * rng.choice((0.02, 0.5))
                self.clock.after(cancel_s, lambda r=request_id: self._cancel(r))
        for _ in range(opts.num_deaths):
            self.clock.after(rng.random() * 1.5, self._kill_one)
        for _ in range(opts.num_disk_losses):
            self.clock.after(rng.random() * 3, self._lose_a_disk)
        for _ in range(opts.num_unlinks):
            self.clock.after(rng.random() * 1.5, self._unlink_one)
        for _ in range(opts.num_head_crashes):
            self.clock.after(rng.random() * 3, self._crash_head)
        for _ in range(opts.num_role_switches):
            self.clock.after(rng.random() * 3, self._switch_one)
        for _ in range(opts.num_drains):
            self.clock.after(rng.random() * 3, self._drain_one)
        for _ in range(opts.num_upgrades):
            self.clock.after(rng.random() * 3, self._upgrade_one)
        self._last_arrival_s = max((opts.arrivals_s, FAULTS_END_S))
        self.clock.after(TICK_S, self._tick)
        self.pauses.start()

    def _begin_life(
        self,
        previous: Member | None,
        instance_id: InstanceId | None = None,
        role: Role | None = None,
    ) -> None:
        if previous is not None:
            instance_id, role = previous.instance_id, previous.role
        assert instance_id is not None and role is not None
        self._num_lives += 1
        kind = VllmLife if self.options.engine == "vllm" else Life
        life = kind(self, instance_id, role, self._num_lives)
        self.lives[instance_id] = life
        if previous is None:
            life.join_at_once()
        else:
            life.join()

    def _cancel(self, request_id: RequestId) -> None:
        self.cancelled.add(request_id)
        self.post(RequestCancelled(request_id))
        if self.head_is_up and not self.pauses.head_is_paused:
            assert request_id in self.ended or request_id in self.lost_with_head, "it goes on"

    def _kill_one(self) -> None:
        life = self.clock.rng.choice(list(self.lives.values()))
        if isinstance(life, VllmLife) and life.alive and self.clock.rng.random() < 0.5:
            life.lose_server()
        elif life.alive:
            life.die()

    def _lose_a_disk(self) -> None:
        self.clock.rng.choice(list(self.lives.values())).lose_disk()

    def _unlink_one(self) -> None:
        self.clock.rng.choice(list(self.lives.values())).lose_head()

    def _switch_one(self) -> None:
        """Forces a role switch; sometimes of the last instance of its role."""
        roles, states = self.conductor.roles, list(self.conductor.instances.values())
        pure = [state for state in states if state.info.role is not Role.MIXED]
        if not pure or self.pauses.head_is_paused or any(state.drain for state in states):
            return
        state = self.clock.rng.choice(pure)
        other = Role.DECODE if state.info.role is Role.PREFILL else Role.PREFILL
        roles.begin(state.info.instance_id, other, "a test", self.clock.now)
        self.post(Tick())

    def _drain_one(self) -> None:
        """Drains an instance by request or because its process received a signal. The instance
        comes back empty some time later. Sometimes the instance is the last of its role."""
        rng = self.clock.rng
        life = rng.choice(list(self.lives.values()))
        within_s = rng.choice((0.0, 0.1, 1.0, 5.0))
        if life.alive and rng.random() < 0.5:
            life.want_to_leave(within_s)
        else:
            self.post(DrainRequested(life.instance_id, within_s, "a test"))

    def _upgrade_one(self) -> None:
        """Lets an instance leave; its next process is of the newest release."""
        old = sorted(self.old_members)
        if old:
            name = self.clock.rng.choice(old)
            self.old_members.discard(name)
            self.seen["upgrades"] += 1
            self.post(DrainRequested(name, self.clock.rng.choice((0.5, 5.0)), "upgrade", True))

    def _crash_head(self) -> None:
        """Replaces the head by one without any state. The clients lose their connections, or the
        next head continues their answers."""
        if not self.head_is_up or self.pauses.head_is_paused:
            return
        under_way = {name: t.request for name, t in self.conductor.requests.items()}
        roles = self.conductor.expected
        self.metering.on_new_head(set(roles))
        self.conductor = self._new_conductor()
        self._channels.clear()
        self.head_is_old = False
        self.head_is_up = False
        for life in self.lives.values():
            life.lose_head()
        if not self.options.keeps_streams:
            self.lost_with_head |= set(under_way)
            self.head_is_up = True
            return
        # A supervisor starts the next head immediately, a standby on another machine later.
        gap_s = self.clock.rng.choice((0.0, 1.0)) * self.clock.rng.random()
        self.clock.after(gap_s, lambda: self._take_over(under_way, roles))

    def _take_over(
        self, under_way: dict[RequestId, Request], roles: dict[InstanceId, Role]
    ) -> None:
        """Lets another head continue the answers that the last head began."""
        self.head_is_up = True
        self.seen["takeovers"] += 1
        self.post(InstancesExpected(roles))
        for name, request in under_way.items():
            delivered = tuple(t.token_id for d in self.answers.get(name, ()) for t in d.tokens)
            self.kept[name] = len(delivered)
            self.post(RequestArrived(request, delivered))
        missed, self._missed = self._missed, []
        for event in missed:
            self.post(event)

    def _tick(self) -> None:
        if not self.pauses.head_is_paused:
            self.pauses.tick()
        if self.goes_on():
            self.clock.after(TICK_S, self._tick)

    def goes_on(self) -> bool:
        drains = [state.drain for state in self.conductor.instances.values() if state.drain]
        leaving = any(drain.becomes is None for drain in drains)
        waits = bool(self.conductor.requests) or not self.head_is_up
        paused = self.pauses.head_is_paused or any(m.is_paused for m in self.lives.values())
        return waits or leaving or paused or self.clock.now < self._last_arrival_s

    def run(self) -> None:
        self.clock.run(MAX_EVENTS)
        assert all(life.alive and life.joined for life in self.lives.values())
        if not self.options.lost_event_rate:
            for life in self.lives.values():
                self._check_index(life)
        for life in self.lives.values():
            # the promises treat the resync of this check like a join
            self.promises.on_joined(life.instance_id)
            self._send(Send(life.instance_id, Resync()))
        # runs all events, because marks of replicas must not cross snapshots
        self.clock.run(MAX_EVENTS)
        self.post(Tick())  # ends drains without attempts
        self.clock.run(MAX_EVENTS)
        self.post(Tick())  # sends the marks of replicas to the instances
        self.clock.run(MAX_EVENTS)
        self._check_end()

    def _check_end(self) -> None:
        assert not self.lost_with_head & set(self.ended)
        ended = self.lost_with_head | set(self.ended)
        assert ended == set(self.truths), "every request ends exactly once"
        for request_id in self.ended:
            truth = self.truths[request_id]
            check_ending(self, request_id, truth)
        kept: set[BlockKey] = set()
        for life in self.lives.values():
            self._check_index(life)
            instance = life.instance
            self.seen.update({f"counter {k}": int(v) for k, v in instance.counters.items()})
            if isinstance(life, VllmLife):
                life.check_end()
                continue
            counted = instance.counters.get("corrupt_slices", 0)
            assert counted == life.num_damaged, f"{counted} of {life.num_damaged} damaged slices"
            leaked = (list(instance.requests), instance.pool.owners())
            assert leaked == ([], {}), f"{life.instance_id} still holds {leaked}"
            assert instance.pool.num_held == 0
            if instance.tier is not None:
                assert not instance.tier.slots.owners() and not instance.tier.slots.num_held
            self._check_cache(life, kept)
        self.promises.check_end(kept)
        self.metering.check_end()
        conductor = self.conductor
        assert not conductor.requests
        conductor.validate()
        for state in conductor.instances.values():
            assert not (state.prefills or state.decodes or state.serving)
            assert not conductor.index.expected(state.info.instance_id)
            assert state.drain is None and not state.handover_tokens, "a drain does not end"
            life = self.lives[state.info.instance_id]
            assert state.info.role is life.instance.role

    def _check_cache(self, life: Life, kept: set[BlockKey]) -> None:
        """Asserts that cached blocks match their keys; adds to `kept` the blocks that must stay."""
        pool = life.instance.pool
        named: dict[BlockKey, int] = {}
        for truth in self.truths.values():
            if truth.request.use_cache:
                named.update(truth.named_contents(self.layout))
        for key in sorted(pool.keys()):
            (block_id,) = pool.match([key])
            for layer in range(self.options.num_layers):
                assert life.arena[(block_id, layer)] == (layer, named[key])
        assert self.options.prefix_caching or not pool.keys()
        lives = [other for other in self.lives.values() if isinstance(other, Life)]
        others = [other.instance.pool for other in lives if other is not life]
        for key, block_id in zip(pool.keys(), pool.cached_blocks(), strict=True):
            shared = any(other.find(key) is not None for other in others)
            if life.instance.is_spare(block_id):
                assert shared, "a block marked as spare has no other copy"
            else:
                assert key not in kept, "two copies of a block are marked as the last"
                kept.add(key)
        tier = life.instance.tier
        if tier is None:
            return
        if not isinstance(life.disk, DiskDriver):
            for shared in self.shared_blocks.values():
                layers = range(self.options.num_layers)
                assert shared.layers == [(layer, named[shared.key]) for layer in layers]
            return
        for slot in tier.slots.cached_blocks():
            stored = life.disk.disk.slots[slot]
            assert stored.key == tier.slots.key_of(slot)
            layers = range(self.options.num_layers)
            assert stored.layers == [(layer, named[stored.key]) for layer in layers]

    def _check_index(self, life: Member) -> None:
        """Asserts that the Conductor's index matches the instance's cached blocks."""
        name, index = life.instance_id, self.conductor.index
        in_dram, below = life.keys_in_dram(), life.keys_below()
        assert all(index.holds(name, key) for key in in_dram | below)
        assert index.num_blocks(name) == len(in_dram | below)
        assert all((name, key in below) in index.holders_of(key) for key in in_dram | below)

"""One instance as a pure state machine, for every role.

`handle` takes one event, a command of the head or an event of the messenger or the engine, and
returns the actions to perform. The state machine never waits, computes or moves a byte.

A prefill instance loads a missing prefix from the SSD if that pays, fetches the blocks after it
from a peer, computes the rest in chunks, and streams the KVCache to the decode instance layer by
layer (Mooncake section 3, steps 1 to 3). A decode instance receives the KVCache into reserved
blocks, checks the SLO again, and adds the request to its running batch (step 4). A mixed instance
does the work of both. KVCache that does not arrive or fails its checksum is computed again from the
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from moonpool.cost.model import CostModel
from moonpool.kvcache.block_pool import BlockPool
from moonpool.kvcache.ssd_tier import SsdTier
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.messages import (
    Abort,
    AttemptId,
    DropCachedBlocks,
    HotPrefixes,
    InstanceLoad,
    LeaveCluster,
    ListHot,
    MarkReplicas,
    PrefetchBlocks,
    ReserveDecode,
    Resync,
    RoleChanged,
    StartDecode,
    StartPrefill,
    StopReceiving,
    SwitchRole,
    TakeOverPrefix,
)
from moonpool.protocol.transfer_events import (
    FetchEnded,
    FetchProgress,
    LoadEnded,
    LoadProgress,
    LoadReturned,
    LookUpEnded,
    ReadEnded,
    ReadRequested,
    ReceiveEnded,
    SendEnded,
    StoreEnded,
    StoreLost,
    StoreReturned,
    TierPaused,
    TierResumed,
)
from moonpool.scheduler.actions import (
    ActionBuffer,
    ArenaBack,
    ArenaLost,
    ExitProcess,
    ForgetStored,
    StepEnded,
    StepFailed,
    StepsEnded,
    WorkerAction,
    WorkerEvent,
)
from moonpool.scheduler.attempt_lifecycle import AttemptLifecycle
from moonpool.scheduler.attention_pools.partitions import ArenaTracker
from moonpool.scheduler.instance_config import NEW_MEMORY, InstanceConfig, InstanceMemory
from moonpool.scheduler.kv_cache_manager import KVCacheManager
from moonpool.scheduler.loading.handover import KvHandover, hottest
from moonpool.scheduler.loading.layerwise_overlap import LayerwiseOverlap
from moonpool.scheduler.loading.prefetch import Prefetch
from moonpool.scheduler.prefix_loader import PrefixLoader
from moonpool.scheduler.request_state import RequestPhase, RequestState
from moonpool.scheduler.scheduler import Scheduler
from moonpool.scheduler.speculation.draft_model import DraftModel, DraftModelPlace
from moonpool.scheduler.speculation.speculation import Speculation
from moonpool.scheduler.ssd_tiering import Demotion, Promotion, reserved_blocks
from moonpool.types import BlockId, BlockKey, Role


class Instance:
    """The state of one instance, and the entry of all its events.

    An attempt at a request passes these phases (`RequestPhase`). Any phase may end in a failure or
    an abort; blocks are freed only after the last step and transfer that can touch them.

        StartPrefill                                                 ReserveDecode
             |                                                            |
             v        blocks allocated                                    v
          WAITING ----------------------> RUNNING <------------------ RECEIVING
             ^                             | | |      KVCache and first token here
             +---------- preempted --------+ | |
                                             | +--- answer ends ---> gone
             a target, last chunk computed   |
          HANDING_OVER <---------------------+
             |
             +--- stream received ---> gone

    Which object owns what:

        AttemptLifecycle   commands and ends of steps and streams: moves attempts between phases
        Scheduler          the queues and the steps in progress; preempts
        QueueOrder         which request is served before which (held by Scheduler)
        ChunkBudget        the token budget of a mixed step (held by Scheduler)
        Speculation        guessed tokens of decodes, which a step verifies (held by Scheduler)
        DraftModel         a draft model's KVCache, and its work (held by Speculation)
        KVCacheManager     the block pool, the SSD's slots, block tables, cache events
        PrefixLoader       fetches, loads and look-ups of waiting requests; reads of peers
        LayerwiseOverlap   requests that compute while their prefix arrives
        Promotion          loads from the SSD       Demotion   writes to the SSD
        Prefetch           loads ahead of the requests that need the blocks
        KvHandover         takeovers of prefixes from an instance that leaves
        ArenaTracker       lost and returning arenas (attention offload)
        ActionBuffer       the actions of the current event, and the counters
    """

    def __init__(
        self,
        config: InstanceConfig,
        layout: BlockLayout,
        num_blocks: int,
        role: Role,
        cost: CostModel,
        eos_token_ids: Iterable[int],
        memory: InstanceMemory = NEW_MEMORY,
        draft_model: DraftModelPlace | None = None,
    ) -> None:
        """`draft_model`: the model that guesses tokens, which steps then verify."""
        self.config = config
        self.layout = layout
        self.role = role
        self.cost = cost
        self.requests: dict[AttemptId, RequestState] = {}
        self._actions_out = ActionBuffer()
        self._kv_cache = KVCacheManager(
            config, layout, num_blocks, memory.arenas, memory.segment_blocks
        )
        self._arenas = ArenaTracker[RequestState](self._kv_cache.pool)
        self._promotion = Promotion(self._kv_cache, self._actions_out)
        self._demotion = Demotion(self._kv_cache, self._actions_out)
        self._prefetch = Prefetch(self._kv_cache, self._promotion, self._actions_out, cost)
        self._overlap = LayerwiseOverlap(
            config, self._kv_cache, self._promotion, self._actions_out, cost
        )
        ends = frozenset(eos_token_ids)
        speculation = self._make_speculation(ends, draft_model)
        self._scheduler = Scheduler(
            config, self._kv_cache, self._actions_out, cost, self._overlap, speculation
        )
        self._prefix_loader = PrefixLoader(
            self.requests,
            self._kv_cache,
            self._overlap,
            self._scheduler,
            self._actions_out,
            cost,
            config.learning,
        )
        self._attempts = AttemptLifecycle(
            config,
            self.requests,
            self._kv_cache,
            self._scheduler,
            self._prefix_loader,
            self._arenas,
            self._actions_out,
            ends,
        )
        self._handover = KvHandover(self._kv_cache, self._actions_out)
        self._handlers = self._make_handlers()
        self._adopt(memory.stored)
        if memory.kept:
            self.pool.adopt(memory.kept)

    def _make_speculation(
        self, eos_token_ids: frozenset[int], place: DraftModelPlace | None
    ) -> Speculation | None:
        config = self.config
        if config.speculative is None:
            return None
        model = None if place is None else DraftModel(place, config.chunk_tokens)
        return Speculation(
            config.speculative,
            config,
            self._kv_cache,
            self._actions_out,
            self.cost,
            eos_token_ids,
            model,
        )

    def _make_handlers(self) -> dict[type[WorkerEvent], Callable[[Any], None]]:
        """Returns the method that handles each type of event."""
        attempts, loader = self._attempts, self._prefix_loader
        return {
            # Steps of the engine
            StepEnded: attempts.on_step_ended,
            StepsEnded: attempts.on_steps_ended,
            StepFailed: attempts.on_step_failed,
            # Commands for one attempt
            StartPrefill: self._on_start_prefill,
            ReserveDecode: attempts.on_reserve_decode,
            StartDecode: attempts.on_start_decode,
            StopReceiving: attempts.on_stop_receiving,
            Abort: attempts.on_abort,
            # Events about streams between prefill and decode
            SendEnded: attempts.on_send_ended,
            ReceiveEnded: attempts.on_receive_ended,
            # Events about prefixes: from peers, for peers, from the SSD or a shared store
            FetchProgress: loader.on_fetch_progress,
            FetchEnded: self._on_fetch_ended,
            ReadRequested: self._on_read_requested,
            ReadEnded: loader.on_read_ended,
            LookUpEnded: loader.on_look_up_ended,
            LoadProgress: loader.on_load_progress,
            LoadEnded: self._on_load_ended,
            LoadReturned: self._promotion.on_returned,
            StoreEnded: self._demotion.on_ended,
            StoreReturned: self._demotion.on_returned,
            StoreLost: self._on_store_lost,
            TierPaused: self._on_tier_paused,
            TierResumed: self._on_tier_resumed,
            # Events about the instance in the cluster
            Resync: self._on_resync,
            MarkReplicas: self._kv_cache.mark_replicas,
            SwitchRole: self._on_switch_role,
            PrefetchBlocks: self._prefetch.on_command,
            ListHot: self._on_list_hot,
            DropCachedBlocks: self._on_drop_cached,
            TakeOverPrefix: self._handover.begin,
            LeaveCluster: self._on_leave_cluster,
            # Attention offload
            ArenaLost: self._on_arena_lost,
            ArenaBack: self._on_arena_back,
        }

    def handle(self, event: WorkerEvent, now: float) -> list[WorkerAction]:
        """Handles one event and returns the actions to perform, in their order."""
        self._scheduler.order.now_s = now
        self._handlers[type(event)](event)
        self._arenas.run()
        for request in self._arenas.unpark():
            self._attempts.reserve(request, patient=True)
        self._attempts.retry_reservations()
        for request in self._overlap.take_out_of_blocks():
            message = "no blocks are left to compute the part of the prefix that did not arrive"
            self._attempts.fail(request, "no_blocks", message)
        self._scheduler.begin_steps()
        return self._finish()

    def abort_all(self) -> list[WorkerAction]:
        """Aborts all attempts, because the connection to the head is lost."""
        for request in list(self.requests.values()):
            self._attempts.abort(request)
        return self._finish()

    def _finish(self) -> list[WorkerAction]:
        if self._kv_cache.tier is None:
            changes = self._kv_cache.take_changes()
            if changes is not None:
                self._actions_out.report(changes)
            return self._actions_out.take()
        self._prefetch.run()
        self._demotion.run()
        self._report_blocks()
        return self._actions_out.take()

    def _report_blocks(self) -> None:
        """Reports what changed in both tiers, and copies what the SSD should have."""
        kv_cache = self._kv_cache
        changes = kv_cache.take_changes()
        self._actions_out.count("dropped_blocks", kv_cache.num_dropped)
        kv_cache.num_dropped = 0
        if changes is not None:
            self._actions_out.report(changes)
            self._prefetch.note_gone((*changes.removed, *changes.demoted))
            self._demotion.publish(changes.stored)
        new = () if changes is None else changes.stored
        self._demotion.write_ahead(new, disk_reads=self._promotion.num_loads > 0)

    # The instance in the cluster

    def _on_resync(self, command: Resync) -> None:
        self._actions_out.report(self._kv_cache.take_snapshot())

    def _on_switch_role(self, command: SwitchRole) -> None:
        # running attempts go on, because their commands have all they need
        self.role = command.role
        self._actions_out.report(RoleChanged(role=self.role))

    def _on_list_hot(self, command: ListHot) -> None:
        found = hottest(self._kv_cache, command.num_blocks, command.lost_with_it)
        self._actions_out.report(HotPrefixes(number=command.number, prefixes=found))

    def _on_drop_cached(self, command: DropCachedBlocks) -> None:
        voided = self._kv_cache.drop_cached()
        if voided:
            self._actions_out.perform(ForgetStored(tuple(voided)))

    def _on_leave_cluster(self, command: LeaveCluster) -> None:
        self._actions_out.perform(ExitProcess())

    def _on_fetch_ended(self, event: FetchEnded) -> None:
        if self._handover.has(event.fetch_id):
            self._handover.on_fetch_ended(event)
        else:
            self._attempts.on_fetch_ended(event)

    def _on_arena_lost(self, event: ArenaLost) -> None:
        """Fails the attempts with blocks in the arena; the Conductor starts new ones."""
        if self._arenas.lose(event.arena):
            self._actions_out.count("lost_arenas")
            self._scheduler.stop_repeating()
            for request in list(self.requests.values()):
                if not request.closing and self._arenas.touches(request, event.arena):
                    self._attempts.fail(request, "blocks_lost", event.message)

    def _on_arena_back(self, event: ArenaBack) -> None:
        self._arenas.bring_back(event.arena, event.named)

    # The SSD

    def _on_start_prefill(self, command: StartPrefill) -> None:
        self._attempts.on_start_prefill(command)
        request = self.requests.get(command.attempt.attempt_id)
        if request is not None:
            self._prefetch.note_used(request.keys)

    def _on_read_requested(self, event: ReadRequested) -> None:
        self._prefix_loader.on_read_requested(event)
        self._prefetch.note_used(event.keys)

    def _on_load_ended(self, event: LoadEnded) -> None:
        self._prefix_loader.on_load_ended(event)
        self._prefetch.on_load_ended(event.load_id)

    def _adopt(self, stored: Sequence[tuple[int, BlockKey]]) -> None:
        void = [slot for slot, _ in stored]
        if self.tier is not None:
            slots = self.tier.slots
            void = [int(s) for s in slots.adopt([(BlockId(slot), key) for slot, key in stored])]
        if void:
            self._actions_out.perform(ForgetStored(tuple(void)))

    def _on_store_lost(self, event: StoreLost) -> None:
        if self.tier is not None:
            self.tier.lose(event.error)
            self._actions_out.count("lost_tiers")

    def _on_tier_paused(self, event: TierPaused) -> None:
        if self.tier is not None:
            self.tier.paused = event.error
            self._actions_out.count("paused_tiers", 1 if event.error else 0)

    def _on_tier_resumed(self, event: TierResumed) -> None:
        if self.tier is not None:
            self.tier.paused = ""

    # State

    @property
    def num_blocks(self) -> int:
        """Blocks that can be promised to requests."""
        num_slots = self._kv_cache.num_slots
        return self.pool.num_blocks - reserved_blocks(self.pool.num_blocks, num_slots)

    @property
    def tier(self) -> SsdTier | None:
        """Returns the SSD tier, or None if the instance has none."""
        return self._kv_cache.tier

    @property
    def pool(self) -> BlockPool:
        """The blocks in DRAM."""
        return self._kv_cache.pool

    @property
    def counters(self) -> dict[str, float]:
        """Returns the totals since the start."""
        return self._actions_out.counters

    @property
    def num_running(self) -> int:
        """Returns the number of requests in the running batch."""
        return len(self._scheduler.running)

    @property
    def num_queued(self) -> int:
        """Number of requests that wait for their first step, or were preempted, without those that
        receive or hand over KVCache."""
        return len(self._scheduler.waiting)

    @property
    def has_steps(self) -> bool:
        """Whether a request runs, waits for its first step, or was preempted."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    @property
    def num_waiting(self) -> int:
        """Number of requests that do not run."""
        return len(self.requests) - len(self._scheduler.running)

    @property
    def max_sequence_blocks(self) -> int:
        """The most blocks that one request can have."""
        return self._kv_cache.sequences.max_sequence_blocks

    def is_spare(self, block_id: BlockId) -> bool:
        """Whether the Conductor has marked a cached block as one to evict first."""
        return self._kv_cache.spares.is_spare(block_id)

    def load(self) -> InstanceLoad:
        """Returns the current gauges and counters."""
        return InstanceLoad(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            held_blocks=self.pool.num_held,
            cached_blocks=self.pool.num_cached,
            free_blocks=self.pool.num_available,
            owners=self.pool.named_owners(),
            counters=dict(self.counters),
            num_blocks=self.pool.num_blocks,
            ssd=self._kv_cache.tier_load(),
        )

    def validate(self) -> None:
        """Asserts the invariants that hold between any two events."""
        self.pool.validate()
        self._kv_cache.spares.validate()
        self._prefetch.validate()
        requests, scheduler = self.requests.values(), self._scheduler
        assert len(scheduler.order) <= len(requests)
        known = {r.owner for r in requests} | {r.fetch_owner for r in requests}
        known |= self._demotion.owners | self._promotion.owners | self._handover.owners
        assert {o for o in self.pool.owners() if o.kind != "read"} <= known
        if self.tier is not None:
            self.tier.validate()
            assert set(self.tier.slots.owners()) <= known
        for request in requests:
            assert request.num_computed <= request.num_scheduled <= len(request.tokens)
            in_steps = sum(request is other for step in scheduler.steps for other, _ in step)
            assert request.steps_pending == in_steps
            assert request.steps_pending or not request.drafts
            assert len(request.block_ids) * self.layout.block_tokens >= request.num_computed
            assert (request in scheduler.running) == (request.phase is RequestPhase.RUNNING)
            assert (request in scheduler.waiting) == (
                request.phase is RequestPhase.WAITING and not request.closing
            )


Performers = Mapping[type[WorkerAction], Callable[[Any], object]]
"""Maps each type of action to the function that performs it."""


class InstanceDriver:
    """Drives one instance: passes events to it, and has the resulting actions performed.

    Live worker, simulator, tests and benchmarks differ in the parts that compute and move blocks.
    Each driver names its parts in one table, action by action.
    """

    def __init__(
        self, instance: Instance, now_s: Callable[[], float], performers: Performers
    ) -> None:
        """`performers` may leave out actions that the instance never takes; an instance without an
        SSD stores nothing. A part that finishes its work posts the outcome as an event, but never
        from within its call."""
        self.instance = instance
        self._now_s = now_s
        self._performers = performers

    def post(self, event: WorkerEvent) -> None:
        """Passes one event to the instance and performs the resulting actions. Raises KeyError if
        an action has no performer."""
        self.perform(self.instance.handle(event, self._now_s()))

    def perform(self, actions: Iterable[WorkerAction]) -> None:
        """Performs actions in the order in which the instance returned them. Raises KeyError if one
        has no performer."""
        for action in actions:
            self._performers[type(action)](action)

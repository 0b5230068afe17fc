"""What one instance does next: a pure state machine for every role.

`handle(event, now)` takes a command of the head, a word of the messenger or of the engine, and
returns actions. It owns the block pool and the works; it never waits, computes, or moves a byte.

Prefill: load a missing prefix from the SSD if that pays, fetch what follows if told to
(`arrivals`), compute the rest in chunks, stream the KVCache to the
decode instance while later layers and chunks are computed (Mooncake section 3, steps 1 to 3).
Decode: receive the KVCache into reserved blocks, check the SLO again, join the running batch
(step 4). A mixed instance does both. Anything that did not arrive or did not verify is computed
again, here, from the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moonpool.config import InstanceConfig
from moonpool.cost.learned import LearnedFactor
from moonpool.cost.model import CostModel
from moonpool.kvcache.blocks import BlockPool
from moonpool.kvcache.layout import BlockLayout
from moonpool.kvcache.tiers import SsdTier
from moonpool.kvcache.transfers import (
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
from moonpool.types import BlockId, BlockKey, Role, Token
from moonpool.workers.actions import (
    AbortStream,
    ArenaBack,
    ArenaLost,
    CancelStream,
    Depart,
    ExpectStream,
    FinishStream,
    ForgetStored,
    StepEnded,
    StepFailed,
    StepsEnded,
    WorkerAction,
    WorkerEvent,
)
from moonpool.workers.active import ActiveWork, Pending, Phase
from moonpool.workers.arenas import Arenas
from moonpool.workers.arrivals import Arrivals
from moonpool.workers.batch import Batch, Step
from moonpool.workers.demotion import Demotion, reserved_blocks
from moonpool.workers.early import EarlyStart
from moonpool.workers.holdings import Holdings
from moonpool.workers.hottest import hottest
from moonpool.workers.messages import (
    Abort,
    HotPrefixes,
    InstanceLoad,
    Leave,
    ListHot,
    MarkCopies,
    PrefillDone,
    ReserveDecode,
    Resync,
    RoleChanged,
    StartDecode,
    StartPrefill,
    StepTokens,
    StopReceiving,
    StreamBroken,
    SwitchRole,
    TakeOver,
    TransferDone,
    Work,
    WorkFailed,
    WorkId,
    WorkTokens,
)
from moonpool.workers.outbox import Outbox
from moonpool.workers.promotion import Promotion
from moonpool.workers.takeover import Takeovers
from moonpool.workers.tokens import Tokens


class Instance:
    """State of one instance. Works are served first come, first served."""

    def __init__(
        self,
        config: InstanceConfig,
        layout: BlockLayout,
        num_blocks: int,
        role: Role,
        cost: CostModel,
        eos_token_ids: Iterable[int],
        stored: Sequence[tuple[int, BlockKey]] = (),
        arenas: Sequence[int] = (),
        kept: Sequence[tuple[BlockId, BlockKey]] = (),
        segment_blocks: int = 0,
    ) -> None:
        """`stored`: what the SSD holds from before, as (slot, name), the longest unused first.
        `arenas`: of how many blocks each, if they lie in several; `kept`: what is in them;
        `segment_blocks`: of a sequence that lie in one of them, if it may lie in several."""
        self.config = config
        self.layout = layout
        self.role = role
        self.cost = cost
        self.works: dict[WorkId, ActiveWork] = {}
        self._decode_factor = LearnedFactor()  # by which its steps take longer than `cost` says
        self._outbox = Outbox()
        self._holdings = Holdings(config, layout, num_blocks, arenas, segment_blocks)
        self._arenas = Arenas(self._holdings)
        promotion = Promotion(self._holdings, self._outbox)
        self._early = EarlyStart(config, self._holdings, promotion, self._outbox, cost)
        self._batch = Batch(config, self._holdings, self._outbox, cost, self._early)
        self._arrivals = Arrivals(
            self._holdings, self._early, self._batch, self._outbox, cost, config.learning
        )
        self._demotion = Demotion(self._holdings, self._outbox)
        self._takeovers = Takeovers(self._holdings, self._outbox)
        self._eos = frozenset(eos_token_ids)
        self._adopt(stored)
        if kept:
            self.pool.adopt(kept)

    def _adopt(self, stored: Sequence[tuple[int, BlockKey]]) -> None:
        void = [slot for slot, _ in stored]
        if self._holdings.tier is not None:
            slots = self._holdings.tier.slots
            void = [int(s) for s in slots.adopt([(BlockId(slot), key) for slot, key in stored])]
        if void:
            self._outbox.do(ForgetStored(tuple(void)))

    @property
    def num_blocks(self) -> int:
        """Blocks that can be promised to requests."""
        holdings = self._holdings
        return self.pool.num_blocks - reserved_blocks(self.pool.num_blocks, holdings.num_slots)

    @property
    def tier(self) -> SsdTier | None:
        """None where there is none."""
        return self._holdings.tier

    @property
    def pool(self) -> BlockPool:
        return self._holdings.pool

    def is_spare(self, block_id: BlockId) -> bool:
        """Whether the Conductor said that others have a named block too."""
        return self._holdings.spares.is_spare(block_id)

    @property
    def counters(self) -> dict[str, float]:
        return self._outbox.counters

    def handle(self, event: WorkerEvent, now: float) -> list[WorkerAction]:
        """One event in, the actions it calls for out, in the order to perform them."""
        del now  # the instance keeps no time: deadlines are the Conductor's
        match event:  # the most frequent first
            case StepEnded():
                self._on_step_ended(event)
                self._fail_outgrown()
            case StepsEnded():
                self._on_steps_ended(event)
                self._fail_outgrown()
            case StartPrefill():
                self._on_start_prefill(event)
            case ReserveDecode():
                self._reserve_decode(self._add(event.work, Phase.RECEIVING), event.patient)
            case StartDecode():
                self._on_start_decode(event)
            case StopReceiving():
                self._on_stop_receiving(event.work_id)
            case Abort():
                self._on_abort(event.work_id)
            case Resync():
                self._outbox.tell(self._holdings.take_snapshot())
            case MarkCopies():
                self._holdings.mark_copies(event)
            case ListHot():
                found = hottest(self._holdings, event.num_blocks, event.lost_with_it)
                self._outbox.tell(HotPrefixes(number=event.number, prefixes=found))
            case TakeOver():
                self._takeovers.begin(event)
            case Leave():
                self._outbox.do(Depart())
            case SwitchRole():
                self.role = event.role  # what a work needs is in its commands
                self._outbox.tell(RoleChanged(role=self.role))
            case StepFailed():
                self._on_step_failed(event)
            case FetchProgress():
                self._arrivals.on_fetch_progress(self.works.get(WorkId(event.fetch_id)), event)
            case FetchEnded():
                self._on_fetch_ended(event)
            case SendEnded():
                self._on_send_ended(event)
            case ReceiveEnded():
                self._on_receive_ended(event)
            case ReadRequested():
                self._arrivals.on_read_requested(event)
            case ReadEnded():
                self._arrivals.on_read_ended(event)
            case LoadProgress():
                self._arrivals.on_load_progress(event)
            case LoadEnded():
                self._arrivals.on_load_ended(event)
            case LookUpEnded():
                self._on_look_up_ended(event)
            case StoreEnded():
                self._demotion.on_ended(event)
            case LoadReturned():
                self._arrivals.promotion.on_returned(event.load_id)
            case StoreReturned():
                self._demotion.on_returned(event.store_id)
            case StoreLost():
                self._on_store_lost(event)
            case TierPaused() | TierResumed():
                self._on_tier_paused(event.error if isinstance(event, TierPaused) else "")
            case ArenaLost():
                self._on_arena_lost(event)
            case ArenaBack():
                self._arenas.bring_back(event)
        return self._go_on()

    def _go_on(self) -> list[WorkerAction]:
        self._arenas.run()
        for active in self._arenas.unpark():
            self._reserve_decode(active, patient=True)
        for active in self._early.take_stranded():
            self._fail(active, "no_blocks", "no blocks are left to compute what did not arrive")
        self._batch.begin_steps()
        self._demotion.run()
        self._announce_blocks()
        return self._outbox.take()

    def abort_all(self) -> list[WorkerAction]:
        """The head is gone: nobody waits for any of the works."""
        for work_id in list(self.works):
            self._on_abort(work_id)
        self._demotion.run()
        self._announce_blocks()
        return self._outbox.take()

    @property
    def num_running(self) -> int:
        return len(self._batch.running)

    @property
    def num_queued(self) -> int:
        """Works that wait for their first step; those that receive or hand over do not count."""
        return len(self._batch.waiting)

    @property
    def num_waiting(self) -> int:
        return len(self.works) - len(self._batch.running)

    def load(self) -> InstanceLoad:
        """Gauges as they are now."""
        return InstanceLoad(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            held_blocks=self.pool.num_held,
            cached_blocks=self.pool.num_cached,
            free_blocks=self.pool.num_available,
            owners=self.pool.owners(),
            counters=dict(self.counters),
            num_blocks=self.pool.num_blocks,
            ssd=self._holdings.tier_load(),
        )

    def validate(self) -> None:
        """Asserts what must hold between any two events."""
        self.pool.validate()
        self._holdings.spares.validate()
        owners = set(self.pool.owners())
        known = {w.owner for w in self.works.values()} | {
            w.fetch_owner for w in self.works.values()
        }
        known |= self._demotion.owners | self._arrivals.promotion.owners
        known |= self._takeovers.owners
        assert {o for o in owners if not o.startswith("read:")} <= known
        if self.tier is not None:
            self.tier.validate()
            assert set(self.tier.slots.owners()) <= known
        for active in self.works.values():
            assert active.num_computed <= active.num_scheduled <= len(active.tokens)
            in_steps = sum(active is work for step in self._batch.steps for work, _ in step)
            assert active.steps_pending == in_steps
            assert len(active.block_ids) * self.layout.block_tokens >= active.num_computed
            assert (active in self._batch.running) == (active.phase is Phase.RUNNING)
            assert (active in self._batch.waiting) == (
                active.phase is Phase.WAITING and not active.closing
            )

    # Commands

    def _on_start_prefill(self, command: StartPrefill) -> None:
        work = command.work
        active = self._add(work, Phase.WAITING)
        if self.layout.blocks_for(len(work.token_ids)) > self.pool.largest:
            self._fail(active, "no_blocks", "the prompt needs more blocks than the instance has")
            return
        active.target = command.target
        self._batch.wait(active)
        self._arrivals.begin(active, command.fetch)

    def _reserve_decode(self, active: ActiveWork, patient: bool) -> None:
        work = active.work
        num_blocks = self.layout.blocks_for(len(work.token_ids) + 1)
        first_index = self._holdings.hold_prefix(active, num_blocks)
        if first_index is None:
            if not (patient and self._arenas.park(active)):
                self._fail(active, "no_blocks", "the decode instance has no blocks left")
            return
        blocks = active.block_ids[first_index : self.layout.blocks_for(len(work.token_ids))]
        active.pending.add(Pending.RECEIVE)
        self._outbox.do(ExpectStream(work.work_id, blocks, first_index, work.timeout_s))
        if active.stream_over:
            self._outbox.do(CancelStream(work.work_id))

    def _on_start_decode(self, command: StartDecode) -> None:
        active = self.works.get(command.work_id)
        if active is None or active.closing or active.has_first_token:
            return
        refusal = self._late_refusal(active)
        if refusal:
            self._fail(active, "tbt_slo", refusal)
            return
        active.has_first_token = True
        active.tokens.append(command.token.token_id)
        self._join_if_ready(active)

    def _late_refusal(self, active: ActiveWork) -> str:
        """Why one more decode would break a promise; "" if it would not. Idle instances accept."""
        batch, work = self._batch, active.work
        num_running = len(batch.running) + len(batch.joining)
        if not num_running or work.slo.tbt_s == float("inf"):
            return ""
        contexts = batch.context_tokens + len(active.tokens)
        step_s = self.cost.decode_step_s(num_running + 1, contexts) * self._decode_factor.value
        limit_s = work.slo.tbt_s * work.tolerance
        if step_s > limit_s:
            text = f"one more request would raise the mean time between tokens to {step_s:.3f} s"
            return f"{text}; above {limit_s:.3f} s the promised {work.slo.tbt_s:g} s is missed"
        if not batch.has_room(len(active.tokens), work.tolerance):
            return f"the engine's memory would have to hold {contexts} tokens at once"
        return ""

    def _on_stop_receiving(self, work_id: WorkId) -> None:
        active = self.works.get(work_id)
        if active is not None and not active.closing:
            active.stream_over = True
            if Pending.RECEIVE in active.pending:
                self._outbox.do(CancelStream(work_id))

    def _on_abort(self, work_id: WorkId) -> None:
        active = self.works.get(work_id)
        if active is not None and not active.closing:
            self._close(active)

    # The engine's word

    def _on_step_ended(self, event: StepEnded) -> None:
        step = self._batch.end_step(event.seconds)
        assert len(step) == len(event.tokens)
        told: list[WorkTokens] = []
        decodes_s = self._learn_steps(step, event.seconds, 1)
        self._outbox.count("steps")
        self._outbox.count("step_s", event.seconds / self.config.micro_batches)  # of one stage
        for index, (active, num_tokens) in enumerate(step):
            if active.closing:
                self._finalise_if_idle(active)
                continue
            if not self._early.on_step_ended(active, index in event.missed):
                continue
            token = event.tokens[index]
            active.num_computed += num_tokens
            self._holdings.seal(active)
            if token is not None:
                self._take_token(active, token, told)
        if told:
            self._outbox.tell(StepTokens(works=tuple(told), gap_s=decodes_s))

    def _on_steps_ended(self, event: StepsEnded) -> None:
        """Decodes alone, several times over; only the last token of a work can be its last."""
        step = self._batch.end_step()
        told: list[WorkTokens] = []
        num_steps = len(event.tokens[0])
        decodes_s = self._learn_steps(step, event.seconds, num_steps)
        self._outbox.count("steps", num_steps)
        self._outbox.count("step_s", event.seconds)
        for (active, _), tokens in zip(step, event.tokens, strict=True):
            assert len(tokens) == num_steps
            if active.closing:
                self._finalise_if_idle(active)
                continue
            active.num_computed += num_steps
            active.num_scheduled = active.num_computed
            active.tokens.extend([token.token_id for token in tokens])
            self._holdings.seal(active)
            finish = active.finish_reason(self._eos)
            told.append(WorkTokens(active.work.work_id, tuple(tokens), finish))
            if finish is not None:
                self._close(active)
        if told:
            self._outbox.tell(StepTokens(works=tuple(told), gap_s=decodes_s))

    def _learn_steps(self, step: Step, seconds: float, num_steps: int) -> float:
        """Seconds of one of the steps if they were of decodes alone, else 0."""
        context_tokens = 0
        for active, num_tokens in step:
            if num_tokens != 1 or active.target is not None or not active.tokens.num_generated:
                return 0.0
            context_tokens += active.tokens.size
        seconds /= num_steps
        if self.config.learning:
            context_tokens += len(step) * (num_steps - 1) // 2
            stages = self.config.micro_batches  # in each of which there are about as many
            expected_s = self.cost.decode_step_s(stages * len(step), stages * context_tokens)
            self._decode_factor.observe(seconds, expected_s)
        return seconds

    def _take_token(self, active: ActiveWork, token: Token, told: list[WorkTokens]) -> None:
        first = active.target is not None
        active.tokens.append(token.token_id)
        finish = active.finish_reason(self._eos)
        if first:
            self._outbox.tell(PrefillDone(work_id=active.work_id, token=token, finish=finish))
            active.tokens.pop()
            self._batch.leave(active)
            active.phase = Phase.HANDING_OVER
            if finish is not None:
                self._close(active)
            elif active.streaming:
                self._outbox.do(FinishStream(active.work_id))
            else:
                self._close(active)
            return
        told.append(WorkTokens(work_id=active.work_id, tokens=(token,), finish=finish))
        if finish is not None:
            self._close(active)

    def _fail_outgrown(self) -> None:
        """Only steps make works longer."""
        for active in self._batch.too_large():
            self._fail(active, "no_blocks", "the answer needs more blocks than the instance has")

    def _on_step_failed(self, event: StepFailed) -> None:
        self._outbox.count("failed_steps")
        for active, _ in self._batch.end_step():
            if active.closing:
                self._finalise_if_idle(active)
            elif event.lost_arena is not None and self._arenas.survives(active, event.lost_arena):
                active.num_scheduled = active.num_computed  # the same tokens once more
            else:
                self._fail(active, "engine_error", event.message)

    def _on_arena_lost(self, event: ArenaLost) -> None:
        """Its works begin anew, from their tokens and whatever of their blocks is elsewhere."""
        if self._arenas.lose(event.arena):
            self._outbox.count("lost_arenas")
            self._batch.stop_repeating()
            for active in list(self.works.values()):
                if not active.closing and self._arenas.touches(active, event.arena):
                    self._fail(active, "blocks_lost", event.message)

    # The messenger's word

    def _on_fetch_ended(self, event: FetchEnded) -> None:
        if event.fetch_id in self._takeovers.owners:
            self._takeovers.on_ended(event)
            return
        active = self.works[WorkId(event.fetch_id)]
        self._arrivals.on_fetch_ended(active, event)
        if active.closing:
            self._finalise_if_idle(active)

    def _on_look_up_ended(self, event: LookUpEnded) -> None:
        active = self.works.get(WorkId(event.lookup_id))
        if active is not None and active.asking and not active.closing:
            self._arrivals.on_looked_up(active, event)

    def _on_store_lost(self, event: StoreLost) -> None:
        if self._holdings.tier is not None:
            self._holdings.tier.lose(event.error)
            self._outbox.count("lost_tiers")

    def _on_tier_paused(self, error: str) -> None:
        """ "": it answers again."""
        if self._holdings.tier is not None:
            self._holdings.tier.paused = error
            self._outbox.count("paused_tiers", 1 if error else 0)

    def _on_send_ended(self, event: SendEnded) -> None:
        active = self.works[WorkId(event.stream_id)]
        active.pending.discard(Pending.SEND)
        self._outbox.count("sent_bytes", event.num_bytes)
        if active.closing:
            self._finalise_if_idle(active)
            return
        if event.error:
            self._outbox.count("failed_streams")
            self._outbox.tell(StreamBroken(work_id=active.work_id, error=event.error))
        if active.phase is Phase.HANDING_OVER:
            self._close(active)
        # A stream that breaks during the prefill only ends itself: the receiver computes what it
        # lacks.

    def _on_receive_ended(self, event: ReceiveEnded) -> None:
        active = self.works[WorkId(event.stream_id)]
        active.pending.discard(Pending.RECEIVE)
        self._outbox.count("received_bytes", event.num_bytes)
        self._outbox.count("corrupt_blocks", len(event.corrupt))
        if active.closing:
            self._finalise_if_idle(active)
            return
        num_prompt = len(active.work.token_ids)
        if event.error:
            usable_blocks = active.num_sealed
        else:
            usable_blocks = min(event.corrupt, default=len(active.block_ids))
        active.num_computed = min(usable_blocks * self.layout.block_tokens, num_prompt)
        active.num_scheduled = active.num_computed
        active.kv_arrived = True
        self._holdings.seal(active)
        self._outbox.count("recomputed_tokens", num_prompt - active.num_computed)
        self._outbox.tell(
            TransferDone(
                work_id=active.work_id,
                num_bytes=event.num_bytes,
                seconds=event.seconds,
                corrupt_blocks=len(event.corrupt),
                error=event.error,
            )
        )
        self._join_if_ready(active)

    def _announce_blocks(self) -> None:
        holdings = self._holdings
        changes = holdings.take_changes()
        self._outbox.count("dropped_blocks", holdings.num_dropped)
        holdings.num_dropped = 0
        if changes is not None:
            self._outbox.tell(changes)
            self._demotion.publish(changes.stored)

    # Beginning and end of a work

    def _add(self, work: Work, phase: Phase) -> ActiveWork:
        assert work.work_id not in self.works
        tokens = Tokens(work.token_ids, work.num_prompt_tokens)
        active = ActiveWork(work=work, phase=phase, tokens=tokens)
        self._holdings.name_prompt(active)
        self.works[work.work_id] = active
        return active

    def _join_if_ready(self, active: ActiveWork) -> None:
        if active.kv_arrived and active.has_first_token and active.phase is Phase.RECEIVING:
            self._batch.join(active)

    def _fail(self, active: ActiveWork, reason: str, message: str) -> None:
        self._outbox.tell(WorkFailed(work_id=active.work_id, reason=reason, message=message))
        self._close(active)

    def _close(self, active: ActiveWork) -> None:
        """Ends a work; its blocks go when nothing can touch them any more."""
        active.closing = True
        self._batch.leave(active)
        if Pending.SEND in active.pending:
            self._outbox.do(AbortStream(active.work_id))
        if Pending.RECEIVE in active.pending:
            self._outbox.do(CancelStream(active.work_id))
        self._finalise_if_idle(active)

    def _finalise_if_idle(self, active: ActiveWork) -> None:
        if not active.idle:
            return
        self.pool.release(active.owner)
        self.pool.release(active.fetch_owner)
        del self.works[active.work_id]

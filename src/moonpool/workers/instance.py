"""What one instance does next: a pure state machine for every role.

`handle(event, now)` takes a command of the head, a word of the messenger or of the engine, and
returns actions. It owns the block pool and the works; it never waits, computes, or moves a byte.

Prefill: fetch a missing prefix if told to, compute the rest in chunks, stream the KVCache to the
decode instance while later layers and chunks are computed (Mooncake section 3, steps 1 to 3).
Decode: receive the KVCache into reserved blocks, check the SLO again, join the running batch
(step 4). A mixed instance does both. Anything that did not arrive or did not verify is computed
again, here, from the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from moonpool.batching.chunked import plan_chunked
from moonpool.batching.plan import Candidate
from moonpool.config import InstanceConfig
from moonpool.cost.model import CostModel
from moonpool.kvcache.blocks import BlockPool
from moonpool.kvcache.hashing import extend_keys, root_key
from moonpool.kvcache.layout import BlockLayout
from moonpool.kvcache.transfers import (
    FetchEnded,
    ReadEnded,
    ReadRequested,
    ReceiveEnded,
    SendEnded,
)
from moonpool.types import BlockId, RequestId, Role, Token
from moonpool.workers.actions import (
    AbortStream,
    CancelStream,
    ExpectStream,
    FetchBlocks,
    FinishStream,
    GrantRead,
    OpenStream,
    RunStep,
    SendBlocks,
    StepEnded,
    StepEntry,
    StepFailed,
    Tell,
    WorkerAction,
    WorkerEvent,
)
from moonpool.workers.active import ActiveWork, Pending, Phase
from moonpool.workers.messages import (
    Abort,
    BlocksChanged,
    BlocksSnapshot,
    DecodeAccepted,
    InstanceLoad,
    PrefillDone,
    PrefillStarted,
    Report,
    ReserveDecode,
    Resync,
    StartDecode,
    StartPrefill,
    StepTokens,
    StopReceiving,
    StreamBroken,
    TransferDone,
    Work,
    WorkFailed,
    WorkId,
    WorkTokens,
)

FETCH_PATIENCE = 10.0
"""A fetch that takes so many times what it should is given up."""


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
    ) -> None:
        self.config = config
        self.layout = layout
        self.role = role
        self.cost = cost
        self.pool = BlockPool(num_blocks)
        self.works: dict[WorkId, ActiveWork] = {}
        self.counters: dict[str, float] = {}
        self._eos = frozenset(eos_token_ids)
        self._waiting: list[ActiveWork] = []
        self._running: list[ActiveWork] = []
        self._step: list[tuple[ActiveWork, int]] = []
        self._next_sequence = 0
        self._actions: list[WorkerAction] = []

    def handle(self, event: WorkerEvent, now: float) -> list[WorkerAction]:
        """One event in, the actions it calls for out, in the order to perform them."""
        del now  # the instance keeps no time: deadlines are the Conductor's
        match event:
            case StartPrefill():
                self._on_start_prefill(event)
            case ReserveDecode():
                self._on_reserve_decode(event.work)
            case StartDecode():
                self._on_start_decode(event)
            case StopReceiving():
                self._on_stop_receiving(event.work_id)
            case Abort():
                self._on_abort(event.work_id)
            case Resync():
                self._on_resync()
            case StepEnded():
                self._on_step_ended(event)
            case StepFailed():
                self._on_step_failed(event)
            case FetchEnded():
                self._on_fetch_ended(event)
            case SendEnded():
                self._on_send_ended(event)
            case ReceiveEnded():
                self._on_receive_ended(event)
            case ReadRequested():
                self._on_read_requested(event)
            case ReadEnded():
                self.pool.release(f"read:{event.read_id}")
        self._plan_step()
        self._announce_blocks()
        actions, self._actions = self._actions, []
        return actions

    def abort_all(self) -> list[WorkerAction]:
        """The head is gone: nobody waits for any of the works."""
        for work_id in list(self.works):
            self._on_abort(work_id)
        self._announce_blocks()
        actions, self._actions = self._actions, []
        return actions

    def load(self) -> InstanceLoad:
        """Gauges as they are now."""
        return InstanceLoad(
            num_running=len(self._running),
            num_waiting=len(self.works) - len(self._running),
            held_blocks=self.pool.num_held,
            cached_blocks=self.pool.num_cached,
            free_blocks=self.pool.num_available,
            owners=self.pool.owners(),
            counters=dict(self.counters),
        )

    def validate(self) -> None:
        """Asserts what must hold between any two events."""
        self.pool.validate()
        owners = set(self.pool.owners())
        known = {w.owner for w in self.works.values()} | {
            w.fetch_owner for w in self.works.values()
        }
        assert {o for o in owners if not o.startswith("read:")} <= known
        for active in self.works.values():
            assert active.num_computed <= len(active.tokens)
            assert len(active.block_ids) * self.layout.block_tokens >= active.num_computed
            assert (active in self._running) == (active.phase is Phase.RUNNING)
            assert (active in self._waiting) == (
                active.phase is Phase.WAITING and not active.closing
            )

    # Commands

    def _on_start_prefill(self, command: StartPrefill) -> None:
        work = command.work
        active = self._add(work, Phase.WAITING)
        if self.layout.blocks_for(len(work.token_ids)) > self.pool.num_blocks:
            self._fail(active, "no_blocks", "the prompt needs more blocks than the instance has")
            return
        active.target = command.target
        self._waiting.append(active)
        if command.fetch is None or not self._caches(active):
            return
        keys = active.keys[: min(command.fetch.num_blocks, self._max_cached_blocks(active))]
        held = self.pool.match(keys)
        self.pool.acquire(active.fetch_owner, held)
        missing = self.pool.allocate(active.fetch_owner, len(keys) - len(held))
        if not missing:
            self.pool.release(active.fetch_owner)
            return
        active.fetched_blocks, active.fetch_first_index = missing, len(held)
        active.pending.add(Pending.FETCH)
        # A source that hangs must not use up the time in which the gap could be computed.
        usual_s = self.cost.transfer_s(len(missing) * self.layout.block_bytes, same_host=False)
        timeout_s = min(work.timeout_s, FETCH_PATIENCE * usual_s + 1.0)
        self._do(
            FetchBlocks(work.work_id, command.fetch.source, keys[len(held) :], missing, timeout_s)
        )

    def _on_reserve_decode(self, work: Work) -> None:
        active = self._add(work, Phase.RECEIVING)
        num_blocks = self.layout.blocks_for(len(work.token_ids) + 1)
        first_index = self._hold_prefix(active, num_blocks)
        if first_index is None:
            self._fail(active, "no_blocks", "the decode instance has no blocks left")
            return
        last = self.layout.blocks_for(len(work.token_ids))
        active.pending.add(Pending.RECEIVE)
        self._do(
            ExpectStream(
                work.work_id, active.block_ids[first_index:last], first_index, work.timeout_s
            )
        )

    def _on_start_decode(self, command: StartDecode) -> None:
        active = self.works.get(command.work_id)
        if active is None or active.closing or active.has_first_token:
            return
        contexts = sum(len(w.tokens) for w in self._running) + len(active.tokens)
        step_s = self.cost.decode_step_s(len(self._running) + 1, contexts)
        if self._running and step_s > active.work.slo.tbt_s:
            text = f"one more request would raise the time between tokens to {step_s:.3f} s"
            self._fail(active, "tbt_slo", text)
            return
        active.has_first_token = True
        active.tokens.append(command.token.token_id)
        self._tell(DecodeAccepted(work_id=active.work_id))
        self._join_if_ready(active)

    def _on_stop_receiving(self, work_id: WorkId) -> None:
        active = self.works.get(work_id)
        if active is not None and not active.closing and Pending.RECEIVE in active.pending:
            self._do(CancelStream(work_id))

    def _on_abort(self, work_id: WorkId) -> None:
        active = self.works.get(work_id)
        if active is not None and not active.closing:
            self._close(active)

    def _on_resync(self) -> None:
        self.pool.take_changes()  # the snapshot has them
        self._tell(BlocksSnapshot(next_sequence=self._next_sequence, keys=tuple(self.pool.keys())))

    # The engine's word

    def _on_step_ended(self, event: StepEnded) -> None:
        step, self._step = self._step, []
        assert len(step) == len(event.tokens)
        told: list[WorkTokens] = []
        self._count("steps")
        for (active, num_tokens), token in zip(step, event.tokens, strict=True):
            active.pending.discard(Pending.STEP)
            if active.closing:
                self._finalise_if_idle(active)
                continue
            active.num_computed += num_tokens
            self._seal(active)
            if token is not None:
                self._take_token(active, token, told)
        if told:
            self._tell(StepTokens(works=tuple(told)))

    def _take_token(self, active: ActiveWork, token: Token, told: list[WorkTokens]) -> None:
        first = active.target is not None
        active.tokens.append(token.token_id)
        finish = active.finish_reason(self._eos)
        if first:
            self._tell(PrefillDone(work_id=active.work_id, token=token, finish=finish))
            active.tokens.pop()
            self._leave_batch(active)
            active.phase = Phase.HANDING_OVER
            if finish is not None:
                self._close(active)
            elif active.streaming:
                self._do(FinishStream(active.work_id))
            else:
                self._close(active)
            return
        told.append(WorkTokens(work_id=active.work_id, tokens=(token,), finish=finish))
        if finish is not None:
            self._close(active)

    def _on_step_failed(self, event: StepFailed) -> None:
        step, self._step = self._step, []
        self._count("failed_steps")
        for active, _ in step:
            active.pending.discard(Pending.STEP)
            if active.closing:
                self._finalise_if_idle(active)
            else:
                self._fail(active, "engine_error", event.message)

    # The messenger's word

    def _on_fetch_ended(self, event: FetchEnded) -> None:
        active = self.works[WorkId(event.fetch_id)]
        active.pending.discard(Pending.FETCH)
        self._count("corrupt_slices", event.corrupt_slices)
        self._count("fetched_bytes", event.num_bytes)
        self._count("failed_fetches", 1 if event.error else 0)
        for offset in range(event.num_blocks):
            index = active.fetch_first_index + offset
            self.pool.seal(active.fetched_blocks[offset], active.keys[index])
        # Only what has a name is worth holding while the work waits.
        self.pool.release(active.fetch_owner)
        usable = active.keys[: self._max_cached_blocks(active)]
        self.pool.acquire(active.fetch_owner, self.pool.match(usable))
        active.num_fetched_tokens = event.num_blocks * self.layout.block_tokens
        active.corrupt_slices = event.corrupt_slices
        if active.closing:
            self._finalise_if_idle(active)

    def _on_send_ended(self, event: SendEnded) -> None:
        active = self.works[WorkId(event.stream_id)]
        active.pending.discard(Pending.SEND)
        self._count("sent_bytes", event.num_bytes)
        if active.closing:
            self._finalise_if_idle(active)
            return
        if event.error:
            self._count("failed_streams")
            self._tell(StreamBroken(work_id=active.work_id, error=event.error))
        if active.phase is Phase.HANDING_OVER:
            self._close(active)
        # A stream that breaks during the prefill only ends itself: the receiver computes what it
        # lacks.

    def _on_receive_ended(self, event: ReceiveEnded) -> None:
        active = self.works[WorkId(event.stream_id)]
        active.pending.discard(Pending.RECEIVE)
        self._count("received_bytes", event.num_bytes)
        self._count("corrupt_blocks", len(event.corrupt))
        if active.closing:
            self._finalise_if_idle(active)
            return
        num_prompt = len(active.work.token_ids)
        if event.error:
            usable_blocks = active.num_sealed
        else:
            usable_blocks = min(event.corrupt, default=len(active.block_ids))
        active.num_computed = min(usable_blocks * self.layout.block_tokens, num_prompt)
        active.kv_arrived = True
        self._seal(active)
        self._count("recomputed_tokens", num_prompt - active.num_computed)
        self._tell(
            TransferDone(
                work_id=active.work_id,
                num_bytes=event.num_bytes,
                seconds=event.seconds,
                corrupt_blocks=len(event.corrupt),
                error=event.error,
            )
        )
        self._join_if_ready(active)

    def _on_read_requested(self, event: ReadRequested) -> None:
        blocks = self.pool.match(event.keys)
        if blocks:
            self.pool.acquire(f"read:{event.read_id}", blocks)
        self._do(GrantRead(event.read_id, blocks))

    # Planning

    def _plan_step(self) -> None:
        if self._step:
            return
        self._make_room_for_decodes()
        self._admit_waiting()
        decodes: list[Candidate] = []
        prefills: list[Candidate] = []
        for active in self._running:
            lane = decodes if active.decoding else prefills
            lane.append(Candidate(RequestId(active.work_id), active.num_uncomputed))
        plan = plan_chunked(decodes, prefills, self.config.chunk_tokens, self.config.max_sequences)
        if not plan:
            return
        entries = []
        for entry in plan.entries:
            active = self.works[WorkId(entry.request_id)]
            active.pending.add(Pending.STEP)
            self._step.append((active, entry.num_tokens))
            entries.append(self._step_entry(active, entry.num_tokens))
        self._do(RunStep(tuple(entries)))

    def _step_entry(self, active: ActiveWork, num_tokens: int) -> StepEntry:
        start, end = active.num_computed, active.num_computed + num_tokens
        last = end == len(active.tokens)
        sends: tuple[tuple[int, BlockId], ...] = ()
        if active.streaming:
            size = self.layout.block_tokens
            ready = self.layout.blocks_for(end) if last else end // size
            indices = range(active.num_streamed_blocks, ready)
            sends = tuple((i, active.block_ids[i]) for i in indices)
            active.num_streamed_blocks = max(ready, active.num_streamed_blocks)
        return StepEntry(
            work_id=active.work_id,
            new_token_ids=active.tokens[start:end],
            start=start,
            block_ids=active.block_ids,
            draw=active.work.sampling if last else None,
            generated=active.generated if last else (),
            sends=sends,
        )

    def _make_room_for_decodes(self) -> None:
        """Every running work gets the blocks its tokens need; the youngest make way if there are
        none."""
        for active in list(self._running):
            if active.phase is not Phase.RUNNING:
                continue  # made way for an older one
            num_blocks = self.layout.blocks_for(len(active.tokens))
            if num_blocks > self.pool.num_blocks:
                self._fail(
                    active, "no_blocks", "the answer needs more blocks than the instance has"
                )
                continue
            lacking = num_blocks - len(active.block_ids)
            while lacking > 0:
                blocks = self.pool.allocate(active.owner, lacking)
                if blocks is not None:
                    active.block_ids.extend(blocks)
                    break
                # It is `active` itself in the end: a prefill that hands over never lacks blocks.
                youngest = next(w for w in reversed(self._running) if w.target is None)
                self._preempt(youngest)
                if youngest is active:
                    break

    def _preempt(self, active: ActiveWork) -> None:
        """Gives up a running work's blocks; it is computed again later, from cached blocks if it
        can."""
        self._count("preemptions")
        self.pool.release(active.owner)
        active.block_ids, active.num_computed, active.num_sealed = [], 0, 0
        self._running.remove(active)
        active.phase = Phase.WAITING
        self._waiting.insert(0, active)

    def _admit_waiting(self) -> None:
        """Moves waiting works, in order, to the batch while the step has tokens to spare."""
        spare = self.config.chunk_tokens - sum(w.num_uncomputed for w in self._running)
        for active in list(self._waiting):
            if spare <= 0 or len(self._running) >= self.config.max_sequences:
                return
            if Pending.FETCH in active.pending:
                continue
            num_blocks = self.layout.blocks_for(len(active.tokens))
            if self._hold_prefix(active, num_blocks) is None:
                if self._running or not self._give_up_fetched():
                    return
                if self._hold_prefix(active, num_blocks) is None:
                    return
            self.pool.release(active.fetch_owner)
            self._waiting.remove(active)
            self._enter_batch(active)
            spare -= active.num_uncomputed

    def _give_up_fetched(self) -> bool:
        """Lets go of what was fetched for works that wait: the first of them may need the room, and
        the others cannot run before it. True if there was any."""
        owners = [w.fetch_owner for w in self._waiting if Pending.FETCH not in w.pending]
        held = self.pool.owners()
        for owner in reversed(owners):
            self.pool.release(owner)
        return any(held.get(owner) for owner in owners)

    def _enter_batch(self, active: ActiveWork) -> None:
        active.phase = Phase.RUNNING
        self._running.append(active)
        if active.started or active.has_first_token:
            return  # it was preempted
        active.started = True
        fetched = min(active.num_fetched_tokens, active.num_computed)
        self._tell(
            PrefillStarted(
                work_id=active.work_id,
                cached_tokens=active.num_computed,
                fetched_tokens=fetched,
                corrupt_slices=active.corrupt_slices,
            )
        )
        if active.target is not None:
            active.pending.add(Pending.SEND)
            self._do(OpenStream(active.work_id, active.target, active.work.timeout_s))
            cached = active.block_ids[: active.num_sealed]
            active.num_streamed_blocks = len(cached)
            if cached:
                self._do(SendBlocks(active.work_id, tuple(enumerate(cached))))

    # Blocks

    def _hold_prefix(self, active: ActiveWork, num_blocks: int) -> int | None:
        """Holds cached blocks of the work's prefix and new ones up to `num_blocks`; returns how
        many were cached, or None, holding nothing, if there is no room."""
        assert not active.block_ids
        cached: list[BlockId] = []
        if self._caches(active):
            cached = self.pool.match(active.keys[: self._max_cached_blocks(active)])
        self.pool.acquire(active.owner, cached)
        blocks = self.pool.allocate(active.owner, num_blocks - len(cached))
        if blocks is None:
            self.pool.release(active.owner)
            return None
        active.block_ids = cached + blocks
        active.num_sealed = len(cached)
        active.num_computed = len(cached) * self.layout.block_tokens
        return len(cached)

    def _max_cached_blocks(self, active: ActiveWork) -> int:
        """At least one token must be computed, or there would be nothing to draw from."""
        return (len(active.tokens) - 1) // self.layout.block_tokens

    def _caches(self, active: ActiveWork) -> bool:
        return self.config.prefix_caching and active.work.use_cache

    def _seal(self, active: ActiveWork) -> None:
        """Names the full blocks whose KVCache is complete."""
        num_full = active.num_computed // self.layout.block_tokens
        if num_full <= active.num_sealed or not self._caches(active):
            return
        extend_keys(active.keys, active.tokens, self.layout.block_tokens, active.root)
        for index in range(active.num_sealed, num_full):
            self.pool.seal(active.block_ids[index], active.keys[index])
        active.num_sealed = num_full

    def _announce_blocks(self) -> None:
        changes = self.pool.take_changes()
        if not changes:
            return
        self._tell(
            BlocksChanged(
                sequence=self._next_sequence,
                stored=tuple(changes.stored),
                removed=tuple(changes.removed),
            )
        )
        self._next_sequence += 1

    # Beginning and end of a work

    def _add(self, work: Work, phase: Phase) -> ActiveWork:
        assert work.work_id not in self.works
        root = root_key(self.layout.fingerprint, work.tenant)
        active = ActiveWork(work=work, phase=phase, root=root, tokens=list(work.token_ids))
        if self._caches(active):
            extend_keys(active.keys, active.tokens, self.layout.block_tokens, root)
        self.works[work.work_id] = active
        return active

    def _join_if_ready(self, active: ActiveWork) -> None:
        if active.kv_arrived and active.has_first_token and active.phase is Phase.RECEIVING:
            active.phase = Phase.RUNNING
            self._running.append(active)

    def _fail(self, active: ActiveWork, reason: str, message: str) -> None:
        self._tell(WorkFailed(work_id=active.work_id, reason=reason, message=message))
        self._close(active)

    def _close(self, active: ActiveWork) -> None:
        """Ends a work; its blocks go when nothing can touch them any more."""
        active.closing = True
        self._leave_batch(active)
        if active in self._waiting:
            self._waiting.remove(active)
        if Pending.SEND in active.pending:
            self._do(AbortStream(active.work_id))
        if Pending.RECEIVE in active.pending:
            self._do(CancelStream(active.work_id))
        self._finalise_if_idle(active)

    def _finalise_if_idle(self, active: ActiveWork) -> None:
        if active.pending:
            return
        self.pool.release(active.owner)
        self.pool.release(active.fetch_owner)
        del self.works[active.work_id]

    def _leave_batch(self, active: ActiveWork) -> None:
        if active in self._running:
            self._running.remove(active)
            active.phase = Phase.WAITING

    # Output

    def _do(self, action: WorkerAction) -> None:
        self._actions.append(action)

    def _tell(self, report: Report) -> None:
        self._actions.append(Tell(report))

    def _count(self, name: str, amount: float = 1) -> None:
        if amount:
            self.counters[name] = self.counters.get(name, 0.0) + amount

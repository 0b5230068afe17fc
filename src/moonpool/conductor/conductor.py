"""The Conductor: the one place where requests are booked on instances, and booked off again.

`handle(event, now)` takes arrivals, reports and losses and returns commands and answers. Policies
choose (`placement`, `admission`), the Conductor books. It also owns every request's deadline, and
tries a request again when an instance fails: tokens already delivered become part of the new
attempt's prompt, and since draws are keyed by (seed, position), the answer goes on as if nothing
had happened.

    arrived --place--> PREFILL --PrefillDone--> HANDOVER --DecodeAccepted--> DECODE --> ended
                 \\--> refused (429, 503)            any failure --> placed again, or refused
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from moonpool.conductor.actions import (
    ConductorAction,
    ConductorEvent,
    Deliver,
    DrainRequested,
    HotRequested,
    InstanceJoined,
    InstanceLost,
    Refuse,
    Reported,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    Send,
    Tick,
)
from moonpool.conductor.admission import UNLIMITED, Promise, admit
from moonpool.conductor.answers import Answers
from moonpool.conductor.beliefs import Beliefs
from moonpool.conductor.bookings import Bookings
from moonpool.conductor.fleet import to_ns
from moonpool.conductor.orders import orders
from moonpool.conductor.output_length import RunningMean
from moonpool.conductor.placement import Placement, Rejection, place
from moonpool.conductor.policies import Demand
from moonpool.conductor.state import Attempt, InstanceState, Stage, Tracked
from moonpool.conductor.upkeep import Upkeep
from moonpool.config import ConductorConfig, SloConfig
from moonpool.kvcache.hashing import block_keys, root_key
from moonpool.kvcache.layout import BlockLayout
from moonpool.kvcache.prefix_index import PrefixMatch
from moonpool.metrics import RequestRecord
from moonpool.types import FinishReason, InstanceId, Request, RequestId, Role, Slo, Token
from moonpool.workers.messages import (
    Abort,
    BlocksChanged,
    BlocksSnapshot,
    Command,
    DecodeAccepted,
    HotPrefixes,
    InstanceInfo,
    InstanceLoad,
    PrefillDone,
    PrefillStarted,
    Report,
    Resync,
    RoleChanged,
    StartDecode,
    StepTokens,
    StopReceiving,
    StreamBroken,
    TakenOver,
    TransferDone,
    WantsToLeave,
    WorkFailed,
    WorkId,
)

TBT_SLO_LATE = "tbt_slo_late"
"""The reason of a refusal by the decode instance's own check: its prefill was for nothing."""
REFUSED = "refused_by_engine"
MAX_RETRY_AFTER_S = 120.0
DEFAULT_SLO = Slo(ttft_s=SloConfig().ttft_s, tbt_s=SloConfig().tbt_s)


class PoolLoads(NamedTuple):
    """Predicted over promised latency (the default SLO), as the mean over a pool's instances."""

    prefill: float
    decode: float  # of what is decoding now
    decode_projected: float  # of what will be when a prefill that is placed now usually ends


class Conductor:
    """Global state machine of the cluster."""

    def __init__(
        self, config: ConductorConfig, life: str = "", default_slo: Slo = DEFAULT_SLO
    ) -> None:
        """`life` tells this Conductor's works from those of the one before it, should any
        remain. `default_slo` is the unit of `loads`."""
        self.config = config
        self.default_slo = default_slo
        self.answers = Answers(config.decode_prediction == "length")
        self.books = Bookings(self.answers.forecast)
        self.index, self.fleet = self.books.index, self.books.fleet
        self.forecast = self.answers.forecast
        self.beliefs = Beliefs(self.books, config.learning, self.forecast.error)
        self.instances = self.books.instances
        self.upkeep = Upkeep(config, self.books, default_slo)
        self.roles, self.drains = self.upkeep.roles, self.upkeep.drains
        self.requests: dict[RequestId, Tracked] = {}
        self._works: dict[WorkId, Tracked] = {}
        self._life = f"{life}." if life else ""
        self._work_numbers = count(1)  # a client may use its request id again
        self._deadlines: list[tuple[float, RequestId]] = []
        self._usual_ttft_s = RunningMean(0.0)
        self._layout: BlockLayout | None = None  # of all instances
        self._token_bytes = 0
        self._actions: list[ConductorAction] = []

    def handle(self, event: ConductorEvent, now: float) -> list[ConductorAction]:
        match event:
            case Reported():
                self._on_report(event.instance_id, event.report, now)
            case RequestArrived():
                self._on_request_arrived(event.request, now)
            case RequestCancelled():
                tracked = self.requests.get(event.request_id)
                if tracked is not None:
                    self._end(tracked, FinishReason.ABORT.value, now)
            case InstanceJoined():
                self._on_instance_joined(event.info, now)
            case InstanceLost():
                self._on_instance_lost(event.instance_id, event.reason, now)
            case DrainRequested():
                self._actions += self.upkeep.drain(
                    event.instance_id, event.within_s, event.why, now
                )
            case HotRequested():
                self._actions += self.upkeep.ask_hot(event.num_blocks)
            case Tick():
                self._on_tick(now)
        actions, self._actions = self._actions, []
        return actions

    def loads(self, now: float) -> PoolLoads:
        """How loaded both pools are; cheap enough to be asked for often."""
        slo, fleet = self.default_slo, self.fleet
        projected = self.forecast.project(now + self._usual_ttft_s.value, now)
        return PoolLoads(
            fleet.prefill_load(slo, now),
            fleet.decode_load(slo),
            fleet.spread_decode_load(slo, *projected),
        )

    def validate(self) -> None:
        """Asserts that bookings and requests agree in both directions."""
        for tracked in self.requests.values():
            assert tracked.attempt is not None
            assert self._works[tracked.attempt.work_id] is tracked
        assert len(self._works) == len(self.requests)
        self.books.validate(self.requests.values())
        self.upkeep.validate()

    # Instances

    def _on_instance_joined(self, info: InstanceInfo, now: float) -> None:
        if info.instance_id in self.instances:
            self._on_instance_lost(info.instance_id, "it joined anew", now)
        self._layout, self._token_bytes = info.layout, info.layout.token_bytes
        self._ask_for_all_blocks(self.books.join(info))

    def _ask_for_all_blocks(self, state: InstanceState) -> None:
        """Once until the answer comes, however many events meanwhile cannot be used."""
        if not state.resyncing:
            state.resyncing = True
            self._send(state.info.instance_id, Resync())

    def _on_instance_lost(self, instance_id: InstanceId, reason: str, now: float) -> None:
        state = self.books.leave(instance_id)
        if state is None:
            return
        self._actions += self.upkeep.on_lost(state, now)
        lost = {**state.prefills, **state.handed_over, **state.decodes}
        for tracked in lost.values():
            attempt = tracked.attempt
            assert attempt is not None
            if instance_id != attempt.decoder and attempt.stage is Stage.DECODE:
                # The prefill is done, but its stream may never have reached the decode instance.
                self._send(attempt.decoder, StopReceiving(work_id=attempt.work_id))
                continue
            text = f"instance {instance_id} was lost: {reason}"
            self._retry(tracked, 503, "instance_lost", text, now)

    # Requests

    def _on_request_arrived(self, request: Request, now: float) -> None:
        assert request.request_id not in self.requests
        record = RequestRecord(
            request.request_id,
            request.num_prompt_tokens,
            request.slo,
            request.arrived_s,
            tenant=request.tenant,
        )
        tracked = Tracked(request, record)
        heapq.heappush(self._deadlines, (request.deadline_s, request.request_id))
        self.requests[request.request_id] = tracked
        self._place(tracked, now)

    def _place(self, tracked: Tracked, now: float) -> None:
        """Books the request's next attempt, or refuses it."""
        request, layout = tracked.request, self._layout
        if not self.instances or layout is None:
            self._refuse(tracked, Rejection(503, "no_instance", "no instance is up", 5.0), now)
            return
        tokens: Sequence[int] = request.token_ids
        if tracked.generated:
            tokens = (*tokens, *tracked.generated)
        self._name_blocks(tracked, tokens, layout)
        match = self.index.match(tracked.keys)
        demand = self._demand(tracked, len(tokens), layout)
        failed_on = [self.instances.get(name) for name in sorted(tracked.failed_on)]
        avoid = [state.row for state in failed_on if state is not None]
        decision = self._decide(tracked, demand, match, avoid, now)
        if not tracked.num_attempts:
            self._note_offered(demand, decision, match, request.sampling.max_tokens, now)
        if isinstance(decision, Rejection) and avoid:
            decision = self._decide(tracked, demand, match, (), now)
        if isinstance(decision, Rejection):
            self._refuse(tracked, decision, now)
            return
        self.answers.predict(tracked, match.deepest)
        self._book(tracked, decision, tokens, demand, now)

    def _note_offered(
        self,
        demand: Demand,
        decision: Placement | Rejection,
        match: PrefixMatch,
        max_tokens: int,
        now: float,
    ) -> None:
        if isinstance(decision, Placement):
            cached_tokens = decision.hit_tokens
        else:
            cached_tokens = min(match.deepest, demand.usable_blocks) * demand.block_tokens
        self.roles.note_arrival(demand.num_tokens, cached_tokens, max_tokens, now)

    def _name_blocks(self, tracked: Tracked, tokens: Sequence[int], layout: BlockLayout) -> None:
        request = tracked.request
        if not request.use_cache:
            return
        if request.keys is not None:
            tracked.keys = request.keys  # of the prompt; what was generated stays nameless
        else:
            root = root_key(layout.fingerprint, request.tenant)
            tracked.keys = block_keys(tokens, layout.block_tokens, root)

    def _demand(self, tracked: Tracked, num_tokens: int, layout: BlockLayout) -> Demand:
        left = tracked.request.sampling.max_tokens - len(tracked.generated)
        expected = num_tokens
        if left > 1:
            expected += min(left, int(self.answers.lengths.mean.value))  # `max_tokens` says little
            # The answer may be shorter: no request is refused for ever that could just fit.
            expected = min(expected, max(self.fleet.most_decode_tokens, num_tokens + 1))
        return Demand(
            number=next(self._work_numbers),
            num_tokens=num_tokens,
            # Booked in whole blocks, as they will be held.
            expected_tokens=layout.blocks_for(expected) * layout.block_tokens,
            decodes=left > 1,
            block_tokens=layout.block_tokens,
            token_bytes=self._token_bytes,
            answer_s=self.answers.usual_s,
            tbt_s=min(tracked.request.slo.tbt_s, self.default_slo.tbt_s),
        )

    def _decide(
        self,
        tracked: Tracked,
        demand: Demand,
        match: PrefixMatch,
        avoid: Sequence[int],
        now: float,
    ) -> Placement | Rejection:
        """The policies' word on it; books nothing."""
        decision = place(demand, self.fleet, match, self.config, now, avoid)
        if isinstance(decision, Rejection):
            return decision
        request = tracked.request
        # An answer that has begun is not taken back for being slow.
        slo = UNLIMITED if tracked.generated else request.slo
        promise = Promise(slo, max(now - request.arrived_s, 0.0))
        refusal = admit(demand, decision, promise, self.fleet, self.forecast, self.config, now)
        if refusal is None:
            return decision
        row, limit = self.instances[decision.prefill].row, self.config.load_limit
        if not self.beliefs.may_probe(decision, row, promise, limit, now):
            return refusal
        tracked.explanation.add(f"taken, to see if the belief is right, although {refusal.message}")
        return decision

    def _book(
        self,
        tracked: Tracked,
        placement: Placement,
        tokens: Sequence[int],
        demand: Demand,
        now: float,
    ) -> None:
        tracked.num_attempts += 1
        request, record = tracked.request, tracked.record
        attempt = Attempt(
            work_id=WorkId(f"{request.request_id}/{self._life}{demand.number}"),
            prefill=placement.prefill,
            decode=placement.decode,
            fetch_from=placement.fetch_from,
            prefill_ns=to_ns(placement.prefill_s),
            num_tokens=demand.num_tokens,
            booked_tokens=self._room(demand, placement),
            answers=demand.decodes,
            expected_keys=tracked.keys[placement.held_blocks :],
            tbt_s=placement.tbt_s,
        )
        tracked.attempt = attempt
        self._works[attempt.work_id] = tracked
        self.books.book(tracked, attempt, now)
        if attempt.answers:
            context_tokens = (demand.num_tokens + demand.expected_tokens) // 2
            self.answers.enter(tracked, attempt, now + placement.ttft_s, context_tokens, now)
        self._usual_ttft_s.add(placement.ttft_s)
        record.attempts = tracked.num_attempts
        record.placed_s = now
        record.prefill_instance, record.decode_instance = attempt.prefill, attempt.decoder
        record.predicted_ttft_s, record.predicted_tbt_s = placement.ttft_s, placement.tbt_s
        tracked.explanation.add(placement.chosen)
        config, tail = self.config, self.fleet.tbt_tail_of(placement.decoder_row)
        commands = orders(tracked, attempt, placement, tokens, self.instances, config, tail, now)
        for instance_id, command in commands:
            self._send(instance_id, command)

    def _room(self, demand: Demand, placement: Placement) -> int:
        """To book where the tokens come from. A prefill instance's own queue sees to its room; but
        on a mixed one, what only prefills there must not take what was promised to others."""
        mixed = self.instances[placement.prefill].info.role is Role.MIXED
        return demand.expected_tokens if demand.decodes or mixed else 0

    # Reports

    def _on_report(self, instance_id: InstanceId, report: Report, now: float) -> None:
        state = self.instances.get(instance_id)
        if state is None:
            return
        match report:
            case StepTokens():
                self._on_step_tokens(state, report, now)
            case BlocksChanged():
                if not self.index.apply(
                    instance_id,
                    state.info.incarnation,
                    report.sequence,
                    report.stored,
                    report.removed,
                    report.demoted,
                ):
                    self._ask_for_all_blocks(state)
            case BlocksSnapshot():
                state.resyncing = False
                self.index.load_snapshot(
                    instance_id,
                    state.info.incarnation,
                    report.next_sequence,
                    report.keys,
                    report.demoted,
                )
            case InstanceLoad():
                state.load = report
            case RoleChanged() | HotPrefixes() | TakenOver() | WantsToLeave():
                self._actions += self.upkeep.on_report(state, report, now)
            case _:
                tracked = self._works.get(report.work_id)
                if tracked is not None and tracked.attempt is not None:
                    self._on_work_report(tracked, tracked.attempt, report, instance_id, now)

    def _on_work_report(
        self,
        tracked: Tracked,
        attempt: Attempt,
        report: PrefillStarted
        | PrefillDone
        | DecodeAccepted
        | TransferDone
        | StreamBroken
        | WorkFailed,
        instance_id: InstanceId,
        now: float,
    ) -> None:
        record = tracked.record
        match report:
            case PrefillStarted():
                self._start_prefill(attempt, report, now)
                if record.prefill_started_s is None:
                    record.prefill_started_s = now
                    record.cached_tokens = min(report.cached_tokens, record.num_prompt_tokens)
                    record.fetched_tokens = report.fetched_tokens
                    record.loaded_tokens = report.loaded_tokens
                record.corrupt_blocks += report.corrupt_slices
            case PrefillDone():
                self._on_prefill_done(tracked, attempt, report, now)
            case DecodeAccepted():
                assert attempt.first_token is not None
                self._begin_decoding(tracked, attempt, now)
                self._deliver(tracked, (attempt.first_token,), None, now)
                self.fleet.grow(
                    self.instances[attempt.decoder].row, 1, self.books.add_tokens(attempt, 1)
                )
            case TransferDone():
                record.transfer_done_s = now
                record.corrupt_blocks += report.corrupt_blocks
            case StreamBroken():
                if attempt.decode is not None:
                    tracked.explanation.add(f"{instance_id}: {report.error}")
                    self._send(attempt.decode, StopReceiving(work_id=attempt.work_id))
            case WorkFailed():
                self._on_work_failed(tracked, report, instance_id, now)

    def _start_prefill(self, attempt: Attempt, report: PrefillStarted, now: float) -> None:
        self.books.start_prefill(attempt, now)
        source = self.instances.get(attempt.fetch_from) if attempt.fetch_from else None
        self.beliefs.start_prefill(self.instances[attempt.prefill], source, attempt, report)

    def _on_work_failed(
        self, tracked: Tracked, report: WorkFailed, instance_id: InstanceId, now: float
    ) -> None:
        text = f"{instance_id}: {report.message}"
        tracked.failed_on.add(instance_id)
        if report.reason == REFUSED:  # another engine of that kind would, too
            self._refuse(tracked, Rejection(400, REFUSED, report.message, 0.0), now)
        elif report.reason != "tbt_slo":
            self._retry(tracked, 503, report.reason, text, now)
        else:
            # Not placed again: the pool is full, and more prefills for nothing would not empty it.
            self._refuse(tracked, Rejection(429, TBT_SLO_LATE, text, self.answers.usual_s), now)

    def _on_prefill_done(
        self, tracked: Tracked, attempt: Attempt, report: PrefillDone, now: float
    ) -> None:
        self._end_prefill(tracked, attempt, now)
        if report.finish is not None:
            self._deliver(tracked, (report.token,), report.finish, now)
            self._end(tracked, report.finish.value, now)
            return
        assert attempt.decode is not None
        attempt.stage = Stage.HANDOVER
        attempt.first_token = report.token
        command = StartDecode(work_id=attempt.work_id, token=report.token, handle=report.handle)
        self._send(attempt.decode, command)

    def _end_prefill(self, tracked: Tracked, attempt: Attempt, now: float) -> None:
        """It ended well, whatever comes of it."""
        tracked.record.prefill_done_s = now
        self.beliefs.end_prefill(self.instances.get(attempt.prefill), attempt, now)
        self.books.end_prefill(tracked, attempt, now)

    def _begin_decoding(self, tracked: Tracked, attempt: Attempt, now: float) -> None:
        tracked.record.decode_started_s = now
        self.books.begin_decoding(attempt, now)
        self.answers.begin(tracked, attempt, now)

    def _on_step_tokens(self, state: InstanceState, report: StepTokens, now: float) -> None:
        self.beliefs.learn_steps(state, report, self._works)
        num_tokens = room_tokens = 0
        ending: list[tuple[Tracked, FinishReason]] = []
        for item in report.works:
            tracked = self._works.get(item.work_id)
            if tracked is None or tracked.attempt is None:
                continue
            attempt = tracked.attempt
            if attempt.stage is Stage.PREFILL:  # a mixed instance: the first token ends the prefill
                self._end_prefill(tracked, attempt, now)
                self._begin_decoding(tracked, attempt, now)
            self._deliver(tracked, item.tokens, item.finish, now, report.gap_s)
            if attempt.answers:
                num_tokens += len(item.tokens)
                room_tokens += self.books.add_tokens(attempt, len(item.tokens))
                if attempt.stay_tokens:
                    self.answers.note_tokens(tracked, attempt, now)
            if item.finish is not None:
                ending.append((tracked, item.finish))
        self.fleet.grow(state.row, num_tokens, room_tokens)
        for tracked, finish in ending:
            self._end(tracked, finish.value, now)

    def _deliver(
        self,
        tracked: Tracked,
        tokens: tuple[Token, ...],
        finish: FinishReason | None,
        now: float,
        gap_s: float = 0.0,
    ) -> None:
        tracked.generated.extend([token.token_id for token in tokens])
        tracked.record.note_tokens(len(tokens), now, gap_s)
        self._actions.append(
            Deliver(tracked.request.request_id, tokens, finish, tracked.record.cached_tokens)
        )

    # Endings

    def _on_tick(self, now: float) -> None:
        at_s = now + self._usual_ttft_s.value
        self.forecast.note_projection(at_s, self.forecast.project(at_s, now)[0])
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            tracked = self.requests.get(request_id)
            if tracked is None or tracked.request.deadline_s > now:
                continue
            stage = tracked.attempt.stage.value if tracked.attempt else "placement"
            text = f"the request's deadline passed during {stage}"
            self._refuse(tracked, Rejection(504, "deadline", text, 1.0), now)
        for tracked in self.drains.to_move(now):
            self._retry(tracked, 503, "drained", "its instance leaves", now, at_fault=False)
        self._actions += self.upkeep.tick(now)

    def _retry(
        self,
        tracked: Tracked,
        status: int,
        reason: str,
        text: str,
        now: float,
        at_fault: bool = True,
    ) -> None:
        """Places the request anew; after too many faults it is refused with the last reason."""
        tracked.explanation.add(text)
        self._unbook(tracked, now)
        is_last = at_fault and tracked.num_attempts >= self.config.max_attempts
        if is_last or now >= tracked.request.deadline_s:
            self._refuse(tracked, Rejection(status, reason, text, 1.0), now)
        else:
            self._place(tracked, now)

    def _refuse(self, tracked: Tracked, rejection: Rejection, now: float) -> None:
        retry_after_s = min(max(rejection.retry_after_s, 1.0), MAX_RETRY_AFTER_S)
        tracked.explanation.add(f"refused: {rejection.message}")
        tracked.record.projection = rejection.projection
        self._actions.append(
            Refuse(
                tracked.request.request_id,
                rejection.status,
                rejection.reason,
                rejection.message,
                retry_after_s if rejection.status in (429, 503) else None,
                rejection.projection,
            )
        )
        self._end(tracked, rejection.reason, now)

    def _end(self, tracked: Tracked, outcome: str, now: float) -> None:
        """Books everything off, whatever the state, and closes the record."""
        finished = outcome in (FinishReason.STOP.value, FinishReason.LENGTH.value)
        if finished:
            self._learn(tracked, now)
            attempt = tracked.attempt
            state = None if attempt is None else self.instances.get(attempt.decoder)
            decodes_only = state is not None and state.info.role is Role.DECODE
            self.beliefs.note_answer(tracked.record, decodes_only)
        self._unbook(tracked, now, abort=not finished)
        del self.requests[tracked.request.request_id]
        if len(self._deadlines) > 2 * len(self.requests) + 64:
            self._deadlines = [d for d in self._deadlines if d[1] in self.requests]
            heapq.heapify(self._deadlines)
        tracked.record.finished_s = now
        tracked.record.outcome = outcome
        self._actions.append(RequestEnded(tracked.record, tracked.explanation))

    def _learn(self, tracked: Tracked, now: float) -> None:
        assert self._layout is not None
        num_blocks = tracked.request.num_prompt_tokens // self._layout.block_tokens
        self.answers.learn(tracked, tracked.keys[:num_blocks], now)
        self.roles.note_answer(
            tracked.request.num_prompt_tokens, tracked.record.num_generated_tokens
        )

    def _unbook(self, tracked: Tracked, now: float, abort: bool = True) -> None:
        attempt = tracked.attempt
        if attempt is None:
            return
        self.books.end_prefill(tracked, attempt, now)
        self.books.unbook(tracked, attempt, now)
        for instance_id in sorted({attempt.prefill, attempt.decoder}):
            reserved = instance_id == attempt.decode and attempt.stage is not Stage.DECODE
            if (abort or reserved) and instance_id in self.instances:
                self._send(instance_id, Abort(work_id=attempt.work_id))
        del self._works[attempt.work_id]
        tracked.attempt = None

    def _send(self, instance_id: InstanceId, command: Command) -> None:
        self._actions.append(Send(instance_id, command))

"""The life of a request in the Conductor: placement, attempts, tokens, deadline and end.

    arrived --place--> PREFILL --PrefillDone--> HANDOVER --DecodeAccepted--> DECODE --> ended
            \\    \\--> rejected (422, 429, 503)     any failure --> placed again, or rejected
             \\--> waits while a lost instance restarts --> placed

A request is placed again when an instance fails. Its delivered tokens become part of the new
attempt's prompt. Each draw is keyed by (seed, position), so the answer continues without a change.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import islice

import msgspec

from moonpool.conductor.actions import (
    Announce,
    ConductorAction,
    Deliver,
    Refuse,
    RequestEnded,
    Send,
)
from moonpool.conductor.attempt_planner import POLICY_ERROR, AttemptPlanner, PlannedAttempt
from moonpool.conductor.cost_estimator import CostEstimator
from moonpool.conductor.estimators import RunningMean
from moonpool.conductor.fair_share import FairShare
from moonpool.conductor.goodput_admission import GoodputModel
from moonpool.conductor.output_predictor import OutputPredictor
from moonpool.conductor.placement import Rejection
from moonpool.conductor.prefetching import Prefetching
from moonpool.conductor.replication import Replication
from moonpool.conductor.reservations import Reservations
from moonpool.conductor.retry_schedule import RetrySchedule
from moonpool.conductor.role_switching import RoleSwitching
from moonpool.conductor.state import Attempt, AttemptStage, InstanceState, TrackedRequest
from moonpool.conductor.waiting import RETRY_DELAYS_S, WaitingRequests
from moonpool.protocol.messages import (
    Abort,
    AttemptFailed,
    AttemptId,
    AttemptSpan,
    Command,
    DecodeAccepted,
    PrefillDone,
    PrefillStarted,
    StartDecode,
    StepTokens,
    StopReceiving,
    StreamBroken,
    TransferDone,
)
from moonpool.request_record import RecordedSpan, RequestRecord
from moonpool.types import FinishReason, InstanceId, Request, RequestId, Role, Token, payer_of

TBT_SLO_LATE = "tbt_slo_late"
"""The reason of a rejection by the decode instance's own check: its prefill was for nothing."""
TTFT_SLO_LATE = "ttft_slo_late"
"""The reason of a rejection because no room in a decode batch came in time: likewise."""
FAIR_SHARE = "fair_share"
"""The reason of a rejection in favour of other tenants' waiting requests."""
REFUSED = "refused_by_engine"
MAX_PLACED_PER_TURN = 256
MAX_TRIED_PER_TURN = 8
"""Waiting requests that are planned in vain in one turn: the others would hardly fit either."""
POLICY_ERROR_TEXT = "a placement or admission policy of this server failed; see its log"

AttemptReport = (
    PrefillStarted
    | PrefillDone
    | DecodeAccepted
    | TransferDone
    | AttemptSpan
    | StreamBroken
    | AttemptFailed
)


class RequestLifecycle:
    """All requests under way. Appends what is to be done to `actions`."""

    def __init__(
        self,
        planner: AttemptPlanner,
        reservations: Reservations,
        output_predictor: OutputPredictor,
        cost_estimator: CostEstimator,
        goodput: GoodputModel,
        roles: RoleSwitching,
        max_attempts: int,
        actions: list[ConductorAction],
        tenant_weights: Mapping[str, float],
        tenant_caches: Mapping[str, float],
        prefetching: Prefetching | None = None,
        replication: Replication | None = None,
    ) -> None:
        self.requests: dict[RequestId, TrackedRequest] = {}
        self.shares = FairShare(tenant_weights)
        self._tenant_caches = tenant_caches
        self.waiting = WaitingRequests(self.shares)
        self._has_room = False  # an answer has ended since the last look at waiting requests
        self.mean_ttft_s = RunningMean(0.0)  # predicted
        self._attempts: dict[AttemptId, TrackedRequest] = {}
        self._retries = RetrySchedule()
        self._deadlines: list[tuple[float, RequestId]] = []  # a heap
        self._joining: list[tuple[float, RequestId]] = []  # a heap: when their TTFT SLO is missed
        self._planner = planner
        self._reservations = reservations
        self._table, self._instances = reservations.instance_table, reservations.instances
        self._output_predictor = output_predictor
        self._cost_estimator = cost_estimator
        self._goodput = goodput
        self._roles = roles
        self._max_attempts = max_attempts
        self._actions = actions
        self._prefetching, self._replication = prefetching, replication

    # Arrival and placement

    def arrive(
        self, request: Request, now: float, delivered: tuple[int, ...] | None = None
    ) -> None:
        """`delivered`: as in `RequestArrived`."""
        assert request.request_id not in self.requests
        record = RequestRecord(
            request.request_id,
            request.num_prompt_tokens,
            request.slo,
            request.arrived_s,
            tenant=request.tenant,
            max_tokens=request.sampling.max_tokens,
            trace=request.trace,
        )
        tracked = TrackedRequest(request, record)
        if delivered is not None:  # an earlier head admitted it and made attempts
            tracked.generated.extend(delivered)
            tracked.num_attempts = 1
            tracked.has_waited = True
        heapq.heappush(self._deadlines, (request.deadline_s, request.request_id))
        self.requests[request.request_id] = tracked
        tenant = payer_of(request.tenant)
        tracked.share = self.shares.weight(tenant)
        tracked.cache_share = self._tenant_caches.get(tenant, 1.0)
        self.shares.see(tenant, now)
        tracked.competes = self.shares.compete(now)
        if delivered is None and self.shares.must_yield(tenant, now):
            text = "other tenants wait for their share of this cluster, and yours is used up"
            self._reject(tracked, Rejection(429, FAIR_SHARE, text, 1.0), now)
            return
        self._place(tracked, now)
        if self._prefetching is not None and request.request_id in self.requests:
            self._prefetching.arrive(tracked, now)
        if self._replication is not None and request.request_id in self.requests:
            self._replication.arrive(tracked, now)

    def _place(self, tracked: TrackedRequest, now: float) -> None:
        """Books the request's next attempt, lets the request wait, or rejects it."""
        planned = self._planner.plan(tracked, now)
        if isinstance(planned, Rejection) and self.waiting.may_wait(tracked, planned):
            if tracked.request.request_id not in self.waiting:
                tracked.explanation.add(f"waits: {planned.message}")
            self.waiting.add(tracked, now)
        elif isinstance(planned, Rejection) and self.waiting.is_owed(tracked, planned, now):
            self.waiting.add(tracked, now, is_owed=True)
        elif isinstance(planned, Rejection):
            if planned.reason == POLICY_ERROR:
                self._actions.append(Announce(planned.message))
                planned = msgspec.structs.replace(planned, message=POLICY_ERROR_TEXT)
            self._reject(tracked, planned, now)
        else:
            self._book(tracked, planned, now)

    def place_waiting(self, now: float) -> None:
        """Places requests that wait, as far as there are instances and room."""
        num_failures = 0
        self._has_room = False
        if not self.waiting:
            return
        for tracked in islice(self.waiting.due(now), MAX_PLACED_PER_TURN):
            self._place(tracked, now)
            num_failures += tracked.request.request_id in self.waiting
            if num_failures >= MAX_TRIED_PER_TURN:
                break

    def use_room(self, now: float) -> None:
        """Places waiting requests if an answer has just ended."""
        if self._has_room:
            self.place_waiting(now)

    def _book(self, tracked: TrackedRequest, planned: PlannedAttempt, now: float) -> None:
        placement, footprint = planned.placement, planned.footprint
        attempt = self._planner.attempt(tracked, planned)
        self.waiting.remove(tracked.request.request_id)
        if not tracked.num_attempts:
            num_tokens = footprint.expected_tokens - placement.hit_tokens
            self.shares.give(payer_of(tracked.request.tenant), num_tokens, now)
        tracked.num_attempts += 1
        tracked.attempt = attempt
        self._attempts[attempt.attempt_id] = tracked
        self._reservations.book(tracked, attempt, now)
        if attempt.decodes:
            context_tokens = (footprint.num_tokens + footprint.expected_tokens) // 2
            begins_s = now + placement.ttft_s
            self._output_predictor.enter(tracked, attempt, begins_s, context_tokens, now)
        self.mean_ttft_s.add(placement.ttft_s)
        record = tracked.record
        record.attempts = tracked.num_attempts
        record.placed_s = now
        record.prefill_instance, record.decode_instance = attempt.prefill, attempt.decoder
        record.predicted_ttft_s, record.predicted_tbt_s = placement.ttft_s, placement.tbt_s
        tracked.explanation.add(placement.chosen)
        for instance_id, command in self._planner.commands(tracked, attempt, planned, now):
            self._send(instance_id, command)

    # Reports of instances

    def on_report(self, report: AttemptReport, instance_id: InstanceId, now: float) -> None:
        """Reports of attempts that have ended are ignored."""
        tracked = self._attempts.get(report.attempt_id)
        if tracked is None or tracked.attempt is None:
            return
        attempt, record = tracked.attempt, tracked.record
        match report:
            case PrefillStarted():
                self._start_prefill(tracked, attempt, report, now)
            case PrefillDone():
                self._on_prefill_done(tracked, attempt, report, now)
            case DecodeAccepted():
                assert attempt.first_token is not None
                self._begin_decoding(tracked, attempt, now)
                self._deliver(tracked, (attempt.first_token,), None, now)
                row = self._instances[attempt.decoder].row
                self._table.grow(row, 1, self._reservations.add_tokens(attempt, 1))
            case TransferDone():
                record.transfer_done_s = now
                record.corrupt_blocks += report.corrupt_blocks
                if report.error:  # the decode waits: an attempt that has ended gets no answer
                    self._send(instance_id, StopReceiving(attempt_id=attempt.attempt_id))
                if record.trace is not None and record.trace.exported:
                    self._note_span(record, "kvcache_transfer", instance_id, report, now)
            case AttemptSpan():
                self._note_span(record, report.name, instance_id, report, now, report.num_tokens)
            case StreamBroken():
                if attempt.decode is not None:
                    tracked.explanation.add(f"{instance_id}: {report.error}")
                    self._send(attempt.decode, StopReceiving(attempt_id=attempt.attempt_id))
            case AttemptFailed():
                self._on_failed(tracked, report, instance_id, now)

    def _note_span(
        self,
        record: RequestRecord,
        name: str,
        instance_id: InstanceId,
        report: AttemptSpan | TransferDone,
        now: float,
        num_tokens: int = 0,
    ) -> None:
        begin_s = max(now - report.seconds, record.arrived_s)
        record.note_span(
            RecordedSpan(name, instance_id, begin_s, now, num_tokens, report.num_bytes)
        )

    def _start_prefill(
        self, tracked: TrackedRequest, attempt: Attempt, report: PrefillStarted, now: float
    ) -> None:
        self._reservations.start_prefill(attempt, now)
        source = self._instances.get(attempt.fetch_from) if attempt.fetch_from else None
        state = self._instances[attempt.prefill]
        self._cost_estimator.start_prefill(state, source, attempt, report)
        record = tracked.record
        if record.prefill_started_s is None:
            record.prefill_started_s = now
            record.cached_tokens = min(report.cached_tokens, record.num_prompt_tokens)
            record.fetched_tokens = report.fetched_tokens
            record.loaded_tokens = report.loaded_tokens
        record.corrupt_blocks += report.corrupt_slices

    def _on_prefill_done(
        self, tracked: TrackedRequest, attempt: Attempt, report: PrefillDone, now: float
    ) -> None:
        self._end_prefill(tracked, attempt, now)
        if report.finish is not None:
            self._deliver(tracked, (report.token,), report.finish, now)
            self.end(tracked, report.finish.value, now)
            return
        assert attempt.decode is not None
        attempt.stage = AttemptStage.HANDOVER
        attempt.first_token = report.token
        command = StartDecode(
            attempt_id=attempt.attempt_id, token=report.token, handle=report.handle
        )
        self._send(attempt.decode, command)
        if attempt.waits:
            latest_s = tracked.request.arrived_s + tracked.request.slo.ttft_s
            heapq.heappush(self._joining, (latest_s, tracked.request.request_id))

    def _end_prefill(self, tracked: TrackedRequest, attempt: Attempt, now: float) -> None:
        """The prefill has succeeded."""
        tracked.record.prefill_done_s = now
        self._cost_estimator.end_prefill(self._instances.get(attempt.prefill), attempt, now)
        self._reservations.end_prefill(tracked, attempt, now)

    def _begin_decoding(self, tracked: TrackedRequest, attempt: Attempt, now: float) -> None:
        tracked.record.decode_started_s = now
        self._reservations.begin_decoding(attempt, now)
        self._output_predictor.begin(tracked, attempt, now)

    def on_step_tokens(self, state: InstanceState, report: StepTokens, now: float) -> None:
        self._cost_estimator.learn_steps(state, report, self._attempts)
        num_tokens = room_tokens = 0
        ending: list[tuple[TrackedRequest, FinishReason]] = []
        for item in report.works:
            tracked = self._attempts.get(item.attempt_id)
            if tracked is None or tracked.attempt is None:
                continue
            attempt = tracked.attempt
            if attempt.stage is AttemptStage.PREFILL:
                # A mixed instance: the first token ends the prefill.
                self._end_prefill(tracked, attempt, now)
                self._begin_decoding(tracked, attempt, now)
            self._deliver(tracked, item.tokens, item.finish, now, report.gap_s)
            if attempt.decodes:
                num_tokens += len(item.tokens)
                room_tokens += self._reservations.add_tokens(attempt, len(item.tokens))
                if attempt.interval_tokens:
                    self._output_predictor.note_tokens(tracked, attempt, now)
            if item.finish is not None:
                ending.append((tracked, item.finish))
        self._table.grow(state.row, num_tokens, room_tokens)
        for tracked, finish in ending:
            self.end(tracked, finish.value, now)

    def _deliver(
        self,
        tracked: TrackedRequest,
        tokens: tuple[Token, ...],
        finish: FinishReason | None,
        now: float,
        gap_s: float = 0.0,
    ) -> None:
        tracked.num_faults = 0
        tracked.generated.extend([token.token_id for token in tokens])
        is_first = tracked.record.first_token_s is None
        tracked.record.note_tokens(len(tokens), now, gap_s)
        if is_first and not tracked.request.forwarded:
            self._cost_estimator.note_first_token(tracked.record)
            self._goodput.note_first_token(tracked.record)
        self._actions.append(
            Deliver(tracked.request.request_id, tokens, finish, tracked.record.cached_tokens)
        )

    # Failures

    def _on_failed(
        self, tracked: TrackedRequest, report: AttemptFailed, instance_id: InstanceId, now: float
    ) -> None:
        text = f"{instance_id}: {report.message}"
        tracked.failed_on.add(instance_id)
        if report.reason == REFUSED:  # another engine of that kind would refuse it, too
            status = report.engine_status or 400
            self._reject(tracked, Rejection(status, REFUSED, report.message, 0.0), now)
        elif report.reason != "tbt_slo":
            self._retry(tracked, 503, report.reason, text, now)
        else:
            # Not placed again: the pool is full, and more wasted prefills would not empty it.
            wait_s = self._output_predictor.mean_s
            self._reject(tracked, Rejection(429, TBT_SLO_LATE, text, wait_s), now)

    def on_instance_lost(self, state: InstanceState, reason: str, now: float) -> None:
        """Places the requests again that cannot continue without the instance."""
        instance_id = state.info.instance_id
        for tracked in {**state.prefills, **state.handed_over, **state.decodes}.values():
            attempt = tracked.attempt
            assert attempt is not None
            if instance_id != attempt.decoder and attempt.stage is AttemptStage.DECODE:
                # The prefill is done, but its stream may never have reached the decode instance.
                self._send(attempt.decoder, StopReceiving(attempt_id=attempt.attempt_id))
                continue
            text = f"instance {instance_id} was lost: {reason}"
            self._retry(tracked, 503, "instance_lost", text, now)

    def move(self, tracked: TrackedRequest, now: float) -> None:
        """Places a request again because its instance leaves."""
        self._retry(tracked, 503, "drained", "its instance leaves", now, at_fault=False)

    def expire(self, now: float) -> None:
        """Ends the requests whose deadlines have passed, and those that wait for room in a decode
        batch although their TTFT SLO is missed."""
        while self._joining and self._joining[0][0] <= now:
            _, request_id = heapq.heappop(self._joining)
            tracked = self.requests.get(request_id)
            if tracked is None or tracked.attempt is None or tracked.generated:
                continue
            if tracked.attempt.stage is AttemptStage.HANDOVER:
                slo_s = tracked.request.slo.ttft_s
                text = f"its decode instance had no room within the TTFT SLO of {slo_s:g} s"
                wait_s = self._output_predictor.mean_s
                self._reject(tracked, Rejection(429, TTFT_SLO_LATE, text, wait_s), now)
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            tracked = self.requests.get(request_id)
            if tracked is None or tracked.request.deadline_s > now:
                continue
            stage = tracked.attempt.stage.value if tracked.attempt else "placement"
            text = f"the request's deadline passed during {stage}"
            self._reject(tracked, Rejection(504, "deadline", text, 1.0), now)

    def _retry(
        self,
        tracked: TrackedRequest,
        status: int,
        reason: str,
        text: str,
        now: float,
        at_fault: bool = True,
    ) -> None:
        """Places the request again. After too many faults without a token, rejects it with the
        last reason. A forwarded answer that has begun cannot go on elsewhere."""
        tracked.explanation.add(text)
        self._unbook(tracked, now)
        tracked.num_faults += at_fault
        is_last = tracked.num_faults >= self._max_attempts or now >= tracked.request.deadline_s
        if is_last or (tracked.request.forwarded and tracked.generated):
            self._reject(tracked, Rejection(status, reason, text, 1.0), now)
            return
        delay_s = RETRY_DELAYS_S[min(max(tracked.num_faults - 1, 0), len(RETRY_DELAYS_S) - 1)]
        if delay_s:  # what failed twice at once may need a moment
            self.waiting.add(tracked, now + delay_s)
        else:
            self._place(tracked, now)

    # Ends

    def cancel(self, request_id: RequestId, now: float) -> None:
        tracked = self.requests.get(request_id)
        if tracked is not None:
            self.end(tracked, FinishReason.ABORT.value, now)

    def _reject(self, tracked: TrackedRequest, rejection: Rejection, now: float) -> None:
        retry_after_s = None
        if rejection.status in (429, 503) and rejection.retry_after_s < float("inf"):
            retry_after_s = self._retries.retry_after_s(rejection.retry_after_s, now)
        tracked.explanation.add(f"refused: {rejection.message}")
        tracked.record.projection = rejection.projection
        self._actions.append(
            Refuse(
                tracked.request.request_id,
                rejection.status,
                rejection.reason,
                rejection.message,
                retry_after_s,
                rejection.projection,
            )
        )
        self.end(tracked, rejection.reason, now)

    def end(self, tracked: TrackedRequest, outcome: str, now: float) -> None:
        """Removes all bookings, whatever the stage, and completes the record."""
        finished = outcome in (FinishReason.STOP.value, FinishReason.LENGTH.value)
        if finished:
            self._retries.note_completed(now)
            self._learn(tracked, now)
        self._unbook(tracked, now, abort=not finished)
        self.waiting.remove(tracked.request.request_id)
        self._has_room = True
        del self.requests[tracked.request.request_id]
        if len(self._deadlines) > 2 * len(self.requests) + 64:
            self._deadlines = [d for d in self._deadlines if d[1] in self.requests]
            heapq.heapify(self._deadlines)
        tracked.record.finished_s = now
        tracked.record.outcome = outcome
        self._actions.append(RequestEnded(tracked.record, tracked.explanation))

    def _learn(self, tracked: TrackedRequest, now: float) -> None:
        if tracked.request.forwarded:  # its tokens are estimates
            return
        assert self._planner.layout is not None
        num_prompt_tokens = tracked.request.num_prompt_tokens
        num_blocks = num_prompt_tokens // self._planner.layout.block_tokens
        self._output_predictor.learn(tracked, tracked.keys[:num_blocks], now)
        if self._prefetching is not None:
            self._prefetching.end(tracked, now)
        record = tracked.record
        self._roles.note_answer(
            num_prompt_tokens, record.cached_tokens or 0, record.num_generated_tokens
        )
        attempt = tracked.attempt
        state = None if attempt is None else self._instances.get(attempt.decoder)
        decodes_only = state is not None and state.role is Role.DECODE
        self._cost_estimator.note_answer(tracked.record, decodes_only)
        mixed = state is not None and state.role is not Role.DECODE
        self._goodput.note_answer(tracked.record, tracked.predicted_step_s, mixed)

    def _unbook(self, tracked: TrackedRequest, now: float, abort: bool = True) -> None:
        attempt = tracked.attempt
        if attempt is None:
            return
        self._reservations.end_prefill(tracked, attempt, now)
        self._reservations.unbook(tracked, attempt, now)
        for instance_id in sorted({attempt.prefill, attempt.decoder}):
            reserved = instance_id == attempt.decode and attempt.stage is not AttemptStage.DECODE
            if (abort or reserved) and instance_id in self._instances:
                self._send(instance_id, Abort(attempt_id=attempt.attempt_id))
        del self._attempts[attempt.attempt_id]
        tracked.attempt = None

    def _send(self, instance_id: InstanceId, command: Command) -> None:
        self._actions.append(Send(instance_id, command))

    def validate(self) -> None:
        """Asserts that requests and attempts refer to each other."""
        for tracked in self.requests.values():
            if tracked.attempt is None:
                assert tracked.request.request_id in self.waiting
            else:
                assert self._attempts[tracked.attempt.attempt_id] is tracked
        assert len(self._attempts) + len(self.waiting) == len(self.requests)
        placed = [tracked for tracked in self.requests.values() if tracked.attempt is not None]
        self._reservations.validate(placed)

"""The life of a request in the Conductor: placement, attempts, tokens, deadline and end.

    arrived --place--> PREFILL --PrefillDone--> HANDOVER --DecodeAccepted--> DECODE --> ended
            \\    \\--> rejected (422, 429, 500, 503)     any failure --> placed again, or rejected
             \\--> waits for an instance, for room or for its turn --> placed, or rejected

A request is placed again when an instance fails. Its delivered tokens become part of the new
attempt's prompt. Each draw is keyed by (seed, position), so the answer continues without a change.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from moonpool.conductor.actions import (
    Announce,
    ConductorAction,
    Deliver,
    Refuse,
    RequestEnded,
    Send,
)
from moonpool.conductor.attempt_planner import POLICY_ERROR, AttemptPlanner
from moonpool.conductor.cluster_state import ClusterState
from moonpool.conductor.crashes.suspects import Suspects, culprit_rejection
from moonpool.conductor.forecast.estimators import RunningMean
from moonpool.conductor.observers import Observers
from moonpool.conductor.placement.choice import NO_ROOM, PlannedAttempt, Rejection
from moonpool.conductor.programs.keeper import ProgramKeeper
from moonpool.conductor.state import Attempt, AttemptPhase, InstanceState, TrackedRequest
from moonpool.conductor.waiting.preemption import Preemption
from moonpool.conductor.waiting.queue import RETRIES, Deadlines, WaitNeed
from moonpool.conductor.waiting.rules import FAIR_SHARE, WaitRules
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
from moonpool.refusal import Refusal
from moonpool.request_record import RequestRecord
from moonpool.types import FinishReason, InstanceId, Request, RequestId, Token, payer_of

TBT_SLO_LATE = "tbt_slo_late"
"""The reason of a rejection by the decode instance's own check, which makes the prefill useless."""
REFUSED = "refused_by_engine"
ASSUMED_TIMES = "too few prompts have ended there to check its profile; these times are assumed"
POLICY_ERROR_TEXT = "a placement or admission policy of this server failed; see its log"


def _note_nothing(request_id: RequestId | None) -> None:
    """Default listener, which ignores the request that is being processed."""


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
    """Owns all requests under way. Appends the actions to perform to `actions`, and tells
    `observers` what has happened."""

    NOT_STORED = ("on_work",)
    on_work: Callable[[RequestId | None], None] = staticmethod(_note_nothing)

    def __init__(
        self,
        planner: AttemptPlanner,
        cluster_state: ClusterState,
        wait_rules: WaitRules,
        keeper: ProgramKeeper,
        observers: Observers,
        actions: list[ConductorAction],
    ) -> None:
        self.requests: dict[RequestId, TrackedRequest] = {}
        self.wait_rules, self.keeper = wait_rules, keeper
        self.shares, self.waiting = wait_rules.shares, wait_rules.waiting
        self._preemption = Preemption(cluster_state, self.shares)
        self.num_pauses = 0  # number of answers that gave way to another tenant's request
        # whether a request, or a suspect's turn, has ended since waiting requests were last placed
        self._has_room = False
        self.mean_ttft_s = RunningMean(0.0)  # predicted
        self._attempts: dict[AttemptId, TrackedRequest] = {}
        self._deadlines = Deadlines(self.requests)
        self._planner = planner
        self._cluster_state = cluster_state
        self._table, self._instances = cluster_state.instance_table, cluster_state.instances
        self._max_attempts = planner.max_attempts
        self._observers = observers
        self._actions = actions
        self._suspects = Suspects(self.requests)

    # Arrival and placement

    def arrive(
        self, request: Request, now: float, delivered: tuple[int, ...] | None = None
    ) -> None:
        """`delivered`: see `RequestArrived`."""
        assert request.request_id not in self.requests
        record = RequestRecord(
            request.request_id,
            request.num_prompt_tokens,
            request.slo,
            request.arrived_s,
            tenant=request.tenant,
            max_tokens=request.sampling.max_tokens,
            uses_cache=request.use_cache,
            trace=request.trace,
        )
        tracked = TrackedRequest(request, record)
        if delivered is not None:  # an earlier head admitted the request and made attempts
            tracked.generated.extend(delivered)
            record.tokens_before = len(delivered)
            record.attempts = tracked.num_attempts = 1
            tracked.has_waited = True
        self._deadlines.add(tracked)
        self.requests[request.request_id] = tracked
        for arrived in self._observers.arrived:
            arrived(tracked, now)
        if delivered is None and self.shares.must_yield(payer_of(request.tenant), now):
            text = "other tenants wait for their share of this cluster, and yours is used up"
            self._wait_or_reject(tracked, Rejection(429, FAIR_SHARE, text, 1.0), now)
        else:
            self.place(tracked, now)
        if request.request_id in self.requests:
            for accepted in self._observers.accepted:
                accepted(tracked, now)

    def place(self, tracked: TrackedRequest, now: float) -> None:
        """Books the request's next attempt, lets the request wait, or rejects it."""
        if self._suspects.must_wait(tracked):
            self._hold_back(tracked, now)
            return
        if (waits := self.keeper.why_wait(tracked, now)) is not None:
            self._wait_or_reject(tracked, waits, now)
            return
        self.on_work(tracked.request.request_id)
        is_new = tracked.found_tokens is None
        planned = self._planner.plan(tracked, now)
        if is_new and tracked.found_tokens is not None:
            for considered in self._observers.considered:
                considered(tracked, now)
        if isinstance(planned, Rejection):
            planned = self._claim(tracked, planned, now)
        self.on_work(None)
        if isinstance(planned, Rejection):
            self._wait_or_reject(tracked, planned, now)
        elif self._suspects.line and self._suspects.run_alone_at(
            tracked, (planned.placement.prefill, planned.placement.decode)
        ):
            self._hold_back(tracked, now)
        else:
            self.book(tracked, planned, now)

    def _claim(
        self, tracked: TrackedRequest, rejection: Rejection, now: float
    ) -> PlannedAttempt | Rejection:
        """Plans the attempt of a request whose tenant has less than its share. Ignores the load,
        and may use the room of answers that give way. Returns `rejection` for other requests."""
        if not self.wait_rules.may_claim(tracked, rejection, now):
            return rejection
        # other tenants cause the load, so the request is not rejected for it
        tracked.has_waited = True
        planned = self._planner.plan(tracked, now) if rejection.reason != NO_ROOM else rejection
        if not isinstance(planned, Rejection) or planned.reason != NO_ROOM:
            return planned
        victims = self._preemption.victims(tracked, planned.room_tokens, now)
        for victim in victims:
            self.pause(victim, now)
        return self._planner.plan(tracked, now) if victims else planned

    def pause(self, tracked: TrackedRequest, now: float) -> None:
        """Ends an attempt in favour of another tenant's request. The paused request continues when
        there is room."""
        assert tracked.attempt is not None
        tracked.explanation.add("pauses: another tenant is owed its share of this cluster")
        self.num_pauses += 1
        tracked.has_waited = True
        need = WaitNeed(tracked.attempt.booked_tokens, 0.0)
        self._unbook(tracked, now)
        self.waiting.add(tracked, now, need)

    def _wait_or_reject(self, tracked: TrackedRequest, rejection: Rejection, now: float) -> None:
        answer_s = self._cluster_state.answer_s
        waited = tracked.request.request_id in self.waiting
        if not waited:
            rejection = self.wait_rules.with_wait(tracked, rejection, answer_s, now)
        if self.wait_rules.may_wait(tracked, rejection, answer_s, now):
            return
        if waited:
            rejection = self.wait_rules.with_wait(tracked, rejection, answer_s, now)
        if rejection.reason == POLICY_ERROR:
            self._actions.append(Announce(rejection.message))
            rejection = msgspec.structs.replace(rejection, message=POLICY_ERROR_TEXT)
        self._reject(tracked, rejection, now)

    def place_waiting(self, now: float) -> None:
        """Places requests that wait, as far as there are instances and room."""
        self._has_room = False
        for tracked in self.wait_rules.worth_trying(self._suspects.must_wait, now):
            self.place(tracked, now)

    def place_into_freed_room(self, now: float) -> None:
        """Places waiting requests if a request, or a suspect's turn, has just ended."""
        if self._has_room:
            self.place_waiting(now)

    def book(self, tracked: TrackedRequest, planned: PlannedAttempt, now: float) -> None:
        placement, footprint = planned.placement, planned.footprint
        self.wait_rules.note_attempt(tracked.request, 1)
        self.waiting.remove(tracked.request.request_id)
        if not tracked.num_attempts:
            tracked.account.charge(footprint.num_tokens - placement.hit_tokens, now)
        record = tracked.record
        record.attempts = tracked.num_attempts = tracked.num_attempts + 1
        self._suspects.note_placed(tracked, now)
        attempt = tracked.attempt = self._cluster_state.book(tracked, planned, now)
        tracked.account.held_tokens += attempt.booked_tokens
        self._attempts[attempt.attempt_id] = tracked
        for placed in self._observers.placed:
            placed(tracked, planned, now)
        self.mean_ttft_s.add(placement.ttft_s)
        record.begin_attempt(now)
        record.prefill_instance, record.decode_instance = attempt.prefill, attempt.decoder
        record.predicted_ttft_s, record.predicted_tbt_s = placement.ttft_s, placement.tbt_s
        if record.first_token_s is None:
            record.expected_ttft_s = now - record.arrived_s + placement.ttft_s
        tracked.explanation.add(placement.chosen)
        if not self._instances[attempt.prefill].prefill_factor.is_learned:
            tracked.explanation.add(f"{attempt.prefill}: {ASSUMED_TIMES}")
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
                self.deliver(tracked, (attempt.first_token,), None, now)
                row = self._instances[attempt.decoder].row
                self._table.grow(row, 1, self._add_tokens(tracked, attempt, 1))
            case TransferDone():
                if record.first_token_s is None:
                    record.transfer_done_s = now
                record.corrupt_slices += report.corrupt_slices
                # After an error the decode instance waits for this command before it computes what
                # is missing. An attempt that has ended gets `Abort` instead.
                if report.error:
                    self._send(instance_id, StopReceiving(attempt_id=attempt.attempt_id))
                if record.trace is not None and record.trace.exported:
                    record.note_span(
                        "kvcache_transfer", instance_id, now, report.seconds, 0, report.num_bytes
                    )
            case AttemptSpan():
                work = report.seconds, report.num_tokens, report.num_bytes
                record.note_span(report.name, instance_id, now, *work)
            case StreamBroken():
                if attempt.decode is not None:
                    tracked.explanation.add(f"{instance_id}: {report.error}")
                    self._send(attempt.decode, StopReceiving(attempt_id=attempt.attempt_id))
            case AttemptFailed():
                self._on_failed(tracked, report, instance_id, now)

    def _start_prefill(
        self, tracked: TrackedRequest, attempt: Attempt, report: PrefillStarted, now: float
    ) -> None:
        self._cluster_state.start_prefill(attempt, now)
        for started in self._observers.prefill_started:
            started(tracked, report, now)
        record = tracked.record
        if record.prefill_started_s is None:
            record.prefill_started_s = now
            record.cached_tokens = min(report.cached_tokens, record.num_prompt_tokens)
            record.fetched_tokens = report.fetched_tokens
            record.loaded_tokens = report.loaded_tokens
        record.corrupt_slices += report.corrupt_slices

    def _on_prefill_done(
        self, tracked: TrackedRequest, attempt: Attempt, report: PrefillDone, now: float
    ) -> None:
        self._end_prefill(tracked, attempt, now)
        if report.finish is not None:
            self.deliver(tracked, (report.token,), report.finish, now)
            self.end(tracked, report.finish.value, now)
            return
        assert attempt.decode is not None
        attempt.phase = AttemptPhase.HANDOVER
        attempt.first_token = report.token
        command = StartDecode(
            attempt_id=attempt.attempt_id, token=report.token, handle=report.handle
        )
        self._send(attempt.decode, command)
        if attempt.waits and self._planner.rejects_late and tracked.request.slo.ttft_stated:
            self._deadlines.add_joining(tracked)

    def _end_prefill(self, tracked: TrackedRequest, attempt: Attempt, now: float) -> None:
        """Handles a prefill that has succeeded."""
        attempt.prefilled_s = now
        tracked.record.end_prefill(now)
        for done in self._observers.prefill_done:
            done(tracked, now)
        self._cluster_state.end_prefill(tracked, attempt, now)

    def _begin_decoding(self, tracked: TrackedRequest, attempt: Attempt, now: float) -> None:
        if tracked.record.first_token_s is None:
            tracked.record.decode_started_s = now
        self._cluster_state.begin_decoding(attempt, now)
        for started in self._observers.decode_started:
            started(tracked, now)

    def on_step_tokens(self, state: InstanceState, report: StepTokens, now: float) -> None:
        for step in self._observers.step:
            step(state, report, self._attempts, now)
        added = self._observers.tokens
        num_tokens = room_tokens = 0
        ending: list[tuple[TrackedRequest, FinishReason]] = []
        for item in report.attempts:
            tracked = self._attempts.get(item.attempt_id)
            if tracked is None or tracked.attempt is None:
                continue
            attempt = tracked.attempt
            if attempt.phase is AttemptPhase.PREFILL:
                # Where the prefill instance also decodes, the first token ends the prefill.
                self._end_prefill(tracked, attempt, now)
                self._begin_decoding(tracked, attempt, now)
            tokens = item.tokens
            self.deliver(tracked, tokens, item.finish, now, report.gap_s, item.longest_gap_s)
            if attempt.decodes:
                count = len(tokens)
                num_tokens += count
                room_tokens += self._add_tokens(tracked, attempt, count)
                for note in added:
                    note(tracked, now)
            if item.finish is not None:
                ending.append((tracked, item.finish))
        self._table.grow(state.row, num_tokens, room_tokens)
        for tracked, finish in ending:
            self.end(tracked, finish.value, now)

    def _add_tokens(self, tracked: TrackedRequest, attempt: Attempt, num_tokens: int) -> int:
        """Calls `ClusterState.add_tokens` and adds the same tokens to what the tenant holds."""
        extra_tokens = self._cluster_state.add_tokens(attempt, num_tokens)
        tracked.account.held_tokens += extra_tokens
        return extra_tokens

    def deliver(
        self,
        tracked: TrackedRequest,
        tokens: tuple[Token, ...],
        finish: FinishReason | None,
        now: float,
        gap_s: float = 0.0,
        longest_gap_s: float = 0.0,
    ) -> None:
        tracked.num_faults = 0
        num_tokens = len(tokens)
        if num_tokens == 1:
            tracked.generated.append(tokens[0].token_id)
        else:
            tracked.generated.extend([token.token_id for token in tokens])
        if self._suspects.line and self._suspects.note_tokens(tracked):
            self._has_room = True  # a waiting request may find room now
        tracked.account.charge(num_tokens, now)
        is_first = tracked.record.first_token_s is None
        if is_first and tracked.request.is_embedding:
            tracked.record.note_embedding(now)
        else:
            tracked.record.note_tokens(num_tokens, now, gap_s, longest_gap_s)
        if is_first and not tracked.request.forwarded:
            for noted in self._observers.first_token:
                noted(tracked, now)
        self._actions.append(
            Deliver(tracked.request.request_id, tokens, finish, tracked.record.cached_tokens)
        )

    # Failures

    def _on_failed(
        self, tracked: TrackedRequest, report: AttemptFailed, instance_id: InstanceId, now: float
    ) -> None:
        tracked.failed_on.add(instance_id)
        text = f"{instance_id}: {report.message}"
        # another engine of the same kind would refuse the request, too
        if report.reason == REFUSED:
            status = report.engine_status or 400
            self._reject(tracked, Rejection(status, REFUSED, report.message, 0.0), now)
        elif report.reason != "tbt_slo":
            self._retry(tracked, 503, report.reason, text, now)
        else:
            # The request is not placed again: the pool is full, and more wasted prefills would not
            # empty it.
            wait_s = self._cluster_state.answer_s
            self._reject(tracked, Rejection(429, TBT_SLO_LATE, text, wait_s), now)

    def on_instance_lost(self, state: InstanceState, reason: str, now: float) -> None:
        """Places the requests again that cannot continue without the instance."""
        instance_id = state.info.instance_id
        has_crashed = self._suspects.note_lost(state)
        for tracked in {**state.prefills, **state.handed_over, **state.decodes}.values():
            attempt = tracked.attempt
            if attempt is None:
                continue  # it has given way to a request before it
            if instance_id != attempt.decoder and attempt.phase is AttemptPhase.DECODE:
                # The prefill is done, but its stream may never have reached the decode instance.
                self._send(attempt.decoder, StopReceiving(attempt_id=attempt.attempt_id))
                continue
            text = f"instance {instance_id} was lost: {reason}"
            self._retry(tracked, 503, "instance_lost", text, now)
        if has_crashed:
            self.on_instance_crashed(instance_id, now)

    def on_instance_crashed(self, instance_id: InstanceId, now: float) -> None:
        """Handles an instance whose process ended without being killed, so that one of its requests
        may be the cause (`Suspects`)."""
        culprit, others = self._suspects.accuse(instance_id)
        if culprit is not None:
            self._reject(culprit, culprit_rejection(instance_id), now)
        for tracked in others:
            if tracked.attempt is not None:
                self._unbook(tracked, now)
                tracked.explanation.add(f"waits: {instance_id} crashed, maybe by this request")
                self._hold_back(tracked, now)

    def _hold_back(self, tracked: TrackedRequest, now: float) -> None:
        """Lets the request wait while another one runs alone."""
        tracked.has_waited = True  # this wait is no reason to reject the request
        self.waiting.add(tracked, now)

    def move(self, tracked: TrackedRequest, now: float) -> None:
        """Places a request again because its instance leaves."""
        self._retry(tracked, 503, "drained", "its instance leaves", now, at_fault=False)

    def move_deadline(self, request_id: RequestId, deadline_s: float) -> None:
        self._deadlines.move(request_id, deadline_s)

    def expire(self, now: float) -> None:
        """Plans requests once more that have waited for a place for as long as they may, pauses
        answers on overfull vLLM instances, and ends the requests whose deadlines have passed, or
        for which no decode batch had room within their TTFT SLO."""
        self._has_room |= self._suspects.end_long_turn(now)
        for waiting in self.waiting.over(now):
            self.place(waiting, now)
        for victim in self._preemption.overfull(now):
            self.pause(victim, now)
        for tracked, rejection in self._deadlines.late(now, self._cluster_state.answer_s):
            self._reject(tracked, rejection, now)

    def _retry(
        self,
        tracked: TrackedRequest,
        status: int,
        reason: str,
        text: str,
        now: float,
        at_fault: bool = True,
    ) -> None:
        """Places the request again after a failed attempt. After too many faults without a token,
        rejects the request with the last reason. A forwarded answer that has begun cannot continue
        on another instance."""
        tracked.explanation.add(text)
        self._unbook(tracked, now)
        tracked.has_waited = True  # the lost time is no reason to reject the request
        tracked.num_faults += at_fault
        is_last = tracked.num_faults >= self._max_attempts or now >= tracked.request.deadline_s
        if is_last or (tracked.request.forwarded and tracked.generated):
            self._reject(tracked, Rejection(status, reason, text, 1.0), now)
            return
        delay_s = RETRIES.after(tracked.num_faults)
        if delay_s:  # after two failures in a row the cause may need a moment to disappear
            self.waiting.add(tracked, now + delay_s)
        else:
            self.place(tracked, now)

    # Ends

    def cancel(self, request_id: RequestId, reason: str, now: float) -> None:
        if (tracked := self.requests.get(request_id)) is not None:
            self.end(tracked, reason, now)

    def finish(
        self, request_id: RequestId, reason: FinishReason, num_tokens: int, now: float
    ) -> None:
        """Ends a complete answer whose engine goes on. Tokens after `num_tokens` are not part of
        the answer; some tokens before it may not be reported yet, because they went to a front
        directly."""
        tracked = self.requests.get(request_id)
        if tracked is None:
            return
        num_unheard = num_tokens - len(tracked.generated)
        if num_unheard > 0:
            tracked.account.charge(num_unheard, now)
            tracked.record.note_tokens(num_unheard, now)
        tracked.record.end_at(num_tokens)
        del tracked.generated[num_tokens:]
        self.end(tracked, reason.value, now, engine_goes_on=True)

    def _reject(self, tracked: TrackedRequest, rejection: Rejection, now: float) -> None:
        retry_after_s = None
        if rejection.status in (429, 503) and rejection.retry_after_s < float("inf"):
            retry_after_s = self.wait_rules.retries.retry_after_s(rejection.retry_after_s, now)
        tracked.explanation.add(f"refused: {rejection.message}")
        tracked.record.projection = rejection.projection
        told = rejection.status, rejection.reason, rejection.message, retry_after_s
        refusal = Refusal(*told, rejection.projection)
        self._actions.append(Refuse(tracked.request.request_id, refusal))
        self.end(tracked, rejection.reason, now)

    def end(
        self, tracked: TrackedRequest, outcome: str, now: float, engine_goes_on: bool = False
    ) -> None:
        """Removes all bookings of the request, whatever its stage, and completes its record.
        `engine_goes_on`: whether the answer is complete while its engine still computes. The engine
        of an incomplete answer is always told to stop."""
        finished = outcome in (FinishReason.STOP.value, FinishReason.LENGTH.value)
        self._tell_end(tracked, finished, now)
        self._unbook(tracked, now, abort=engine_goes_on or not finished, answered=finished)
        self.waiting.remove(tracked.request.request_id)
        self._suspects.forget(tracked.request.request_id)
        self._has_room = True
        del self.requests[tracked.request.request_id]
        self._deadlines.trim()
        tracked.record.finished_s = now
        tracked.record.outcome = outcome
        self._actions.append(RequestEnded(tracked.record, tracked.explanation))

    def _tell_end(self, tracked: TrackedRequest, is_answered: bool, now: float) -> None:
        for ended in self._observers.ended:
            ended(tracked, is_answered, now)
        if is_answered and not tracked.request.forwarded:
            attempt = tracked.attempt
            decoder = None if attempt is None else self._instances.get(attempt.decoder)
            for answered in self._observers.answered:
                answered(tracked, decoder, now)

    def _unbook(
        self, tracked: TrackedRequest, now: float, abort: bool = True, answered: bool = False
    ) -> None:
        attempt = tracked.attempt
        if attempt is None:
            return
        if attempt.started_s is not None:
            until_s = now if attempt.prefilled_s is None else attempt.prefilled_s
            tracked.record.note_prefill(max(until_s - attempt.started_s, 0.0), not answered)
        self._cluster_state.end_prefill(tracked, attempt, now)
        self._cluster_state.unbook(tracked, attempt, now)
        tracked.account.held_tokens -= attempt.booked_tokens
        for instance_id in sorted({attempt.prefill, attempt.decoder}):
            reserved = instance_id == attempt.decode and attempt.phase is not AttemptPhase.DECODE
            if (abort or reserved) and instance_id in self._instances:
                self._send(instance_id, Abort(attempt_id=attempt.attempt_id))
        del self._attempts[attempt.attempt_id]
        tracked.attempt = None
        self.wait_rules.note_attempt(tracked.request, -1)

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
        held: dict[str, list[int]] = {}
        for tracked in self.requests.values():
            tokens = 0 if tracked.attempt is None else tracked.attempt.booked_tokens
            held.setdefault(payer_of(tracked.request.tenant), []).append(tokens)
        self.shares.validate_held(held)
        self._cluster_state.validate(list(self._attempts.values()))

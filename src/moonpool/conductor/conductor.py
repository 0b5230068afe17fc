"""The Conductor: the one place where requests are booked on instances, and booked off again.

`handle(event, now)` takes arrivals, reports and losses and returns commands and answers. Policies
choose (`placement`), the Conductor books. It also owns every request's deadline, and tries a
request again when an instance fails: tokens already delivered become part of the new attempt's
prompt, and since draws are keyed by (seed, position), the answer goes on as if nothing had
happened.

    arrived --place--> PREFILL --PrefillDone--> HANDOVER --DecodeAccepted--> DECODE --> ended
                 \\--> refused (429, 503)            any failure --> placed again, or refused
"""

from __future__ import annotations

import heapq
from itertools import count

from moonpool.conductor.actions import (
    ConductorAction,
    ConductorEvent,
    Deliver,
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
from moonpool.conductor.placement import Demand, Placement, Rejection, place
from moonpool.conductor.state import Attempt, InstanceState, Stage, Tracked
from moonpool.config import ConductorConfig
from moonpool.kvcache.hashing import block_keys, root_key
from moonpool.kvcache.prefix_index import PrefixIndex
from moonpool.metrics import RequestRecord
from moonpool.types import FinishReason, InstanceId, Request, RequestId, Slo, Token
from moonpool.workers.messages import (
    Abort,
    BlocksChanged,
    BlocksSnapshot,
    Command,
    DecodeAccepted,
    Fetch,
    InstanceInfo,
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

MAX_RETRY_AFTER_S = 120.0
UNLIMITED = Slo(ttft_s=float("inf"), tbt_s=float("inf"))
FIRST_EXPECTED_OUTPUT_TOKENS = 256.0
OUTPUT_MEMORY = 0.02
"""Weight of the newest answer in the running mean of answer lengths (`max_tokens` says little)."""


class Conductor:
    """Global state machine of the cluster."""

    def __init__(self, config: ConductorConfig, life: str = "") -> None:
        """`life` tells this Conductor's works from those of the one before it, should any
        remain."""
        self.config = config
        self.index = PrefixIndex()
        self.instances: dict[InstanceId, InstanceState] = {}
        self.requests: dict[RequestId, Tracked] = {}
        self._works: dict[WorkId, Tracked] = {}
        self._life = f"{life}." if life else ""
        self._work_numbers = count(1)  # a client may use its request id again
        self._deadlines: list[tuple[float, RequestId]] = []
        self._expected_output_tokens = FIRST_EXPECTED_OUTPUT_TOKENS
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
            case Tick():
                self._on_tick(now)
        actions, self._actions = self._actions, []
        return actions

    def validate(self) -> None:
        """Asserts that bookings and requests agree in both directions."""
        self.index.validate()
        for tracked in self.requests.values():
            assert tracked.attempt is not None
            assert self._works[tracked.attempt.work_id] is tracked
        assert len(self._works) == len(self.requests)
        booked = {w for s in self.instances.values() for w in (*s.prefills, *s.decodes)}
        assert booked <= set(self._works), booked - set(self._works)
        fetching = [a.fetch_from for s in self.instances.values() for a in s.prefills.values()]
        for instance_id, state in self.instances.items():
            assert state.num_fetches_served == fetching.count(instance_id)
            assert state.prefills or not state.expected

    # Instances

    def _on_instance_joined(self, info: InstanceInfo, now: float) -> None:
        if info.instance_id in self.instances:
            self._on_instance_lost(info.instance_id, "it joined anew", now)
        state = InstanceState(info)
        self.instances[info.instance_id] = state
        self.index.add_instance(info.instance_id, info.incarnation)
        self._ask_for_all_blocks(state)

    def _ask_for_all_blocks(self, state: InstanceState) -> None:
        """Once until the answer comes, however many events meanwhile cannot be used."""
        if not state.resyncing:
            state.resyncing = True
            self._send(state.info.instance_id, Resync())

    def _on_instance_lost(self, instance_id: InstanceId, reason: str, now: float) -> None:
        if self.instances.pop(instance_id, None) is None:
            return
        self.index.remove_instance(instance_id)
        for tracked in list(self.requests.values()):
            attempt = tracked.attempt
            if attempt is None:
                continue
            if attempt.fetch_from == instance_id:
                attempt.fetch_from = None  # the fetch fails by itself, and is computed instead
            if instance_id not in attempt.instances:
                continue
            if instance_id != attempt.decoder and attempt.stage is Stage.DECODE:
                # The prefill is done, but its stream may never have reached the decode instance.
                self._send(attempt.decoder, StopReceiving(work_id=attempt.work_id))
                continue
            text = f"instance {instance_id} was lost: {reason}"
            self._retry(tracked, 503, "instance_lost", text, now)

    # Requests

    def _on_request_arrived(self, request: Request, now: float) -> None:
        assert request.request_id not in self.requests
        tracked = Tracked(
            request=request,
            keys=[],
            record=RequestRecord(
                request.request_id,
                request.num_prompt_tokens,
                request.slo,
                request.arrived_s,
                tenant=request.tenant,
            ),
        )
        heapq.heappush(self._deadlines, (request.deadline_s, request.request_id))
        self.requests[request.request_id] = tracked
        self._place(tracked, now)

    def _place(self, tracked: Tracked, now: float) -> None:
        """Books the request's next attempt, or refuses it."""
        request = tracked.request
        sample = next(iter(self.instances.values()), None)
        if sample is None:
            self._refuse(tracked, Rejection(503, "no_instance", "no instance is up", 5.0), now)
            return
        layout = sample.info.layout
        tokens = (*request.token_ids, *tracked.generated)
        if request.use_cache:
            root = root_key(layout.fingerprint, request.tenant)
            tracked.keys = block_keys(tokens, layout.block_tokens, root)
        held = self.index.match(tracked.keys)
        views = [
            state.view(tracked.keys, held.get(instance_id, 0), len(tokens), now)
            for instance_id, state in self.instances.items()
        ]
        left = request.sampling.max_tokens - len(tracked.generated)
        # Booked in whole blocks, as they will be held.
        expected = len(tokens) + min(left, int(self._expected_output_tokens))
        demand = Demand(
            num_tokens=len(tokens),
            expected_tokens=layout.blocks_for(expected) * layout.block_tokens,
            decodes=left > 1,
            token_bytes=layout.token_bytes,
            # An answer that has begun is not taken back for being slow.
            slo=UNLIMITED if tracked.generated else request.slo,
        )
        fresh = [view for view in views if view.instance_id not in tracked.failed_on]
        decision = place(demand, fresh, self.config)
        if isinstance(decision, Rejection) and len(fresh) < len(views):
            decision = place(demand, views, self.config)
        if isinstance(decision, Rejection):
            self._refuse(tracked, decision, now)
        else:
            self._book(tracked, decision, tokens, demand, now)

    def _book(
        self,
        tracked: Tracked,
        placement: Placement,
        tokens: tuple[int, ...],
        demand: Demand,
        now: float,
    ) -> None:
        tracked.num_attempts += 1
        request, record = tracked.request, tracked.record
        attempt = Attempt(
            work_id=WorkId(f"{request.request_id}/{self._life}{next(self._work_numbers)}"),
            prefill=placement.prefill,
            decode=placement.decode,
            fetch_from=placement.fetch_from,
            prefill_s=placement.prefill_s,
            booked_tokens=demand.expected_tokens,
        )
        tracked.attempt = attempt
        self._works[attempt.work_id] = tracked
        prefill, decoder = self.instances[attempt.prefill], self.instances[attempt.decoder]
        prefill.prefills[attempt.work_id] = attempt
        prefill.expect(tracked.keys, 1)
        prefill.last_placed_s = decoder.last_placed_s = now
        if demand.decodes:
            decoder.decodes[attempt.work_id] = tracked
        if attempt.fetch_from is not None:
            self.instances[attempt.fetch_from].num_fetches_served += 1
        record.attempts = tracked.num_attempts
        record.placed_s = now
        record.prefill_instance, record.decode_instance = attempt.prefill, attempt.decoder
        record.predicted_ttft_s, record.predicted_tbt_s = placement.ttft_s, placement.tbt_s
        tracked.explanation.extend(placement.reasons)
        tracked.explanation.append(self._describe(placement))
        self._command(tracked, attempt, placement, tokens, now)

    def _command(
        self,
        tracked: Tracked,
        attempt: Attempt,
        placement: Placement,
        tokens: tuple[int, ...],
        now: float,
    ) -> None:
        request = tracked.request
        work = Work(
            work_id=attempt.work_id,
            token_ids=tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=request.sampling,
            slo=request.slo,
            tenant=request.tenant,
            use_cache=request.use_cache,
            timeout_s=max(request.deadline_s - now, 0.001),
        )
        target = fetch = None
        if attempt.decode is not None:
            # The reservation goes first, so that the decode instance knows of the stream in time.
            self._send(attempt.decode, ReserveDecode(work=work))
            target = self.instances[attempt.decode].info.address
        if attempt.fetch_from is not None:
            source = self.instances[attempt.fetch_from].info
            num_blocks = placement.fetch_tokens // source.layout.block_tokens
            fetch = Fetch(source=source.address, num_blocks=num_blocks)
        self._send(attempt.prefill, StartPrefill(work=work, fetch=fetch, target=target))

    def _describe(self, placement: Placement) -> str:
        text = f"prefill on {placement.prefill}"
        if placement.decode is not None:
            text += f", decode on {placement.decode}"
        if placement.fetch_from is not None:
            text += f", fetching {placement.fetch_tokens} tokens from {placement.fetch_from}"
        return f"{text}; predicted TTFT {placement.ttft_s:.3f} s, TBT {placement.tbt_s:.4f} s"

    # Reports

    def _on_report(self, instance_id: InstanceId, report: Report, now: float) -> None:
        state = self.instances.get(instance_id)
        if state is None:
            return
        match report:
            case StepTokens():
                for item in report.works:
                    self._on_tokens(instance_id, item, now)
            case BlocksChanged():
                if not self.index.apply(
                    instance_id,
                    state.info.incarnation,
                    report.sequence,
                    report.stored,
                    report.removed,
                ):
                    self._ask_for_all_blocks(state)
            case BlocksSnapshot():
                state.resyncing = False
                self.index.load_snapshot(
                    instance_id, state.info.incarnation, report.next_sequence, report.keys
                )
            case InstanceLoad():
                state.load = report
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
                attempt.started_s = now
                if record.prefill_started_s is None:
                    record.prefill_started_s = now
                    record.cached_tokens = min(report.cached_tokens, record.num_prompt_tokens)
                    record.fetched_tokens = report.fetched_tokens
                record.corrupt_blocks += report.corrupt_slices
            case PrefillDone():
                self._on_prefill_done(tracked, attempt, report, now)
            case DecodeAccepted():
                assert attempt.first_token is not None
                attempt.stage = Stage.DECODE
                record.decode_started_s = now
                self._deliver(tracked, (attempt.first_token,), None, now)
            case TransferDone():
                record.transfer_done_s = now
                record.corrupt_blocks += report.corrupt_blocks
            case StreamBroken():
                if attempt.decode is not None:
                    tracked.explanation.append(f"{instance_id}: {report.error}")
                    self._send(attempt.decode, StopReceiving(work_id=attempt.work_id))
            case WorkFailed():
                text = f"{instance_id}: {report.message}"
                status = 429 if report.reason == "tbt_slo" else 503
                tracked.failed_on.add(instance_id)
                self._retry(tracked, status, report.reason, text, now)

    def _on_prefill_done(
        self, tracked: Tracked, attempt: Attempt, report: PrefillDone, now: float
    ) -> None:
        tracked.record.prefill_done_s = now
        self._unbook_prefill(tracked, attempt)
        if report.finish is not None:
            self._deliver(tracked, (report.token,), report.finish, now)
            self._end(tracked, report.finish.value, now)
            return
        assert attempt.decode is not None
        attempt.stage = Stage.HANDOVER
        attempt.first_token = report.token
        self._send(attempt.decode, StartDecode(work_id=attempt.work_id, token=report.token))

    def _on_tokens(self, instance_id: InstanceId, item: WorkTokens, now: float) -> None:
        tracked = self._works.get(item.work_id)
        if tracked is None or tracked.attempt is None:
            return
        attempt = tracked.attempt
        if attempt.stage is Stage.PREFILL:  # a mixed instance: its first token ends the prefill
            attempt.stage = Stage.DECODE
            tracked.record.prefill_done_s = tracked.record.decode_started_s = now
            self._unbook_prefill(tracked, attempt)
        self._deliver(tracked, item.tokens, item.finish, now)
        if item.finish is not None:
            self._end(tracked, item.finish.value, now)

    def _deliver(
        self, tracked: Tracked, tokens: tuple[Token, ...], finish: FinishReason | None, now: float
    ) -> None:
        tracked.generated.extend(token.token_id for token in tokens)
        tracked.record.note_tokens(len(tokens), now)
        self._actions.append(
            Deliver(tracked.request.request_id, tokens, finish, tracked.record.cached_tokens)
        )

    # Endings

    def _on_tick(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            tracked = self.requests.get(request_id)
            if tracked is None or tracked.request.deadline_s > now:
                continue
            stage = tracked.attempt.stage.value if tracked.attempt else "placement"
            text = f"the request's deadline passed during {stage}"
            self._refuse(tracked, Rejection(504, "deadline", text, 1.0), now)

    def _retry(self, tracked: Tracked, status: int, reason: str, text: str, now: float) -> None:
        """Places the request anew; after too many attempts it is refused with the last reason."""
        tracked.explanation.append(text)
        self._unbook(tracked)
        if tracked.num_attempts >= self.config.max_attempts or now >= tracked.request.deadline_s:
            self._refuse(tracked, Rejection(status, reason, text, 1.0), now)
            return
        self._place(tracked, now)

    def _refuse(self, tracked: Tracked, rejection: Rejection, now: float) -> None:
        retry_after_s = min(max(rejection.retry_after_s, 1.0), MAX_RETRY_AFTER_S)
        tracked.explanation.append(f"refused: {rejection.message}")
        self._actions.append(
            Refuse(
                tracked.request.request_id,
                rejection.status,
                rejection.reason,
                rejection.message,
                retry_after_s if rejection.status in (429, 503) else None,
            )
        )
        self._end(tracked, rejection.reason, now)

    def _end(self, tracked: Tracked, outcome: str, now: float) -> None:
        """Books everything off, whatever the state, and closes the record."""
        finished = outcome in (FinishReason.STOP.value, FinishReason.LENGTH.value)
        self._unbook(tracked, abort=not finished)
        del self.requests[tracked.request.request_id]
        if len(self._deadlines) > 2 * len(self.requests) + 64:
            self._deadlines = [d for d in self._deadlines if d[1] in self.requests]
            heapq.heapify(self._deadlines)
        if finished:
            error = tracked.record.num_generated_tokens - self._expected_output_tokens
            self._expected_output_tokens += OUTPUT_MEMORY * error
        tracked.record.finished_s = now
        tracked.record.outcome = outcome
        tracked.record.explanation = tuple(tracked.explanation)
        self._actions.append(RequestEnded(tracked.record))

    def _unbook(self, tracked: Tracked, abort: bool = True) -> None:
        attempt = tracked.attempt
        if attempt is None:
            return
        self._unbook_prefill(tracked, attempt)
        for instance_id in sorted(attempt.instances):
            state = self.instances.get(instance_id)
            if state is None:
                continue
            state.decodes.pop(attempt.work_id, None)
            reserved = instance_id == attempt.decode and attempt.stage is not Stage.DECODE
            if abort or reserved:
                self._send(instance_id, Abort(work_id=attempt.work_id))
        del self._works[attempt.work_id]
        tracked.attempt = None

    def _unbook_prefill(self, tracked: Tracked, attempt: Attempt) -> None:
        state = self.instances.get(attempt.prefill)
        if state is not None and state.prefills.pop(attempt.work_id, None) is not None:
            state.expect(tracked.keys, -1)
        elif state is not None:
            return  # booked off before
        source = self.instances.get(attempt.fetch_from) if attempt.fetch_from else None
        if source is not None:
            source.num_fetches_served -= 1
            attempt.fetch_from = None

    def _send(self, instance_id: InstanceId, command: Command) -> None:
        self._actions.append(Send(instance_id, command))

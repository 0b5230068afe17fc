"""The life of an attempt at a request: from its first command to the release of its blocks.

Handles the commands for one attempt, and the ends of steps and streams. `instance.py` shows the
phases as a diagram.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moonpool.protocol.instance_counters import ATTEMPT_PREEMPTIONS, STEP_TOKENS
from moonpool.protocol.messages import (
    Abort,
    AttemptFailed,
    AttemptId,
    AttemptSpec,
    AttemptTokens,
    PrefillDone,
    ReserveDecode,
    StartDecode,
    StartPrefill,
    StepTokens,
    StopReceiving,
    StreamBroken,
    TransferDone,
)
from moonpool.protocol.transfer_events import FetchEnded, ReceiveEnded, SendEnded
from moonpool.scheduler.actions import (
    AbortStream,
    ActionBuffer,
    CancelStream,
    ExpectStream,
    FinishStream,
    StepEnded,
    StepFailed,
    StepsEnded,
)
from moonpool.scheduler.attention_pools.partitions import ArenaTracker
from moonpool.scheduler.instance_config import InstanceConfig
from moonpool.scheduler.kv_cache_manager import KVCacheManager
from moonpool.scheduler.prefix_loader import PrefixLoader
from moonpool.scheduler.request_state import PendingTransfer, RequestPhase, RequestState
from moonpool.scheduler.scheduler import Scheduler, Step
from moonpool.scheduler.speculation.speculation import Speculation
from moonpool.types import Token, TokenLogprobs, Tokens


class AttemptLifecycle:
    """Moves attempts between their phases, and ends them.

    An attempt ends in two steps. `_close` takes it out of the scheduler and stops its streams. The
    blocks of the attempt are released when no transfer and no step in progress can touch them any
    more.
    """

    def __init__(
        self,
        config: InstanceConfig,
        requests: dict[AttemptId, RequestState],
        kv_cache: KVCacheManager,
        scheduler: Scheduler,
        prefix_loader: PrefixLoader,
        arenas: ArenaTracker[RequestState],
        actions_out: ActionBuffer,
        eos_token_ids: frozenset[int],
    ) -> None:
        """`requests` is shared with the instance; only this class adds and removes entries."""
        self._config = config
        self._requests = requests
        self._kv_cache = kv_cache
        self._pool = kv_cache.pool
        self._layout = kv_cache.layout
        self._scheduler = scheduler
        self._overlap = scheduler.overlap
        self._prefix_loader = prefix_loader
        self._arenas = arenas
        self._actions_out = actions_out
        self._cost = scheduler.cost
        self._eos = eos_token_ids
        self._speculation = scheduler.speculation
        # decodes that wait for blocks to hold their KVCache
        self._unreserved: list[RequestState] = []

    # Begin

    def on_start_prefill(self, command: StartPrefill) -> None:
        """Queues a prefill, and starts to load or fetch its prefix."""
        attempt = command.attempt
        request = self._add(attempt, RequestPhase.WAITING)
        if (
            self._layout.blocks_for(len(attempt.token_ids))
            > self._kv_cache.sequences.max_sequence_blocks
        ):
            self.fail(request, "no_blocks", "the prompt needs more blocks than the instance has")
            return
        request.target = command.target
        self._scheduler.add(request)
        self._prefix_loader.begin(request, command.fetch)

    def on_reserve_decode(self, command: ReserveDecode) -> None:
        """Holds blocks for a decode, and receives its KVCache."""
        self.reserve(self._add(command.attempt, RequestPhase.RECEIVING), command.patient)

    def reserve(self, request: RequestState, patient: bool) -> None:
        """Holds the blocks of a decode and opens its stream. If there is no room, lets it wait for
        blocks that are about to be released or, if it is `patient`, for a lost arena; else fails
        the attempt."""
        attempt = request.attempt
        num_blocks = self._layout.blocks_for(len(attempt.token_ids) + 1)
        first_index = self._kv_cache.allocate(request, num_blocks)
        while first_index is None and self._scheduler.preempt_for(attempt):
            first_index = self._kv_cache.allocate(request, num_blocks)
        if first_index is None:
            if patient and self._arenas.park(request):
                return
            if self._releases_blocks() or self._scheduler.may_preempt_for(attempt):
                self._unreserved.append(request)
                self._scheduler.stop_repeating()
            else:
                self.fail(request, "no_blocks", "the decode instance has no blocks left")
            return
        blocks = request.block_ids[first_index : self._layout.blocks_for(len(attempt.token_ids))]
        request.pending.add(PendingTransfer.RECEIVE)
        self._actions_out.perform(
            ExpectStream(attempt.attempt_id, blocks, first_index, attempt.timeout_s)
        )
        if request.stream_ended:
            self._actions_out.perform(CancelStream(attempt.attempt_id))

    def _releases_blocks(self) -> bool:
        """Whether the end of a step or of a cancelled stream will release blocks: blocks of
        attempts that have ended, or blocks that a repeated step holds in advance."""
        if any(step and self._scheduler.holds_ahead(step) for step in self._scheduler.steps):
            return True
        receives = PendingTransfer.RECEIVE
        return any(
            r.closing and r.block_ids and (r.steps_pending or receives in r.pending)
            for r in self._requests.values()
        )

    def retry_reservations(self) -> None:
        """Reserves blocks for the decodes that wait for some. Call this method after each event."""
        if self._unreserved:
            waiting, self._unreserved = self._unreserved, []
            self._scheduler.take_back_ahead()
            for request in waiting:
                if not request.closing:
                    self.reserve(request, patient=False)

    def _add(self, attempt: AttemptSpec, phase: RequestPhase) -> RequestState:
        assert attempt.attempt_id not in self._requests
        tokens = Tokens(attempt.token_ids, attempt.num_prompt_tokens)
        request = RequestState(attempt=attempt, phase=phase, tokens=tokens)
        self._kv_cache.hash_prompt(request)
        self._requests[attempt.attempt_id] = request
        return request

    # Prefill to decode

    def on_fetch_ended(self, event: FetchEnded) -> None:
        """Handles the end of a fetch for an attempt."""
        request = self._requests[AttemptId(event.fetch_id)]
        self._prefix_loader.on_fetch_ended(request, event)
        if request.closing:
            self._release_if_idle(request)

    def on_send_ended(self, event: SendEnded) -> None:
        """Handles the end of a prefill's stream. If the stream breaks during the prefill, the
        prefill goes on, and the receiver computes what it lacks."""
        request = self._requests[AttemptId(event.stream_id)]
        request.pending.discard(PendingTransfer.SEND)
        self._actions_out.count("sent_bytes", event.num_bytes)
        if request.closing:
            self._release_if_idle(request)
            return
        if event.error:
            self._actions_out.count("failed_streams")
            self._actions_out.report(StreamBroken(attempt_id=request.attempt_id, error=event.error))
        if request.phase is RequestPhase.HANDING_OVER:
            self._close(request)

    def on_stop_receiving(self, command: StopReceiving) -> None:
        """Stops waiting for the rest of a decode's KVCache, and computes what is missing."""
        request = self._requests.get(command.attempt_id)
        if request is not None and not request.closing:
            request.stream_ended = True
            if PendingTransfer.RECEIVE in request.pending:
                self._actions_out.perform(CancelStream(command.attempt_id))
            elif request.stream_broken:
                self._end_receiving(request)

    def on_receive_ended(self, event: ReceiveEnded) -> None:
        """Handles the end of a decode's KVCache stream; missing KVCache is computed again. After a
        broken stream, waits for the Conductor to say whether the attempt continues, because an
        aborted prefill breaks its stream before the abort arrives here."""
        request = self._requests[AttemptId(event.stream_id)]
        request.pending.discard(PendingTransfer.RECEIVE)
        self._actions_out.count("received_bytes", event.num_bytes)
        self._actions_out.count("corrupt_slices", event.corrupt_slices)
        if request.closing:
            self._release_if_idle(request)
            return
        num_prompt = len(request.attempt.token_ids)
        if event.error:
            usable_blocks = request.num_cached_blocks
        else:
            usable_blocks = min(event.incomplete, default=len(request.block_ids))
        request.num_computed = min(usable_blocks * self._layout.block_tokens, num_prompt)
        request.num_scheduled = request.num_computed
        self._kv_cache.cache_full_blocks(request)
        self._actions_out.report(
            TransferDone(
                attempt_id=request.attempt_id,
                num_bytes=event.num_bytes,
                seconds=event.seconds,
                corrupt_slices=event.corrupt_slices,
                error=event.error,
            )
        )
        if event.error and not request.stream_ended:
            request.stream_broken = True
        else:
            self._end_receiving(request)

    def _end_receiving(self, request: RequestState) -> None:
        """Handles the moment when all KVCache that can arrive has arrived. The decode computes the
        missing KVCache."""
        request.stream_broken = False
        request.kv_arrived = True
        missing = len(request.attempt.token_ids) - request.num_computed
        self._actions_out.count("recomputed_tokens", missing)
        self._join_if_ready(request)

    def on_start_decode(self, command: StartDecode) -> None:
        """Takes the first token of a decode, after a second check of the SLO. Fails the attempt
        with the reason "tbt_slo" if it would break one."""
        request = self._requests.get(command.attempt_id)
        if request is None or request.closing or request.has_first_token:
            return
        refusal = self._refusal(request)
        if refusal:
            self.fail(request, "tbt_slo", refusal)
            return
        request.has_first_token = True
        request.tokens.append(command.token.token_id)
        self._join_if_ready(request)

    def _refusal(self, request: RequestState) -> str:
        """Returns why one more decode would break an SLO, or "" if it would break none. An idle
        instance accepts any decode."""
        scheduler, attempt = self._scheduler, request.attempt
        if attempt.max_step_s is not None or attempt.slo.tbt_s == float("inf"):
            return ""  # the request waits for a batch instead of being rejected, or has no SLO
        if not scheduler.running and not scheduler.joining:
            return ""
        step_s = scheduler.step_s_with(request)
        limit_s = attempt.slo.tbt_s * attempt.tolerance
        if step_s > limit_s:
            text = f"one more request would raise the mean time between tokens to {step_s:.3f} s"
            return f"{text}; above {limit_s:.3f} s the TBT SLO of {attempt.slo.tbt_s:g} s is missed"
        if not scheduler.has_room(len(request.tokens), max(attempt.tolerance, 1.0)):
            contexts = scheduler.context_tokens + len(request.tokens)
            return f"the engine's memory would have to hold {contexts} tokens at once"
        return ""

    def _join_if_ready(self, request: RequestState) -> None:
        ready = request.kv_arrived and request.has_first_token
        if ready and request.phase is RequestPhase.RECEIVING:
            self._scheduler.join(request)

    # Steps

    def on_step_ended(self, event: StepEnded) -> None:
        """Takes the results of one step."""
        step = self._scheduler.end_step(event.seconds)
        assert len(step) == len(event.tokens)
        reported: list[AttemptTokens] = []
        decodes_s = self._learn_decodes(step, event.seconds, 1)
        self._actions_out.count("steps")
        self._actions_out.count("step_s", event.seconds / self._config.micro_batches)  # per stage
        step_tokens = 0
        block_tokens, has_windows = self._layout.block_tokens, self._kv_cache.has_windows
        scored, pooled, further = event.scored, event.pooled, event.further
        for index, (request, num_tokens) in enumerate(step):
            in_prompt = request.num_computed < len(request.attempt.token_ids)
            if in_prompt:
                step_tokens += request.num_prompt_tokens_of(num_tokens)
            if request.closing:
                request.drafts, request.draft_task = (), None
                self._release_if_idle(request)
                continue
            overlaps = request.num_overlap_blocks > 0
            if overlaps and not self._overlap.on_step_ended(request, index in event.missed):
                continue
            token = event.tokens[index]
            if index in scored:
                request.scored.update(enumerate(scored[index], request.num_computed + 1))
            if in_prompt:
                request.report_span(self._actions_out, "prefill_chunk", event.seconds, num_tokens)
            request.pooled = pooled.get(index, b"")
            request.num_computed += num_tokens - len(request.drafts)
            tokens = () if token is None else (token, *further.get(index, ()))
            step_tokens += len(tokens)
            if self._speculation is not None and tokens:
                self._take_drafts(self._speculation, request, tokens, event.drafted.get(index))
            if request.num_computed >= (request.num_cached_blocks + 1) * block_tokens:
                self._kv_cache.cache_full_blocks(request)
            if has_windows:
                self._kv_cache.release_unseen(request)
            if not tokens:
                continue
            if request.scored:
                tokens, request.scored = (_with_prompt(tokens[0], request.scored),), {}
            request.tokens.append(tokens[-1].token_id)
            if request.target is None:
                self._report_tokens(request, tokens, reported)
            else:
                self._end_prefill(request, tokens[0])
        STEP_TOKENS.count(step_tokens, self._actions_out.count)
        if reported:
            self._actions_out.report(StepTokens(attempts=tuple(reported), gap_s=decodes_s))
        self._fail_too_long()

    def _take_drafts(
        self,
        speculation: Speculation,
        request: RequestState,
        tokens: tuple[Token, ...],
        drafted: Sequence[int] | None,
    ) -> None:
        """Accepts the right drafts, whose KVCache the step has computed. The rows of wrong drafts
        are void: the next step writes over them. `drafted`: the tokens that the draft model
        guessed."""
        token_ids = [token.token_id for token in tokens]
        speculation.end_draft_task(request, drafted, len(token_ids) - 1)
        speculation.judge(request, token_ids)
        request.drafts = ()
        request.tokens.extend(token_ids[:-1])
        request.num_computed += len(tokens) - 1
        request.num_scheduled += len(tokens) - 1

    def on_steps_ended(self, event: StepsEnded) -> None:
        """Takes the results of a repeated step of decodes. Only the last repetition can end an
        answer."""
        step = self._scheduler.end_step()
        reported: list[AttemptTokens] = []
        num_steps = len(event.tokens[0])
        decodes_s = self._learn_decodes(step, event.seconds, num_steps)
        self._actions_out.count("steps", num_steps)
        self._actions_out.count("step_s", event.seconds)
        for (request, _), tokens in zip(step, event.tokens, strict=True):
            assert len(tokens) == num_steps
            if request.closing:
                self._release_if_idle(request)
                continue
            if request.account is not None:
                request.account.charge(num_steps - 1)
            request.num_computed += num_steps
            request.num_scheduled = request.num_computed
            request.tokens.extend([token.token_id for token in tokens])
            self._kv_cache.cache_full_blocks(request)
            self._kv_cache.release_unseen(request)
            self._report_tokens(request, tuple(tokens), reported)
        if reported:
            self._actions_out.report(StepTokens(attempts=tuple(reported), gap_s=decodes_s))
        self._fail_too_long()

    def on_step_failed(self, event: StepFailed) -> None:
        """Fails the requests of a step, except those that can repeat it without the arena that was
        lost."""
        self._actions_out.count("failed_steps")
        for request, _ in self._scheduler.end_step():
            request.drafts, request.draft_task = (), None
            if request.closing:
                self._release_if_idle(request)
            elif event.lost_arena is not None and self._arenas.survives(request, event.lost_arena):
                request.num_scheduled = request.num_computed
            else:
                self.fail(request, "engine_error", event.message)

    def _learn_decodes(self, step: Step, seconds: float, num_steps: int) -> float:
        """Returns the seconds per repetition of a step with decodes only, and learns from them.
        For other steps it returns 0."""
        if step[-1][1] != 1:
            return 0.0  # in most steps with chunks, the last entry is a chunk
        context_tokens = 0
        for request, num_tokens in step:
            if (
                num_tokens != 1
                or request.draft_task is not None
                or request.target is not None
                or not request.tokens.num_generated
            ):
                return 0.0
            context_tokens += request.tokens.size
        seconds /= num_steps
        if self._config.learning:
            context_tokens += len(step) * (num_steps - 1) // 2
            # each micro-batch has about the same number of decodes
            stages = self._config.micro_batches
            expected_s = self._cost.decode_step_s(stages * len(step), stages * context_tokens)
            self._scheduler.decode_factor.observe(seconds, expected_s)
        return seconds

    def _report_tokens(
        self, request: RequestState, tokens: tuple[Token, ...], reported: list[AttemptTokens]
    ) -> None:
        """Reports the newest tokens of a decode, and ends it after its last token."""
        finish = request.finish_reason(self._eos)
        reported.append(AttemptTokens(request.attempt.attempt_id, tokens, finish))
        if finish is not None:
            self._close(request)

    def _end_prefill(self, request: RequestState, token: Token) -> None:
        """Reports the first token and hands the request over to its decode instance."""
        finish = request.finish_reason(self._eos)
        request.tokens.pop()  # the decode instance computes the newest token again
        attempt_id = request.attempt_id
        self._actions_out.report(PrefillDone(attempt_id=attempt_id, token=token, finish=finish))
        self._scheduler.remove(request)
        request.phase = RequestPhase.HANDING_OVER
        if finish is None and request.streaming:
            self._actions_out.perform(FinishStream(attempt_id))
        else:
            self._close(request)

    def _fail_too_long(self) -> None:
        for request in self._scheduler.too_long():
            self.fail(request, "no_blocks", "the answer needs more blocks than the instance has")

    # End

    def on_abort(self, command: Abort) -> None:
        """Aborts an attempt; ignores unknown attempts."""
        request = self._requests.get(command.attempt_id)
        if request is not None:
            self.abort(request)

    def abort(self, request: RequestState) -> None:
        """Ends an attempt without a report."""
        if not request.closing:
            self._close(request)

    def fail(self, request: RequestState, reason: str, message: str) -> None:
        """Ends an attempt and reports why."""
        self._actions_out.report(
            AttemptFailed(attempt_id=request.attempt_id, reason=reason, message=message)
        )
        self._close(request)

    def _close(self, request: RequestState) -> None:
        request.closing = True
        if request.target is None:
            ATTEMPT_PREEMPTIONS.count(request.num_preemptions, self._actions_out.count)
        self._scheduler.remove(request)
        if self._speculation is not None:
            self._speculation.forget(request)
        if PendingTransfer.SEND in request.pending:
            self._actions_out.perform(AbortStream(request.attempt_id))
        if PendingTransfer.RECEIVE in request.pending:
            self._actions_out.perform(CancelStream(request.attempt_id))
        self._release_if_idle(request)

    def _release_if_idle(self, request: RequestState) -> None:
        """Releases the blocks of an ended attempt once nothing can touch them any more."""
        if not request.idle:
            return
        self._pool.release(request.owner)
        self._pool.release(request.fetch_owner)
        del self._requests[request.attempt_id]


def _with_prompt(token: Token, scored: dict[int, TokenLogprobs]) -> Token:
    """Returns the token with the logprobs of its prompt."""
    prompt = tuple(scored[position] for position in sorted(scored))
    return msgspec.structs.replace(token, prompt=prompt)

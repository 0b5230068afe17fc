"""The state machine of an instance whose engine is vLLM or another server; it is pure, like
`scheduler.instance`.

vLLM itself batches, caches and evicts. This state machine decides which requests to submit, and
what to report to the head: the current prompt, the steps in which tokens came, and the blocks held.
Outputs arrive per request; outputs that arrive together count as one step.

A prefill instance requests one token and a `handle`, by which a decode instance finds the KVCache.
The decode instance draws the first token again and must draw the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from msgspec.structs import replace

from moonpool.kvcache.block_owner import BlockOwner
from moonpool.protocol.block_layout import BlockLayout, extend_keys, root_key
from moonpool.protocol.messages import (
    Abort,
    AttemptFailed,
    AttemptId,
    AttemptSpec,
    AttemptTokens,
    BlocksChanged,
    BlocksSnapshot,
    CacheView,
    DecodeAccepted,
    HotPrefixes,
    InstanceLoad,
    LeaveCluster,
    ListHot,
    MarkReplicas,
    PrefetchBlocks,
    PrefillDone,
    PrefillStarted,
    PrefixTakenOver,
    Report,
    ReserveDecode,
    Resync,
    RoleChanged,
    StartDecode,
    StartPrefill,
    StepTokens,
    StopReceiving,
    SwitchRole,
    TakeOverPrefix,
)
from moonpool.scheduler.actions import ExitProcess, SendReport
from moonpool.types import BlockKey, FinishReason, Role, Token
from moonpool.vllm.actions import (
    AwaitPool,
    CacheEventsReceived,
    CacheExplained,
    CancelRequest,
    EngineOutput,
    EngineStepEnded,
    ExplainCache,
    FlushStep,
    PoolChanged,
    PoolJoined,
    PoolLost,
    PoolReady,
    PrefixesCounted,
    SlotsChanged,
    SubmitFailed,
    SubmitRequest,
    TimePassed,
    VllmAction,
    VllmEvent,
)
from moonpool.vllm.known_cache import KnownCache, PrefixCounts
from moonpool.vllm.pooled_blocks import PooledBlocks, address_of
from moonpool.vllm.slot_table import SlotTable

SHOWN_OWNERS = 1024
NO_HANDLE = "vLLM does not share its KVCache; start it with a --kv-transfer-config"


@dataclass(slots=True)
class _VllmRequestState:
    attempt: AttemptSpec
    keys: list[BlockKey]
    hands_over: bool
    first_token: Token | None = None  # the first token, if the prefill instance has drawn it
    submitted: bool = False
    prefilling: bool = False  # whether the prompt is computed here and has no token yet
    # the action that follows when the pool has copied the blocks
    then: SubmitRequest | PrefillDone | None = None
    fetched_blocks: int = 0
    generated: list[int] = field(default_factory=list)


class _StepOutput(NamedTuple):
    tokens: list[Token]
    finish: FinishReason | None


@dataclass(slots=True)
class _Step:
    """The outputs of one step before they are reported."""

    outputs: dict[AttemptId, _StepOutput] = field(default_factory=dict)
    decodes_alone: bool = True


class VllmInstance:
    """The state machine of one instance. The engine has `num_blocks` of `layout` for KVCache.

    `publishes_events`: whether the engine publishes events of its cache. Otherwise its content is
    assumed.
    """

    def __init__(
        self,
        layout: BlockLayout,
        num_blocks: int,
        role: Role,
        publishes_events: bool,
        caches: bool = True,
        slots: SlotTable | None = None,
        context_tokens: int = 0,
    ) -> None:
        """`caches` is False for an engine without a prefix cache. `slots`: the slots, for an engine
        whose cache consists of slots. `context_tokens`: most tokens of a prompt and its answer; 0
        means that no limit is known."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.role = role
        self._context_tokens = context_tokens
        self.counters: dict[str, float] = {}
        self._cache: KnownCache | SlotTable = (
            KnownCache(layout, num_blocks, publishes_events, caches) if slots is None else slots
        )
        self._view = CacheView(source=self._cache.source)
        self._pool: PooledBlocks | None = None
        self._takeovers: dict[AttemptId, int] = {}
        self._first_counts: PrefixCounts | None = None
        self._attempts: dict[AttemptId, _VllmRequestState] = {}
        self._queue: dict[
            AttemptId, None
        ] = {}  # prompts under way, in the order of their submission
        self._step: _Step | None = None
        self._last_step_s: float | None = None
        self._sequence = 0
        self._actions: list[VllmAction] = []

    def handle(self, event: VllmEvent, now: float) -> list[VllmAction]:
        match event:
            case EngineOutput():
                self._on_output(event, now)
            case EngineStepEnded():
                self._end_step(now)
            case StartPrefill():
                self._on_start_prefill(event)
            case ReserveDecode():
                self._add(event.attempt, hands_over=False)
            case StartDecode():
                self._on_start_decode(event)
            case Abort():
                self._on_abort(event.attempt_id)
            case SubmitFailed():
                reason = "refused_by_engine" if event.refused else "engine_error"
                self._fail(event.attempt_id, event.message, reason, event.status)
            case CacheEventsReceived():
                if event.lost:
                    self._count("names_lost")
                self._cache.hear(event.events, event.lost, now)
            case TimePassed():
                self._judge_cache(now)
            case SlotsChanged():
                self.counters.update(event.counters)
            case PrefixesCounted():
                self._note_counts(event.counts)
            case CacheExplained():
                self._view = replace(self._view, note=event.note)
            case Resync():
                self._report(self._snapshot())
            case PoolJoined():
                self._pool = self._pool or PooledBlocks(event.address)
                self._pool.address = event.address
            case PoolChanged():
                if self._pool is not None:
                    self._pool.hear(event.report)
            case PoolLost():
                if self._pool is not None:
                    self._pool.forget()
            case PoolReady():
                self._on_pool_ready(event)
            case SwitchRole():
                # an external engine cannot switch its role
                self._report(RoleChanged(role=self.role))
            case ListHot():
                self._report(HotPrefixes(number=event.number, prefixes=()))
            case TakeOverPrefix():
                self._on_take_over(event)
            case LeaveCluster():
                self._actions.append(ExitProcess())
            case StopReceiving() | MarkReplicas() | PrefetchBlocks():
                pass  # nothing to do, because the engine itself fetches and evicts
        self._announce()
        actions, self._actions = self._actions, []
        return actions

    def abort_all(self) -> list[VllmAction]:
        """Ends all attempts, because the head is gone."""
        for attempt_id in list(self._attempts):
            self._on_abort(attempt_id)
        actions, self._actions = self._actions, []
        return actions

    @property
    def attempt_ids(self) -> list[AttemptId]:
        """The attempts under way."""
        return list(self._attempts)

    @property
    def cached_keys(self) -> tuple[BlockKey, ...]:
        """The blocks that the server is known, or assumed, to have cached."""
        return self._cache.keys

    def is_idle(self) -> bool:
        """Whether no attempt is under way."""
        return not self._attempts

    def load(self) -> InstanceLoad:
        """Returns the current gauges. Blocks that attempts share count once for each attempt."""
        sizes = {
            attempt_id: self.layout.blocks_for(len(one.attempt.token_ids) + len(one.generated))
            for attempt_id, one in self._attempts.items()
        }
        shown = islice(sizes.items(), SHOWN_OWNERS)
        held = min(sum(sizes.values()), self.num_blocks)
        return InstanceLoad(
            num_running=len(self._attempts) - len(self._queue),
            num_waiting=len(self._queue),
            held_blocks=held,
            cached_blocks=min(len(self._cache), self.num_blocks),
            free_blocks=self.num_blocks - held,
            owners={BlockOwner("work", attempt_id).name: size for attempt_id, size in shown},
            counters=dict(self.counters),
            num_blocks=self.num_blocks,
            cache_view=replace(self._view, source=self._cache.source),
        )

    # Commands

    def _add(self, work: AttemptSpec, hands_over: bool) -> _VllmRequestState:
        request = _VllmRequestState(work, [], hands_over)
        self._name_blocks(request)
        self._attempts[work.attempt_id] = request
        return request

    def _name_blocks(self, request: _VllmRequestState) -> None:
        """Derives the keys of the full blocks of prompt and output that have none yet."""
        work = request.attempt
        if work.use_cache:
            root = root_key(self.layout.fingerprint, work.tenant, work.adapter)
            tokens = (*work.token_ids, *request.generated)
            extend_keys(request.keys, tokens, self.layout.block_tokens, root)

    def _on_start_prefill(self, command: StartPrefill) -> None:
        request = self._add(command.attempt, hands_over=command.target is not None)
        if not _hides_first_token(request.attempt):
            request.prefilling = True
            self._queue[command.attempt.attempt_id] = None
        submit = self._request(command.attempt, hands_over=request.hands_over)
        fetch = command.fetch
        if self._pool is None or fetch is None or not request.keys:
            self._submit_prefill(request, submit)
        else:  # the copy from the other host comes first, and the prefill after it
            request.then = submit
            keys = tuple(request.keys[: fetch.num_blocks])
            self._actions.append(AwaitPool(command.attempt.attempt_id, keys, fetch.source))

    def _submit_prefill(self, request: _VllmRequestState, submit: SubmitRequest) -> None:
        """Submits a request. Its prefill begins now, unless other prompts come first."""
        request.submitted = True
        self._actions.append(submit)
        if not request.prefilling:
            self._begin_prefill(request, early=True)
        elif next(iter(self._queue)) == request.attempt.attempt_id:
            self._begin_prefill(request)

    def _request(
        self, work: AttemptSpec, hands_over: bool = False, handle: bytes = b""
    ) -> SubmitRequest:
        return SubmitRequest(work, hands_over, handle, self._pool is not None)

    def _begin_prefill(self, request: _VllmRequestState, early: bool = False) -> None:
        """Reports the start of a prefill, as far as it can be seen from outside. `early`: whether
        the prefill may wait for other prompts first."""
        held, most = 0, (len(request.attempt.token_ids) - 1) // self.layout.block_tokens
        for key in request.keys[:most]:
            if not self._holds(key):
                break
            held += 1
        held_tokens = held * self.layout.block_tokens
        if _is_exact(request.attempt):
            self._expect(len(request.attempt.token_ids), held_tokens)
        self._report(
            PrefillStarted(
                attempt_id=request.attempt.attempt_id,
                cached_tokens=held_tokens,
                fetched_tokens=request.fetched_blocks * self.layout.block_tokens,
                early=early,
            )
        )

    def _on_start_decode(self, command: StartDecode) -> None:
        request = self._attempts.get(command.attempt_id)
        if request is None or request.submitted:
            return
        request.first_token, request.submitted = command.token, True
        if command.handle:  # all full blocks except the last token's will be fetched
            num_tokens = len(request.attempt.token_ids)
            full = (num_tokens - 1) // self.layout.block_tokens * self.layout.block_tokens
            self._expect(num_tokens, full)
        source = address_of(command.handle) if self._pool is not None else None
        if source is None:
            self._actions.append(self._request(request.attempt, handle=command.handle))
            return
        request.submitted, request.then = False, self._request(request.attempt)
        keys = tuple(
            request.keys[: (len(request.attempt.token_ids) - 1) // self.layout.block_tokens]
        )
        self._actions.append(AwaitPool(command.attempt_id, keys, source))

    def _on_take_over(self, command: TakeOverPrefix) -> None:
        """The pool of this host copies a prefix from another one."""
        if self._pool is None:
            error = "an instance with vLLM and without a pool cannot take over blocks"
            self._report(PrefixTakenOver(number=command.number, num_blocks=0, error=error))
            return
        name = AttemptId(f"takeover:{command.number}")
        self._takeovers[name] = command.number
        self._actions.append(AwaitPool(name, tuple(command.keys), command.source))

    def _on_pool_ready(self, event: PoolReady) -> None:
        """Lets requests continue that have waited for the pool, whatever the pool has."""
        number = self._takeovers.pop(event.attempt_id, None)
        if number is not None:
            self._report(PrefixTakenOver(number=number, num_blocks=event.num_blocks, error=""))
            return
        request = self._attempts.get(event.attempt_id)
        if request is None or request.then is None:
            return
        then, request.then = request.then, None
        if isinstance(then, PrefillDone):
            self._end(request)
            self._report(then)
            return
        request.fetched_blocks = event.num_blocks
        if request.first_token is None:
            self._submit_prefill(request, then)
        else:
            request.submitted = True
            self._actions.append(then)

    def _on_abort(self, attempt_id: AttemptId) -> None:
        request = self._attempts.get(attempt_id)
        if request is None:
            return
        if request.submitted:
            self._actions.append(CancelRequest(attempt_id))
        self._end(request)

    def _fail(
        self, attempt_id: AttemptId, message: str, reason: str = "engine_error", status: int = 0
    ) -> None:
        request = self._attempts.get(attempt_id)
        if request is not None:
            self._count("failed_works")
            self._end(request)
            self._report(
                AttemptFailed(
                    attempt_id=attempt_id, reason=reason, message=message, engine_status=status
                )
            )

    # Outputs of the engine

    def _on_output(self, output: EngineOutput, now: float) -> None:
        request = self._attempts.get(output.attempt_id)
        if request is None:
            return
        tokens = output.tokens
        if tokens and not request.generated:
            self._end_prefill(request, now)
            if request.first_token is not None:
                if tokens[0].token_id != request.first_token.token_id:
                    self._actions.append(CancelRequest(output.attempt_id))
                    text = "the decode instance drew another first token than the prefill instance"
                    self._fail(output.attempt_id, text)
                    return
                self._report(DecodeAccepted(attempt_id=output.attempt_id))
                tokens = tokens[1:]
        request.generated.extend(token.token_id for token in output.tokens)
        self._count("generated_tokens", len(output.tokens))
        if request.hands_over:
            self._end_handed_over(request, output)
        elif output.finish is FinishReason.LENGTH and self._outgrown(request):
            self._gather(output.attempt_id, tokens, None)
            self._end_step(now)
            text = f"the answer needs more than the server's {self._context_tokens} tokens"
            self._fail(output.attempt_id, text, reason="no_blocks")
        elif tokens or output.finish is not None:
            self._gather(output.attempt_id, tokens, output.finish)

    def _outgrown(self, request: _VllmRequestState) -> bool:
        """Whether the answer ends where the context ends, and can continue elsewhere."""
        work, num_new = request.attempt, len(request.generated)
        left = work.sampling.max_tokens - (len(work.token_ids) - work.num_prompt_tokens)
        filled = len(work.token_ids) + num_new >= self._context_tokens > 0
        return filled and num_new < left and not work.sampling.grammar and work.call is None

    def _end_prefill(self, request: _VllmRequestState, now: float) -> None:
        """Handles the first token of an attempt."""
        # Not every vLLM's events name blocks of adapters, and fetched blocks need not be named.
        is_here = request.prefilling or request.attempt.call is not None
        is_named = is_here and _is_exact(request.attempt) and not request.attempt.adapter
        self._cache.note_computed(request.keys, now, is_named)
        if not request.prefilling:
            return
        request.prefilling = False
        if self._step is not None:
            self._step.decodes_alone = False
        self._last_step_s = None  # no gap is known, because the last step included a prefill
        if next(iter(self._queue)) != request.attempt.attempt_id:
            self._begin_prefill(
                request
            )  # several prompts share a step, which ends with the first of them
        self._leave_queue(request.attempt.attempt_id)

    def _leave_queue(self, attempt_id: AttemptId) -> None:
        """Removes a prompt from the queue. If it was the first one, the next one begins, unless it
        waits for the pool."""
        was_first = next(iter(self._queue), None) == attempt_id
        self._queue.pop(attempt_id, None)
        if was_first and self._queue:
            following = self._attempts[next(iter(self._queue))]
            if following.submitted:
                self._begin_prefill(following)

    def _end_handed_over(self, request: _VllmRequestState, output: EngineOutput) -> None:
        if output.finish is None:
            return
        if not output.tokens:
            self._fail(output.attempt_id, "vLLM ended the prefill without a token")
            return
        # the answer ended by a stop token, not by the limit of one token
        ends = output.finish is FinishReason.STOP
        handle = output.handle
        if not handle and self._pool is not None:
            handle = self._pool.handle
        # without a handle, the decode instance would silently compute the prompt again
        if not ends and not handle:
            self._fail(output.attempt_id, NO_HANDLE)
            return
        done = PrefillDone(
            attempt_id=output.attempt_id,
            token=output.tokens[0],
            finish=output.finish if ends else None,
            handle=handle,
        )
        if ends or output.handle or not request.keys:
            self._end(request)
            self._report(done)
        else:  # the engine stores the last blocks after the answer has ended
            request.then = done
            self._actions.append(AwaitPool(output.attempt_id, tuple(request.keys)))

    def _gather(
        self, attempt_id: AttemptId, tokens: Sequence[Token], finish: FinishReason | None
    ) -> None:
        if self._step is None:
            self._step = _Step(decodes_alone=not self._queue)
            self._actions.append(FlushStep())
        pending = self._step.outputs.get(attempt_id, _StepOutput([], None))
        pending.tokens.extend(tokens)
        self._step.outputs[attempt_id] = _StepOutput(pending.tokens, finish or pending.finish)

    def _end_step(self, now: float) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        works = tuple(
            AttemptTokens(
                attempt_id=attempt_id, tokens=tuple(pending.tokens), finish=pending.finish
            )
            for attempt_id, pending in step.outputs.items()
            if attempt_id in self._attempts
        )
        if not works:
            return
        single = all(len(item.tokens) == 1 for item in works)
        is_every_request = len(works) == sum(
            bool(request.generated) for request in self._attempts.values()
        )
        gap_s = 0.0
        if step.decodes_alone and single and is_every_request and self._last_step_s is not None:
            gap_s = now - self._last_step_s
        self._last_step_s = now
        self._report(StepTokens(attempts=works, gap_s=max(gap_s, 0.0)))
        for item in works:
            if item.finish is not None:
                self._end(self._attempts[item.attempt_id])

    # Methods about the engine's cache

    def _expect(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Notes that a prompt is about to be computed, except for its cached tokens."""
        self._view = replace(
            self._view,
            prompt_tokens=self._view.prompt_tokens + prompt_tokens,
            expected_tokens=self._view.expected_tokens + cached_tokens,
        )

    def _judge_cache(self, now: float) -> None:
        if not self._cache.judge(now):
            return
        fits = not self._cache.distrusts_events
        self._actions.append(ExplainCache(fits, self._cache.other_block_tokens))

    def _note_counts(self, counts: PrefixCounts) -> None:
        first = self._first_counts
        # smaller counters show that the engine has restarted
        if first is None or counts.queries < first.queries:
            first = self._first_counts = counts
        hits = counts.hits - first.hits
        if self.role is Role.DECODE:  # the hits of a decode instance are what its connector fetches
            hits += counts.fetched - first.fetched
        self._view = replace(
            self._view,
            engine_queries=int(counts.queries - first.queries),
            engine_hits=int(hits),
        )

    # Both

    def _end(self, request: _VllmRequestState) -> None:
        """Removes an attempt, however it ended."""
        attempt_id = request.attempt.attempt_id
        if request.generated and request.attempt.call is None:
            self._name_blocks(request)
            self._cache.note_ended(request.keys)
        self._leave_queue(attempt_id)
        del self._attempts[attempt_id]
        if self._step is not None:
            self._step.outputs.pop(attempt_id, None)
            self._step.decodes_alone = False
        if not self._attempts:
            self._last_step_s = None  # the next step does not follow the last one directly

    def _holds(self, key: BlockKey) -> bool:
        """Whether vLLM can have the block without computing it."""
        return self._cache.holds(key) or (self._pool is not None and self._pool.holds(key))

    def _snapshot(self) -> BlocksSnapshot:
        self._cache.take_changes()
        if self._pool is not None:
            return self._pool.snapshot(self._cache.keys, self._sequence)
        return BlocksSnapshot(next_sequence=self._sequence, keys=self._cache.keys)

    def _announce(self) -> None:
        stored, removed = self._cache.take_changes()
        if self._pool is not None:
            holds = self._cache.holds
            changes = self._pool.changes(stored, removed, holds, self._sequence)
            if changes is not None:
                self._report(changes)
                self._sequence += 1
            return
        if stored or removed:
            self._report(BlocksChanged(sequence=self._sequence, stored=stored, removed=removed))
            self._sequence += 1

    def _report(self, report: Report) -> None:
        self._actions.append(SendReport(report))

    def _count(self, name: str, amount: float = 1) -> None:
        self.counters[name] = self.counters.get(name, 0.0) + amount


def _is_exact(work: AttemptSpec) -> bool:
    """Whether the tokens are exactly those that the engine computes."""
    return work.call is None or work.call.is_exact


def _hides_first_token(work: AttemptSpec) -> bool:
    """Whether the engine's output does not show when the prefill has ended."""
    return work.call is not None and not work.call.tells_first_token

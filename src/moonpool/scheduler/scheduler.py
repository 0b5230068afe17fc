"""Decides which requests an instance runs in its next step, and which one is preempted when blocks
run out.

Read `_begin_step` first: it is the whole algorithm, and the methods after it are its parts, in the
order of their calls. A request enters from `waiting`, where it gets blocks, or by `join`, with
blocks that it already has. A request leaves by `remove`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from moonpool.cost.model import CostModel
from moonpool.cost.online import LearnedFactor
from moonpool.protocol.messages import AttemptSpec, DecodeAccepted
from moonpool.scheduler.actions import (
    ActionBuffer,
    RunStep,
    SendBlocks,
    StartStream,
    StepEntry,
    StopRepeating,
)
from moonpool.scheduler.batching.chunk_budget import ChunkBudget, ExpectedStep
from moonpool.scheduler.batching.contended_chunks import ContendedChunks
from moonpool.scheduler.batching.policies import PLANNERS, Share
from moonpool.scheduler.batching.queue_order import QueueOrder
from moonpool.scheduler.instance_config import InstanceConfig
from moonpool.scheduler.kv_cache_manager import KVCacheManager
from moonpool.scheduler.loading.layerwise_overlap import LayerwiseOverlap
from moonpool.scheduler.request_state import PendingTransfer, RequestPhase, RequestState
from moonpool.scheduler.speculation.speculation import Speculation
from moonpool.types import BlockId

Step = list[Share[RequestState]]
NO_IDS: frozenset[int] = frozenset()
MAX_SCORED_TOKENS = 128
"""Most prompt tokens of a request in a step that computes their logprobs, because each of these
tokens needs the logits of the whole vocabulary."""


class Scheduler:
    """The queues of one instance and its steps in progress. Requests are served by priority, fairly
    among tenants, and first come, first served (`order`).

    `waiting`: requests without a block table, some of which hold blocks of their prefix. `joining`:
    requests with all of their KVCache, which wait for room in the engine's memory, or until the
    batch is small enough for their TBT SLO.
    `running`: requests that every step considers.
    """

    def __init__(
        self,
        config: InstanceConfig,
        kv_cache: KVCacheManager,
        actions_out: ActionBuffer,
        cost: CostModel,
        overlap: LayerwiseOverlap,
        speculation: Speculation | None = None,
    ) -> None:
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []
        self.joining: deque[RequestState] = deque()
        self.steps: deque[Step] = deque()
        self._config = config
        self.cost = cost
        # factor by which decodes take longer than `cost` predicts
        self.decode_factor = LearnedFactor()
        self._plan = PLANNERS[config.batching]()
        # The baseline policies ignore the time between tokens.
        self._chunk_budget = ChunkBudget(config, cost) if config.batching == "chunked" else None
        self._contended_chunks = None
        if config.batching == "chunked":
            self._contended_chunks = ContendedChunks(config.chunk_tokens, cost)
        self.speculation = speculation
        # Predictions for the steps in progress: the expected time of a mixed step, and the seconds
        # of a step with drafts. They are None and 0 for a step of another kind.
        self._expected: deque[tuple[ExpectedStep | None, float]] = deque()
        self._kv_cache = kv_cache
        self._layout = kv_cache.layout
        self._actions_out = actions_out
        self.overlap = overlap
        self._repeating = False
        # the newest request in `joining`, which may have joined since
        self._newest_joining: RequestState | None = None
        self.order = QueueOrder()

    # Queues

    @property
    def context_tokens(self) -> int:
        """Sum of the lengths of all running and joining requests."""
        return sum(r.tokens.size for r in self.running) + sum(r.tokens.size for r in self.joining)

    def step_s_with(self, request: RequestState) -> float:
        """Returns the predicted time of a step of all running and joining decodes and this one."""
        num_running = len(self.running) + len(self.joining)
        context_tokens = self.context_tokens + request.tokens.size
        seconds = self.cost.decode_step_s(num_running + 1, context_tokens)
        return seconds * self.decode_factor.value

    def has_room(self, num_tokens: int, tolerance: float = 1.0) -> bool:
        """Whether the engine's own memory has room for `num_tokens` more. A `tolerance` above 1
        allows for requests that wait for room. Answers outgrow this check by a few tokens, which
        the engine's reserve covers."""
        limit_tokens = self._config.engine_tokens * tolerance
        return not limit_tokens or self.context_tokens + num_tokens <= limit_tokens

    def add(self, request: RequestState) -> None:
        """Adds a request to the end of the waiting queue."""
        self.order.enter(request)
        self.waiting.append(request)
        self.stop_repeating()

    def join(self, request: RequestState) -> None:
        """Adds a request with all of its KVCache; it runs once the engine has room for it.

        With a TBT SLO (`max_step_s`), the request joins between two steps, and its first token is
        delivered when its first step begins. Otherwise its first gap would include the rest of the
        step under way, and short answers would miss their SLO at any load.
        """
        self.order.enter(request)
        self.joining.append(request)
        self._newest_joining = request
        if request.attempt.max_step_s is not None and self.steps:
            self.stop_repeating()
        else:
            self._admit_joining()

    def remove(self, request: RequestState) -> None:
        """Removes a request from all queues, of which it may be in none."""
        self.order.leave(request)
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)
            request.phase = RequestPhase.WAITING
            self.stop_repeating()
        if request in self.joining:
            self.joining.remove(request)
        self._admit_joining()

    def holds_ahead(self, step: Step) -> bool:
        """Whether requests of a step hold blocks for later tokens."""
        size = self._layout.block_tokens
        return any(len(r.block_ids) * size >= r.tokens.size + size for r, _ in step)

    def take_back_ahead(self) -> bool:
        """Takes back the blocks that a repeated step held ahead of its tokens, because the step has
        ended early. Returns False if the step held no such blocks."""
        idle = [request for request in self.running if not request.steps_pending]
        return sum(map(self._kv_cache.shrink, idle)) > 0

    def too_long(self) -> list[RequestState]:
        """Returns the running requests that have outgrown the instance's blocks."""
        capacity_tokens = self._kv_cache.sequences.max_sequence_blocks * self._layout.block_tokens
        return [r for r in self.running if r.tokens.size > capacity_tokens]

    def stop_repeating(self) -> None:
        """Ends a repeated step, because the next step should differ from it."""
        if self._repeating:
            self._repeating = False
            self._actions_out.perform(StopRepeating())

    # Steps

    def end_step(self, seconds: float = 0.0) -> Step:
        """Removes and returns the oldest step, which took `seconds`; nothing is learned if
        `seconds` is 0."""
        self._repeating = False
        step = self.steps.popleft()
        mixed, drafted_s = self._expected.popleft()
        if self._chunk_budget is not None and mixed is not None and seconds:
            self._chunk_budget.learn(mixed, seconds)
        if self.speculation is not None and seconds and drafted_s:
            self.speculation.learn(drafted_s * self.decode_factor.value, seconds)
        for request, _ in step:
            request.steps_pending -= 1
        return step

    def begin_steps(self) -> None:
        """Starts steps until as many are in progress as the engine takes."""
        while len(self.steps) < self._config.max_steps_in_flight and self._begin_step():
            pass

    def _begin_step(self) -> bool:
        # ------------------------------------------------------------------------------------
        # There is no prefill phase and no decode phase. Each request has `tokens` and a number of
        # them that are scheduled (`num_scheduled`). A step is a list of (request, number of
        # tokens): one token of a decode, up to a chunk of a prefill. The two kinds share steps.
        #
        # 1. Blocks: Running requests come first: each gets the blocks for its tokens. If no blocks
        #    are left, the youngest request of the worst priority, and of the tenant that was served
        #    most, is preempted.
        # 2. Admit: Received requests, then waiting ones in their order (`queue_order`), enter
        #    `running` while there is room.
        # 3. Select: `running` is split into decodes and prefills that can be computed now. The
        #    prefills have the order of waiting requests: one may overtake another.
        # 4. Budget: Beside decodes, the TBT SLO limits the tokens of the step. The prompts of
        #    another tenant that would go first also limit them (`contended_chunks`).
        # 5. Plan: The batching policy takes from both lists (`batching.policies`).
        # 6. Drafts: What the budget leaves may verify guessed tokens of decodes (`speculation`).
        # 7. Start: The chosen tokens are counted as scheduled, and the engine gets the step.
        # ------------------------------------------------------------------------------------
        if not (self.running or self.waiting or self.joining):
            return False
        self._allocate_for_decodes()
        self._admit_joining()
        self._admit_waiting()
        decodes, prefills = self._select()
        chunk_budget = self._chunk_budget if decodes and prefills else None
        budget = self._config.chunk_tokens
        if chunk_budget is not None:
            budget = chunk_budget.budget(decodes, prefills)
        if self._contended_chunks is not None and prefills:
            budget = self._contended_chunks.budget(
                prefills, self.waiting, len(decodes), self.order, budget
            )
        step = self._plan(decodes, prefills, budget, self._config.max_sequences)
        if not step:
            return False
        mixed = None if chunk_budget is None else chunk_budget.expect(step)
        drafted = None
        if self.speculation is not None:
            drafted = self.speculation.add_drafts(step, budget)
        if drafted is not None:
            self._start(drafted.step, (None, drafted.seconds), 1, drafted.drafting_s)
        else:
            repeats = 1 if prefills else self._allocate_repeats(step)
            self._start(step, (mixed, 0.0), repeats)
        return True

    # 1. Blocks

    def _allocate_for_decodes(self) -> None:
        """Gives every running request the blocks for its tokens; preempts a request if no blocks
        are left."""
        block_tokens = self._layout.block_tokens
        lacking = [r for r in self.running if r.tokens.size > len(r.block_ids) * block_tokens]
        for request in lacking:
            if request.phase is not RequestPhase.RUNNING or not request.num_uncomputed:
                # the request was just preempted, or all its tokens are in steps in progress
                continue
            while not self._kv_cache.grow(request, request.tokens.size):
                # A prefill that hands over never lacks blocks, so the last victim is `request`.
                idle = (
                    r
                    for r in reversed(self.running)
                    if not (r.target or r.steps_pending)
                    and self._kv_cache.sequences.makes_room(r.block_ids, request.block_ids)
                )
                victim = self.order.victim(idle) or request
                if victim.steps_pending:
                    break
                self._preempt(victim)
                if victim is request:
                    break

    def preempt_for(self, attempt: AttemptSpec) -> bool:
        """Preempts a running request for an attempt without blocks, if the tenant of the running
        request was served far more than the tenant of the attempt. Returns False if there is no
        such request, or if each one is in a step."""
        victim = self.order.victim(r for r in self._behind(attempt) if not r.steps_pending)
        if victim is None:
            return False
        self._preempt(victim)
        return True

    def may_preempt_for(self, attempt: AttemptSpec) -> bool:
        """Whether `preempt_for` may preempt a request when the steps in progress have ended."""
        return any(True for _ in self._behind(attempt))

    def _behind(self, attempt: AttemptSpec) -> Iterator[RequestState]:
        """Yields the running requests that should give way to an attempt, the youngest first."""
        if not self.order.is_plain or not self.order.is_present(attempt):
            able = (request for request in reversed(self.running) if request.target is None)
            yield from self.order.behind(attempt, able)

    def _preempt(self, request: RequestState) -> None:
        """Frees a running request's blocks and puts it first in the waiting queue. Later, the
        request's tokens are computed again, except those that are still cached."""
        self._actions_out.count("preemptions")
        request.num_preemptions += 1
        request.num_overlap_blocks = 0
        self._kv_cache.free(request)
        if self.speculation is not None:
            self.speculation.forget(request)
        self.running.remove(request)
        request.phase = RequestPhase.WAITING
        self.waiting.appendleft(request)

    # 2. Admit

    def _admit_joining(self) -> None:
        """Moves received requests to `running` while the engine's memory has room for them and the
        step stays short enough. An instance without work takes any request."""
        limit_tokens = self._config.engine_tokens
        if len(self.joining) > 1 and not self.order.is_plain:
            self.joining = deque(sorted(self.joining, key=self.order.key))
        while self.joining:
            request = self.joining[0]
            if self.running:
                running_tokens = sum(r.tokens.size for r in self.running) if limit_tokens else 0
                if limit_tokens and running_tokens + request.tokens.size > limit_tokens:
                    return
                if not self._keeps_step_short(request):
                    return
            self.joining.popleft()
            request.phase = RequestPhase.RUNNING
            self.running.append(request)
            self._actions_out.report(DecodeAccepted(attempt_id=request.attempt_id))
            self.stop_repeating()

    def _keeps_step_short(self, request: RequestState) -> bool:
        """Whether the first joining request may join without a step above its limit."""
        attempt = request.attempt
        if attempt.max_step_s is None:
            return True
        max_step_s = attempt.max_step_s
        assert self._newest_joining is not None
        newest = self._newest_joining.attempt
        if newest.slo == attempt.slo and newest.max_step_s is not None:
            max_step_s = newest.max_step_s  # the Conductor has sent a new limit since
        context_tokens = sum(r.tokens.size for r in self.running) + request.tokens.size
        seconds = self.cost.decode_step_s(len(self.running) + 1, context_tokens)
        return seconds * self.decode_factor.value <= max_step_s

    def _admit_waiting(self) -> None:
        """Moves waiting requests, in order, to `running` while the step has tokens left, and places
        and blocks are free."""
        if not self.waiting:
            return
        skipped: list[RequestState] = []
        places = self._config.max_sequences * self._config.max_steps_in_flight
        is_plain = self.order.is_plain
        if not is_plain and len(self.running) < places:
            self.waiting = deque(sorted(self.waiting, key=self.order.key))
        uncomputed = sum([r.tokens.size - r.num_scheduled for r in self.running])
        spare = self._config.chunk_tokens - uncomputed
        while self.waiting and len(self.running) < places:
            request = self.waiting[0]
            if not is_plain:
                spare = self._spare_before(request)
            if spare <= 0:
                break
            if request.arriving:
                if not self._allocate_overlapping(request):
                    skipped.append(self.waiting.popleft())  # later requests may pass this one
                    continue
            elif not self._allocate(request):
                break
            if self.waiting[0] is request:
                self.waiting.popleft()
            else:  # other requests were preempted for this one
                self.waiting.remove(request)
                self.waiting = deque(sorted(self.waiting, key=self.order.key))
            if not request.overlapping:
                self._kv_cache.pool.release(request.fetch_owner)
            self._begin_prefill(request)
            spare -= request.num_uncomputed
        self.waiting.extendleft(reversed(skipped))

    def _spare_before(self, request: RequestState) -> int:
        """Returns the tokens of a step that running requests leave to a waiting one. The running
        requests that the waiting one overtakes wait, and keep their blocks."""
        key = self.order.key(request)
        before = (r for r in self.running if r.decoding or self.order.key(r) <= key)
        return self._config.chunk_tokens - sum(r.num_uncomputed for r in before)

    def _allocate(self, request: RequestState) -> bool:
        """Holds the blocks that a waiting request needs. Returns False if there is no room."""
        num_blocks = self._layout.blocks_for(request.tokens.size)
        if self.running and not self.has_room(request.tokens.size):
            return False
        if self._kv_cache.allocate(request, num_blocks) is not None:
            return True
        while self.take_back_ahead() or self.preempt_for(request.attempt):
            if self._kv_cache.allocate(request, num_blocks) is not None:
                return True
        if self.running or not self._release_fetched():
            return False
        return self._kv_cache.allocate(request, num_blocks) is not None

    def _allocate_overlapping(self, request: RequestState) -> bool:
        """Like `_allocate`, for a request that may compute while its prefix is still arriving."""
        if self.running and not self.has_room(request.tokens.size):
            return False
        if any(r.decoding for r in self.running) or self.joining:
            return False
        return self.overlap.try_allocate(request)

    def _release_fetched(self) -> bool:
        """Releases the fetched blocks of waiting requests, because the first of these requests may
        need the room, and the others cannot run before it. Returns False if no waiting request had
        fetched blocks."""
        owners = [r.fetch_owner for r in self.waiting if not r.arriving]
        held = self._kv_cache.pool.owners()
        for owner in reversed(owners):
            self._kv_cache.pool.release(owner)
        return any(held.get(owner) for owner in owners)

    def _begin_prefill(self, request: RequestState) -> None:
        """Moves an allocated request to `running`; the first time, also reports it and opens the
        stream to its decode instance."""
        request.phase = RequestPhase.RUNNING
        self.running.append(request)
        if request.started or request.has_first_token:
            return  # the request was preempted earlier in this step
        request.num_reused = request.num_computed
        if not request.overlapping:
            request.report_started(self._actions_out, request.num_computed)
        if request.target is not None:
            request.pending.add(PendingTransfer.SEND)
            attempt_id = request.attempt_id
            self._actions_out.perform(
                StartStream(attempt_id, request.target, request.attempt.timeout_s)
            )
            cached = request.block_ids[: request.num_cached_blocks]
            request.num_streamed_blocks = max(len(cached), request.num_overlap_blocks)
            if cached:
                self._actions_out.perform(SendBlocks(attempt_id, tuple(enumerate(cached))))

    # 3. Select

    def _select(self) -> tuple[Step, Step]:
        """Returns the decodes and the prefills that can be computed now, each with the number of
        its uncomputed tokens."""
        decodes: Step = []
        prefills: Step = []
        block_tokens = self._layout.block_tokens
        for request in self.running:
            num_tokens = request.tokens.size
            num_uncomputed = num_tokens - request.num_scheduled
            if not num_uncomputed or num_tokens > len(request.block_ids) * block_tokens:
                # all tokens of the request are in steps in progress, or it waits for blocks
                continue
            if request.num_overlap_blocks and not self._may_overlap(request):
                continue
            decoding = num_uncomputed == 1 and request.decoding
            if request.attempt.sampling.prompt_logprobs is not None and not decoding:
                num_uncomputed = min(num_uncomputed, MAX_SCORED_TOKENS)
            (decodes if decoding else prefills).append((request, num_uncomputed))
        if not self.order.is_plain:
            if len(prefills) > 1:
                prefills.sort(key=lambda share: self.order.key(share[0]))
            if len(decodes) > self._config.max_sequences:  # some decodes must wait for others
                decodes.sort(key=lambda share: self.order.key(share[0]))
        return self._micro_batch(decodes, bool(prefills)), prefills

    def _may_overlap(self, request: RequestState) -> bool:
        """Whether a request may have another step: while its prefix is arriving, it has one step at
        a time, which must prove valid, and no step beside decodes."""
        if request.missed or request.steps_pending:
            return False
        return not request.arriving or not any(r.decoding for r in self.running)

    def _micro_batch(self, decodes: Step, prefills: bool) -> Step:
        """Returns the decodes of one micro-batch. Each micro-batch has an equal share, so that no
        stage waits for another stage's larger batch (SARATHI section 3.2). Decodes alone never fill
        more steps than there are stages, because more steps would only be smaller."""
        stages = self._config.micro_batches
        if stages == 1 or not decodes:
            return decodes
        if not prefills and len(self.steps) >= stages:
            return []
        num_decoding = sum(r.tokens.num_generated > 0 and r.target is None for r in self.running)
        return decodes[: -(-num_decoding // stages)]

    # 7. Start

    def _start(
        self,
        step: Step,
        expected: tuple[ExpectedStep | None, float],
        repeats: int,
        drafting_s: float = 0.0,
    ) -> None:
        self._expected.append(expected)
        self._repeating = repeats > 1
        self.steps.append(step)
        entries = tuple([self._step_entry(request, num_tokens) for request, num_tokens in step])
        self._actions_out.perform(RunStep(entries, repeats, drafting_s))

    def _allocate_repeats(self, step: Step) -> int:
        """Returns how often a step of decodes may run without any report: until an answer may end
        or the blocks run out. Holds the blocks for the tokens of all these repetitions."""
        left = min(r.attempt.sampling.max_tokens - r.tokens.num_generated for r, _ in step)
        repeats = min(self._config.max_repeats, max(left, 1))
        while repeats > 1 and not self._try_repeats(step, repeats):
            repeats //= 2
        return repeats

    def _try_repeats(self, step: Step, repeats: int) -> bool:
        """Holds the blocks for `repeats` more tokens of each request. Returns False, holding no
        block, if there is no room."""
        block_tokens = self._layout.block_tokens
        lacking: list[RequestState] = []
        needs: list[tuple[Sequence[BlockId], int]] = []
        for request, _ in step:
            num_held = len(request.block_ids)
            left_tokens = num_held * block_tokens - request.tokens.size - repeats + 1
            if left_tokens < 0:
                lacking.append(request)
                needs.append((request.block_ids, self._layout.blocks_for(-left_tokens)))
        if not self._kv_cache.sequences.can_extend(needs):
            return False
        for request in lacking:
            grown = self._kv_cache.grow(request, request.tokens.size + repeats - 1)
            assert grown
        return True

    def _step_entry(self, request: RequestState, num_tokens: int) -> StepEntry:
        """Counts the tokens as scheduled, but not the drafts among them, and returns the engine's
        view of them. Where logprobs of the prompt are wanted, `targets` has the prompt's token
        after each token of this step, whose logits yield its logprob."""
        attempt, tokens, drafts = request.attempt, request.tokens, request.drafts
        start, end = request.num_scheduled, request.num_scheduled + num_tokens - len(drafts)
        if request.draft_task is not None:
            drafts = ()  # the draft model guesses the tokens when the step begins
        last = end == tokens.size
        sampling = attempt.sampling
        needs_prompt_ids = last and sampling.repetition_penalty != 1
        pooling = sampling.pooling
        request.num_scheduled = end
        request.steps_pending += 1
        if request.account is not None:
            request.account.charge(num_tokens)
        sends: tuple[tuple[int, BlockId], ...] = ()
        if request.pending and request.streaming:
            size = self._layout.block_tokens
            ready = self._layout.blocks_for(end) if last else end // size
            sent = request.num_streamed_blocks
            sends = tuple(enumerate(request.block_ids[sent:ready], sent))
            request.num_streamed_blocks = max(ready, sent)
        targets: Sequence[int] = ()
        if sampling.prompt_logprobs is not None and start < attempt.num_prompt_tokens:
            targets = tokens.between(start + 1, min(end + 1, attempt.num_prompt_tokens))
        # By position: with names, it takes twice the time, for each token.
        return StepEntry(
            attempt.attempt_id,
            (*tokens.between(start, end), *drafts) if drafts else tokens.between(start, end),
            start,
            request.block_ids,
            sampling if last else None,
            tokens.generated if last else (),
            sends,
            self.overlap.arriving(request) if request.num_overlap_blocks else None,
            tokens.prompt_ids if needs_prompt_ids else NO_IDS,
            targets,
            sampling.prompt_logprobs or 0,
            attempt.adapter,
            "none" if pooling == "last" and not last else pooling,
            request.pooled,
            len(drafts),
            False,
            request.draft_task,
        )

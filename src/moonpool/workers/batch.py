"""The works an instance runs, those that wait for it, and the steps under way.

Decides what runs in the next step, and who makes way when blocks run out. A work enters the batch
from the waiting line (its blocks are then held) or by `join`, and leaves it by `leave`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from moonpool.batching.alternating import AlternatingPlanner
from moonpool.batching.chunked import plan_chunked
from moonpool.batching.plan import BatchPlan, Candidate
from moonpool.batching.prefill_first import plan_prefill_first
from moonpool.batching.whole_prompts import plan_whole_prompts
from moonpool.config import Batching, InstanceConfig
from moonpool.cost.model import CostModel
from moonpool.types import BlockId, RequestId
from moonpool.workers.actions import (
    OpenStream,
    RunStep,
    SendBlocks,
    StepEntry,
    StopRepeating,
)
from moonpool.workers.active import ActiveWork, Pending, Phase
from moonpool.workers.early import EarlyStart
from moonpool.workers.holdings import Holdings
from moonpool.workers.messages import DecodeAccepted
from moonpool.workers.outbox import Outbox
from moonpool.workers.pace import Pace

Planner = Callable[[list[Candidate], list[Candidate], int, int], BatchPlan]
# One is made for each instance, since some remember whose turn it is.
PLANNERS: dict[Batching, Callable[[], Planner]] = {
    "chunked": lambda: plan_chunked,
    "fixed-chunks": lambda: plan_chunked,  # as vLLM has it: whatever the TBT SLO
    "prefill-first": lambda: plan_prefill_first,
    "whole-prompts": lambda: plan_whole_prompts,
    "alternating": AlternatingPlanner,
}

Step = list[tuple[ActiveWork, int]]


def steps_in_flight(num_stages: int) -> int:
    """At most: one a stage, and one that waits for the first stage."""
    return num_stages + 1 if num_stages > 1 else 1


class Batch:
    """Works are served first come, first served."""

    def __init__(
        self,
        config: InstanceConfig,
        holdings: Holdings,
        outbox: Outbox,
        cost: CostModel,
        early: EarlyStart,
    ) -> None:
        self.waiting: deque[ActiveWork] = deque()
        self.running: list[ActiveWork] = []
        self.joining: deque[ActiveWork] = deque()
        self.steps: deque[Step] = deque()
        self._config = config
        self._plan = PLANNERS[config.batching]()
        # The baselines are what they are because they do not look at the time between tokens.
        self._pace = Pace(config, cost) if config.batching == "chunked" else None
        self._expected_s: deque[float] = deque()  # of the steps under way; 0: unknown
        self._holdings = holdings
        self._layout = holdings.layout
        self._outbox = outbox
        self._early = early
        self._repeating = False

    @property
    def context_tokens(self) -> int:
        """Sum of the lengths of all works that run or are about to."""
        return sum(w.tokens.size for w in self.running) + sum(w.tokens.size for w in self.joining)

    def has_room(self, num_tokens: int, tolerance: float = 1.0) -> bool:
        """Whether the engine's own memory takes so many tokens more, or will soon: `tolerance`
        counts what waits for it. Answers grow beyond what was looked at here; the little that makes
        is left to the engine's reserve."""
        limit_tokens = self._config.engine_tokens * tolerance
        return not limit_tokens or self.context_tokens + num_tokens <= limit_tokens

    def wait(self, active: ActiveWork) -> None:
        self.waiting.append(active)
        self.stop_repeating()

    def join(self, active: ActiveWork) -> None:
        """All of its KVCache is here: it runs as soon as the engine has room for it."""
        self.joining.append(active)
        self._let_join()

    def _let_join(self) -> None:
        limit_tokens = self._config.engine_tokens
        while self.joining:
            active = self.joining[0]
            running_tokens = sum(len(w.tokens) for w in self.running) if limit_tokens else 0
            if limit_tokens and self.running and running_tokens + len(active.tokens) > limit_tokens:
                return
            self.joining.popleft()
            active.phase = Phase.RUNNING
            self.running.append(active)
            self._outbox.tell(DecodeAccepted(work_id=active.work_id))
            self.stop_repeating()

    def leave(self, active: ActiveWork) -> None:
        if active in self.waiting:
            self.waiting.remove(active)
        if active in self.running:
            self.running.remove(active)
            active.phase = Phase.WAITING
            self.stop_repeating()
        if active in self.joining:
            self.joining.remove(active)
        self._let_join()

    def stop_repeating(self) -> None:
        """What should run next is no longer what runs now."""
        if self._repeating:
            self._repeating = False
            self._outbox.do(StopRepeating())

    def too_large(self) -> list[ActiveWork]:
        """Running works that have outgrown the instance."""
        capacity_tokens = self._holdings.pool.largest * self._layout.block_tokens
        return [w for w in self.running if w.tokens.size > capacity_tokens]

    def end_step(self, seconds: float = 0.0) -> Step:
        """The oldest step is over; it took so long, 0 if that says nothing."""
        self._repeating = False
        step = self.steps.popleft()
        expected_s = self._expected_s.popleft()
        if self._pace is not None and seconds:
            self._pace.learn(expected_s, seconds)
        for active, _ in step:
            active.steps_pending -= 1
        return step

    def begin_steps(self) -> None:
        """Begins what can be run beside the steps under way."""
        while len(self.steps) < self._config.max_steps_in_flight and self._begin_step():
            pass

    def _begin_step(self) -> bool:
        if not (self.running or self.waiting or self.joining):
            return False
        self._make_room_for_decodes()
        self._let_join()  # in the place of those that made way
        self._admit_waiting()
        decodes: list[Candidate] = []
        prefills: list[Candidate] = []
        works: dict[RequestId, ActiveWork] = {}
        block_tokens = self._layout.block_tokens
        for active in self.running:
            num_tokens = active.tokens.size
            num_uncomputed = num_tokens - active.num_scheduled
            if not num_uncomputed or num_tokens > len(active.block_ids) * block_tokens:
                continue  # all of it is under way, or it must wait for room
            if active.early_blocks and not self._may_step_early(active):
                continue
            name = RequestId(active.work.work_id)
            works[name] = active
            decoding = num_uncomputed == 1 and active.decoding
            (decodes if decoding else prefills).append(Candidate(name, num_uncomputed))
        decodes = self._micro_batch(decodes, bool(prefills))
        pace = self._pace if decodes and prefills else None
        budget = self._config.chunk_tokens
        if pace is not None:
            budget = pace.budget(
                [works[candidate.request_id] for candidate in decodes],
                [works[candidate.request_id] for candidate in prefills],
            )
        plan = self._plan(decodes, prefills, budget, self._config.max_sequences)
        if not plan:
            return False
        step = [(works[entry.request_id], entry.num_tokens) for entry in plan.entries]
        self._expected_s.append(0.0 if pace is None else pace.expect(step))
        repeats = 1 if prefills else self._hold_repeats(step)
        self._repeating = repeats > 1
        self.steps.append(step)
        entries = tuple([self._entry(active, num_tokens) for active, num_tokens in step])
        self._outbox.do(RunStep(entries, repeats))
        return True

    def _micro_batch(self, decodes: list[Candidate], prefills: bool) -> list[Candidate]:
        """Those of the decodes whose turn it is: an even share for each stage, so that none of them
        waits for a larger step than others (SARATHI section 3.2). Decodes alone are never under way
        in more steps than there are stages: those would only be smaller."""
        stages = self._config.micro_batches
        if stages == 1 or not decodes:
            return decodes
        if not prefills and len(self.steps) >= stages:
            return []
        num_decoding = sum(w.tokens.num_generated > 0 and w.target is None for w in self.running)
        return decodes[: -(-num_decoding // stages)]

    def _may_step_early(self, active: ActiveWork) -> bool:
        """One step at a time until it is known to be right, and none beside decodes."""
        if active.missed or active.steps_pending:
            return False
        return not active.arriving or not any(work.decoding for work in self.running)

    def _hold_repeats(self, step: Step) -> int:
        """How often decodes may go on without a word: while no answer must end and there are blocks
        for all their tokens. Those are held at once."""
        left = min(w.work.sampling.max_tokens - w.tokens.num_generated for w, _ in step)
        repeats = min(self._config.max_repeats, max(left, 1))
        while repeats > 1 and not self._hold_for(step, repeats):
            repeats //= 2
        return repeats

    def _hold_for(self, step: Step, repeats: int) -> bool:
        """Holds the blocks for `repeats` more tokens of each work; False, holding none, if there is
        no room."""
        block_tokens = self._layout.block_tokens
        lacking: list[ActiveWork] = []
        needs: list[tuple[Sequence[BlockId], int]] = []
        for active, _ in step:
            num_held = len(active.block_ids)
            left_tokens = num_held * block_tokens - active.tokens.size - repeats + 1
            if left_tokens < 0:
                lacking.append(active)
                needs.append((active.block_ids, self._layout.blocks_for(-left_tokens)))
        if not self._holdings.pool.has_room(needs):
            return False
        for active in lacking:
            grown = self._holdings.grow(active, active.tokens.size + repeats - 1)
            assert grown
        return True

    def _entry(self, active: ActiveWork, num_tokens: int) -> StepEntry:
        work, tokens = active.work, active.tokens
        start, end = active.num_scheduled, active.num_scheduled + num_tokens
        last = end == tokens.size
        looks_back = last and work.sampling.repetition_penalty != 1
        active.num_scheduled = end
        active.steps_pending += 1
        sends: tuple[tuple[int, BlockId], ...] = ()
        if active.pending and active.streaming:
            size = self._layout.block_tokens
            ready = self._layout.blocks_for(end) if last else end // size
            sent = active.num_streamed_blocks
            sends = tuple(enumerate(active.block_ids[sent:ready], sent))
            active.num_streamed_blocks = max(ready, sent)
        return StepEntry(
            work.work_id,
            tokens.between(start, end),
            start,
            active.block_ids,
            draw=work.sampling if last else None,
            generated=tokens.generated if last else (),
            sends=sends,
            arriving=self._early.arriving(active) if active.early_blocks else None,
            prompt_ids=tokens.prompt_ids if looks_back else frozenset(),
        )

    def _make_room_for_decodes(self) -> None:
        """Every running work gets the blocks its tokens need; the youngest make way if there are
        none."""
        block_tokens = self._layout.block_tokens
        lacking = [w for w in self.running if w.tokens.size > len(w.block_ids) * block_tokens]
        for active in lacking:
            if active.phase is not Phase.RUNNING or not active.num_uncomputed:
                continue  # made way for an older one, or all of it is under way
            while not self._holdings.grow(active, len(active.tokens)):
                # It is `active` itself in the end: a prefill that hands over never lacks blocks.
                idle = (
                    w
                    for w in reversed(self.running)
                    if not (w.target or w.steps_pending)
                    and self._holdings.pool.together(w.block_ids, active.block_ids)
                )
                youngest = next(idle, active)
                if youngest.steps_pending:
                    break
                self._preempt(youngest)
                if youngest is active:
                    break

    def _preempt(self, active: ActiveWork) -> None:
        """Gives up a running work's blocks; it is computed again later, from cached blocks if it
        can."""
        self._outbox.count("preemptions")
        active.early_blocks = 0
        self._holdings.let_go(active)
        self.running.remove(active)
        active.phase = Phase.WAITING
        self.waiting.appendleft(active)

    def _admit_waiting(self) -> None:
        """Moves waiting works, in order, to the batch while the step has tokens to spare."""
        if not self.waiting:
            return
        spare = self._config.chunk_tokens - sum(w.num_uncomputed for w in self.running)
        fetching: list[ActiveWork] = []
        places = self._config.max_sequences * self._config.max_steps_in_flight
        while self.waiting and spare > 0 and len(self.running) < places:
            active = self.waiting[0]
            if active.arriving:
                if not self._hold_early(active):
                    fetching.append(self.waiting.popleft())  # others pass it meanwhile
                    continue
            elif not self._hold(active):
                break
            self.waiting.popleft()
            if not active.early:
                self._holdings.pool.release(active.fetch_owner)
            self._enter(active)
            spare -= active.num_uncomputed
        self.waiting.extendleft(reversed(fetching))

    def _hold(self, active: ActiveWork) -> bool:
        """Holds what a waiting work needs, if there is room."""
        num_blocks = self._layout.blocks_for(len(active.tokens))
        if self.running and not self.has_room(len(active.tokens)):
            return False
        if self._holdings.hold_prefix(active, num_blocks) is not None:
            return True
        if self.running or not self._give_up_fetched():
            return False
        return self._holdings.hold_prefix(active, num_blocks) is not None

    def _hold_early(self, active: ActiveWork) -> bool:
        """The same for a work whose prefix is on its way, where it may be computed already."""
        if self.running and not self.has_room(len(active.tokens)):
            return False
        if any(work.decoding for work in self.running) or self.joining:
            return False
        return self._early.try_hold(active)

    def _give_up_fetched(self) -> bool:
        """Lets go of what was fetched for works that wait: the first of them may need the room, and
        the others cannot run before it. True if there was any."""
        owners = [w.fetch_owner for w in self.waiting if not w.arriving]
        held = self._holdings.pool.owners()
        for owner in reversed(owners):
            self._holdings.pool.release(owner)
        return any(held.get(owner) for owner in owners)

    def _enter(self, active: ActiveWork) -> None:
        active.phase = Phase.RUNNING
        self.running.append(active)
        if active.started or active.has_first_token:
            return  # it was preempted
        active.num_reused = active.num_computed
        if not active.early:
            active.tell_started(self._outbox, active.num_computed)
        if active.target is not None:
            active.pending.add(Pending.SEND)
            self._outbox.do(OpenStream(active.work_id, active.target, active.work.timeout_s))
            cached = active.block_ids[: active.num_sealed]
            active.num_streamed_blocks = max(len(cached), active.early_blocks)
            if cached:
                self._outbox.do(SendBlocks(active.work_id, tuple(enumerate(cached))))

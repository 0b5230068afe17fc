"""Decides for which requests a draft model computes and keeps KVCache.

The draft model runs in the instance's own process, before the step that verifies its guesses. The
KVCache of the draft model is separate, of a fixed size and in blocks that no other instance sees.
If a request comes from a prefill instance, was preempted, or lost its blocks, the draft model lacks
part of its KVCache. The draft model then computes that part from the request's tokens, in chunks
that share steps with decodes, if the answer is expected to gain more than this costs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from moonpool.cost.model import Chunk, CostModel
from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import DraftTask
from moonpool.scheduler.request_state import RequestState
from moonpool.scheduler.speculation.drafts import DraftState

KVCACHE_SHARE = 1 / 8
"""The KVCache of a draft model takes at most this share of the memory for KVCache, unless a size is
set."""
READY_TOKENS = 8
"""A draft model that lacks no more than this many tokens computes them together with its first
guess."""
EXPECTED_TOKENS = 64
"""An answer is expected to get as many more tokens as it has, and at least this many."""


@dataclass(frozen=True, slots=True)
class DraftModelPlace:
    """What an instance knows of its draft model: step times, and the blocks of its KVCache."""

    cost: CostModel
    num_blocks: int
    block_tokens: int
    max_positions: int  # longest text, in tokens, that gets drafts


class DraftModel:
    """Manages the draft model's KVCache, and the work that it is given."""

    def __init__(self, place: DraftModelPlace, chunk_tokens: int) -> None:
        """`chunk_tokens`: most tokens that one step adds to the draft model's KVCache."""
        self.cost = place.cost
        # whether the draft model has answered with an error, after which it gets no more work
        self.failed = False
        self._place = place
        self._chunk_tokens = chunk_tokens
        self._free = list(range(place.num_blocks - 1, -1, -1))
        self._holders: dict[AttemptId, RequestState] = {}

    @property
    def num_held(self) -> int:
        """Number of blocks that requests hold."""
        return self._place.num_blocks - len(self._free)

    def takes(self, request: RequestState, num_drafts: int) -> bool:
        """Whether the request and its drafts fit into the draft model's context and its KVCache."""
        place, size = self._place, request.tokens.size + num_drafts
        most = min(place.max_positions, place.num_blocks * place.block_tokens)
        return not self.failed and size <= most

    def num_lacking(self, request: RequestState) -> int:
        """Returns how many of the request's tokens have no draft KVCache; the newest token is
        always one of them."""
        return request.tokens.size - _state(request).num_computed

    def is_ready(self, request: RequestState) -> bool:
        """Whether the draft model can guess for the request at once."""
        return self.num_lacking(request) <= READY_TOKENS

    def chunk_s(self, request: RequestState, num_tokens: int) -> float:
        """Returns the time to compute the next `num_tokens` tokens of missing KVCache."""
        start = _state(request).num_computed
        return self.cost.step_s([Chunk(num_tokens, start, start, True)], 0, 0)

    def pays(self, request: RequestState, saved_s: float) -> bool:
        """Whether computing the missing KVCache costs less than drafts will save. `saved_s`: the
        time that drafts save per token."""
        left = request.attempt.sampling.max_tokens - request.tokens.num_generated
        expected = min(left, max(EXPECTED_TOKENS, request.tokens.num_generated))
        return self.lacking_s(request) < expected * saved_s

    def lacking_s(self, request: RequestState) -> float:
        """Returns the time to compute all missing KVCache of the request, in chunks."""
        start, end = _state(request).num_computed, request.tokens.size
        seconds = 0.0
        for begin in range(start, end, self._chunk_tokens):
            number = min(self._chunk_tokens, end - begin)
            seconds += self.cost.step_s([Chunk(number, begin, start, True)], 0, 0)
        return seconds

    def prepare(
        self,
        requests: Sequence[tuple[RequestState, int]],
        wanted: Collection[AttemptId],
        limit_s: float,
    ) -> tuple[dict[AttemptId, int], float]:
        """Chooses the requests whose draft KVCache is extended in the next step. `requests`: each
        request with the most drafts that it may have. Requests that are not ready are served if
        they are in `wanted`, until the step's time `limit_s` is used up.

        Returns the requests that can have drafts in this step or get at least a chunk, each with
        the position up to which its KVCache will then be complete, and the time for the chunks.
        """
        until: dict[AttemptId, int] = {}
        spent_s, left_tokens = 0.0, self._chunk_tokens
        for request, num_drafts in requests:
            size = request.tokens.size
            if self.is_ready(request):
                if self._extend(request, size + num_drafts, until):
                    until[request.attempt_id] = size
                continue
            if request.attempt_id not in wanted:
                continue
            number = min(self.num_lacking(request), left_tokens)
            while number >= READY_TOKENS:
                seconds = self.chunk_s(request, number)
                if spent_s + seconds <= limit_s:
                    break
                number //= 2
            else:
                continue
            if not self._extend(request, size + num_drafts, until):
                continue
            spent_s += seconds
            left_tokens -= number
            until[request.attempt_id] = _state(request).num_computed + number
        return until, spent_s

    def task(
        self, request: RequestState, until: int, num_drafts: int, ends: frozenset[int]
    ) -> DraftTask:
        """Returns the draft model's task for a request in the next step. The request must be one
        that `prepare` chose."""
        state = _state(request)
        tokens = request.tokens.between(state.num_computed, until)
        return DraftTask(tokens, state.num_computed, state.block_ids, num_drafts, ends)

    def end(
        self, request: RequestState, task: DraftTask, drafted: Sequence[int] | None, num_right: int
    ) -> None:
        """Records the end of a task. `num_right` of the `drafted` tokens were right."""
        if drafted is None:
            self.failed = True
            return
        # the KVCache of the last guess was not computed
        guessed = min(num_right, max(len(drafted) - 1, 0))
        _state(request).num_computed = task.start + len(task.token_ids) + guessed

    def forget(self, request: RequestState) -> None:
        """Gives the request's blocks back."""
        if self._holders.pop(request.attempt_id, None) is not None:
            state = _state(request)
            self._free += state.block_ids
            state.block_ids, state.num_computed = [], 0

    def _extend(self, request: RequestState, num_tokens: int, keep: Collection[AttemptId]) -> bool:
        """Gives the request blocks for `num_tokens`, taking them from requests that have fallen
        behind, but not from those to `keep`."""
        state = _state(request)
        lacking = -(-num_tokens // self._place.block_tokens) - len(state.block_ids)
        if lacking <= 0:
            return True
        if len(self._free) < lacking and not self._take_from_others(request, lacking, keep):
            return False
        self._holders[request.attempt_id] = request
        # A new list: the task of a step in progress has the old one.
        state.block_ids = [*state.block_ids, *(self._free.pop() for _ in range(lacking))]
        return True

    def _take_from_others(
        self, request: RequestState, num_blocks: int, keep: Collection[AttemptId]
    ) -> bool:
        """Makes `num_blocks` free. Takes the blocks only from requests that lack more than this
        one, so that two requests never take blocks from each other in turn. Returns False, having
        taken nothing, if those requests have too few blocks."""
        least = max(READY_TOKENS, self.num_lacking(request))
        others = [
            other
            for other in self._holders.values()
            if self.num_lacking(other) > least
            and not other.steps_pending
            and other.attempt_id not in keep
        ]
        others.sort(key=self.num_lacking)
        if len(self._free) + sum(len(_state(o).block_ids) for o in others) < num_blocks:
            return False
        while len(self._free) < num_blocks:
            self.forget(others.pop())
        return True


def _state(request: RequestState) -> DraftState:
    assert request.speculation is not None, "it was never offered a draft"
    return request.speculation

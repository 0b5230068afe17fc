"""Forecasts when an instance has room for a number of KVCache tokens.

The answers that hold the room free it when they end. The end of each answer is predicted from its
length so far:

* An answer that no token ends early (`ignore_eos`) gets all of its `max_tokens`.
* The length of any other answer is one of the lengths of recent answers that were longer than it is
  now. Of n answers on an instance, the longest gets the lowest of n quantiles of these lengths, the
  next longest the second, and so on, so that some end soon and some late.
* If fewer than `LEAST_LONGER` recent answers were longer, the answer is assumed to double its
  length, and to reach at least `FIRST_GUESS_TOKENS`.

Requests that already wait take the room that becomes free before this request does.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque

import numpy as np

from moonpool.conductor.cluster_state import ClusterState
from moonpool.conductor.forecast.estimators import FIRST_GUESS_TOKENS
from moonpool.conductor.instance_table import Floats, InstanceTable
from moonpool.conductor.observers import ClusterObserver
from moonpool.conductor.state import AttemptPhase, InstanceState, TrackedRequest
from moonpool.distributions import rank_above

MEMORY_ANSWERS = 256
"""Recent answers whose lengths are remembered."""
LEAST_LONGER = 4
"""With fewer longer answers in memory, their lengths say too little about an answer."""
UPDATE_EVERY_S = 0.5
"""The ends are predicted again after this time, because under overload each arrival asks for
them."""
MOST_LOOKED_AT = 32
"""Most instances that a forecast considers; it takes those with the most room."""


class RecentLengths:
    """The lengths of the answers that ended recently, in tokens."""

    def __init__(self) -> None:
        self._by_age: deque[int] = deque()
        self._sorted: list[int] = []

    def note(self, num_tokens: int) -> None:
        self._by_age.append(num_tokens)
        insort(self._sorted, num_tokens)
        if len(self._by_age) > MEMORY_ANSWERS:
            oldest = self._by_age.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]

    def left(self, num_tokens: int, share: float) -> float:
        """Returns how many tokens an answer of `num_tokens` still gets: the quantile `share` of the
        tokens that longer answers got after that length."""
        first = bisect_right(self._sorted, num_tokens)
        longer = len(self._sorted) - first
        if longer < LEAST_LONGER:
            return max(float(num_tokens), FIRST_GUESS_TOKENS - num_tokens)
        return float(self._sorted[first + rank_above(share, longer)] - num_tokens)


class RoomForecast(ClusterObserver):
    """Forecasts room from the bookings, and changes none of them."""

    def __init__(self, cluster_state: ClusterState) -> None:
        self._table, self._instances = cluster_state.instance_table, cluster_state.instances
        self._lengths = RecentLengths()
        self._ends: dict[int, _Ends] = {}  # by row
        self._updated_s = float("-inf")

    def answered(self, tracked: TrackedRequest, decoder: InstanceState | None, now: float) -> None:
        self._lengths.note(tracked.record.num_generated_tokens)

    def wait_s(
        self, num_tokens: int, ahead_tokens: float, answer_s: float, now: float, decodes: bool
    ) -> float:
        """Returns the time until some instance has room for `num_tokens`, after the waiting
        requests ahead have got their `ahead_tokens`. `answer_s`: mean duration of an answer.
        `decodes`: whether the request needs an instance that decodes, or only one for its
        prompt."""
        if not 0.0 <= now - self._updated_s < UPDATE_EVERY_S:
            self._update(now)
        table = self._table
        ahead = ahead_tokens / max(table.num_decodes, 1)
        possible = table.decodes if decodes else table.prefills
        waits_s: list[float] = []
        for row, ends in self._ends.items():
            if table.context_tokens.item(row) >= num_tokens and possible[row]:
                lacking = num_tokens + ahead - table.room_tokens.item(row)
                waits_s.append(ends.wait_s(lacking, table.capacity_tokens.item(row), answer_s, now))
        return min(waits_s, default=answer_s)  # an instance that has just joined has no answers

    def _update(self, now: float) -> None:
        self._updated_s = now
        table = self._table
        states = {state.row: state for state in self._instances.values()}
        rows = np.array(list(states), dtype=np.intp)
        rows = rows[table.holds_answers[rows]]
        if len(rows) > MOST_LOOKED_AT:
            rows = rows[np.argsort(-table.room_tokens[rows], kind="stable")[:MOST_LOOKED_AT]]
        self._ends = {int(row): self._ends_on(states[int(row)], now) for row in rows}

    def _ends_on(self, state: InstanceState, now: float) -> _Ends:
        """Returns the answers of an instance, ordered by their predicted ends."""
        holding = {**state.prefills, **state.decodes}.values()
        step_s = _step_s(self._table, state.row)
        ordered = sorted(holding, key=lambda tracked: -len(tracked.generated))
        found: list[tuple[float, int]] = []
        for place, tracked in enumerate(ordered):
            attempt = tracked.attempt
            assert attempt is not None
            if attempt.decoder == state.info.instance_id and attempt.booked_tokens:
                left = self._left(tracked, (place + 0.5) / len(ordered))
                end_s = _begin_s(tracked, now) + left * step_s
                found.append((end_s, attempt.booked_tokens))
        found.sort()
        return _Ends(
            np.array([end_s for end_s, _ in found]), np.cumsum([float(n) for _, n in found])
        )

    def _left(self, tracked: TrackedRequest, share: float) -> float:
        """Returns the tokens that the answer still gets."""
        sampling, num_tokens = tracked.request.sampling, len(tracked.generated)
        most = float(max(sampling.max_tokens - num_tokens, 0))
        if sampling.ignore_eos and not sampling.stop_token_ids:
            return most
        return min(self._lengths.left(num_tokens, share), most)


class _Ends:
    """The predicted ends of the answers of one instance, and how many tokens are free by each of
    them."""

    def __init__(self, ends_s: Floats, freed: Floats) -> None:
        self._ends_s, self._freed = ends_s, freed

    def wait_s(self, lacking: float, capacity_tokens: float, answer_s: float, now: float) -> float:
        """Returns the time until this many tokens are free."""
        if lacking <= 0.0:
            return 0.0
        place = int(np.searchsorted(self._freed, lacking))
        if place < len(self._ends_s):
            return max(float(self._ends_s[place]) - now, 0.0)
        if not len(self._ends_s):
            return answer_s
        # The waiting requests would fill the instance more than once.
        last_s = max(float(self._ends_s[-1]) - now, 0.0)
        rounds = (lacking - float(self._freed[-1])) / max(capacity_tokens, 1.0)
        return last_s + rounds * max(answer_s, last_s)


def _step_s(table: InstanceTable, row: int) -> float:
    return table.tbt_s(row, table.booked_batch.item(row), table.booked_context.item(row))


def _begin_s(tracked: TrackedRequest, now: float) -> float:
    """Returns the earliest time at which the answer's next token should come."""
    attempt, record = tracked.attempt, tracked.record
    assert attempt is not None
    if attempt.phase is AttemptPhase.DECODE or record.placed_s is None:
        return now
    return max(record.placed_s + (record.predicted_ttft_s or 0.0), now)

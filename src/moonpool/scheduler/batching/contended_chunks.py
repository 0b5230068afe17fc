"""Makes chunks shorter while another tenant's prompt may come that would be served first.

An arriving prompt waits for the end of the step under way, on average half of that step. So a step
of one tenant takes at most a share of the time that recent prompts of the other tenant take alone.
The new prompt also shares its step with no more tokens of other tenants than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from moonpool.cost.model import Chunk, CostModel
from moonpool.scheduler.batching.chunk_budget import token_budget
from moonpool.scheduler.batching.policies import Share
from moonpool.scheduler.batching.queue_order import QueueOrder
from moonpool.scheduler.request_state import RequestState
from moonpool.types import payer_of

WINDOW_S = 15.0
"""A tenant that has sent no prompt for this long is not waited for."""
STEP_SHARE = 0.35
"""The longest step of other tenants, relative to the time that a tenant's prompt takes alone. Half
of such a step is the prompt's mean delay."""
FLOOD = 4
"""Prompts of other tenants that together are at most this many times as long are computed without
limit: they are not a flood, and each extra step delays them more."""
LEAST_TOKENS = 32
"""A step has at least this many tokens, because shorter steps would make all tenants wait for the
fixed time of steps."""
MAX_TENANTS = 256


@dataclass(slots=True)
class _Seen:
    """The recent prompts of one tenant."""

    tokens: int  # tokens of the shortest recent prompt, without its cached part
    shortest_s: float
    last_s: float
    priority: int


class ContendedChunks:
    """Limits the tokens of a step by who else sends prompts to this instance."""

    def __init__(self, chunk_tokens: int, cost: CostModel) -> None:
        self._chunk_tokens = chunk_tokens
        self._cost = cost
        # tenants by the time when they were last seen, the oldest first
        self._seen: dict[str, _Seen] = {}

    def budget(
        self,
        prefills: Sequence[Share[RequestState]],
        waiting: Iterable[RequestState],
        num_decodes: int,
        order: QueueOrder,
        most: int,
    ) -> int:
        """Returns the tokens of a step with some of these prefills, in their order: `most` or less.
        `waiting`: requests that wait for blocks."""
        self._note(prefills, order.now_s)
        if len(self._seen) < 2:
            return most
        num_first = 0
        for place, (request, num_tokens) in enumerate(prefills):
            shortest = self._shortest(request, order)
            if shortest:
                num_left = sum(num for _, num in prefills[place:])
                num_left += sum(late.tokens.size for late in islice(waiting, FLOOD))
                if num_left <= FLOOD * shortest:
                    return most
                limit_s = STEP_SHARE * self._alone_s(shortest)
                allowed = self._tokens_within(request, limit_s, num_decodes, most)
                return min(most, max(num_first + num_decodes, allowed))
            num_first += num_tokens
        return most

    def _note(self, prefills: Sequence[Share[RequestState]], now: float) -> None:
        for request, num_tokens in prefills:
            if request.num_scheduled > request.num_reused:
                continue  # the prompt was noted when its prefill began
            tenant = payer_of(request.attempt.tenant)
            seen = self._seen.pop(tenant, None)
            if seen is None or num_tokens <= seen.tokens or now - seen.shortest_s > WINDOW_S:
                seen = _Seen(num_tokens, now, now, request.attempt.priority)
            seen.last_s, seen.priority = now, request.attempt.priority
            self._seen[tenant] = seen
        while self._seen:
            tenant, seen = next(iter(self._seen.items()))
            if now - seen.last_s <= WINDOW_S and len(self._seen) <= MAX_TENANTS:
                return
            del self._seen[tenant]

    def _shortest(self, request: RequestState, order: QueueOrder) -> int:
        """Returns the tokens of the shortest prompt that would go before this request, or 0 if
        there is no such prompt."""
        assert request.account is not None
        tenant, priority = payer_of(request.attempt.tenant), order.priority(request)
        return min(
            (
                seen.tokens
                for name, seen in self._seen.items()
                if name != tenant
                and seen.priority <= priority
                and order.served(name) < request.account.served
            ),
            default=0,
        )

    def _alone_s(self, num_tokens: int) -> float:
        seconds = 0.0
        for start in range(0, num_tokens, self._chunk_tokens):
            num = min(self._chunk_tokens, num_tokens - start)
            chunk = Chunk(num, start, 0, start + num == num_tokens)
            seconds += self._cost.step_s([chunk], 0, 0)
        return seconds

    def _tokens_within(
        self, request: RequestState, limit_s: float, num_decodes: int, most: int
    ) -> int:
        start = request.num_scheduled

        def step_s(num_tokens: int) -> float:
            return self._cost.step_s([Chunk(num_tokens, start, 0, False)], 0, 0)

        tile = self._cost.tile_tokens
        return token_budget(step_s, num_decodes, limit_s, tile, most, LEAST_TOKENS)

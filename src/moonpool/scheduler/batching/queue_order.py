"""Orders the requests of an instance.

The lower priority value is first; within a priority, the tenant with the least tokens served
(`TenantAccounts`); within a tenant, the older request. After half of its time a request counts as
one of the best priority here, so none waits forever.

With one tenant and one priority, the order is that of arrival. `is_plain` says so, and spares the
scheduler the comparisons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from moonpool.protocol.messages import AttemptSpec
from moonpool.scheduler.request_state import RequestState, TenantAccount
from moonpool.types import payer_of

CREDIT_TOKENS = 16_384
"""A tenant that was idle is at most this many tokens ahead of, or behind, those that were not: that
many tokens of its next prompts do not wait for other tenants."""
MAX_ABSENT = 1024
"""Tenants without requests whose counters are kept; beyond that, the tenant that left first is
dropped."""


class TenantAccounts:
    """How many tokens of each tenant an instance has computed, as virtual counters.

    A counter is that of the Virtual Token Counter of Sheng et al. (OSDI'24): prompt and output
    tokens over the tenant's weight. The tenant with the least is next. A tenant that returns after
    a pause is moved to within `credit_tokens` of those that were present, so that no tenant saves
    up service while idle, or pays for what was served long ago.
    """

    def __init__(self, credit_tokens: float) -> None:
        self._credit_tokens = credit_tokens
        self._present: dict[str, TenantAccount] = {}
        self._absent: dict[str, TenantAccount] = {}  # the first one left first
        self._last = 0.0  # `served` of the last tenant that left

    @property
    def num_present(self) -> int:
        """Tenants with requests."""
        return len(self._present)

    def is_present(self, tenant: str) -> bool:
        return tenant in self._present

    def served(self, tenant: str) -> float:
        """Returns what was served to a tenant, as it would count if the tenant came now; 0 if it is
        unknown."""
        account = self._present.get(tenant) or self._absent.get(tenant)
        return 0.0 if account is None else account.served

    def enter(self, tenant: str, weight: float) -> TenantAccount:
        """Adds one more request of the tenant. Returns the tenant's account."""
        account = self._present.get(tenant)
        if account is None:
            served = [other.served for other in self._present.values()] or [self._last]
            account = self._absent.pop(tenant, None) or TenantAccount(weight)
            least = min(served) - self._credit_tokens
            account.served = min(max(account.served, least), max(served) + self._credit_tokens)
            self._present[tenant] = account
        account.weight = weight
        account.num_requests += 1
        return account

    def leave(self, tenant: str) -> None:
        """Notes that a request of the tenant has gone."""
        account = self._present[tenant]
        account.num_requests -= 1
        if account.num_requests:
            return
        self._last = account.served
        self._absent[tenant] = self._present.pop(tenant)
        if len(self._absent) > MAX_ABSENT:
            del self._absent[next(iter(self._absent))]


class QueueOrder:
    """The order of the requests that have entered and not left. Callers keep requests that are
    equal in this order by their arrival."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._accounts = TenantAccounts(CREDIT_TOKENS)
        self._priorities: Counter[int] = Counter()

    def __len__(self) -> int:
        """The requests that have not left."""
        return sum(self._priorities.values())

    def enter(self, request: RequestState) -> None:
        attempt = request.attempt
        request.account = self._accounts.enter(payer_of(attempt.tenant), attempt.share)
        request.aged_s = self.now_s + attempt.timeout_s / 2
        self._priorities[attempt.priority] += 1

    def leave(self, request: RequestState) -> None:
        """Takes a request out; it may have left before."""
        if request.account is None:
            return
        request.account = None
        self._accounts.leave(payer_of(request.attempt.tenant))
        priority = request.attempt.priority
        self._priorities[priority] -= 1
        if not self._priorities[priority]:
            del self._priorities[priority]

    @property
    def is_plain(self) -> bool:
        """Whether the order is that of arrival."""
        return len(self._priorities) <= 1 and self._accounts.num_present <= 1

    def priority(self, request: RequestState) -> int:
        """Returns the request's priority, or the best one here if it has waited for long."""
        if self.now_s >= request.aged_s:
            return min(self._priorities)
        return request.attempt.priority

    def is_present(self, attempt: AttemptSpec) -> bool:
        """Whether the tenant of an attempt has other requests here."""
        return self._accounts.is_present(payer_of(attempt.tenant))

    def served(self, tenant: str) -> float:
        """Returns the tokens served to a tenant that has requests here, or had some lately."""
        return self._accounts.served(tenant)

    def key(self, request: RequestState) -> tuple[int, float]:
        """Returns what to sort by; a request with the lower key is served first."""
        assert request.account is not None
        return self.priority(request), request.account.served

    def is_behind(self, attempt: AttemptSpec, other: RequestState) -> bool:
        """Whether another request, which is no more urgent, should give way to an attempt that
        needs room. It should if the attempt's tenant was served less by more tokens than both
        requests have, so that two tenants do not take the room from each other in turn."""
        if self.priority(other) < attempt.priority or other.account is None:
            return False
        lead = other.account.served - self.served(payer_of(attempt.tenant))
        cost = other.tokens.size / other.attempt.share + len(attempt.token_ids) / attempt.share
        return lead > cost

    def victim(self, requests: Iterable[RequestState]) -> RequestState | None:
        """Returns the request to preempt, or None if there are none: among those of the worst
        priority, the first one of the tenant with the most tokens served. `requests`: the youngest
        first."""
        if self.is_plain:
            return next(iter(requests), None)
        return max(requests, key=self.key, default=None)

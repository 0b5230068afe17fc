"""Orders the requests of an instance.

The lower priority value is first; within a priority, the tenant with the least tokens served
(`TenantAccounts`); within a tenant, the older request. After half of its time a request counts as
one of the best priority here, so none waits forever.

With one tenant and one priority, requests are served in the order of arrival. `is_plain` returns
True in that case, and spares the scheduler the comparisons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from moonpool.protocol.messages import AttemptSpec
from moonpool.scheduler.request_state import RequestState, TenantAccount
from moonpool.types import payer_of

CREDIT_TOKENS = 16_384
"""A tenant that was idle is at most this many tokens ahead of, or behind, the other tenants: that
many tokens of its next prompts do not wait for other tenants."""
MAX_ABSENT = 1024
"""Tenants without requests whose counters are kept; beyond that, the tenant that left first is
dropped."""


class TenantAccounts:
    """How many tokens of each tenant an instance has computed, as virtual counters.

    A counter is that of the Virtual Token Counter of Sheng et al. (OSDI'24): prompt and output
    tokens over the tenant's weight. The tenant with the smallest counter is next. The counter of a
    tenant that returns after a pause is moved to within `credit_tokens` of the present tenants'
    counters, so that no tenant saves up service while it is idle, or pays for service that it got
    long ago.
    """

    def __init__(self, credit_tokens: float) -> None:
        self._credit_tokens = credit_tokens
        self._present: dict[str, TenantAccount] = {}
        # accounts of absent tenants, in the order in which they left
        self._absent: dict[str, TenantAccount] = {}
        self._last = 0.0  # `served` of the tenant that left last

    @property
    def num_present(self) -> int:
        """Number of tenants that have requests at this instance."""
        return len(self._present)

    def is_present(self, tenant: str) -> bool:
        return tenant in self._present

    def served(self, tenant: str) -> float:
        """Returns the counter of a tenant; that of an absent one as it was when the tenant left,
        and 0 if the tenant is unknown."""
        account = self._present.get(tenant) or self._absent.get(tenant)
        return 0.0 if account is None else account.served

    def served_at_entry(self, tenant: str) -> float:
        """Returns the counter of a tenant with one more request: that of an absent one is moved to
        within the credit of the present ones."""
        served = self.served(tenant)
        if tenant in self._present:
            return served
        present = [account.served for account in self._present.values()] or [self._last]
        least = min(present) - self._credit_tokens
        return min(max(served, least), max(present) + self._credit_tokens)

    def enter(self, tenant: str, weight: float) -> TenantAccount:
        """Adds one more request of the tenant. Returns the tenant's account."""
        account = self._present.get(tenant)
        if account is None:
            served = self.served_at_entry(tenant)
            account = self._absent.pop(tenant, None) or TenantAccount(weight)
            account.served = served
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
        """Returns the number of requests that have not left."""
        return sum(self._priorities.values())

    def enter(self, request: RequestState) -> None:
        attempt = request.attempt
        request.account = self._accounts.enter(payer_of(attempt.tenant), attempt.share)
        request.aged_s = self.now_s + attempt.timeout_s / 2
        self._priorities[attempt.priority] += 1

    def leave(self, request: RequestState) -> None:
        """Removes a request, which may have left before."""
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
        """Whether requests are served in the order of arrival."""
        return len(self._priorities) <= 1 and self._accounts.num_present <= 1

    def priority(self, request: RequestState) -> int:
        """Returns the request's priority, or the best priority at this instance if the request has
        waited for long."""
        if self.now_s >= request.aged_s:
            return min(self._priorities)
        return request.attempt.priority

    def is_present(self, attempt: AttemptSpec) -> bool:
        """Whether the tenant of an attempt has other requests at this instance."""
        return self._accounts.is_present(payer_of(attempt.tenant))

    def served(self, tenant: str) -> float:
        """Returns the tokens served to a tenant over its weight; 0 for a tenant that has had no
        requests at this instance recently."""
        return self._accounts.served(tenant)

    def key(self, request: RequestState) -> tuple[int, float]:
        """Returns the sort key of a request; the request with the lowest key is served first."""
        assert request.account is not None
        return self.priority(request), request.account.served

    def behind(
        self, attempt: AttemptSpec, others: Iterable[RequestState]
    ) -> Iterator[RequestState]:
        """Yields the other requests that should give way to an attempt that needs room. A request
        of the same or a worse priority should if its tenant is ahead of the attempt's tenant by
        more served tokens than both requests have, so that two tenants do not take the room from
        each other in turn."""
        served = self._accounts.served_at_entry(payer_of(attempt.tenant))
        for other in others:
            if self.priority(other) < attempt.priority or other.account is None:
                continue
            cost = other.tokens.size / other.attempt.share + len(attempt.token_ids) / attempt.share
            if other.account.served - served > cost:
                yield other

    def victim(self, requests: Iterable[RequestState]) -> RequestState | None:
        """Returns the request to preempt, or None if there is no request: among the requests of the
        worst priority, the first one of the tenant with the most tokens served. `requests`: the
        requests to choose from, the youngest first."""
        if self.is_plain:
            return next(iter(requests), None)
        return max(requests, key=self.key, default=None)

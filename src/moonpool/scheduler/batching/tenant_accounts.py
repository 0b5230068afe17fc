"""How many tokens of each tenant an instance has computed, as virtual counters.

A counter is that of the Virtual Token Counter of Sheng et al. (OSDI'24): prompt and output tokens
over the tenant's weight. The tenant with the least is next. A tenant that returns after a pause is
moved to within `credit_tokens` of those that were present, so that no tenant saves up service while
idle, or pays for what was served long ago.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_ABSENT = 1024
"""Tenants without requests whose counters are kept; beyond that, the tenant that left first is
dropped."""


@dataclass(slots=True)
class TenantAccount:
    """The counter of one tenant. `served`: tokens over the weight."""

    weight: float
    served: float = 0.0
    num_requests: int = 0

    def charge(self, num_tokens: int) -> None:
        self.served += num_tokens / self.weight


class TenantAccounts:
    """The accounts of the tenants with requests at this instance, and of those that had some."""

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

"""Shares an overloaded cluster among tenants by the tokens they were given.

Admission refuses what arrives while the cluster is full, so a tenant that sends without pause would
take every place that becomes free. Where tenants compete, one that had less than its share of
tokens lately is owed a place: it waits for one instead of being refused, and the others are refused
meanwhile. A tenant alone is never affected. Time is the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

HALF_LIFE_S = 20.0
"""What a tenant was given counts half after this time."""
ACTIVE_S = 20.0
"""A tenant competes for so long after its last request."""
MAX_TENANTS = 4096
MAX_OWED_WAITING = 64
"""Requests of one tenant that wait because it is owed; further ones are refused as usual."""


@dataclass(slots=True)
class _Account:
    weight: float
    given: float = 0.0  # tokens over the weight, decayed up to `at_s`
    at_s: float = 0.0
    seen_s: float = 0.0

    def given_at(self, now: float) -> float:
        kept: float = 0.5 ** (max(now - self.at_s, 0.0) / HALF_LIFE_S)
        return self.given * kept


class FairShare:
    """What each tenant was given lately."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights`: shares of tenants relative to 1, the share of all others."""
        self._weights = dict(weights or {})
        self._accounts: dict[str, _Account] = {}
        self._num_owed: dict[str, int] = {}  # waiting requests of tenants that are owed

    def see(self, tenant: str, now: float) -> None:
        """The tenant has sent a request."""
        account = self._accounts.pop(tenant, None)
        if account is None:
            account = _Account(self.weight(tenant), at_s=now)
            if len(self._accounts) >= MAX_TENANTS:
                del self._accounts[next(iter(self._accounts))]
        account.seen_s = now
        self._accounts[tenant] = account  # the last one was seen last

    def give(self, tenant: str, num_tokens: float, now: float) -> None:
        """A request of the tenant with so many tokens was admitted."""
        account = self._accounts.get(tenant)
        if account is not None:
            account.given = account.given_at(now) + num_tokens / account.weight
            account.at_s = now

    def weight(self, tenant: str) -> float:
        """Returns the tenant's share relative to 1."""
        return self._weights.get(tenant, 1.0)

    def level(self, tenant: str, now: float) -> float:
        """Returns what the tenant was given lately, over its weight."""
        account = self._accounts.get(tenant)
        return 0.0 if account is None else account.given_at(now)

    def compete(self, now: float) -> bool:
        """Whether several tenants have sent requests lately."""
        latest = list(islice(reversed(self._accounts.values()), 2))
        return len(latest) == 2 and now - latest[1].seen_s <= ACTIVE_S

    def is_owed(self, tenant: str, now: float) -> bool:
        """Whether the tenant competes with others and had less than its share."""
        mean = self._mean_of_competitors(now)
        return mean is not None and self.level(tenant, now) < mean

    def must_yield(self, tenant: str, now: float) -> bool:
        """Whether a request of this tenant would take a place that a waiting one is owed."""
        if not self._num_owed or (len(self._num_owed) == 1 and tenant in self._num_owed):
            return False
        mean = self._mean_of_competitors(now)
        return mean is not None and self.level(tenant, now) > mean

    def may_wait(self, tenant: str, now: float) -> bool:
        return self._num_owed.get(tenant, 0) < MAX_OWED_WAITING and self.is_owed(tenant, now)

    def begin_wait(self, tenant: str) -> None:
        self._num_owed[tenant] = self._num_owed.get(tenant, 0) + 1

    def end_wait(self, tenant: str) -> None:
        left = self._num_owed.get(tenant, 0) - 1
        if left > 0:
            self._num_owed[tenant] = left
        else:
            self._num_owed.pop(tenant, None)

    def _mean_of_competitors(self, now: float) -> float | None:
        """Returns the mean level of the tenants that compete; None if there are no two."""
        levels = []
        for account in reversed(self._accounts.values()):
            if now - account.seen_s > ACTIVE_S:
                break
            levels.append(account.given_at(now))
        return sum(levels) / len(levels) if len(levels) > 1 else None

"""Shares an overloaded cluster among tenants by the tokens that each has and had recently.

A tenant's level is the sum of the KVCache that its requests hold now and the tokens recently
computed for it, divided by its weight. So an answer counts for as long as it runs, and for some
time afterwards. Tenants compete while they have requests under way, and for some time after a
request. A tenant below the mean level of the competitors is owed a place:

* Its requests wait for a place instead of being refused, and the requests of tenants above the mean
come after them.
* A tenant far below its share claims a place: its requests are not refused for load that other
tenants cause, and where other tenants hold the room, their youngest answers give way
(`waiting.preemption`).

A tenant without competitors is never affected. The caller supplies the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from moonpool.conductor.observers import ClusterObserver
from moonpool.conductor.state import ShareAccount, TrackedRequest
from moonpool.types import payer_of

ACTIVE_S = 20.0
"""A tenant competes for this long after its last request."""
MAX_TENANTS = 4096
MAX_OWED_WAITING = 64
"""Requests of one tenant that may wait because it is owed a place; further requests are refused as
usual."""
QUICK_SHARE = 0.5
"""A tenant claims a place immediately while it has at most this share of the mean, including the
request that claims."""
PATIENT_SHARE = 0.125
"""The share of its TTFT SLO that a request waits before its tenant may claim up to the mean."""


class FairShare(ClusterObserver):
    """The accounts of all tenants that were seen recently."""

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        caches: Mapping[str, float] | None = None,
    ) -> None:
        """`weights`: shares of tenants relative to 1, which is the share of all tenants without an
        entry. `caches`: most of each instance's cache that a tenant may have; 1 for tenants without
        an entry."""
        self._weights = dict(weights or {})
        self._caches = dict(caches or {})
        # the account of each tenant, in the order in which tenants were last seen
        self._accounts: dict[str, ShareAccount] = {}
        self._busy: dict[str, ShareAccount] = {}  # accounts of tenants with requests under way
        # number of waiting requests of each tenant that are owed a place
        self._num_owed: dict[str, int] = {}

    def arrived(self, tracked: TrackedRequest, now: float) -> None:
        tenant = payer_of(tracked.request.tenant)
        tracked.share = self.weight(tenant)
        tracked.cache_share = self._caches.get(tenant, 1.0)
        tracked.account = self.begin(tenant, now)
        tracked.competes = self.compete(now)

    def ended(self, tracked: TrackedRequest, is_answered: bool, now: float) -> None:
        self.end(payer_of(tracked.request.tenant), tracked.account)

    def begin(self, tenant: str, now: float) -> ShareAccount:
        """Notes that a request of the tenant has arrived; it is under way until `end`."""
        account = self._accounts.pop(tenant, None)
        if account is None:
            account = ShareAccount(self.weight(tenant), at_s=now)
            if len(self._accounts) >= MAX_TENANTS:
                self._forget_one()
        self._accounts[tenant] = self._busy[tenant] = account
        account.seen_s = now
        account.num_under_way += 1
        return account

    def end(self, tenant: str, account: ShareAccount) -> None:
        account.num_under_way -= 1
        if not account.num_under_way:
            del self._busy[tenant]

    def _forget_one(self) -> None:
        """Forgets the tenant that has been idle for longest, but never one with requests under
        way."""
        idle = next((name for name in self._accounts if name not in self._busy), None)
        if idle is not None:
            del self._accounts[idle]

    def weight(self, tenant: str) -> float:
        """Returns the tenant's share relative to 1."""
        return self._weights.get(tenant, 1.0)

    def level(self, tenant: str, now: float) -> float:
        """Returns what the tenant has and had recently, over its weight."""
        account = self._accounts.get(tenant)
        return 0.0 if account is None else account.level(now)

    def compete(self, now: float) -> bool:
        """Whether several tenants have requests under way, or have sent some recently."""
        if len(self._busy) > 1:
            return True
        latest = islice(reversed(self._accounts.items()), 2)
        recent = {name for name, account in latest if now - account.seen_s <= ACTIVE_S}
        return len(recent | self._busy.keys()) > 1

    def is_owed(self, tenant: str, now: float) -> bool:
        """Whether the tenant competes with others and had less than its share."""
        mean = self.mean(now)
        return mean is not None and self.level(tenant, now) < mean

    def must_yield(self, tenant: str, now: float) -> bool:
        """Whether a request of this tenant would take a place that a waiting request is owed."""
        if not self._num_owed or (len(self._num_owed) == 1 and tenant in self._num_owed):
            return False
        mean = self.mean(now)
        return mean is not None and self.level(tenant, now) > mean

    def may_wait(self, tenant: str, now: float) -> bool:
        return self._num_owed.get(tenant, 0) < MAX_OWED_WAITING and self.is_owed(tenant, now)

    def may_claim(self, tenant: str, num_tokens: int, is_patient: bool, now: float) -> bool:
        """Whether the tenant's request, which will hold `num_tokens`, is within the part of its
        share that other tenants must leave to it. `is_patient`: whether the request has waited for
        `PATIENT_SHARE`."""
        mean = self.mean(now)
        if mean is None:
            return False
        level = self.level(tenant, now) + num_tokens / self.weight(tenant)
        return level <= (mean if is_patient else QUICK_SHARE * mean)

    @property
    def num_owed_waiting(self) -> int:
        """Returns the number of waiting requests of tenants that are owed a place."""
        return sum(self._num_owed.values())

    def begin_wait(self, tenant: str) -> None:
        self._num_owed[tenant] = self._num_owed.get(tenant, 0) + 1

    def end_wait(self, tenant: str) -> None:
        left = self._num_owed.get(tenant, 0) - 1
        if left > 0:
            self._num_owed[tenant] = left
        else:
            self._num_owed.pop(tenant, None)

    def validate_held(self, held_tokens: Mapping[str, Sequence[int]]) -> None:
        """Asserts that each account has the tokens that the tenant's requests under way hold."""
        assert held_tokens.keys() == self._busy.keys()
        for tenant, tokens in held_tokens.items():
            account = self._busy[tenant]
            assert (len(tokens), sum(tokens)) == (account.num_under_way, account.held_tokens)

    def mean(self, now: float) -> float | None:
        """Returns the mean level of the tenants that compete, or None if fewer than two compete."""
        levels = [account.level(now) for account in self._competitors(now)]
        return sum(levels) / len(levels) if len(levels) > 1 else None

    def _competitors(self, now: float) -> Iterator[ShareAccount]:
        yield from self._busy.values()
        for name, account in reversed(self._accounts.items()):
            if now - account.seen_s > ACTIVE_S:
                break
            if name not in self._busy:
                yield account

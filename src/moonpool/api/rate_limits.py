"""Rates of tenants: calls and tokens per second, limited by buckets that fill up with time.

A bucket holds what `BURST_S` seconds bring. Each call takes one unit from the bucket of calls. A
call only needs a bucket of tokens that is not in debt, because the length of its answer is not
known. The tokens of the prompt are taken at once, and those of the answer as they come, which may
leave the bucket in debt. The caller passes the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from moonpool.api.errors import ApiError
from moonpool.api.keys import NO_LIMITS, TenantLimits
from moonpool.api.serving_backend import RequestRefused
from moonpool.types import PRIORITY_RANGE, ProgramContext

BURST_S = 10.0
"""For how many seconds unused calls or tokens accumulate, which may then be used at the same
time."""
RATE_LIMIT = "rate_limit"
"""The reason of a refusal because a tenant's calls or tokens are used up."""


@dataclass(slots=True)
class _Bucket:
    rate: float
    least: float  # a call needs a bucket at this level or above
    level: float
    at_s: float = 0.0

    @property
    def capacity(self) -> float:
        return max(self.rate * BURST_S, 1.0)

    def wait_s(self, now: float) -> float:
        """Returns the seconds after which a call may come; 0 means now."""
        self.level = min(self.level + (now - self.at_s) * self.rate, self.capacity)
        self.at_s = now
        lacking = self.least - self.level
        return max(lacking / self.rate, 0.0)


class RateLimits:
    """The buckets of the tenants that have limits. Other tenants have no buckets."""

    def __init__(self, limits: Mapping[str, TenantLimits]) -> None:
        self._limits = limits
        self._calls = _buckets({name: one.requests_per_s for name, one in limits.items()}, 1.0)
        self._tokens = _buckets({name: one.tokens_per_s for name, one in limits.items()}, 0.0)

    async def admit(self, tenant: str, now: float) -> None:
        """Like `begin`. Checks a call; the buckets may be in another process."""
        self.begin(tenant, now)

    def begin(self, tenant: str, now: float) -> None:
        """Notes that a call of the tenant has come. Raises RequestRefused (429) with the time to
        wait."""
        calls, tokens = self._calls.get(tenant), self._tokens.get(tenant)
        waits = [
            (bucket.wait_s(now), unit, bucket.rate)
            for unit, bucket in (("requests", calls), ("tokens", tokens))
            if bucket is not None
        ]
        wait_s, unit, rate = max(waits, default=(0.0, "", 0.0))
        if wait_s > 0.0:
            text = (
                f"This API key has used up its {rate:g} {unit} per second. Send the request again"
                f" in {max(math.ceil(wait_s), 1)} s."
            )
            raise RequestRefused(429, RATE_LIMIT, text, wait_s)
        if calls is not None:
            calls.level -= 1.0

    @contextmanager
    def prompts(self, tenant: str, num_tokens: int) -> Iterator[None]:
        """Counts the tokens of a call's prompts, unless the call is refused in this context."""
        self.spend(tenant, num_tokens)
        try:
            yield
        except RequestRefused:
            self.spend(tenant, -num_tokens)
            raise

    def counts(self, tenant: str) -> bool:
        """Whether the tenant's tokens are counted."""
        return tenant in self._tokens

    def limits_calls(self, tenant: str) -> bool:
        """Whether a call of the tenant may be refused."""
        return tenant in self._calls or tenant in self._tokens

    def spend(self, tenant: str, num_tokens: int) -> None:
        """Counts tokens of the tenant; a negative number gives tokens back."""
        bucket = self._tokens.get(tenant)
        if bucket is not None:
            bucket.level -= num_tokens

    def priority(
        self, tenant: str, asked: int | None, is_operator: bool, program: ProgramContext | None
    ) -> int:
        """Returns the priority of a tenant's request: the one that it asked for, or else the one of
        its program. Raises ApiError if the request asked for a better priority than its key has;
        the operator may ask for any. The priority of a program is only a hint, so a better one has
        no effect."""
        best = self._limits.get(tenant, NO_LIMITS).priority
        if asked is None:
            least, most = PRIORITY_RANGE
            wanted = min(max(best - (program.priority if program else 0), least), most)
            return wanted if is_operator else max(wanted, best)
        if asked < best and not is_operator:
            text = f"'priority' must be at least {best} for this API key. A lower one is better."
            raise ApiError(text, param="priority")
        return asked


def _buckets(rates: Mapping[str, float], least: float) -> dict[str, _Bucket]:
    found = {}
    for tenant, rate in rates.items():
        if rate < math.inf:
            bucket = _Bucket(rate, least, 0.0)
            bucket.level = bucket.capacity
            found[tenant] = bucket
    return found

"""Mutants of shares and priorities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moonpool.conductor import request_lifecycle
from moonpool.conductor.fair_share import FairShare
from moonpool.conductor.state import TrackedRequest
from moonpool.conductor.waiting import WaitingRequests
from tests.sim.mutants.mutant import plant
from tests.sim.mutants.patches import Method


@plant("a tenant above its share takes what others wait for", FairShare, "must_yield")
def _greedy(original: Method) -> Method:
    return lambda *args: False


@plant("waiting requests of all tenants are in one queue", WaitingRequests, "_by_tenant")
def _one_queue(original: Method) -> Method:
    return lambda self, ready, now: iter(ready)


@plant("requests wait without regard to their priority", WaitingRequests, "due")
def _no_priority(original: Method) -> Method:
    def defective(self: WaitingRequests, now: float) -> Iterator[TrackedRequest]:
        ready = [wait.tracked for wait in self._waits.values() if wait.not_before_s <= now]
        yield from self._by_tenant(ready, now)

    return defective


@plant("all tenants have the same share", FairShare, "give")
def _same_share(original: Method) -> Method:
    def defective(self: FairShare, tenant: str, *rest: Any) -> None:
        if tenant in self._accounts:
            self._accounts[tenant].weight = 1.0
        original(self, tenant, *rest)

    return defective


@plant("each cache salt has a share of its own", request_lifecycle, "payer_of")
def _salts_pay(original: Method) -> Method:
    return lambda tenant: tenant

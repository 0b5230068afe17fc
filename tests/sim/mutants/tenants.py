"""Plants bugs in shares and priorities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moonpool.conductor import request_lifecycle
from moonpool.conductor.state import TrackedRequest
from moonpool.conductor.waiting.fair_share import FairShare
from moonpool.conductor.waiting.order import WaitingOrder
from tests.sim.mutants.mutant import plant
from tests.sim.mutants.patches import Method


@plant("a tenant above its share takes what others wait for", FairShare, "must_yield")
def _greedy(original: Method) -> Method:
    return lambda *args: False


@plant("waiting requests of all tenants are in one queue", WaitingOrder, "_by_tenant")
def _one_queue(original: Method) -> Method:
    def defective(self: WaitingOrder, parts: Any, now: float) -> Iterator[TrackedRequest]:
        waiting = sorted(one for part in parts for queue in part.values() for one in queue)
        yield from [tracked for _, tracked in waiting]

    return defective


@plant("requests wait without regard to their priority", WaitingOrder, "due")
def _no_priority(original: Method) -> Method:
    def defective(self: WaitingOrder, now: float) -> Iterator[TrackedRequest]:
        self._look(now)
        yield from self._by_tenant([self._aged, *self._classes.values()], now)

    return defective


@plant("all tenants have the same share", FairShare, "weight")
def _same_share(original: Method) -> Method:
    return lambda self, tenant: 1.0


@plant("each cache salt has a share of its own", request_lifecycle, "payer_of")
def _salts_pay(original: Method) -> Method:
    return lambda tenant: tenant

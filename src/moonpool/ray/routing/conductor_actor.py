"""The actor that has the Conductor of one Serve deployment, for all its routers.

Every proxy and every handle of Serve has a router of its own; they ask this actor. The actor ends
when no router has asked for a while. If it is lost, Ray starts another one, which learns again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from secrets import token_hex

import msgspec
import ray

from moonpool.ray.replicas.calls import ReplicaCall
from moonpool.ray.replicas.replica_conductor import (
    Decision,
    ReplicaConductor,
    Seen,
)
from moonpool.ray.replicas.settings import RouterSettings

log = logging.getLogger("moonpool.ray")

TICK_S = 0.1
IDLE_S = 600.0
GONE_S = 5.0
"""A replica is gone if no router has named it for this long, although routers have named others.
The time is needed because routers learn of changes one after another."""
CALLS = 4096
"""Calls of this actor at a time: one for each call of the deployment that waits for its place."""


class Sighting(msgspec.Struct, frozen=True):
    """The fields of `Seen`, with the age of the observation when it was sent, because routers have
    clocks of their own."""

    call_id: str
    age_s: float = 0.0
    num_tokens: int = 0
    has_ended: bool = False
    has_failed: bool = False
    replica: str = ""


class ConductorActor:
    """Made by Ray on a loop."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._incarnation = token_hex(4)
        self._state = ReplicaConductor(settings, self._incarnation)
        self._waiting: dict[str, tuple[ReplicaCall, asyncio.Future[Decision]]] = {}
        self._named_s: dict[str, float] = {}
        self._asked_s = time.monotonic()
        self._ticks = asyncio.get_event_loop().create_task(self._tick())

    async def choose(self, call: ReplicaCall, replicas: Sequence[str]) -> Decision:
        """Waits until the call is placed or refused. `replicas`: the replicas that its router
        knows."""
        now = self._asked_s = time.monotonic()
        self._name(replicas, now)
        before = self._waiting.pop(call.call_id, None)
        if before is not None:
            before[1].cancel()
        found: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        waiting = self._waiting[call.call_id] = (call, found)
        self._state.arrive(call, now)
        self._settle()
        try:
            return await found
        finally:
            if self._waiting.get(call.call_id) is waiting:
                del self._waiting[call.call_id]

    async def adopt(self, settings: RouterSettings) -> None:
        """Takes new settings of the deployment: a new Conductor takes over the calls that wait, and
        learns everything else again."""
        if settings == self._settings:
            return
        now = self._asked_s = time.monotonic()
        self._settings, self._incarnation = settings, token_hex(4)
        self._state = ReplicaConductor(settings, self._incarnation)
        self._state.set_replicas(self._named_s, now)
        for call, found in list(self._waiting.values()):
            if not found.done():
                self._state.arrive(call, now)
        self._settle()

    async def see(self, sightings: Sequence[Sighting], lost: Sequence[str] = ()) -> None:
        """Takes a router's observations of answers, and the names of the replicas that have
        died."""
        now = self._asked_s = time.monotonic()
        self._state.see(
            [
                Seen(
                    each.call_id,
                    now - each.age_s,
                    each.num_tokens,
                    each.has_ended,
                    each.has_failed,
                    each.replica,
                )
                for each in sorted(sightings, key=lambda each: -each.age_s)
            ]
        )
        for name in lost:
            self._named_s.pop(name, None)
        if lost:
            self._state.set_replicas(self._named_s, now)
        self._settle()

    async def describe(self) -> dict[str, object]:
        """Describes the state of the Conductor, for operators and tests."""
        instances = self._state.conductor.instances
        return {
            "life": self._incarnation,
            "replicas": sorted(self._state.replicas),
            "calls": len(self._state.conductor.requests),
            "waiting": self._state.conductor.num_waiting,
            "cached_blocks": {
                str(name): self._state.conductor.index.num_blocks(name) for name in instances
            },
            "costs": {str(name): state.info.cost for name, state in instances.items()},
        }

    def _name(self, replicas: Sequence[str], now: float) -> None:
        self._named_s.update(dict.fromkeys(replicas, now))
        for name in [name for name, at in self._named_s.items() if now - at > GONE_S]:
            del self._named_s[name]
        self._state.set_replicas(self._named_s, now)

    def _settle(self) -> None:
        for decision in self._state.take_decisions():
            waiting = self._waiting.get(decision.call_id)
            if waiting is not None and not waiting[1].done():
                waiting[1].set_result(decision)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._state.tick(time.monotonic())
            self._settle()
            if time.monotonic() - self._asked_s > IDLE_S:
                log.info("no router has asked for %.0f s: this Conductor ends", IDLE_S)
                ray.actor.exit_actor()

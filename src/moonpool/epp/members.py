"""The endpoints that a picker uses: new endpoints are served, and leaving endpoints are drained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from moonpool.discovery.endpoint import Endpoint
from moonpool.discovery.membership import (
    DrainServer,
    HoldServerOff,
    JoinServer,
    Membership,
    TooManyServers,
)
from moonpool.epp.endpoint_worker import EndpointWorker, PickerShared
from moonpool.link.head_link import WorkerError
from moonpool.log_limit import limited_logger

log = limited_logger("moonpool.epp")

AGAIN_S = 30.0
"""Time from the refusal of a server, whose model cannot be read or is another, to the next attempt.
"""
GRACE_S = 2.0
LATER_S = 0.05
"""Added to the time for which an endpoint is held off, so that it is over at the next attempt."""


@dataclass(slots=True, eq=False)
class _Member:
    endpoint: Endpoint
    worker: EndpointWorker | None = None
    task: asyncio.Task[None] | None = None
    leaves: bool = False


class Members:
    """The endpoints by name. `drain_s`: how long the calls of a leaving endpoint may take. `make`:
    creates the instance of an endpoint."""

    def __init__(
        self,
        shared: PickerShared,
        drain_s: float,
        make: Callable[[Endpoint, PickerShared], EndpointWorker] = EndpointWorker,
    ) -> None:
        self._make = make
        self._making = asyncio.Lock()
        self._shared = shared
        self._drain_s = drain_s
        self._members: dict[str, _Member] = {}
        self._leaving: set[_Member] = set()
        self._listed: Sequence[Endpoint] = ()
        self._membership = Membership()
        self._held: dict[str, asyncio.TimerHandle] = {}

    def __iter__(self) -> Iterator[Endpoint]:
        return (member.endpoint for member in self._members.values())

    def find(self, name: str) -> Endpoint | None:
        """Finds an endpoint, even one that is leaving."""
        member = self._members.get(name)
        if member is not None:
            return member.endpoint
        leaving = (each.endpoint for each in self._leaving)
        return next((endpoint for endpoint in leaving if endpoint.name == name), None)

    def update(self, endpoints: Sequence[Endpoint]) -> None:
        """Takes the endpoints that there are now."""
        self._listed = endpoints
        self._shared.num_endpoints = len(endpoints)
        self._step()

    def _step(self) -> None:
        for action in self._membership.see(self._listed, self._shared.now()):
            match action:
                case JoinServer(endpoint):
                    member = self._members[endpoint.name] = _Member(endpoint)
                    member.task = asyncio.create_task(self._serve(member))
                case DrainServer(endpoint):
                    self._part_with(endpoint.name, self._members[endpoint.name])
                case HoldServerOff(endpoint, for_s):
                    log.warning("%s comes and goes: not used for %.0f s", endpoint.name, for_s)
                    self._held[endpoint.name] = asyncio.get_running_loop().call_later(
                        for_s + LATER_S, self._step
                    )
                case TooManyServers():
                    pass  # there is no limit of servers

    async def stop(self) -> None:
        for handle in self._held.values():
            handle.cancel()
        members = {*self._members.values(), *self._leaving}
        tasks = [member.task for member in members if member.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _part_with(self, name: str, member: _Member) -> None:
        del self._members[name]
        log.info("%s at %s leaves", name, member.endpoint.address)
        member.leaves = True
        assert member.task is not None
        self._leaving.add(member)
        member.task.add_done_callback(lambda _: self._leaving.discard(member))
        if member.worker is None or not member.worker.ask_to_leave(self._drain_s):
            member.task.cancel()
        else:
            asyncio.get_running_loop().call_later(self._drain_s + GRACE_S, member.task.cancel)

    async def _serve(self, member: _Member) -> None:
        """Serves an endpoint until it leaves."""
        before = [each.task for each in self._leaving if each.endpoint.name == member.endpoint.name]
        await asyncio.gather(*(task for task in before if task), return_exceptions=True)
        last = ""
        while not member.leaves:
            try:
                # one server per turn of the loop, so that calls can be placed in between
                async with self._making:
                    member.worker = self._make(member.endpoint, self._shared)
                    await asyncio.sleep(0)
                await member.worker.run("", 0)
                if not member.leaves:
                    name = member.endpoint.name
                    log.info("%s was drained: not used until it is listed again", name)
                return
            except WorkerError as error:
                if str(error) != last:
                    log.warning("%s is not used: %s", member.endpoint.name, error)
                last = str(error)
            except Exception:
                log.exception("the instance of %s failed", member.endpoint.name)
            if not member.leaves:
                await asyncio.sleep(AGAIN_S)

"""The instance of one endpoint, in the picker's own process.

The worker is the instance of a vLLM server like any other: it asks the server what it serves,
measures it, watches its health and follows its cache. Only its requests take another path (see
`routed_call`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from msgspec.structs import replace

from moonpool.config.rules import vllm_place
from moonpool.discovery.endpoint import Endpoint
from moonpool.epp.client_salts import with_roots
from moonpool.epp.local_link import LocalLink
from moonpool.epp.routed_call import CallDesk
from moonpool.head.worker_link import LinkOwner
from moonpool.link.head_link import HeadLink
from moonpool.log_limit import limited_logger
from moonpool.protocol.frames import HEARTBEAT_S
from moonpool.protocol.messages import AttemptId
from moonpool.types import InstanceId
from moonpool.vllm.actions import (
    CacheEventsReceived,
    EngineOutput,
    SubmitFailed,
    SubmitRequest,
    VllmEvent,
)
from moonpool.vllm.cache_watch import COUNT_S
from moonpool.vllm.facts import VllmFacts
from moonpool.vllm.instance import VllmInstance
from moonpool.vllm.offer_watch import OFFER_S
from moonpool.vllm.worker import FoundServer, VllmWorker

log = limited_logger("moonpool.epp")

MEASURED_AT_A_TIME = 8
"""Servers that are measured at a time: more would keep the loop from deciding."""
LOOKS_PER_S = 100.0
"""Health checks of all servers together per second; with many servers, each is checked less often.
"""
MOST_PAUSE_S = 10.0
"""Shorter than the silence after which the head gives an instance up."""
SOON_S = 0.1
"""Time to the next health check after a call failed."""


class PickerShared:
    """State that the instances of one picker share."""

    def __init__(self, owner: LinkOwner, api_key: str, now: Callable[[], float]) -> None:
        self.owner = owner
        self.api_key = api_key
        self.now = now
        self.desk = CallDesk()
        self.measuring = asyncio.Semaphore(MEASURED_AT_A_TIME)
        self.num_endpoints = 0
        self.suspects: set[InstanceId] = set()
        """Instances at which a call has just failed: others are preferred until their health is
        known."""

    @property
    def pause_s(self) -> float:
        return min(max(HEARTBEAT_S, self.num_endpoints / LOOKS_PER_S), MOST_PAUSE_S)


class EndpointWorker(VllmWorker):
    """`run` serves until the instance is drained. The task that runs it may be cancelled."""

    def __init__(self, endpoint: Endpoint, shared: PickerShared) -> None:
        """Raises WorkerError."""
        self.endpoint = endpoint
        self._shared = shared
        self._look_now = asyncio.Event()
        name, machine = InstanceId(endpoint.name), socket.gethostname()
        place = vllm_place(endpoint.place)
        super().__init__(endpoint.role, name, machine, b"", place, shared.api_key)
        self._count_s = max(COUNT_S, 5.0 * shared.pause_s)
        self._offer_s = max(OFFER_S, 5.0 * shared.pause_s)

    def post_output(self, output: EngineOutput | SubmitFailed) -> None:
        self._post(output)

    def _post(self, event: VllmEvent) -> None:
        if isinstance(event, CacheEventsReceived) and self._engine is not None:
            layout = self._engine.layout
            event = event if layout is None else with_roots(event, layout.fingerprint)
        super()._post(event)

    def look(self) -> None:
        if not self._joined:  # it gets no calls, and its health is not checked
            return
        self._shared.suspects.add(self.instance_id)
        self._look_now.set()

    def _open_link(self) -> HeadLink:
        return LocalLink(self.instance_id, self, self._shared.owner)

    async def _with_parsers(self, facts: VllmFacts) -> VllmFacts:
        """Calls go to the server unchanged, so the head does not need their tokens, and estimates
        the tokens if the model's files cannot be read."""
        found = await super()._with_parsers(facts)
        if found.offer.takes == "tokens":
            found = replace(found, offer=replace(found.offer, takes="either"))
        return found

    async def _profile(self, engine: FoundServer, instance: VllmInstance) -> None:
        async with self._shared.measuring:
            await super()._profile(engine, instance)

    async def _pause(self) -> None:
        if self._look_now.is_set():  # a second check was requested
            await asyncio.sleep(SOON_S)
            self._look_now.clear()
            return
        self._shared.suspects.discard(self.instance_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._shared.pause_s):
                await self._look_now.wait()

    def leave_gone(self) -> None:
        self._shared.suspects.discard(self.instance_id)
        super().leave_gone()

    async def _end_tasks(self) -> None:
        self._shared.suspects.discard(self.instance_id)
        await super()._end_tasks()

    def _submit(self, submit: SubmitRequest) -> None:
        self._shared.desk.on_submit(self, submit)

    def _cancel(self, attempt_id: AttemptId) -> None:
        """Does nothing, because the call's own connections end without it."""

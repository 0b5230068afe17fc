"""A head whose calls are answered by fronts."""

from __future__ import annotations

import asyncio

from moonpool.api.serving_backend import ApiOptions
from moonpool.head.fronts.front_link import FrontLinks
from moonpool.head.head import ClusterHead
from moonpool.head.supervisor_link import SupervisorLink
from moonpool.protocol.model_offer import ModelOffer
from moonpool.types import InstanceId, Role


class FrontCalls:
    """The calls of fronts, each from `begin` until `hand_over` or `end`. The supervisor starts and
    ends the fronts."""

    def __init__(self, link: SupervisorLink, head: ClusterHead, options: ApiOptions) -> None:
        self._link = link
        self._links = FrontLinks(head, options.limits)
        head.fronts = self._links
        head.on_tick = self._links.tick
        know = head.on_instances

        def on_instances(
            roles: dict[InstanceId, Role], offers: dict[InstanceId, ModelOffer]
        ) -> None:
            know(roles, offers)
            self._links.tell()

        head.on_instances = on_instances

    async def begin(self) -> asyncio.Task[None]:
        """Starts to answer calls, and returns what runs."""
        self._adding = asyncio.create_task(self._add_fronts())
        return self._adding

    async def hand_over(self, calls_s: float) -> None:
        """Call it when the fronts have ended."""

    async def end(self) -> None:
        self._links.close()
        self._adding.cancel()

    async def _add_fronts(self) -> None:
        while True:
            number, sock = await self._link.fronts.get()
            await self._links.add(number, sock)

"""Finds the head that leads, among the actors of all heads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import ray
from ray.exceptions import RayError

Standing = Literal["leads", "stands by", "starts"]


@dataclass(frozen=True, slots=True)
class HeadPlace:
    """The addresses at which a head serves clients, and at which workers join it."""

    url: str
    host: str
    port: int


log = logging.getLogger("moonpool.ray")

ASK_S = 2.0
"""How long to wait for an actor's answer; an actor that is being replaced gives none."""

T = TypeVar("T")


class HeadFinder:
    """Asks actors by name, and remembers their handles: those work without Ray's head node."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._handles: dict[str, Any] = {}

    async def leader(self) -> HeadPlace | None:
        """Returns where the leading head serves, or None if no actor says that it leads."""
        places = await asyncio.gather(*(self._ask(name, "place") for name in self.names))
        return next(filter(None, places), None)

    async def standings(self) -> list[Standing]:
        """Returns the state of each head within reach."""
        found = await asyncio.gather(*(self._ask(name, "standing") for name in self.names))
        return [standing for standing in found if standing is not None]

    async def _ask(self, name: str, method: str) -> Any:
        """Returns None if the actor is not in reach."""
        try:
            if name not in self._handles:
                found = await _within(asyncio.to_thread(ray.get_actor, name))
                self._handles[name] = found
            return await _within(getattr(self._handles[name], method).remote())
        except (RayError, ValueError, TimeoutError) as error:
            log.debug("%s does not answer: %s", name, error)
            return None


async def _within(call: Awaitable[T]) -> T:
    async with asyncio.timeout(ASK_S):
        return await call

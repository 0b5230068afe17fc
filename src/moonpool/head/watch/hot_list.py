"""Asks the instances for their most used prefixes: once for a client, and again and again while
an operator watches the live page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from moonpool.conductor.actions import HotRequested
from moonpool.conductor.conductor import Conductor
from moonpool.conductor.state import InstanceState
from moonpool.head.explain import MAX_LISTED_BLOCKS, describe_hot

HOT_S = 2.0
"""An instance that does not report its hot prefixes within this time is left out."""
WATCHED_EVERY_S = 10.0
WATCHED_BLOCKS = 2048
"""Blocks that an instance lists for the page. Each list also goes into the event log."""
MAX_CACHED_BLOCKS = 50_000
"""An instance with more blocks is not asked for the page: its steps wait while it ranks them."""
NUM_WATCHED = 10


class HotList:
    """The hot prefixes of one cluster."""

    def __init__(
        self,
        conductors: Sequence[Conductor],
        post: Callable[[HotRequested], None],
        now: Callable[[], float],
    ) -> None:
        self._conductors = conductors
        self._post = post
        self._now = now
        self._asked_s = float("-inf")

    async def collect(self, num_prefixes: int) -> list[dict[str, Any]]:
        """Returns the most used prefixes first. Waits for reports, at most `HOT_S`."""
        for state in self._states():
            state.hot = None
        self._post(HotRequested(MAX_LISTED_BLOCKS))
        until_s = self._now() + HOT_S
        while self._now() < until_s:
            if all(state.hot is not None for state in self._states()):
                break
            await asyncio.sleep(HOT_S / 100)
        return describe_hot(self._conductors, num_prefixes)

    def watched(self) -> list[dict[str, Any]] | None:
        """Returns the latest reports, and asks for new ones if they are old. None: the instances
        cache too many blocks to be asked again and again."""
        loads = [state.load for state in self._states()]
        if any(load is not None and load.cached_blocks > MAX_CACHED_BLOCKS for load in loads):
            return None
        if self._now() - self._asked_s >= WATCHED_EVERY_S:
            self._asked_s = self._now()
            self._post(HotRequested(WATCHED_BLOCKS))
        return describe_hot(self._conductors, NUM_WATCHED)

    def _states(self) -> Iterator[InstanceState]:
        for conductor in self._conductors:
            yield from conductor.instances.values()

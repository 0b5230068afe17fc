"""Follows a source that is read again and again, and that may leave out a server once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from moonpool.discovery.endpoint import Endpoint, Listing, Notice, SourceError


async def follow_looks(
    look: Callable[[], Awaitable[frozenset[Endpoint]]],
    pause_s: Callable[[int], float],
    update: Callable[[Listing], None],
    notice: Notice,
) -> None:
    """Like `EndpointSource.follow`. `look`: returns the present servers, or raises SourceError.
    `pause_s`: returns the time to the next look for the number of servers that was found."""
    seen = Looks()
    while True:
        wait_s = pause_s(0)
        try:
            found = await look()
        except SourceError as error:
            notice.say(f"{error}; its servers stay as they were")
        else:
            wait_s = pause_s(len(found))
            now = seen.add(found)
            if now is not None:
                update(Listing(endpoints=tuple(sorted(now, key=lambda each: each.name))))
        await asyncio.sleep(wait_s)


class Looks:
    """Decides from several listings which servers exist. A server is gone when two listings in a
    row lack it, or when another server has its name."""

    def __init__(self) -> None:
        self._now: frozenset[Endpoint] | None = None
        self._missed: frozenset[Endpoint] = frozenset()

    def add(self, found: frozenset[Endpoint]) -> frozenset[Endpoint] | None:
        """Returns all that there is, or None if nothing has changed."""
        names = {each.name for each in found}
        lacks = {each for each in self._now or () if each.name not in names}
        self._missed = frozenset(lacks - self._missed)
        now = found | self._missed
        if now == self._now:
            return None
        self._now = now
        return now

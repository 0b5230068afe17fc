"""Sources of endpoints: the interface of every source, and several sources joined as one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from moonpool.discovery.dns_names import DnsName
from moonpool.discovery.endpoint import Endpoint, Listing, Notice, SourceError
from moonpool.discovery.endpoints_file import EndpointsFile
from moonpool.discovery.pods import LabelledPods
from moonpool.discovery.ray_servers import RayServers
from moonpool.discovery.source_text import (
    DnsSource,
    FileSource,
    PodSource,
    RayActorSource,
    RayServeSource,
    Source,
)
from moonpool.log_limit import limited_logger

log = limited_logger("moonpool.discovery")

AGAIN_S = 1.0


class EndpointSource(Protocol):
    async def follow(self, update: Callable[[Listing], None]) -> None:
        """Calls `update` with all that there is, at first and after each change, until cancelled.
        If the source fails for a time, what it listed last remains valid. Raises SourceError if it
        cannot begin."""
        ...


class CheckedSource(EndpointSource, Protocol):
    async def check(self) -> None:
        """Reads the source once, before anything starts. Raises SourceError."""
        ...


def open_source(source: Source) -> CheckedSource:
    """Raises SourceError."""
    match source:
        case FileSource(path):
            return EndpointsFile(path)
        case PodSource():
            return LabelledPods(source)
        case DnsSource():
            return DnsName(source)
        case RayActorSource() | RayServeSource():
            return RayServers(source)


class Sources:
    """Follows several sources as one. If two endpoints have the same name, the endpoint of the
    earlier source is used."""

    def __init__(self, sources: Sequence[EndpointSource], names: Sequence[str]) -> None:
        """`names`: the text of each source on the command line."""
        self._sources, self._names = sources, names
        self._heard: dict[int, Listing] = {}

    async def follow(self, update: Callable[[Listing], None]) -> None:
        """Like `EndpointSource.follow`. A source that cannot start is tried again; the other
        sources are used meanwhile."""

        notices = [Notice(log) for _ in self._sources]

        def hear(number: int, listing: Listing) -> None:
            self._heard[number] = listing
            update(self._joined())
            text = (
                f"{self._names[number]} lists no server: is it the right name, or is none up yet?"
            )
            notices[number].say("" if listing.endpoints else text)

        async with asyncio.TaskGroup() as group:
            for number, source in enumerate(self._sources):
                group.create_task(_keep_following(source, partial(hear, number)))

    def _joined(self) -> Listing:
        heard = [self._heard[number] for number in sorted(self._heard)]
        endpoints: dict[str, Endpoint] = {}
        objectives: dict[str, int] = {}
        for listing in reversed(heard):
            endpoints |= {each.name: each for each in listing.endpoints}
            objectives |= listing.objectives
        said = [each.fails_open for each in heard if each.fails_open is not None]
        return Listing(
            endpoints=tuple(endpoints.values()),
            objectives=objectives,
            fails_open=said[0] if said else None,
            is_whole=len(heard) == len(self._sources),
        )


async def _keep_following(source: EndpointSource, update: Callable[[Listing], None]) -> None:
    notice = Notice(log)
    while True:
        try:
            await source.follow(update)
        except SourceError as error:
            notice.say(str(error))
        await asyncio.sleep(AGAIN_S)

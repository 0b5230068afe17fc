"""Looks at the sources again and again, and says what changed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from moonpool.discovery.dns_records import resolve
from moonpool.discovery.endpoints_file import read_endpoints
from moonpool.discovery.listed_server import (
    FileSource,
    ListedServer,
    PodSource,
    Source,
    SourceError,
    parse_source,
)
from moonpool.discovery.membership import (
    DrainServer,
    HoldServerOff,
    JoinServer,
    Membership,
    TooManyServers,
)
from moonpool.discovery.pods import LabelledPods

log = logging.getLogger("moonpool.discovery")

LOOK_S = 1.0


class Discovery:
    """`run` calls `join` and `drain` as servers come and go. A source that cannot be read keeps
    what it listed last."""

    def __init__(
        self,
        sources: Sequence[str],
        join: Callable[[ListedServer], None],
        drain: Callable[[ListedServer], None],
    ) -> None:
        """Raises SourceError for what is no source."""
        self._sources = [parse_source(text) for text in sources]
        self._join = join
        self._drain = drain
        self._last: dict[Source, list[ListedServer]] = {}
        self._said: dict[Source, str] = {}
        self._pods: dict[Source, LabelledPods] = {
            source: LabelledPods(source)
            for source in self._sources
            if isinstance(source, PodSource)
        }
        self.membership = Membership()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for source, pods in self._pods.items():
                group.create_task(pods.run(partial(self._heard, source)))
            while True:
                await self.look()
                await asyncio.sleep(LOOK_S)

    def _heard(self, source: Source) -> None:
        self._last[source] = self._pods[source].servers

    async def look(self) -> None:
        """Looks once at all sources, and acts. Not before the pods are known: servers of an earlier
        supervisor would seem to be gone."""
        if any(source not in self._last for source in self._pods):
            return
        listed: dict[str, ListedServer] = {}
        for servers in await asyncio.gather(*map(self._read, self._sources)):
            for server in servers:
                listed.setdefault(server.name, server)
        for action in self.membership.see(list(listed.values()), time.monotonic()):
            match action:
                case JoinServer(server):
                    log.info("%s is listed, at %s", server.name, server.place)
                    self._join(server)
                case DrainServer(server):
                    log.info("%s is no longer listed; it drains", server.name)
                    self._drain(server)
                case HoldServerOff(server, for_s):
                    log.warning("%s comes and goes; it is held off for %.0f s", server.name, for_s)
                case TooManyServers(number):
                    log.warning("%d listed servers are too many for one front", number)

    async def _read(self, source: Source) -> list[ListedServer]:
        problems: list[str] = []
        try:
            if isinstance(source, FileSource):
                self._last[source], problems = await asyncio.to_thread(read_endpoints, source.path)
            elif isinstance(source, PodSource):
                problems = self._pods[source].problems
            else:
                self._last[source] = await resolve(source)
        except SourceError as error:
            problems = [f"{error}; its servers stay as they were"]
        said = "; ".join(problems)
        if said and said != self._said.get(source):
            log.warning("%s", said)
        self._said[source] = said
        return self._last.get(source, [])


async def check_source(text: str) -> None:
    """Reads a source once, before anything starts. Raises SourceError."""
    source = parse_source(text)
    if isinstance(source, FileSource):
        read_endpoints(source.path)
    elif isinstance(source, PodSource):
        await LabelledPods(source).check()
    else:
        await resolve(source)

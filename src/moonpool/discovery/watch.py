"""Follows the sources of `serve --vllm-endpoints`, and says which servers come and go."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from moonpool.discovery.endpoint import Endpoint, Listing
from moonpool.discovery.membership import (
    DrainServer,
    HoldServerOff,
    JoinServer,
    Membership,
    TooManyServers,
)
from moonpool.discovery.rank_counts import RankCounts
from moonpool.discovery.source_text import parse_source
from moonpool.discovery.sources import Sources, open_source

log = logging.getLogger("moonpool.discovery")

LOOK_S = 1.0
"""How often servers that were held off are looked at again."""
MAX_SERVERS = 64
"""Each server takes a process of some 60 MB on this machine."""


class Discovery:
    """`run` calls `join` and `drain` as servers come and go, each data-parallel rank a server. A
    source that cannot be read keeps what it listed last."""

    def __init__(
        self,
        sources: Sequence[str],
        join: Callable[[Endpoint], None],
        drain: Callable[[Endpoint], None],
    ) -> None:
        """Raises SourceError for what is not a source."""
        self._sources = Sources([open_source(parse_source(text)) for text in sources], sources)
        self._join = join
        self._drain = drain
        self._listing = Listing(is_whole=False)
        self._rank_counts = RankCounts()
        self.membership = Membership(MAX_SERVERS)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._sources.follow(self._hear))
            ranks = self._rank_counts.follow(lambda: self._listing.endpoints, self._step)
            group.create_task(ranks)
            while True:
                await asyncio.sleep(LOOK_S)
                self._step()

    def _hear(self, listing: Listing) -> None:
        self._listing = listing
        self._step()

    def _step(self) -> None:
        listed = [rank for each in self._listing.endpoints for rank in self._ranks_of(each)]
        # with an incomplete listing, servers of an earlier supervisor would seem to be gone
        if not self._listing.is_whole:
            known = {each.name for each in listed}
            listed += [each for each in self.membership.joined if each.name not in known]
        for action in self.membership.see(listed, time.monotonic()):
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

    def _ranks_of(self, server: Endpoint) -> Sequence[Endpoint]:
        found = self._rank_counts.ranks_of(server)
        if found is not None:
            return found
        # servers of an earlier supervisor stay until the source has listed
        joined = self.membership.joined
        return [each for each in joined if each.name.rpartition(".")[0] == server.name]


async def check_source(text: str) -> None:
    """Reads a source once, before anything starts. Raises SourceError."""
    await open_source(parse_source(text)).check()

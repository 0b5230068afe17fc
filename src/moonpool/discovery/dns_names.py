"""Endpoints from DNS: the addresses of a name with one port, or a service (SRV records).

A name is looked up every 2 seconds, and less often if it has hundreds of records. A resolver may
leave out some of many, so an endpoint is gone when two answers in a row lack it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from moonpool.discovery.dns_query import ANSWER_S, DnsSettings, ask_srv, system_settings
from moonpool.discovery.endpoint import (
    Endpoint,
    EndpointError,
    Listing,
    Notice,
    SourceError,
)
from moonpool.discovery.looks import follow_looks
from moonpool.discovery.source_text import DnsSource, server_of
from moonpool.log_limit import limited_logger

log = limited_logger("moonpool.discovery")

LEAST_S, MOST_S = 2.0, 10.0
LOOKUPS_PER_S = 100.0
"""The most lookups of one source. Each target of an SRV record is a lookup of its own."""


class DnsName:
    """`settings`: in place of the machine's own, for SRV records."""

    def __init__(self, source: DnsSource, settings: DnsSettings | None = None) -> None:
        self._source = source
        self._settings = settings
        self._notice = Notice(log)

    async def check(self) -> None:
        """Like `EndpointSource.check`."""
        await self._look_up()

    async def follow(self, update: Callable[[Listing], None]) -> None:
        """Like `EndpointSource.follow`."""
        await follow_looks(self._look_up, _pause_s, update, self._notice)

    async def _look_up(self) -> frozenset[Endpoint]:
        """The servers that the name has now, none if it has no records. Raises SourceError."""
        source = self._source
        if source.port is None:
            settings = self._settings or system_settings()
            targets = await ask_srv(source.name, settings)
        else:
            targets = [(source.name, source.port)]
        places = {(host, port) for name, port in targets for host in await addresses(name)}
        problems: list[str] = []
        found = set()
        for host, port in places:
            try:
                found.add(self._endpoint(host, port))
            except EndpointError as error:
                problems.append(str(error))
        self._notice.say("; ".join(sorted(problems)))
        return frozenset(found)

    def _endpoint(self, host: str, port: int) -> Endpoint:
        """Raises EndpointError."""
        source = self._source
        name = f"{source.role.value}-{host.replace(':', '-')}-{port}"
        return server_of(source, name, host, port)


def _pause_s(num_found: int) -> float:
    return min(max(LEAST_S, num_found / LOOKUPS_PER_S), MOST_S)


async def addresses(name: str) -> set[str]:
    """Returns the addresses of a host as the system resolves them, or none. IPv6 addresses count
    only if there are no others, because both kinds would list one server twice. Raises
    SourceError."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(2 * ANSWER_S):
            found = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except TimeoutError:
        raise SourceError(f"no answer for {name} from DNS") from None
    except OSError as error:
        if error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", None)):
            return set()
        raise SourceError(f"cannot resolve {name}: {error.strerror}") from None
    four = {str(address[0]) for family, *_, address in found if family == socket.AF_INET}
    return four or {str(address[0]) for *_, address in found}

"""Endpoints from DNS: the addresses of a name with one port, or a service (SRV records).

A name is looked up every 2 seconds, and less often if it has hundreds of records. A resolver may
leave out some of many records, so an endpoint is gone when two answers in a row lack it.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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

ANSWER_S = 3.0
RESOLV_CONF = Path("/etc/resolv.conf")
DNS_PORT = 53
_SRV, _INTERNET, _CUT, _NO_NAME = 33, 1, 0x0200, 3
_BAD = (struct.error, IndexError, ValueError)


@dataclass(frozen=True, slots=True)
class DnsSettings:
    """Settings of /etc/resolv.conf. `ndots`: a name with fewer dots is first looked up in the
    domains of `search`."""

    nameservers: tuple[tuple[str, int], ...] = ()
    search: tuple[str, ...] = ()
    ndots: int = 1

    def candidates(self, name: str) -> list[str]:
        """The full names that a name may mean, in the order in which they are asked for."""
        if name.endswith("."):
            return [name]
        within = [f"{name}.{domain.strip('.')}" for domain in self.search]
        return [name, *within] if name.count(".") >= self.ndots else [*within, name]


def system_settings() -> DnsSettings:
    """Returns the settings of this machine, without nameservers if they cannot be read."""
    try:
        return parse_settings(RESOLV_CONF.read_text(errors="replace"))
    except OSError:
        return DnsSettings()


def parse_settings(text: str) -> DnsSettings:
    """Reads a resolv.conf. Unknown lines of the file are ignored."""
    nameservers: list[tuple[str, int]] = []
    search: tuple[str, ...] = ()
    ndots = 1
    for words in map(str.split, text.splitlines()):
        match words:
            case ["nameserver", host, *_]:
                nameservers.append((host, DNS_PORT))
            case ["search" | "domain", *domains]:
                search = tuple(domains)
            case ["options", *options]:
                given = [each.removeprefix("ndots:") for each in options if each[:6] == "ndots:"]
                ndots = next((int(each) for each in given if each.isdecimal()), ndots)
    return DnsSettings(tuple(nameservers), search, ndots)


async def ask_srv(name: str, settings: DnsSettings) -> list[tuple[str, int]]:
    """Returns target and port of each SRV record of a name; none if it has none. Raises
    SourceError if no nameserver answers."""
    problem = "no nameserver is configured"
    for host, port in settings.nameservers:
        try:
            for candidate in settings.candidates(name):
                async with asyncio.timeout(ANSWER_S):
                    found = parse_srv(*await _ask(srv_query(candidate), host, port))
                if found:
                    return found
            return []
        except (OSError, SourceError) as error:  # includes timeouts
            problem = f"{host}: {error or 'no answer'}"
    raise SourceError(f"no SRV records of {name} from DNS: {problem}")


def srv_query(name: str) -> bytes:
    """A query for the SRV records of a full name. Raises SourceError."""
    labels = name.rstrip(".").encode("ascii").split(b".")
    if not all(0 < len(label) < 64 for label in labels):
        raise SourceError(f"{name} is no name of DNS")
    head = struct.pack(">HHHHHH", secrets.randbits(16), 0x0100, 1, 0, 0, 0)
    asked = b"".join(bytes([len(label)]) + label for label in labels) + b"\0"
    return head + asked + struct.pack(">HH", _SRV, _INTERNET)


class _Answer(asyncio.DatagramProtocol):
    def __init__(self, query: bytes) -> None:
        self._number = query[:2]
        self.data: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def datagram_received(self, data: bytes, addr: object) -> None:
        if data[:2] == self._number and not self.data.done():
            self.data.set_result(data)

    def error_received(self, exc: Exception) -> None:
        if not self.data.done():
            self.data.set_exception(exc)


async def _ask(query: bytes, host: str, port: int) -> tuple[bytes, bytes]:
    """Returns the query and its answer. Raises OSError."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_datagram_endpoint(
        lambda: _Answer(query), remote_addr=(host, port)
    )
    try:
        transport.sendto(query)
        data = await protocol.data
    finally:
        transport.close()
    if len(data) < 4 or not struct.unpack(">H", data[2:4])[0] & _CUT:
        return query, data
    # a long answer is fetched by TCP
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(struct.pack(">H", len(query)) + query)
        (size,) = struct.unpack(">H", await reader.readexactly(2))
        return query, await reader.readexactly(size)
    except asyncio.IncompleteReadError:
        raise OSError("it ended its answer early") from None
    finally:
        writer.close()


def parse_srv(query: bytes, data: bytes) -> list[tuple[str, int]]:
    """Returns target and port of each SRV record of an answer; none if the name does not exist.
    Raises SourceError."""
    try:
        number, flags, num_asked, num_answers = struct.unpack(">HHHH", data[:8])
        if number != int.from_bytes(query[:2], "big") or not flags & 0x8000 or num_asked != 1:
            raise SourceError("another answer")
        if flags & 15:
            if flags & 15 == _NO_NAME:
                return []
            raise SourceError(f"status {flags & 15}")
        if data[12 : len(query)].lower() != query[12:].lower():
            raise SourceError("an answer to another question")
        at, found = len(query), []
        for _ in range(num_answers):
            _, at = _name(data, at)
            kind, _, _, size = struct.unpack(">HHIH", data[at : at + 10])
            at += 10
            if kind == _SRV:
                (port,) = struct.unpack(">H", data[at + 4 : at + 6])
                target, _ = _name(data, at + 6)
                if target and port:  # the target "." means that there is no server
                    found.append((target, port))
            at += size
        return found
    except SourceError:
        raise
    except _BAD:
        raise SourceError("its answer is malformed") from None


def _name(data: bytes, at: int) -> tuple[str, int]:
    """Reads a name. Returns it, and where the next field begins."""
    labels: list[str] = []
    end = 0
    for _ in range(128):  # a name may refer to itself
        size = data[at]
        if size & 0xC0 == 0xC0:
            end = end or at + 2
            at = int.from_bytes(data[at : at + 2], "big") & 0x3FFF
            continue
        at += 1
        if not size:
            return ".".join(labels), end or at
        labels.append(data[at : at + size].decode("ascii"))
        at += size
    raise ValueError("endless")


log = limited_logger("moonpool.discovery")

LEAST_S, MOST_S = 2.0, 10.0
LOOKUPS_PER_S = 100.0
"""The most lookups of one source. Each target of an SRV record needs a separate lookup."""


class DnsName:
    """`settings`: DNS settings used for SRV records in place of the machine's own."""

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
    only if there are no others, because with both kinds one server would be listed twice. Raises
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

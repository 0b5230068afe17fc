"""Asks DNS for the records of a name: addresses by the system, SRV by a query of our own."""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from moonpool.discovery.listed_server import DnsSource, ListedServer, SourceError, servers_at

ANSWER_S = 3.0
RESOLV_CONF = Path("/etc/resolv.conf")
DNS_PORT = 53
_SRV, _INTERNET, _CUT, _NO_NAME = 33, 1, 0x0200, 3
_MAX_BYTES = 65_535
_BAD = (struct.error, IndexError, ValueError)


async def resolve(
    source: DnsSource, nameservers: Sequence[tuple[str, int]] | None = None
) -> list[ListedServer]:
    """Returns the servers that a name has now, none if it has no records. `nameservers`: for SRV
    records, in place of the system's. Raises SourceError."""
    if source.port is None:
        places = await _srv(source.name, nameservers)
    else:
        places = [(host, source.port) for host in await _addresses(source.name)]
    rest = source.role, source.events, source.replay, "", source.ranks
    return [one for host, port in sorted(set(places)) for one in servers_at(host, port, *rest)]


async def _addresses(name: str) -> list[str]:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(2 * ANSWER_S):
            found = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except TimeoutError:
        raise SourceError(f"no answer for {name} from DNS") from None
    except OSError as error:
        if error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", None)):
            return []
        raise SourceError(f"cannot resolve {name}: {error.strerror}") from None
    return [str(address[0]) for *_, address in found]


async def _srv(name: str, nameservers: Sequence[tuple[str, int]] | None) -> list[tuple[str, int]]:
    problem = "no nameserver is configured"
    for host, port in system_nameservers() if nameservers is None else nameservers:
        try:
            async with asyncio.timeout(ANSWER_S):
                return parse_srv(*await _ask(srv_query(name), host, port))
        except (OSError, SourceError) as error:  # also a timeout
            problem = f"{host}: {error or 'no answer'}"
    raise SourceError(f"no SRV records of {name} from DNS: {problem}")


def system_nameservers() -> list[tuple[str, int]]:
    """Returns the name servers of /etc/resolv.conf; none if it cannot be read."""
    try:
        lines = RESOLV_CONF.read_text().splitlines()
    except OSError:
        return []
    words = [line.split() for line in lines]
    return [(each[1], DNS_PORT) for each in words if len(each) > 1 and each[0] == "nameserver"]


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
    reader, writer = await asyncio.open_connection(host, port)  # the answer is long: by TCP
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
                if target and port:  # "." says that there is none
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
    for _ in range(128):  # a name may point to itself
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
